"""What the actuator knows of a node's workers, card by card: rebuilt from ``describe``, kept by snapshots.

Two engines of a card must never race between looking at free memory and mapping it, so free page groups
are granted by one owner, this account. A grant is taken back only when the engine confirmed it. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from schemas.actions import Action
from schemas.classes import DEFAULT_LIMITS, ClassLimits, ServiceClass
from schemas.engine import Description, Receipt, Snapshot, SnapshotReply
from schemas.identity import parse_worker_id
from services.actuator.budget import next_scale
from services.actuator.effects import MOVES, Command, EffectSettings, plan_card
from services.actuator.views import WorkerView

HOLD: Final = int(Action.HOLD)
CAN_GROW: Final = "grow"
"""Capability of an engine whose KV pool is not fixed at its start."""


class Known(msgspec.Struct):
    """A described worker: its card view and the quota the engine itself last said to be in force."""

    view: WorkerView
    service_class: int
    rho_max: float
    """Of its class."""
    capabilities: frozenset[str]
    generation: int
    rho: float
    soft_bytes: int
    hard_bytes: int
    max_running: int
    granted_bytes: int
    target: tuple[int, float, int] | None = None
    """(action, rho, max_running) to plan for in this step; None: it holds what is in force."""
    keeps_hard: bool = False
    """Its hard quota stays what is in force, whatever is planned in this step."""
    command: Command | None = None
    """What was planned for it in this step."""
    idle_before_evict_s: float = 0.0
    """Of its class."""
    prefill_tokens_per_s: float = 0.0
    """0: the engine does not know."""
    asked: Snapshot = Snapshot()
    """What ``said`` answers."""
    said: SnapshotReply | None = None
    """The newest snapshot; None before the first."""
    capacity_bytes: float = 0.0
    """KV capacity of its card with all weights on it; the view's is that of now."""
    shrink_bytes: float = 0.0
    """What it is to give up in this step for a neighbour's weights."""


class Card:
    """The workers of one card. ``members`` maps each expected worker to what is known, None before that."""

    def __init__(self) -> None:
        self.members: dict[str, Known | None] = {}
        self.scale = 1.0
        """Share of the movement budget the card has now."""
        self.troubled = False
        """Whether TPOT is beyond its limit in this step."""
        self._known: list[Known] | None = None
        self._basis: list[tuple[tuple[int, float, int] | None, bool, float, float, float]] | None = None

    def put(self, worker: str, known: Known | None) -> None:
        """Expect a worker (None), or take in what it said."""
        self.members[worker] = known
        self._known = self._basis = None

    def resize(self, extra_bytes: float) -> None:
        """Weights that are off the card make its KV capacity larger by so much than described, for engines whose pool
        can grow. Q0 stays, and with it what they may promise: the rest is lent, and has to come back at once."""
        for one in self.members.values():
            if one is None or CAN_GROW not in one.capabilities:
                continue
            if one.view.capacity_bytes != one.capacity_bytes + extra_bytes:
                one.view.capacity_bytes = one.capacity_bytes + extra_bytes
                self._basis = None

    @property
    def coming_scale(self) -> float:
        """The share that the next plan has."""
        return next_scale(self.scale, self.troubled) if self.troubled or self.scale < 1.0 else 1.0

    def plan(self, settings: EffectSettings) -> None:
        """Give every worker that has a target its command. The others count as holding: their memory is theirs
        whether they are commanded or not. Ends the card's step: the budget follows TPOT, targets are used up."""
        known = self._known
        if known is None:
            known = self._known = [one for one in self.members.values() if one is not None]
        if not known:
            return
        self.scale = self.coming_scale
        self.troubled = False
        basis = [
            (one.target, one.keeps_hard, one.view.mapped_bytes, one.view.floor_bytes, one.view.prefetch_bytes)
            for one in known
        ]
        if basis == self._basis:  # a quiet step: same targets, same memory, same commands
            for one in known:
                one.target = None
            return
        planned = plan_card(
            [one.target or (HOLD, one.rho, one.max_running) for one in known],
            [one.view for one in known],
            self.scale,
            settings,
        )
        complete = self.complete
        moves = False
        for one, command in zip(known, planned, strict=True):
            if one.target is None:
                one.command = None
                continue
            moves = moves or one.target[0] in MOVES or one.view.prefetch_bytes > 0
            if one.keeps_hard:
                command.hard_bytes = one.hard_bytes
            elif not complete:  # somebody we cannot see may have mapped the rest
                command.hard_bytes = min(command.hard_bytes, one.hard_bytes)
            one.target, one.command = None, command
        self._basis = basis if complete and not moves else None

    @property
    def quiet(self) -> bool:
        """Whether the next plan gives the same commands to the same targets, as long as nobody maps or frees."""
        return self._basis is not None and self.scale == 1.0 and not self.troubled

    @property
    def complete(self) -> bool:
        """Whether every worker expected here was described: only then free memory is known."""
        return None not in self.members.values()

    def grants(self) -> dict[str, int]:
        """What each worker may map in all, bytes, where it differs from what it was granted; none while a
        worker of the card is unknown.

        Everybody keeps max(mapped, floor); the rest is shared by Q0 in whole page groups. Raises come out
        of what no confirmed grant holds: what a neighbour is to give back counts once it did.
        """
        known = {worker: one for worker, one in self.members.items() if one is not None}
        if not known or not self.complete:
            return {}
        capacity = min(one.view.capacity_bytes for one in known.values())
        held = {worker: _held(one) for worker, one in known.items()}
        free = max(capacity - sum(held.values()), 0.0)
        q0 = sum(one.view.q0_bytes for one in known.values())
        wanted = {w: held[w] + _groups(free * one.view.q0_bytes / q0, one) for w, one in known.items()}
        unclaimed = capacity - sum(max(one.granted_bytes, held[w]) for w, one in known.items())
        changes = {}
        for worker, one in known.items():
            before = max(one.granted_bytes, held[worker])
            more = min(wanted[worker] - before, max(unclaimed, 0.0))
            if more > 0:
                more = _groups(more, one)
                unclaimed -= more
            if int(before + more) != one.granted_bytes:
                changes[worker] = int(before + more)
        return changes


class Account:
    """All cards of a node."""

    def __init__(self, limits: Mapping[ServiceClass, ClassLimits] = DEFAULT_LIMITS) -> None:
        self.cards: dict[int, Card] = {}
        self._limits = limits

    def expect(self, workers: Iterable[str]) -> None:
        """These workers exist; ValueError for a text that is no worker id."""
        for worker in workers:
            card = self.cards.setdefault(parse_worker_id(worker).gpu, Card())
            if worker not in card.members:
                card.put(worker, None)

    def card_of(self, worker: str) -> Card:
        return self.cards[parse_worker_id(worker).gpu]

    def describe(self, worker: str, said: Description) -> Known:
        """Take a worker in, or anew after its engine came back. ValueError for what no engine can mean."""
        classes = len(ServiceClass)
        if said.page_group_bytes < 1 or said.q0_bytes < 1 or not 0 <= said.service_class < classes:
            raise ValueError(
                f"{worker}: page group {said.page_group_bytes}, Q0 {said.q0_bytes}, class {said.service_class}: "
                f"expected bytes above 0 and a class below {classes}"
            )
        limits = self._limits[ServiceClass(said.service_class)]
        view = WorkerView(
            q0_bytes=float(said.q0_bytes),
            capacity_bytes=float(said.card_kv_capacity_bytes),
            group_bytes=float(said.page_group_bytes),
            floor_bytes=float(said.floor_bytes),
            mapped_bytes=float(said.mapped_bytes),
            kv_bytes=float(said.mapped_bytes),
            idle_bytes=0.0,
            swap_allowed=limits.swap_allowed,
            link_bytes_per_s=said.link_bytes_per_s,
        )
        known = Known(
            view,
            said.service_class,
            limits.rho_max,
            frozenset(said.capabilities),
            said.generation,
            1.0,
            said.q0_bytes,
            said.q0_bytes,
            0,
            said.granted_bytes,
            idle_before_evict_s=limits.idle_before_evict_s,
            prefill_tokens_per_s=said.prefill_tokens_per_s,
            capacity_bytes=float(said.card_kv_capacity_bytes),
        )
        self.card_of(worker).put(worker, known)
        return known

    @staticmethod
    def snapshot(known: Known, said: SnapshotReply, asked: Snapshot) -> None:
        """Physical truth before a step, and the sessions that ``asked`` had listed."""
        known.asked, known.said = asked, said
        view = known.view
        view.mapped_bytes = float(said.mapped_bytes)
        view.kv_bytes = float(said.live_bytes + said.idle_bytes)
        view.idle_bytes = float(said.idle_bytes)
        view.floor_bytes = float(said.floor_bytes)
        view.host_free_bytes = float(said.host_free_bytes)
        view.iteration_s = said.iteration_s
        view.prefetch_bytes = 0.0
        if said.prefill_tokens_per_s > 0:
            known.prefill_tokens_per_s = said.prefill_tokens_per_s
        known.generation = said.generation
        known.rho = said.rho
        known.soft_bytes = said.quota_soft_bytes
        known.hard_bytes = said.quota_hard_bytes
        known.max_running = said.max_running

    @staticmethod
    def receipt(known: Known, said: Receipt) -> None:
        """The quota in force after a command."""
        known.generation = said.generation
        known.rho = said.rho
        known.soft_bytes = said.quota_soft_bytes
        known.hard_bytes = said.quota_hard_bytes
        known.max_running = said.max_running
        known.view.mapped_bytes = float(said.mapped_bytes)


def _held(known: Known) -> float:
    return max(known.view.mapped_bytes, known.view.floor_bytes)


def _groups(amount_bytes: float, known: Known) -> float:
    return amount_bytes // known.view.group_bytes * known.view.group_bytes
