"""OutcomeBatch: what became of a node's commands (actuator -> featurizer, audit)."""

from __future__ import annotations

import enum
from typing import Final

import msgspec

from schemas.codec import Codec


class OutcomeKind(enum.IntEnum):
    """A receipt answers within the step; a completion follows when an effect that outlasts it is done."""

    RECEIPT = 0
    COMPLETION = 1


class Status(enum.IntEnum):
    """What the actuator did with a command. Append only."""

    ACCEPTED = 0
    CLIPPED = 1
    DEFERRED = 2
    REFUSED = 3


class Refusal(enum.IntEnum):
    """Why a command was refused or clipped; 0 = it was not. Append only."""

    NONE = 0
    LATE = 1
    OUT_OF_RANGE = 2
    OLDER_GENERATION = 3
    CLASS_FORBIDS = 4
    BELOW_FLOOR = 5
    UNKNOWN_WORKER = 6
    ENGINE_UNREACHABLE = 7
    ENGINE_REFUSED = 8
    DUPLICATE = 9
    BUDGET_EXHAUSTED = 10
    TIER_FULL = 11


class WorkerOutcome(msgspec.Struct, frozen=True, array_like=True):
    """Requested and effective quota stand apart: an acknowledgement is not an effect."""

    worker: str
    action_id: str
    kind: int
    status: int
    requested_action: int
    executed_action: int
    """What was really done: a refused or ineffective command executed ``hold``."""
    refusal: int
    requested_rho: float
    effective_rho: float
    effective_generation: int
    effective_max_running: int
    policy: str
    """Behaviour policy of the command, echoed."""
    probability: float
    mask: int
    """Mask of the command, echoed: the featurizer learns masks from outcomes alone."""
    hold: int = 0
    quota_soft_bytes: int = 0
    quota_hard_bytes: int = 0
    compacted_bytes: int = 0
    evicted_bytes: int = 0
    prefetched_bytes: int = 0
    pages_freed: int = 0
    pause_us: float = 0.0
    detail: str = ""


class OutcomeBatch(msgspec.Struct, frozen=True, array_like=True):
    """All of a node's outcomes for a step; ``boot_id`` and ``step`` are those of the commands."""

    node: str
    boot_id: int
    step: int
    schema_version: int
    t_ns: int
    outcomes: tuple[WorkerOutcome, ...]


OUTCOME_BATCH: Final = Codec(OutcomeBatch)


class AuditRecord(msgspec.Struct, frozen=True, array_like=True):
    """A step's commands and outcomes together, for keeping (JetStream TG_AUDIT)."""

    node: str
    boot_id: int
    step: int
    schema_version: int
    t_ns: int
    actions: bytes
    """The encoded ActionBatch as it came."""
    outcomes: bytes
    """The encoded OutcomeBatch as it went."""
    gaps: int = 0
    """Audit records of this node lost before this one, since the actuator's start."""


AUDIT_RECORD: Final = Codec(AuditRecord)
