"""What the actuator knows of a node's workers, card by card: rebuilt from ``describe``, kept by snapshots.

Two engines of a card must never race between looking at free memory and mapping it, so free page groups
are granted by one owner, this account. A grant is taken back only when the engine confirmed it. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from schemas.classes import DEFAULT_LIMITS, ClassLimits, ServiceClass
from schemas.engine import Description, Receipt, SnapshotReply
from schemas.identity import parse_worker_id
from services.actuator.budget import next_scale
from services.actuator.effects import WorkerView


class Known(msgspec.Struct):
    """A described worker: its card view and the quota the engine itself last said to be in force."""

    view: WorkerView
    service_class: int
    capabilities: frozenset[str]
    generation: int
    rho: float
    soft_bytes: int
    hard_bytes: int
    max_running: int
    granted_bytes: int


class Card:
    """The workers of one card. ``members`` maps each expected worker to what is known, None before that."""

    def __init__(self) -> None:
        self.members: dict[str, Known | None] = {}
        self.scale = 1.0
        """Share of the movement budget the card has now."""

    @property
    def complete(self) -> bool:
        """Whether every worker expected here was described: only then free memory is known."""
        return None not in self.members.values()

    def settle(self, over_limit: bool) -> None:
        """End of a step: the budget halves when TPOT left its limit, else recovers."""
        self.scale = next_scale(self.scale, over_limit)

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
            self.cards.setdefault(parse_worker_id(worker).gpu, Card()).members.setdefault(worker, None)

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
        view = WorkerView(
            q0_bytes=float(said.q0_bytes),
            capacity_bytes=float(said.card_kv_capacity_bytes),
            group_bytes=float(said.page_group_bytes),
            floor_bytes=float(said.floor_bytes),
            mapped_bytes=float(said.mapped_bytes),
            kv_bytes=float(said.mapped_bytes),
            idle_bytes=0.0,
            swap_allowed=self._limits[ServiceClass(said.service_class)].swap_allowed,
            link_bytes_per_s=said.link_bytes_per_s,
        )
        known = Known(
            view,
            said.service_class,
            frozenset(said.capabilities),
            said.generation,
            1.0,
            said.q0_bytes,
            said.q0_bytes,
            0,
            said.granted_bytes,
        )
        self.card_of(worker).members[worker] = known
        return known

    @staticmethod
    def snapshot(known: Known, said: SnapshotReply) -> None:
        """Physical truth before a step."""
        view = known.view
        view.mapped_bytes = float(said.mapped_bytes)
        view.kv_bytes = float(said.live_bytes + said.idle_bytes)
        view.idle_bytes = float(said.idle_bytes)
        view.floor_bytes = float(said.floor_bytes)
        view.host_free_bytes = float(said.host_free_bytes)
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
