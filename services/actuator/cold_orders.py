"""Orders about cold weights, sent to a node's engines between their snapshots and their quotas.

The rule is ``cold_weights``; here are its eyes and hands. Nothing is ordered on a card one of whose workers is unknown
or did not answer in this step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from schemas.engine import Receipt, SetWeights
from schemas.identity import STEP_S
from services.actuator.account import CAN_GROW, Card, Known
from services.actuator.cold_weights import CAN_SLEEP, CardWeights, ColdWeightSettings, Order, Seat
from services.actuator.effects import EffectSettings
from services.actuator.grants import CAN_GRANT
from services.actuator.members import Member
from services.errors import EngineRefused, EngineUnreachable
from services.spans import Span

SLEEP_SUFFIX: Final = "/sleep"
WAKE_SUFFIX: Final = "/wake"
"""After the id of the command in whose step the weights were ordered away or back."""


class ColdOrders:
    """The cold weights of a node: a ledger for each card that has an engine which can sleep."""

    def __init__(self, settings: ColdWeightSettings, effects: EffectSettings) -> None:
        self._settings = settings
        self._effects = effects
        self._ledgers: dict[Card, CardWeights] = {}
        self._orders: dict[str, str] = {}
        """Action under way of each worker."""
        self._words: dict[str, list[str]] = {}

    async def look(self, members: Sequence[Member], cards: Mapping[int, Card], now_s: float) -> None:
        """After the snapshots of ``members``: follow what was ordered, and give each card the capacity that it has."""
        self._words.clear()
        by_worker = {member.engine.worker: member for member in members}
        for card in cards.values():
            ledger = self._ledger(card)
            if ledger is None:
                continue
            self._tell(ledger.see(_seats(card, by_worker, {}), now_s))
            for worker in ledger.moving():
                member = by_worker.get(worker)
                if member is None or member.problem:
                    continue
                said = await _receipt(member, self._orders.get(worker, ""))
                if said is not None:
                    self._tell({worker: ledger.receipt(worker, said.done, said.detail, now_s)})
            card.resize(ledger.extra_bytes)

    def plan(
        self, members: Sequence[Member], cards: Mapping[int, Card], commanded: Mapping[str, bool], now_s: float
    ) -> list[tuple[Order, Member, CardWeights]]:
        """Before the cards are planned: what to order in this step. Room that is reserved now already lowers the
        quotas of this step."""
        by_worker = {member.engine.worker: member for member in members}
        orders = []
        for card in cards.values():
            ledger = self._ledger(card)
            if ledger is None or not card.complete:
                continue
            seats = _seats(card, by_worker, commanded)
            if any(seat.said is None for seat in seats):
                continue
            capacity = min(known.capacity_bytes for known in card.members.values() if known is not None)
            plan = ledger.plan(seats, capacity, now_s)
            self._tell(plan.words)
            for order in plan.orders:
                orders.append((order, by_worker[order.worker], ledger))
            card.resize(ledger.extra_bytes)
            for known in card.members.values():
                if known is not None:
                    known.shrink_bytes = 0.0
            for worker, size in plan.shrink_bytes.items():
                shrinking = card.members[worker]
                if shrinking is not None:
                    shrinking.shrink_bytes = size
        return orders

    def make_room(self, card: Card) -> None:
        """After the card is planned: movements that empty page groups of those who are to give some up, unless they
        move something anyway. Holes are closed first: that frees what it moves many times over."""
        for known in card.members.values():
            command = known.command if known is not None else None
            if known is None or command is None or known.shrink_bytes <= 0:
                continue
            if command.compact_bytes or command.evict_bytes or command.prefetch_bytes:
                continue
            view, size = known.view, known.shrink_bytes
            holes = view.mapped_bytes - view.kv_bytes
            link = view.link_bytes_per_s or self._effects.default_link_bytes_per_s
            closes = "compact" in known.capabilities and holes >= view.group_bytes
            if closes and (holes >= size or view.idle_bytes < view.group_bytes):
                command.compact_bytes = int(min(holes, view.kv_bytes, self._effects.compact_limit_bytes))
            if not command.compact_bytes and "evict" in known.capabilities and view.swap_allowed:
                command.evict_bytes = int(min(size, view.idle_bytes, link * STEP_S * self._effects.movement_share))

    async def send(
        self, orders: Sequence[tuple[Order, Member, CardWeights]], suffix: str, now_s: float, span: Span
    ) -> None:
        """Before the quotas, which are a worker's last frame in a step."""
        for order, member, ledger in orders:
            worker = order.worker
            action_id = worker + suffix + (WAKE_SUFFIX if order.on_card else SLEEP_SUFFIX)
            verb = "wake" if order.on_card else "sleep"
            self._orders[worker] = action_id
            try:
                with span.child("weights", {"tidegate.worker": worker, "tidegate.on_card": order.on_card}):
                    said = await member.engine.set_weights(SetWeights(order.on_card, action_id))
                self._tell({worker: f"{verb} ordered: {said.detail}" if said.detail else f"{verb} ordered"})
            except EngineRefused as error:
                ledger.refused(worker, error.reason, now_s)
                member.card.resize(ledger.extra_bytes)
                self._tell({worker: f"{verb} refused: {error}"})
            except EngineUnreachable as error:  # it may have taken the order: what it shows later counts
                self._tell({worker: f"{verb}: {error.detail}"})

    def words(self, worker: str) -> str:
        """What there is to say about a worker's weights in this step; empty: nothing."""
        return "; ".join(self._words.get(worker, ()))

    def _tell(self, words: Mapping[str, str]) -> None:
        for worker, word in words.items():
            if word:
                self._words.setdefault(worker, []).append(f"weights: {word}")

    def _ledger(self, card: Card) -> CardWeights | None:
        ledger = self._ledgers.get(card)
        if ledger is None and any(_may_sleep(known) for known in card.members.values()):
            ledger = self._ledgers[card] = CardWeights(self._settings)
        return ledger


def _may_sleep(known: Known | None) -> bool:
    return known is not None and known.view.swap_allowed and CAN_SLEEP in known.capabilities


def _seats(card: Card, by_worker: Mapping[str, Member], commanded: Mapping[str, bool]) -> list[Seat]:
    seats = []
    for worker, known in card.members.items():
        if known is None:
            continue
        member = by_worker.get(worker)
        answered = member is not None and not member.problem
        view = known.view
        granted_bytes = float(known.granted_bytes) if CAN_GRANT in known.capabilities else 0.0
        seats.append(
            Seat(
                worker,
                _may_sleep(known),
                CAN_GROW in known.capabilities,
                commanded.get(worker, False),
                known.said if answered else None,
                max(view.mapped_bytes, granted_bytes),
                view.floor_bytes,
                view.group_bytes,
            )
        )
    return seats


async def _receipt(member: Member, action_id: str) -> Receipt | None:
    try:
        return await member.engine.receipt(action_id)
    except (EngineRefused, EngineUnreachable):
        return None
