"""Reading a JetStream stream without owning a place in it: for histories and for people who look something up."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import AsyncIterator
from typing import Final

from nats.errors import Error
from nats.errors import TimeoutError as NatsTimeout
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy
from nats.js.errors import NotFoundError

from services.bus.api import Delivery

ANSWER_LIMIT_S: Final = 5.0
"""Longest silence in the middle of what the server said it has."""
FOLLOW_S: Final = 0.5
FORGET_S: Final = 10.0
BATCH: Final = 500


async def span(context: JetStreamContext, stream: str) -> tuple[int, int] | None:
    """First and last sequence; None when there is no such stream. nats errors pass through."""
    try:
        state = (await context.stream_info(stream)).state
    except NotFoundError:
        return None
    return state.first_seq, state.last_seq


async def read(
    context: JetStreamContext,
    stream: str,
    subject: str,
    *,
    start_sequence: int = 1,
    since_ns: int = 0,
    follow: bool = False,
) -> AsyncIterator[Delivery]:
    """See :meth:`services.bus.api.Bus.stream_read`. The consumer is the server's to forget when we leave."""
    config = ConsumerConfig(
        filter_subjects=[subject], ack_policy=AckPolicy.NONE, inactive_threshold=FORGET_S, mem_storage=True
    )
    if since_ns:
        config.deliver_policy = DeliverPolicy.BY_START_TIME
        config.opt_start_time = datetime.datetime.fromtimestamp(since_ns / 1e9, datetime.UTC)
    else:
        config.deliver_policy = DeliverPolicy.BY_START_SEQUENCE
        config.opt_start_seq = max(start_sequence, 1)
    pull = await context.pull_subscribe(subject, stream=stream, config=config)
    info = await pull.consumer_info()
    left = info.num_pending or 0
    try:
        while follow or left > 0:
            batch = min(max(left, 1), BATCH)
            try:
                messages = await pull.fetch(batch, timeout=FOLLOW_S if left <= 0 else ANSWER_LIMIT_S)
            except NatsTimeout:
                if left <= 0:
                    continue
                raise
            for message in messages:
                about = message.metadata
                left -= 1
                yield Delivery(
                    message.subject,
                    message.data,
                    message.headers,
                    about.sequence.stream,
                    about.num_delivered or 1,
                    round(about.timestamp.timestamp() * 1e9),
                )
    finally:
        await pull.unsubscribe()
        with contextlib.suppress(Error, TimeoutError):  # it is forgotten by itself in FORGET_S
            await context.delete_consumer(stream, info.name)
