"""What a transition must satisfy before anything is learned from it; what does not is dropped and counted.

Messages are judged one by one on their shape alone, rows all at once on their values: at 10,000 workers the
first costs a few microseconds a message, the second nanoseconds a row.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from schemas.actions import ACTION_COUNT, ALL_ACTIONS, Action
from schemas.features import FEATURE_COUNT, FEATURE_HASH, FEATURES
from schemas.identity import STEP_NS
from schemas.transitions import REWARD_PARTS, Columns, TransitionBatch


class Fault(enum.IntEnum):
    """Why a row is dropped; the lower-case names are the labels of the counter. The first that holds counts."""

    NONE = 0
    ACTION_UNKNOWN = 1
    MASK_INVALID = 2
    ACTION_MASKED = 3
    STATE_NOT_FINITE = 4
    STATE_RANGE = 5
    REWARD_ABSENT = 6
    REWARD_RANGE = 7
    PROBABILITY_RANGE = 8
    DISCOUNT_RANGE = 9
    DUPLICATE = 10
    STALE = 11
    """Not newer than the worker's last."""
    TOO_OLD = 12
    AHEAD = 13
    """Further in the future than any node can be."""
    FLOOD = 14
    """Beyond its worker's share of the replay."""


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """Within which a row is believed."""

    reward_low: float
    reward_high: float


STATE_RANGES: Final = 1e4
"""A state's value may be this many times the width of its feature's scale: beyond lies a broken source, since the
network clips at 1.5 times already."""
_KINDS: Final = {"actions": "u1", "masks": "u1", "next_masks": "u1", "dones": "u1"}
_WIDTHS: Final = {"states": FEATURE_COUNT, "next_states": FEATURE_COUNT, "rewards": len(REWARD_PARTS)}
_ROW_BYTES: Final = tuple(_WIDTHS.get(name, 1) * (1 if name in _KINDS else 4) for name in Columns.__struct_fields__)
_SPAN: Final = np.array([max(abs(f.low), abs(f.high)) for f in FEATURES], np.float32)
_REQUIRED: Final = np.array([not f.may_be_absent for f in FEATURES])


def message_fault(batch: TransitionBatch) -> str:
    """``""``, or why the whole message is dropped: ``feature_table``, ``bad_shape`` or ``identity``."""
    if batch.feature_hash != FEATURE_HASH:
        return "feature_table"
    rows = len(batch.workers)
    # Written out, since it runs for every message: a loop over the names takes four times as long.
    found = (
        len(batch.states), len(batch.next_states), len(batch.actions), len(batch.masks), len(batch.next_masks),
        len(batch.probabilities), len(batch.rewards), len(batch.discounts), len(batch.dones), len(batch.policies),
    )  # fmt: skip
    if found != _lengths(rows):
        return "bad_shape"
    if batch.step < 0 or not 0 < batch.boot_id < 1 << 63 or batch.step >= 1 << 62:
        return "identity"
    return ""


@lru_cache(maxsize=4096)
def _lengths(rows: int) -> tuple[int, ...]:
    """Bytes of each column of ``rows`` rows, and the number of policies."""
    return (*(rows * width for width in _ROW_BYTES), rows)


def gather(batches: Sequence[TransitionBatch]) -> Columns:
    """The rows of several messages, each without :func:`message_fault`, as one set of columns in their order."""
    arrays: dict[str, NDArray[np.generic]] = {}
    for name in Columns.__struct_fields__:
        joined = np.frombuffer(b"".join([getattr(b, name) for b in batches]), _KINDS.get(name, "<f4"))
        arrays[name] = joined.reshape(-1, _WIDTHS[name]) if name in _WIDTHS else joined
    return Columns(**arrays)  # type: ignore[arg-type]  # kinds as the table above


def terminal(columns: Columns) -> NDArray[np.bool_]:
    """bool [n]: rows after which nothing follows: crashed, or of discount 0."""
    ends: NDArray[np.bool_] = (columns.dones != 0) | (columns.discounts == 0)
    return ends


def row_faults(columns: Columns, objective: int, bounds: Bounds) -> NDArray[np.uint8]:
    """:class:`Fault` per row, uint8 [n]; those from DUPLICATE on are for who knows what came before, and when.

    ``objective`` is the column of REWARD_PARTS that is learned from; the others may be absent. Next state and
    next mask of a terminal row are never read and may hold anything.
    """
    ends = terminal(columns)
    actions, masks, next_masks = columns.actions, columns.masks, columns.next_masks
    rewards = columns.rewards[:, objective]
    unknown = actions >= ACTION_COUNT
    bit = np.left_shift(1, np.where(unknown, 0, actions)).astype(np.uint8)
    finite, in_range = _states(columns.states)
    next_finite, next_in_range = _states(columns.next_states)
    probability, discount = columns.probabilities, columns.discounts
    with np.errstate(invalid="ignore"):
        tests = (
            (Fault.ACTION_UNKNOWN, unknown),
            (Fault.MASK_INVALID, _invalid(masks) | (~ends & _invalid(next_masks))),
            (Fault.ACTION_MASKED, (masks & bit) == 0),
            (Fault.STATE_NOT_FINITE, ~finite | ~(next_finite | ends)),
            (Fault.STATE_RANGE, ~in_range | ~(next_in_range | ends)),
            (Fault.REWARD_ABSENT, np.isnan(rewards)),
            (Fault.REWARD_RANGE, ~((rewards >= bounds.reward_low) & (rewards <= bounds.reward_high))),
            (Fault.PROBABILITY_RANGE, ~((probability >= 0) & (probability <= 1))),
            (Fault.DISCOUNT_RANGE, ~((discount >= 0) & (discount <= 1)) | ((columns.dones != 0) & (discount != 0))),
        )
    faults = np.zeros(actions.shape[0], np.uint8)
    for fault, found in reversed(tests):  # so that the first of the table is the one that stays
        faults[found] = fault
    return faults


def age_fault(boot_id: int, step: int, now_ns: int, max_age_s: float, max_ahead_s: float) -> Fault:
    """Of a message of this step at wall clock ``now_ns``: NONE, TOO_OLD or AHEAD. A boot id is the wall clock at
    telemetry's start."""
    age_s = (now_ns - boot_id - step * STEP_NS) / 1e9
    if age_s > max_age_s:
        return Fault.TOO_OLD
    return Fault.AHEAD if age_s < -max_ahead_s else Fault.NONE


def _invalid(masks: NDArray[np.uint8]) -> NDArray[np.bool_]:
    invalid: NDArray[np.bool_] = ((masks & (1 << Action.HOLD)) == 0) | (masks > ALL_ACTIONS)
    return invalid


def _states(states: NDArray[np.float32]) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Per row: no infinity and no required feature absent; nothing absurdly large."""
    absent = np.isnan(states)
    broken = np.logical_or(np.isinf(states).any(axis=1), absent[:, _REQUIRED].any(axis=1))
    with np.errstate(invalid="ignore"):
        beyond = np.logical_or.reduce(np.abs(states) > _SPAN * np.float32(STATE_RANGES), axis=1)
    return np.logical_not(broken), np.logical_not(beyond)
