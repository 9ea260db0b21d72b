"""Actions, the reasons that forbid them, and the ActionBatch that carries them (decision -> actuator)."""

from __future__ import annotations

import enum
from typing import Final

import msgspec

from schemas.codec import Codec


class Action(enum.IntEnum):
    """What a worker is told in a step (article 1's A0 to A4)."""

    HOLD = 0
    WIDEN = 1
    TIGHTEN = 2
    COMPACT = 3
    EVICT = 4


ACTION_COUNT: Final = len(Action)
ALL_ACTIONS: Final = (1 << ACTION_COUNT) - 1
"""Mask with every action allowed: bit k is action k. Bit 0 (hold) is always set."""

RHO_MIN: Final = 1.0
RHO_MAX: Final = 1.6
RHO_STEP: Final = 0.1
MAX_RUNNING_START: Final = 256
MAX_RUNNING_LOW: Final = 4
MAX_RUNNING_HIGH: Final = 1024
WIDEN_RUNNING: Final = 1.25
TIGHTEN_RUNNING: Final = 0.8


class MaskReason(enum.IntEnum):
    """Why the shield forbids an action; 0 = it does not. Append only: the numbers are in the audit stream."""

    ALLOWED = 0
    HELD = 1
    AT_RHO_MAX = 2
    AT_RHO_MIN = 3
    CLASS_FORBIDS_SWAP = 4
    CLASS_FORBIDS_OVERCOMMIT = 5
    COOL_DOWN = 6
    FORECAST_EXHAUSTION = 7
    LATENCY_AT_LIMIT = 8
    NOTHING_FRAGMENTED = 9
    NOTHING_IDLE = 10
    HOST_FULL = 11
    LINK_BUSY = 12
    AT_MAX_RUNNING_LOW = 13
    UNKNOWN_STATE = 14
    TRAINING_NOT_OPTED_IN = 15


class Hold(enum.IntEnum):
    """Why a worker is held: it gets action 0 with this reason, which renews its lease. 0 = it is not."""

    NONE = 0
    WINDOW_FILLING = 1
    STALE = 2
    ENGINE_STARTING = 3
    SAMPLE_REJECTED = 4
    FEATURE_TABLE_MISMATCH = 5
    MODE_OFF = 6
    PAUSED = 7


class ShadowDecision(msgspec.Struct, frozen=True, array_like=True):
    """What a policy that does not act would have done."""

    policy: str
    action: int
    q_values: tuple[float, ...] = ()


class WorkerAction(msgspec.Struct, frozen=True, array_like=True):
    """One worker's command: absolute, so that a repeat does nothing."""

    worker: str
    action_id: str
    action: int
    target_rho: float
    target_max_running: int
    base_generation: int
    """The generation the decision was made on; the engine refuses it once its own is newer."""
    deadline_ns: int
    """Node clock; later arrival is refused."""
    lease_ns: int
    """Node clock; when it passes unrenewed, the engine returns to rho 1.0 by itself."""
    policy: str
    probability: float
    """With which the behaviour policy chose this action, 0 to 1."""
    mask: int
    mask_reasons: tuple[int, ...]
    """One :class:`MaskReason` per action."""
    hold: int = 0
    q_values: tuple[float, ...] = ()
    shadows: tuple[ShadowDecision, ...] = ()


class ActionBatch(msgspec.Struct, frozen=True, array_like=True):
    """All of a node's commands for a step."""

    node: str
    boot_id: int
    step: int
    schema_version: int
    t_ns: int
    actions: tuple[WorkerAction, ...]
    policy_version: str = ""


ACTION_BATCH: Final = Codec(ActionBatch)
