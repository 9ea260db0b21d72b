"""Which model of a card goes to sleep, which comes back, and what the others may map meanwhile. Pure.

A long-tail model's weights leave the card when nobody has asked it for a while and a neighbour is out of memory; they
come back on its first request (article 2's host pool). Their room is reserved before that: from then on the account
counts them as on the card, so that the neighbours' hard quotas fall by what lacks, and it is handed back when the room
does not come. An order that was taken is no effect: what the engine's memory shows is.

:class:`CardWeights` is a card's ledger. It holds nothing that cannot be had again from ``describe`` and ``snapshot``:
after a restart it errs on the side of weights that are on the card.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Final, NamedTuple

import msgspec

from schemas.engine import SnapshotReply

CAN_SLEEP: Final = "sleep"
"""Capability of an engine whose weights can leave its card."""

_Seconds = Annotated[float, msgspec.Meta(ge=0.0)]


class ColdWeightSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When weights leave a card. Classes whose KV may not leave it (training, copilot) never sleep."""

    enabled: bool = False
    """Off: a model that sleeps for a first request's wait is an operator's decision."""
    idle_before_sleep_s: _Seconds = 120.0
    """How long nobody has asked a model before it may sleep, seconds: a hundred times what waking costs."""
    need_steps: Annotated[int, msgspec.Meta(ge=1)] = 2
    """Steps in a row in which a neighbour waits with its hard quota all mapped: one is a burst."""
    min_awake_s: _Seconds = 300.0
    """A model that woke is left awake for so long, seconds: bounds how often requests pay for a waking."""
    min_asleep_s: _Seconds = 10.0
    """A model that fell asleep is left asleep for so long, seconds, whoever asks: its way out is paid for."""
    room_limit_s: _Seconds = 30.0
    """How long the neighbours may take to make room before a waking is refused, seconds."""
    effect_limit_s: _Seconds = 120.0
    """After so long without an effect an order counts as failed, seconds."""
    retry_s: _Seconds = 10.0
    """Before an order that failed is tried again, seconds; twice as long after each further failure."""
    retry_limit_s: _Seconds = 320.0
    """At most so long, seconds."""


OFF: Final = ColdWeightSettings()


class Phase(enum.Enum):
    """Where a worker's weights are, as far as it was seen."""

    AWAKE = "awake"
    LEAVING = "leaving"
    """Ordered to sleep; on the card until its memory shows otherwise."""
    ASLEEP = "asleep"
    RESERVED = "reserved"
    """Asleep, its requests wait, the neighbours make room: counts as on the card."""
    RETURNING = "returning"
    """Ordered to wake; counts as on the card."""


class Seat(NamedTuple):
    """A worker of the card in this step."""

    worker: str
    may_sleep: bool
    """Its engine can and its class lets it."""
    may_grow: bool
    """Its KV pool can use what leaves the card; one that is fixed at its start cannot."""
    commanded: bool
    """Neither held nor in shadow, and nothing about its command was refused."""
    said: SnapshotReply | None
    """This step's snapshot; None: it did not answer, or was not asked."""
    held_bytes: float
    """What it has mapped, or may map without asking."""
    floor_bytes: float
    group_bytes: float


class Order(NamedTuple):
    worker: str
    on_card: bool


class Plan(NamedTuple):
    """What to do in this step; words on workers are for their outcomes."""

    orders: tuple[Order, ...] = ()
    shrink_bytes: Mapping[str, float] = {}
    """What each commanded neighbour is to give up for weights that come back."""
    words: Mapping[str, str] = {}


class Sleeper(msgspec.Struct):
    """A worker as the ledger knows it."""

    phase: Phase
    since_s: float
    ours: bool = False
    """Whether this actuator put it to sleep: then it wakes it also in steps that hold it."""
    weights_bytes: float = 0.0
    fresh: bool = False
    """Whether it was seen in this step."""
    failures: int = 0
    retry_at_s: float = 0.0
    asked_since_s: float | None = None
    """Asleep: since when requests wait."""
    needy_steps: int = 0


class CardWeights:
    """The ledger of one card. ``now_s`` is the node clock in seconds and never goes back."""

    def __init__(self, settings: ColdWeightSettings) -> None:
        self._settings = settings
        self.sleepers: dict[str, Sleeper] = {}

    def see(self, seats: Sequence[Seat], now_s: float) -> dict[str, str]:
        """Take in a step's snapshots; words on what was seen to have happened."""
        words = {}
        for seat in seats:
            if seat.said is None:
                if seat.worker in self.sleepers:
                    self.sleepers[seat.worker].fresh = False
                continue
            told = self._see(seat, seat.said, now_s)
            if told:
                words[seat.worker] = told
        return words

    @property
    def extra_bytes(self) -> float:
        """KV capacity that the card has beyond its own while weights are off it. Whoever did not answer may have
        restarted with its weights on the card."""
        return sum(one.weights_bytes for one in self.sleepers.values() if one.phase is Phase.ASLEEP and one.fresh)

    def moving(self) -> list[str]:
        """Workers with an order whose effect was not seen yet."""
        return [worker for worker, one in self.sleepers.items() if one.phase in (Phase.LEAVING, Phase.RETURNING)]

    def plan(self, seats: Sequence[Seat], capacity_bytes: float, now_s: float) -> Plan:
        """Orders for this step. ``capacity_bytes``: the card's KV capacity with all weights on it. At most one worker
        is on its way at a time: they would share the link, and each would take twice as long."""
        words: dict[str, str] = {}
        self._ask_for_room(seats, now_s)
        waking = self._with_phase(Phase.RESERVED)
        if waking is not None and not self._may_wake(waking, seats):
            self.sleepers[waking].phase, waking = Phase.ASLEEP, None
        if waking is not None:
            lacking = sum(seat.held_bytes for seat in seats) - capacity_bytes - self.extra_bytes
            if lacking <= 0:
                return Plan() if self.moving() else Plan((self._order(waking, True, now_s),))
            one = self.sleepers[waking]
            if now_s - one.since_s <= self._settings.room_limit_s:
                return Plan(shrink_bytes=_shares(seats, waking, lacking))
            words[waking] = (
                f"waking refused: {lacking / 1e9:.1f} GB of room lacking after {now_s - one.since_s:.0f} s, "
                "quotas restored"
            )
            self._failed(waking, Phase.ASLEEP, now_s)
        asked = any(one.asked_since_s is not None for one in self.sleepers.values())
        if waking is None and not asked and not self.moving():
            tired = self._tired(seats, now_s)
            if tired is not None:
                return Plan((self._order(tired, False, now_s),))
        return Plan(words=words)

    def refused(self, worker: str, reason: str, now_s: float) -> None:
        """The engine said no. Room that was taken in the last moment is waited for; anything else is tried later."""
        one = self.sleepers[worker]
        if one.phase is Phase.RETURNING and reason == "busy":
            one.phase = Phase.RESERVED
        else:
            self._failed(worker, Phase.ASLEEP if one.phase is Phase.RETURNING else Phase.AWAKE, now_s)

    def receipt(self, worker: str, done: bool, detail: str, now_s: float) -> str:
        """The engine's word on an order, after :meth:`see`; words for the worker's outcome. ``done`` without the
        effect in the snapshot is a failure, and so is an order that had its time."""
        one = self.sleepers.get(worker)
        if one is None or one.phase not in (Phase.LEAVING, Phase.RETURNING):
            return ""
        late = now_s - one.since_s > self._settings.effect_limit_s
        if not done and not late:
            return ""
        if one.phase is Phase.RETURNING:
            if done and one.asked_since_s is None:  # on the card, see _see
                self._turn(one, Phase.AWAKE, now_s)
                return f"awake: {detail}"
            self._failed(worker, Phase.ASLEEP, now_s)
            return f"not awake, its room is given up: {detail}"
        self._failed(worker, Phase.AWAKE, now_s)
        return f"not asleep: {detail or 'the engine says it is done, its weights are on the card'}"

    def _see(self, seat: Seat, said: SnapshotReply, now_s: float) -> str:
        one = self.sleepers.get(seat.worker)
        if one is None:
            # Requests that wait for weights off the card: whoever was here before may have ordered them back.
            asleep = Phase.RESERVED if said.waiting else Phase.ASLEEP
            one = self.sleepers[seat.worker] = Sleeper(Phase.AWAKE if said.weights_on_card else asleep, now_s)
        one.fresh = True
        one.weights_bytes = float(said.weights_bytes)
        all_mapped = said.mapped_bytes + seat.group_bytes > said.quota_hard_bytes
        needs = seat.may_grow and said.weights_on_card and said.waiting > 0 and all_mapped
        one.needy_steps = one.needy_steps + 1 if needs else 0
        if said.weights_on_card:
            one.asked_since_s = None
            if one.phase in (Phase.ASLEEP, Phase.RESERVED):  # somebody else woke it, or it restarted
                self._turn(one, Phase.AWAKE, now_s)
            return ""
        if one.phase in (Phase.AWAKE, Phase.LEAVING):
            one.ours = one.phase is Phase.LEAVING
            self._turn(one, Phase.ASLEEP, now_s)
        if one.asked_since_s is None and said.waiting:
            one.asked_since_s = now_s
        elif not said.waiting and one.phase in (Phase.ASLEEP, Phase.RESERVED):  # its clients gave up
            one.asked_since_s, one.phase = None, Phase.ASLEEP
        return f"asleep: {one.weights_bytes / 1e9:.1f} GB off the card" if one.since_s == now_s and one.ours else ""

    def _ask_for_room(self, seats: Sequence[Seat], now_s: float) -> None:
        """Reserve room for the one whose requests have waited longest; a neighbour of it waits for its turn."""
        if self._with_phase(Phase.RESERVED) is not None:
            return
        asked = []
        for seat in seats:
            one = self.sleepers.get(seat.worker)
            if one is None or one.phase is not Phase.ASLEEP or one.asked_since_s is None:
                continue
            rested = now_s - one.since_s >= self._settings.min_asleep_s and now_s >= one.retry_at_s
            if rested and self._may_wake(seat.worker, (seat,)):
                asked.append((one.asked_since_s, seat.worker))
        if asked:
            one = self.sleepers[min(asked)[1]]
            one.phase, one.since_s = Phase.RESERVED, now_s

    def _may_wake(self, worker: str, seats: Iterable[Seat]) -> bool:
        """Whether it was seen in this step and is ours to wake: commanded, or put to sleep by us and held since."""
        one = self.sleepers[worker]
        return one.fresh and any(
            seat.may_sleep and (seat.commanded or one.ours) for seat in seats if seat.worker == worker
        )

    def _tired(self, seats: Iterable[Seat], now_s: float) -> str | None:
        """Whom nobody has asked for longest, beside a neighbour in need."""
        settings = self._settings
        needy = {
            worker for worker, one in self.sleepers.items() if one.fresh and one.needy_steps >= settings.need_steps
        }
        quiet = []
        for seat in seats:
            one = self.sleepers.get(seat.worker)
            if one is None or seat.said is None or one.phase is not Phase.AWAKE or not needy - {seat.worker}:
                continue
            rested = now_s - one.since_s >= settings.min_awake_s and now_s >= one.retry_at_s
            unasked = seat.said.waiting == 0 and seat.said.live_bytes == 0 and seat.said.weights_bytes > 0
            enough = seat.said.quiet_s > 0 and seat.said.quiet_s >= settings.idle_before_sleep_s  # 0: not known
            if rested and unasked and enough and seat.may_sleep and seat.commanded:
                quiet.append((seat.said.quiet_s, seat.worker))
        return max(quiet)[1] if quiet else None

    def _order(self, worker: str, on_card: bool, now_s: float) -> Order:
        one = self.sleepers[worker]
        one.phase, one.since_s = Phase.RETURNING if on_card else Phase.LEAVING, now_s
        return Order(worker, on_card)

    def _with_phase(self, phase: Phase) -> str | None:
        return next((worker for worker, one in self.sleepers.items() if one.phase is phase), None)

    def _turn(self, one: Sleeper, phase: Phase, now_s: float) -> None:
        one.phase, one.since_s, one.failures, one.retry_at_s = phase, now_s, 0, 0.0

    def _failed(self, worker: str, phase: Phase, now_s: float) -> None:
        one, settings = self.sleepers[worker], self._settings
        one.phase = phase
        one.retry_at_s = now_s + min(settings.retry_s * 2.0**one.failures, settings.retry_limit_s)
        one.failures += 1


def _shares(seats: Sequence[Seat], waking: str, lacking_bytes: float) -> dict[str, float]:
    """What lacks, from the commanded neighbours by what each holds above its floor; more than that nobody gives."""
    spare = {
        seat.worker: max(seat.held_bytes - seat.floor_bytes, 0.0)
        for seat in seats
        if seat.worker != waking and seat.commanded
    }
    total = sum(spare.values())
    part = min(lacking_bytes / total, 1.0) if total > 0 else 0.0
    return {worker: above * part for worker, above in spare.items() if above * part > 0}
