"""What an action means in bytes: absolute engine commands from a WorkerAction and the view of its card.

Decision says *which* of five actions; this module says how much. The live actuator plans a card at a time
(:func:`plan_card`), the offline replay whole fleets (:func:`plan`); both give the same commands, so a policy
that is compared offline acts as it would live. Pure (DESIGN sections 1, 3 and 5).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from schemas.actions import Action
from schemas.identity import STEP_S
from services.actuator import budget
from services.actuator.views import Views, WorkerView

F8 = NDArray[np.float64]
I8 = NDArray[np.int64]

INF: Final = float("inf")
EVICT: Final = int(Action.EVICT)
COMPACT: Final = int(Action.COMPACT)
"""As plain numbers: naming a member of an enum costs more than planning a worker (0.3 us in Python 3.11)."""


MOVES: Final = (EVICT, COMPACT)


class EffectSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How much of it an action moves."""

    evict_idle_share: float = 0.5
    """Share of the worker's idle KV that one evict action moves, 0 to 1: a wrong guess costs half."""
    movement_share: float = 0.5
    """Share of a step in which a card may move KV at all, 0 to 1; halves while TPOT is beyond its limit."""
    gap_ms: float = 4.0
    """Most milliseconds of compaction in one decode gap: a tenth of a 40 ms iteration; halves likewise."""
    copy_bytes_per_s: float = 400e9
    """Rate of in-card copies, bytes/s: about a quarter of an A100's HBM, since each byte is read and written
    and decoding goes on beside it."""
    compact_limit_bytes: int = 4 << 30
    """Most that one compact action moves, bytes."""
    reserve_bytes: int = 1_000_000_000
    """KV capacity of a shared card that no hard quota hands out, bytes: it covers what a neighbour maps ahead
    between two looks of the actuator (1 GB, DESIGN section 5)."""
    default_link_bytes_per_s: float = 25e9
    """Host link of a card that reports none, bytes/s (PCIe Gen4 x16 as measured)."""


DEFAULTS: Final = EffectSettings()


class Command(msgspec.Struct):
    """Absolute commands to one engine; 0 bytes = that verb is not sent."""

    rho: float
    max_running: int
    soft_bytes: int
    hard_bytes: int
    evict_bytes: int = 0
    compact_bytes: int = 0
    prefetch_bytes: int = 0


@dataclasses.dataclass(frozen=True, eq=False)
class Commands:
    """:class:`Command` for n workers: float64 [n] factors and bytes (whole numbers), int64 [n] running cap."""

    rho: F8
    max_running: I8
    soft_bytes: F8
    hard_bytes: F8
    evict_bytes: F8
    compact_bytes: F8
    prefetch_bytes: F8


def hard_quotas(views: Views, settings: EffectSettings = DEFAULTS) -> F8:
    """Hard quota per worker, float64 [n] bytes: what the card has beyond its neighbours' max(mapped, floor)
    and the reserve, in whole page groups; the whole capacity when alone; never below the worker's floor."""
    held = np.maximum(views.mapped_bytes, views.floor_bytes)
    count = int(views.cards.max(initial=-1)) + 1
    tenants = np.bincount(views.cards, minlength=count)[views.cards]
    neighbours = budget.per_card(views.cards, held, count)[views.cards] - held
    reserve = np.where(tenants > 1, float(settings.reserve_bytes), 0.0)
    groups = (views.capacity_bytes - neighbours - reserve) // views.group_bytes
    least = -(-views.floor_bytes // views.group_bytes)
    return np.maximum(groups, least) * views.group_bytes


def plan(
    actions: I8,
    target_rho: F8,
    target_max_running: I8,
    views: Views,
    scales: F8 | None = None,
    settings: EffectSettings = DEFAULTS,
) -> Commands:
    """Commands of n workers for their actions int64 [n] and absolute targets float64 [n] and int64 [n].

    ``scales`` float64 [c]: share of its movement budget each card has (``budget.next_scales``), all by default.
    """
    count = int(views.cards.max(initial=-1)) + 1
    scale = np.ones(count) if scales is None else scales
    if len(scale) != count:
        raise ValueError(f"{len(scale)} budget scales for {count} cards")
    evict_want = np.where(
        (actions == EVICT) & views.swap_allowed,
        np.minimum(np.maximum(views.idle_bytes * settings.evict_idle_share, views.group_bytes), views.idle_bytes),
        0.0,
    )
    asked = budget.per_card(views.cards, evict_want, count)[views.cards]
    evict_want = evict_want * budget.shares(asked, views.host_free_bytes)
    holes = views.mapped_bytes - views.kv_bytes
    compact_want = np.where(
        (actions == COMPACT) & (holes >= views.group_bytes),
        np.minimum(np.minimum(holes, views.kv_bytes), float(settings.compact_limit_bytes)),
        0.0,
    )
    link = np.where(views.link_bytes_per_s > 0, views.link_bytes_per_s, settings.default_link_bytes_per_s)
    gaps_s = budget.longest(views.cards, views.iteration_s, count)
    granted = budget.split(
        views.cards,
        scale * settings.movement_share * STEP_S,
        scale * budget.cards_in_gaps(STEP_S, settings.gap_ms / 1e3, gaps_s),
        link,
        settings.copy_bytes_per_s,
        np.where(views.swap_allowed, views.prefetch_bytes, 0.0),
        evict_want,
        compact_want,
    )
    return Commands(
        rho=target_rho,
        max_running=target_max_running,
        soft_bytes=np.floor(target_rho * views.q0_bytes),
        hard_bytes=hard_quotas(views, settings),
        evict_bytes=np.floor(granted.evict_bytes),
        compact_bytes=np.floor(granted.compact_bytes),
        prefetch_bytes=np.floor(granted.prefetch_bytes),
    )


def plan_card(
    targets: Sequence[tuple[int, float, int]],
    views: Sequence[WorkerView],
    scale: float = 1.0,
    settings: EffectSettings = DEFAULTS,
) -> list[Command]:
    """:func:`plan` for the workers of one card without arrays: ``targets`` are (action, target_rho,
    target_max_running). At least one worker; for a handful this costs a tenth of the vectorised form."""
    held = [view.mapped_bytes if view.mapped_bytes > view.floor_bytes else view.floor_bytes for view in views]
    taken = sum(held) + settings.reserve_bytes if len(views) > 1 else held[0]
    commands = []
    moving = False
    for (action, rho, max_running), view, own in zip(targets, views, held, strict=True):
        group = view.group_bytes
        groups = (view.capacity_bytes - taken + own) // group
        least = -(-view.floor_bytes // group)
        hard = (groups if groups > least else least) * group
        commands.append(Command(rho, max_running, int(rho * view.q0_bytes), int(hard)))
        moving = moving or action in MOVES or view.prefetch_bytes > 0
    if moving:
        _move(targets, views, commands, scale, settings)
    return commands


def _move(
    targets: Sequence[tuple[int, float, int]],
    views: Sequence[WorkerView],
    commands: Sequence[Command],
    scale: float,
    settings: EffectSettings,
) -> None:
    evict = [
        min(max(view.idle_bytes * settings.evict_idle_share, view.group_bytes), view.idle_bytes)
        if action == EVICT and view.swap_allowed
        else 0.0
        for (action, _, _), view in zip(targets, views, strict=True)
    ]
    asked = sum(evict)
    evict = [want * budget.share(asked, view.host_free_bytes) for want, view in zip(evict, views, strict=True)]
    compact = [
        min(view.mapped_bytes - view.kv_bytes, view.kv_bytes, settings.compact_limit_bytes)
        if action == COMPACT and view.mapped_bytes - view.kv_bytes >= view.group_bytes
        else 0.0
        for (action, _, _), view in zip(targets, views, strict=True)
    ]
    prefetch = [view.prefetch_bytes if view.swap_allowed else 0.0 for view in views]
    links = [view.link_bytes_per_s or settings.default_link_bytes_per_s for view in views]
    gap_s = max(view.iteration_s for view in views)
    left_s = scale * settings.movement_share * STEP_S
    compact_s = scale * budget.in_gaps(STEP_S, settings.gap_ms / 1e3, gap_s)
    copy_rates = [settings.copy_bytes_per_s] * len(views)
    parts = []
    for wants, rates, most_s in ((prefetch, links, INF), (evict, links, INF), (compact, copy_rates, compact_s)):
        asked_s = sum(want / rate for want, rate in zip(wants, rates, strict=True))
        part = budget.share(asked_s, min(left_s, most_s))
        left_s -= asked_s * part
        parts.append(part)
    for command, back, out, inside in zip(commands, prefetch, evict, compact, strict=True):
        command.prefetch_bytes = int(back * parts[0])
        command.evict_bytes = int(out * parts[1])
        command.compact_bytes = int(inside * parts[2])
