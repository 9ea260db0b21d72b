"""The live half: the transitions of a new champion beside those of the policy before it, and the way back."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

import numpy as np

from loadgen.examiner.pointers import Pointers
from loadgen.examiner.settings import Settings
from schemas.codec import DecodeError
from schemas.policies import KEY_CHAMPION, PolicyPointer, behaviour_name
from schemas.subjects import BUCKET_POLICY, STREAM_TRANSITIONS
from schemas.transitions import TRANSITION_BATCH
from services.bus import Bus, PullConsumer
from services.decision.book import read_pointer
from services.errors import BusError, PolicyError
from services.learner.promotion import Judgement, Ledger

log = logging.getLogger(__name__)

WAIT_S = 1.0
"""Between looks for a stream that is not there yet, and after an error of the bus."""


class Watch:
    """Judges the champion that an examiner promoted over its window; ``judgement`` is the latest. What operators
    promoted is theirs to take back."""

    def __init__(
        self,
        bus: Bus,
        settings: Settings,
        pointers: Pointers,
        on_rollback: Callable[[PolicyPointer, Judgement], None] = lambda _pointer, _judgement: None,
    ) -> None:
        self._bus = bus
        self._settings = settings
        self._pointers = pointers
        self._on_rollback = on_rollback
        self._rng = np.random.default_rng(settings.seed)
        self._consumer: PullConsumer | None = None
        self._champion: PolicyPointer | None = None
        """On probation; None: nobody is."""
        self._revision = 0
        self._kept = ""
        """Why the pointer could not be moved last."""
        self._sound = ""
        """Version that came through its window last."""
        self._read_backlog = False
        """Whether what was in the stream at the start has been read."""
        self.ledger = Ledger(settings.live)
        self.judgement = Judgement(state="waiting")

    async def run(self) -> None:
        """Until cancelled."""
        following = asyncio.create_task(self._follow())
        try:
            self._consumer = await self._bind()
            while not following.done():
                await self._once(self._consumer)
            following.result()
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            if self._consumer is not None:
                with contextlib.suppress(BusError):
                    await self._consumer.stop()

    async def _follow(self) -> None:
        async for entry in self._bus.kv_watch(BUCKET_POLICY, KEY_CHAMPION):
            try:
                pointer = read_pointer(KEY_CHAMPION, entry.value or b"")
            except PolicyError:
                self._champion = None
                continue
            promoted = pointer.kind == "dqn" and not pointer.who and bool(pointer.parent)
            if not promoted or pointer.version == self._sound:
                self._champion = None
                continue
            known = self._champion
            if known is None or (known.version, known.on_probation) != (pointer.version, pointer.on_probation):
                self.ledger.begin(behaviour_name(pointer))
                self.judgement = Judgement(state="waiting")
            self._champion, self._revision = pointer, entry.revision

    async def _bind(self) -> PullConsumer:
        while True:
            with contextlib.suppress(BusError):
                span = await self._bus.stream_span(STREAM_TRANSITIONS)
                if span is not None:
                    first, last = span
                    start = max(first, last - self._settings.lookback_messages + 1, 1)
                    return await self._bus.pull_consumer(
                        STREAM_TRANSITIONS, self._settings.durable, start_sequence=start
                    )
            await asyncio.sleep(WAIT_S)

    async def _once(self, consumer: PullConsumer) -> None:
        deliveries = await consumer.fetch(self._settings.fetch_messages, self._settings.fetch_timeout_s)
        for delivery in deliveries:
            with contextlib.suppress(DecodeError):
                self.ledger.add(TRANSITION_BATCH.decode(delivery.data))
        if not self._read_backlog and len(deliveries) < self._settings.fetch_messages:
            self._read_backlog = True
            self.ledger.mark()
        try:
            if deliveries:
                await consumer.ack(deliveries)
            champion = self._champion
            if champion is None:
                return
            rejection = (await self._pointers.rejections()).of(champion) if not deliveries else None
            if rejection is not None:  # somebody was killed between the rejection and the way back
                await self._roll_back(champion, Judgement(state="regressed", why=rejection.why))
            elif deliveries:
                await self._judge(champion)
        except BusError as error:
            log.warning("the champion's watch waits", extra={"fields": {"error": str(error)}})
            await asyncio.sleep(WAIT_S)

    async def _judge(self, champion: PolicyPointer) -> None:
        former = behaviour_name(await self._pointers.former(champion))
        self.judgement = self.ledger.judge(behaviour_name(champion), former, self._rng)
        if self.judgement.state == "regressed":
            await self._roll_back(champion, self.judgement)
        elif champion.on_probation and self.judgement.state in ("sound", "absent"):
            await self._widen(champion, self.judgement)
        elif self.judgement.state == "sound":
            self._champion, self._sound = None, champion.version
            log.info("champion sound", extra={"fields": {"version": champion.version, **self.judgement.figures}})

    async def _widen(self, champion: PolicyPointer, judgement: Judgement) -> None:
        """It acts on all workers from now on, for another window."""
        why = f"off probation, {judgement.state} after {judgement.blocks} blocks"
        why += f": {judgement.why}" if judgement.why else ""
        refused = await self._pointers.move(champion.for_all(), self._revision, why)
        fields = {"version": champion.version, "why": why, "kept": refused, **judgement.figures}
        if self._is_moved(champion, refused):
            log.info("champion acts on all workers", extra={"fields": fields})

    async def _roll_back(self, champion: PolicyPointer, judgement: Judgement) -> None:
        """Rejected first, then moved: killed between the two, the next examiner moves it."""
        why = f"live regression: {judgement.why}"
        await self._pointers.reject(champion, why)
        former = await self._pointers.former(champion)
        refused = await self._pointers.move(former, self._revision, f"rollback from {champion.version}: {why}")
        if self._is_moved(champion, refused):
            fields = {"from": champion.version, "to": former.version, "why": why}
            log.warning("rollback", extra={"fields": fields})
            self._on_rollback(champion, judgement)

    def _is_moved(self, champion: PolicyPointer, refused: str) -> bool:
        """Whether the pointer went; where it did not (a pin), the champion is judged again over another window: else
        it would stay on probation for ever."""
        if not refused:
            self._champion, self._kept = None, ""
            return True
        if refused != self._kept:
            self._kept = refused
            log.warning("champion kept", extra={"fields": {"version": champion.version, "why": refused}})
        self.ledger.begin(behaviour_name(champion))
        return False
