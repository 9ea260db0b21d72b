"""OutcomeBatch: what became of a node's commands (actuator -> featurizer, audit)."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from schemas.codec import Codec, DecodeError, pack_row, unpack_row
from schemas.identity import SCHEMA_VERSION, action_id, parse_action_id
from schemas.movement import Moved


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


class Effect(msgspec.Struct, frozen=True, array_like=True):
    """What a command moved; only the few rows that moved something have one."""

    row: int
    compacted_bytes: int = 0
    evicted_bytes: int = 0
    prefetched_bytes: int = 0
    pages_freed: int = 0
    pause_us: float = 0.0
    lower_bound_bytes: int = 0
    """Of a compaction: no plan frees as many page groups with fewer."""
    dropped_moves: int = 0
    """Moves whose source changed under the copy."""
    moved: tuple[Moved, ...] = ()
    """The transfers, where bytes are really moved."""


class Completion(msgspec.Struct, frozen=True, array_like=True):
    """The order of the command that a row reports the end of, always of an earlier step."""

    row: int
    boot_id: int
    step: int


class OutcomeBatch(msgspec.Struct, frozen=True, array_like=True):
    """All of a node's outcomes for a step, a column a field; numbers little-endian, rows in ``workers``' order.

    ``boot_id`` and ``step`` are those of the commands. Requested and effective quota stand apart: an
    acknowledgement is not an effect. Rows are receipts of this step, but for those in ``completions``.
    """

    node: str
    boot_id: int
    step: int
    schema_version: int
    t_ns: int
    workers: tuple[str, ...]
    policies: tuple[str, ...]
    """Behaviour policies of the commands, echoed."""
    policy_index: bytes
    """uint8 [workers]: each row's place in ``policies``; empty when there is one policy for all."""
    statuses: bytes
    """uint8 [workers]: a :class:`Status` each."""
    requested_actions: bytes
    """uint8 [workers]."""
    executed_actions: bytes
    """uint8 [workers]: what was really done; a refused or ineffective command executed ``hold``."""
    refusals: bytes
    """uint8 [workers]: a :class:`Refusal` each."""
    requested_rho: bytes
    """float64 [workers]: multiple of Q0."""
    effective_rho: bytes
    """float64 [workers]: as the engine confirmed it; 0 where nobody knows the worker."""
    effective_generations: bytes
    """int64 [workers]."""
    effective_max_running: bytes
    """int64 [workers]: requests."""
    quota_soft_bytes: bytes
    """int64 [workers]."""
    quota_hard_bytes: bytes
    """int64 [workers]."""
    probabilities: bytes
    """float32 [workers]: of the command, echoed."""
    masks: bytes
    """uint8 [workers]: of the command, echoed: the featurizer learns masks from outcomes alone."""
    holds: bytes
    """uint8 [workers]: of the command, echoed."""
    effects: tuple[Effect, ...] = ()
    completions: tuple[Completion, ...] = ()
    details: dict[int, str] = msgspec.field(default_factory=dict)
    """Words on a row that has something to say: why it was refused, or by what it was clipped."""


OUTCOME_BATCH: Final = Codec(OutcomeBatch)


def check_columns(batch: OutcomeBatch) -> None:
    """DecodeError (``bad_shape``) when the parts of a batch do not agree."""
    rows = len(batch.workers)
    if (
        not len(batch.statuses) == len(batch.requested_actions) == len(batch.executed_actions) == rows
        or not len(batch.refusals) == len(batch.masks) == len(batch.holds) == rows
        or not len(batch.requested_rho) == len(batch.effective_rho) == len(batch.effective_generations) == 8 * rows
        or not len(batch.quota_soft_bytes) == len(batch.quota_hard_bytes) == 8 * rows
        or len(batch.effective_max_running) != 8 * rows
        or len(batch.probabilities) != 4 * rows
        or len(batch.policy_index) not in (0, rows)
        or (rows and max(batch.policy_index, default=0) >= len(batch.policies))
    ):
        raise DecodeError("OutcomeBatch", "bad_shape", f"columns that do not fit {rows} workers")
    if batch.effects or batch.completions:
        named = [one.row for one in batch.effects] + [one.row for one in batch.completions]
        if min(named) < 0 or max(named) >= rows:
            raise DecodeError("OutcomeBatch", "bad_shape", f"rows {sorted(named)}: there are {rows}")


class WorkerOutcome(NamedTuple):
    """One worker's row of an :class:`OutcomeBatch`; the fields are explained there."""

    worker: str
    action_id: str
    kind: int
    status: int
    requested_action: int
    executed_action: int
    refusal: int
    requested_rho: float
    effective_rho: float
    effective_generation: int
    effective_max_running: int
    policy: str
    probability: float
    mask: int
    hold: int = 0
    quota_soft_bytes: int = 0
    quota_hard_bytes: int = 0
    compacted_bytes: int = 0
    evicted_bytes: int = 0
    prefetched_bytes: int = 0
    pages_freed: int = 0
    pause_us: float = 0.0
    detail: str = ""
    lower_bound_bytes: int = 0
    dropped_moves: int = 0
    moved: tuple[Moved, ...] = ()


def outcomes_of(batch: OutcomeBatch) -> list[WorkerOutcome]:
    """The batch by row, for screens, tests and whoever is in no hurry; DecodeError as :func:`check_columns`."""
    check_columns(batch)
    rho, effective = unpack_row(batch.requested_rho, "d"), unpack_row(batch.effective_rho, "d")
    generations, ceilings = unpack_row(batch.effective_generations, "q"), unpack_row(batch.effective_max_running, "q")
    soft, hard = unpack_row(batch.quota_soft_bytes, "q"), unpack_row(batch.quota_hard_bytes, "q")
    probabilities = unpack_row(batch.probabilities, "f")
    orders = {one.row: (one.boot_id, one.step) for one in batch.completions}
    effects = {one.row: one for one in batch.effects}
    rows = []
    for k, worker in enumerate(batch.workers):
        effect = effects.get(k, NO_EFFECT)
        rows.append(
            WorkerOutcome(
                worker,
                action_id(worker, *orders.get(k, (batch.boot_id, batch.step))),
                int(OutcomeKind.COMPLETION if k in orders else OutcomeKind.RECEIPT),
                batch.statuses[k],
                batch.requested_actions[k],
                batch.executed_actions[k],
                batch.refusals[k],
                rho[k],
                effective[k],
                generations[k],
                ceilings[k],
                batch.policies[batch.policy_index[k] if batch.policy_index else 0],
                probabilities[k],
                batch.masks[k],
                batch.holds[k],
                soft[k],
                hard[k],
                effect.compacted_bytes,
                effect.evicted_bytes,
                effect.prefetched_bytes,
                effect.pages_freed,
                effect.pause_us,
                batch.details.get(k, ""),
                effect.lower_bound_bytes,
                effect.dropped_moves,
                effect.moved,
            )
        )
    return rows


NO_EFFECT: Final = Effect(-1)


def outcome_batch(node: str, boot_id: int, step: int, t_ns: int, rows: Sequence[WorkerOutcome]) -> OutcomeBatch:
    """The batch of these rows: the few that complete an effect, tests. ValueError for a malformed action id."""
    policies = tuple(dict.fromkeys(row.policy for row in rows))
    effects = [
        Effect(
            k,
            row.compacted_bytes,
            row.evicted_bytes,
            row.prefetched_bytes,
            row.pages_freed,
            row.pause_us,
            row.lower_bound_bytes,
            row.dropped_moves,
            row.moved,
        )
        for k, row in enumerate(rows)
    ]
    return OutcomeBatch(
        node,
        boot_id,
        step,
        SCHEMA_VERSION,
        t_ns,
        tuple(row.worker for row in rows),
        policies,
        b"" if len(policies) < 2 else bytes(policies.index(row.policy) for row in rows),
        bytes(row.status for row in rows),
        bytes(row.requested_action for row in rows),
        bytes(row.executed_action for row in rows),
        bytes(row.refusal for row in rows),
        pack_row([row.requested_rho for row in rows], "d"),
        pack_row([row.effective_rho for row in rows], "d"),
        pack_row([row.effective_generation for row in rows], "q"),
        pack_row([row.effective_max_running for row in rows], "q"),
        pack_row([row.quota_soft_bytes for row in rows], "q"),
        pack_row([row.quota_hard_bytes for row in rows], "q"),
        pack_row([row.probability for row in rows], "f"),
        bytes(row.mask for row in rows),
        bytes(row.hold for row in rows),
        tuple(one for one in effects if one != msgspec.structs.replace(NO_EFFECT, row=one.row)),
        tuple(
            Completion(k, *parse_action_id(row.action_id)[1])
            for k, row in enumerate(rows)
            if row.kind == OutcomeKind.COMPLETION
        ),
        {k: row.detail for k, row in enumerate(rows) if row.detail},
    )


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
