"""Messages between arrival and callback."""

from __future__ import annotations

import asyncio

import pytest

from services.bus.api import Message
from services.bus.mailbox import Mailbox
from tests.services.bus.collect import Collector


def message(data: bytes) -> Message:
    return Message("s", data, None)


async def test_the_next_turn_of_the_loop_drains_all_that_came_in_this_one() -> None:
    collector = Collector()
    mailbox = Mailbox(collector.on_batch)
    mailbox.start()
    await asyncio.sleep(0)
    for i in range(100):
        mailbox.push(message(str(i).encode()))
    assert collector.batches == [], "push never runs the callback itself"
    await asyncio.sleep(0)
    assert [len(batch) for batch in collector.batches] == [100]
    await mailbox.close()


async def test_the_byte_limit_drops_and_a_smaller_message_still_fits() -> None:
    collector = Collector()
    mailbox = Mailbox(collector.on_batch, limit_bytes=10)
    for data in (b"12345678", b"too long", b"9"):
        mailbox.push(message(data))
    assert mailbox.dropped == 1
    mailbox.start()
    await collector.until(2)
    assert collector.payloads == [b"12345678", b"9"]
    await mailbox.close()


async def test_close_cuts_off_a_callback_that_does_not_end_and_counts_what_it_held() -> None:
    entered = asyncio.Event()

    async def endless(_: list[Message]) -> None:
        entered.set()
        await asyncio.Event().wait()

    mailbox = Mailbox(endless)
    mailbox.start()
    mailbox.push(message(b"1"))
    await entered.wait()
    mailbox.push(message(b"2"))
    await mailbox.close(timeout_s=0.01)
    assert mailbox.dropped == 1
    mailbox.push(message(b"3"))
    assert mailbox.dropped == 2, "a closed mailbox takes nothing"


async def test_a_callback_may_close_its_own_mailbox() -> None:
    done = asyncio.Event()

    async def closes(_: list[Message]) -> None:
        await mailbox.close(timeout_s=5)
        done.set()

    mailbox = Mailbox(closes)
    mailbox.start()
    mailbox.push(message(b"1"))
    await asyncio.wait_for(done.wait(), 2)
    await mailbox.close(timeout_s=1)


def test_limits_below_one_are_the_callers_mistake() -> None:
    with pytest.raises(ValueError, match="pending limits 0 messages"):
        Mailbox(Collector().on_batch, limit_messages=0)
