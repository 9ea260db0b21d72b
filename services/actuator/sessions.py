"""Which sessions of a worker leave its card and which come back: what to ask of its snapshot, and the choice. Pure.

The rules are the memory plane's (``memory.victims``, ``memory.prefetch``); here is what a live engine says, put into
their terms. Expected returns are the engine's own, since it alone sees every turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from schemas.engine import AwaySession, IdleSession, Snapshot
from schemas.identity import STEP_S
from services.actuator.account import Card, Known
from services.actuator.effects import EVICT, EffectSettings
from services.actuator.memory import prefetch
from services.actuator.memory.prefetch import Away, Headroom, PrefetchSettings
from services.actuator.memory.victims import Idle, Machine, Prices, Way, choose, costs

F8 = NDArray[np.float64]

CAN_NAME: Final = "sessions"
"""Capability of an engine that evicts sessions by name."""
CAN_PREFETCH: Final = "prefetch"
LISTED: Final = 1024
"""Idle sessions looked at, least recently used first."""
HORIZON_S: Final = 600.0
"""How far ahead a choice looks: beyond that, others will have come and gone."""
UNKNOWN_RETURNS: Final = 0.5
"""Chance of a return where the engine expects none: it may not know."""
TURN_BACK_S: Final = 1.0
"""Slack of a way out and back; what is expected before that is over stays where it is."""
FREE_SHARE: Final = 0.05
"""Share of Q0 that a prefetch leaves free."""

PREFETCH: Final = PrefetchSettings(margin_s=STEP_S + 0.5)
"""The next look is a step away: what would have to start before that starts now."""
DUE_WITHIN_S: Final = 2 * STEP_S + 0.5
PRICES: Final = Prices()

_PLAIN: Final = Snapshot()


def question(known: Known, action: int) -> Snapshot:
    """What to ask of a worker's snapshot before ``action``: sessions only where a choice among them is coming."""
    if not known.view.swap_allowed or known.prefill_tokens_per_s <= 0:
        return _PLAIN
    idle = LISTED if action == EVICT and CAN_NAME in known.capabilities else 0
    due_s = DUE_WITHIN_S if CAN_PREFETCH in known.capabilities else 0.0
    return Snapshot(idle, due_s) if idle or due_s else _PLAIN


def leaving(known: Known, needed_bytes: float, settings: EffectSettings) -> tuple[int, ...] | None:
    """Sessions to swap out for ``needed_bytes``, the worthiest first; None where the engine has to choose itself.

    Left alone are those idle for less than their class grants, those back before they could be out and back, and
    those that are cheaper to compute again than to carry. Sessions are whole: the last one may take more than needed.
    """
    said = known.said
    if said is None or not known.asked.idle_listed:
        return None
    machine = _machine(known, settings)
    trip_s_per_byte = 2.0 / machine.back_bytes_per_s
    listed = [
        one
        for one in said.idle
        if one.bytes > 0
        and one.idle_s >= known.idle_before_evict_s
        and one.expected_return_s > trip_s_per_byte * one.bytes + TURN_BACK_S
    ]
    if not listed:
        return ()
    _, ways = costs(_idle(listed), machine, PRICES)
    carried = [one for one, way in zip(listed, ways.tolist(), strict=True) if way != Way.DROP]
    if not carried:
        return ()
    chosen = choose(_idle(carried), needed_bytes, machine, PRICES, tier_free_bytes=said.host_free_bytes)
    return tuple(carried[row].session for row in chosen.rows.tolist())


def returning(known: Known, budget_bytes: float, settings: EffectSettings) -> tuple[tuple[int, ...], int]:
    """Sessions to bring back now within ``budget_bytes``, the worthiest first, and their bytes: into memory that
    nobody needs, over a link that nobody waits for."""
    said = known.said
    if said is None or not said.away or said.waiting or not known.view.swap_allowed:
        return (), 0
    away = [one for one in said.away if one.bytes > 0]
    room = said.free_block_bytes + max(said.quota_hard_bytes - said.mapped_bytes, 0)
    free_bytes = room - FREE_SHARE * known.view.q0_bytes
    machine = _machine(known, settings)
    headroom = Headroom(free_bytes, free_bytes, said.link_backlog_bytes / machine.back_bytes_per_s)
    rows = prefetch.due(_away(away), headroom, machine, PRICES, PREFETCH, budget_bytes).tolist()
    return tuple(away[row].session for row in rows), sum(away[row].bytes for row in rows)


def want_back(card: Card, workers: Sequence[Known], settings: EffectSettings) -> None:
    """Set what these workers of a card are to bring back, one after the other within what the card may move: a
    session that fits into no step is not waited for with the budget of others."""
    left_s = card.coming_scale * settings.movement_share * STEP_S
    for known in workers:
        link = _machine(known, settings).back_bytes_per_s
        _, size = returning(known, left_s * link * (1 - 1e-9), settings)  # the sum is to fit in spite of rounding
        known.view.prefetch_bytes = float(size)
        left_s -= size / link


def _machine(known: Known, settings: EffectSettings) -> Machine:
    link = known.view.link_bytes_per_s or settings.default_link_bytes_per_s
    return Machine(link, link, known.prefill_tokens_per_s)


def _idle(listed: Sequence[IdleSession]) -> Idle:
    size = np.array([one.bytes for one in listed], np.float64)
    back_s = np.array([one.expected_return_s for one in listed], np.float64)
    copied = np.array([one.copied for one in listed], np.bool_)
    return Idle(
        size_bytes=size,
        tokens=np.array([one.tokens for one in listed], np.float64),
        missing_bytes=np.where(copied, 0.0, size),
        returns=np.where(np.isfinite(back_s), 1.0, UNKNOWN_RETURNS),
        away_s=np.clip(back_s, 0.0, HORIZON_S),
    )


def _away(listed: Sequence[AwaySession]) -> Away:
    back_s = np.array([one.expected_return_s for one in listed], np.float64)
    return Away(
        size_bytes=np.array([one.bytes for one in listed], np.float64),
        tokens=np.array([one.tokens for one in listed], np.float64),
        early_s=back_s,
        # Who is overdue is expected to be as late again, as the engine has it when it is asked who may leave: fetched
        # now, it would be the next to go.
        chance=np.where(back_s >= -PREFETCH.margin_s, 1.0, 0.0),
    )
