"""Actions, the reasons that forbid them, and the ActionBatch that carries them (decision -> actuator)."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from schemas.codec import Codec, DecodeError, matrix_rows, pack_row, unpack_row
from schemas.identity import SCHEMA_VERSION, action_id


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
    RISK_VETO = 16
    """The acting policy's own risk head, not the shield: the action's mask bit stays set."""


class Hold(enum.IntEnum):
    """Why a worker is held: it gets action 0 with this reason, which renews its lease. 0 = it is not. Append only.

    Those in ``OPERATOR_HOLDS`` are an operator's word, not a doubt about the state: but for MODE_OFF, what the policy
    would have done stands beside them. An override may name another action than 0.
    """

    NONE = 0
    WINDOW_FILLING = 1
    STALE = 2
    ENGINE_STARTING = 3
    SAMPLE_REJECTED = 4
    FEATURE_TABLE_MISMATCH = 5
    MODE_OFF = 6
    PAUSED = 7
    SHADOW = 8
    OVERRIDE = 9
    KILLED = 10


OPERATOR_HOLDS: Final = frozenset({Hold.MODE_OFF, Hold.PAUSED, Hold.SHADOW, Hold.OVERRIDE, Hold.KILLED})
BASELINE_HOLDS: Final = frozenset({Hold.MODE_OFF, Hold.SHADOW, Hold.KILLED})
"""Orders under which nothing of a worker may be moved: it is what it would be without Tidegate."""
OPERATOR: Final = "operator"
"""Behaviour policy of rows that an operator's word decided: their action is not the acting policy's."""


NO_DECISION: Final = 255


class ShadowDecisions(msgspec.Struct, frozen=True, array_like=True):
    """What a policy that does not act would have done; rows held for a doubt about their state mean nothing. In a
    message with rows that an operator holds, the acting policy is among the shadows, without its Q values: those are
    the message's own. Where two policies act, each is there, with decisions for its own rows alone."""

    policy: str
    actions: bytes
    """uint8 [workers]; NO_DECISION where it has nothing to say."""
    q_values: bytes = b""
    """float32 [workers, actions], empty when the policy has none."""


class ActionBatch(msgspec.Struct, frozen=True, array_like=True):
    """All of a node's commands for a step, a column a field; numbers little-endian, rows in ``workers``' order.

    Commands are absolute, so that a repeat does nothing. ``schemas.identity.action_id`` gives each its id.
    """

    node: str
    boot_id: int
    step: int
    schema_version: int
    t_ns: int
    workers: tuple[str, ...]
    policy_version: str
    """Of the champion, also where some of these workers are still on the former one."""
    deadline_ns: int
    """Node clock; later arrival is refused. The same for all workers."""
    lease_ns: int
    """Node clock; when it passes unrenewed, the engines return to rho 1.0 by themselves."""
    policies: tuple[str, ...]
    """Names of the behaviour policies that chose these actions: one, two while a new one is on probation, and
    :data:`OPERATOR` where an operator's word did."""
    policy_index: bytes
    """uint8 [workers]: each worker's place in ``policies``; empty when there is one policy for all."""
    actions: bytes
    """uint8 [workers]: an :class:`Action` each."""
    target_rho: bytes
    """float64 [workers]: multiple of Q0."""
    target_max_running: bytes
    """int64 [workers]: requests."""
    base_generations: bytes
    """int64 [workers]: the generation each decision was made on; an engine refuses it once its own is newer."""
    probabilities: bytes
    """float32 [workers]: with which the behaviour policy chose the action, 0 to 1."""
    masks: bytes
    """uint8 [workers]: allowed actions, bit k is action k."""
    mask_reasons: bytes
    """uint8 [workers, actions]: a :class:`MaskReason` each."""
    holds: bytes
    """uint8 [workers]: a :class:`Hold` each."""
    q_values: bytes = b""
    """float32 [workers, actions] of the acting policy, empty when it has none; rows held for a doubt about their
    state mean nothing."""
    shadows: tuple[ShadowDecisions, ...] = ()
    orders: bytes = b""
    """uint8 [workers]: the operator's word on each worker as a :class:`Hold`, also where ``holds`` tells a doubt about
    its state instead; empty: on none."""


ACTION_BATCH: Final = Codec(ActionBatch)


class Columns(NamedTuple):
    """The columns of an ActionBatch that are no bytes of one number each, as Python numbers: for the handful of
    workers of a node that costs less than arrays do."""

    target_rho: tuple[float, ...]
    target_max_running: tuple[int, ...]
    base_generations: tuple[int, ...]


def columns_of(batch: ActionBatch) -> Columns:
    """Numbers of a batch whose parts agree; DecodeError (``bad_shape``) when they do not."""
    rows = len(batch.workers)
    if (
        not len(batch.actions) == len(batch.masks) == len(batch.holds) == rows
        or not len(batch.target_rho) == len(batch.target_max_running) == len(batch.base_generations) == 8 * rows
        or len(batch.probabilities) != 4 * rows
        or len(batch.policy_index) not in (0, rows)
        or len(batch.orders) not in (0, rows)
        or (rows and max(batch.policy_index, default=0) >= len(batch.policies))
    ):
        raise DecodeError("ActionBatch", "bad_shape", f"columns that do not fit {rows} workers")
    if (rows and len(batch.mask_reasons) % rows) or (rows == 0) != (not batch.mask_reasons):
        raise DecodeError("ActionBatch", "bad_shape", f"{len(batch.mask_reasons)} reasons for {rows} workers")
    return Columns(
        unpack_row(batch.target_rho, "d"),
        unpack_row(batch.target_max_running, "q"),
        unpack_row(batch.base_generations, "q"),
    )


def left_alone(batch: ActionBatch) -> list[bool]:
    """Whether each worker of a batch whose parts agree is one that nothing may be done to, whatever else is said of
    it: in shadow, off, or under the kill switch."""
    if not batch.orders:
        return [hold in BASELINE_HOLDS for hold in batch.holds]
    pairs = zip(batch.holds, batch.orders, strict=True)
    return [hold in BASELINE_HOLDS or order in BASELINE_HOLDS for hold, order in pairs]


class ShadowDecision(NamedTuple):
    """One worker's part of a :class:`ShadowDecisions`."""

    policy: str
    action: int
    q_values: tuple[float, ...] = ()


class WorkerAction(NamedTuple):
    """One worker's row of an :class:`ActionBatch`; the fields are explained there."""

    worker: str
    action_id: str
    action: int
    target_rho: float
    target_max_running: int
    base_generation: int
    deadline_ns: int
    lease_ns: int
    policy: str
    probability: float
    mask: int
    mask_reasons: tuple[int, ...]
    hold: int = 0
    q_values: tuple[float, ...] = ()
    shadows: tuple[ShadowDecision, ...] = ()
    order: int = 0


def actions_of(batch: ActionBatch) -> list[WorkerAction]:
    """The batch by worker, for screens, tests and whoever is in no hurry; DecodeError as :func:`columns_of`."""
    columns = columns_of(batch)
    rows = len(batch.workers)
    if any(len(shadow.actions) != rows for shadow in batch.shadows):
        raise DecodeError("ActionBatch", "bad_shape", f"shadow decisions that do not fit {rows} workers")
    probabilities = unpack_row(batch.probabilities, "f")
    reasons = [tuple(row) for row in matrix_rows(batch.mask_reasons, "u1", rows, "ActionBatch")]
    q_values = matrix_rows(batch.q_values, "<f4", rows, "ActionBatch")
    shadow_q = [matrix_rows(shadow.q_values, "<f4", rows, "ActionBatch") for shadow in batch.shadows]
    return [
        WorkerAction(
            worker,
            action_id(worker, batch.boot_id, batch.step),
            batch.actions[k],
            columns.target_rho[k],
            columns.target_max_running[k],
            columns.base_generations[k],
            batch.deadline_ns,
            batch.lease_ns,
            batch.policies[batch.policy_index[k] if batch.policy_index else 0],
            probabilities[k],
            batch.masks[k],
            reasons[k],
            batch.holds[k],
            () if _silent(batch.holds[k]) else q_values[k],
            ()
            if _silent(batch.holds[k])
            else tuple(
                ShadowDecision(shadow.policy, shadow.actions[k], q[k])
                for shadow, q in zip(batch.shadows, shadow_q, strict=True)
                if shadow.actions[k] != NO_DECISION
            ),
            batch.orders[k] if batch.orders else 0,
        )
        for k, worker in enumerate(batch.workers)
    ]


def _silent(hold: int) -> bool:
    """Whether nothing is recommended for a worker: its state is in doubt, or an operator turned Tidegate off."""
    return hold == Hold.MODE_OFF or (hold != Hold.NONE and hold not in OPERATOR_HOLDS)


def action_batch(
    node: str, boot_id: int, step: int, t_ns: int, rows: Sequence[WorkerAction], policy_version: str = ""
) -> ActionBatch:
    """The batch of these rows, without their Q values and shadows. ValueError when they name more than one
    deadline or lease: a batch has one of each."""
    instants = {(row.deadline_ns, row.lease_ns) for row in rows}
    if len(instants) > 1:
        raise ValueError(f"deadlines and leases {sorted(instants)}: expected one pair for the whole batch")
    deadline_ns, lease_ns = instants.pop() if instants else (t_ns, t_ns)
    policies = tuple(dict.fromkeys(row.policy for row in rows))
    return ActionBatch(
        node,
        boot_id,
        step,
        SCHEMA_VERSION,
        t_ns,
        tuple(row.worker for row in rows),
        policy_version,
        deadline_ns,
        lease_ns,
        policies,
        b"" if len(policies) < 2 else bytes(policies.index(row.policy) for row in rows),
        bytes(row.action for row in rows),
        pack_row([row.target_rho for row in rows], "d"),
        pack_row([row.target_max_running for row in rows], "q"),
        pack_row([row.base_generation for row in rows], "q"),
        pack_row([row.probability for row in rows], "f"),
        bytes(row.mask for row in rows),
        b"".join(bytes(row.mask_reasons) for row in rows),
        bytes(row.hold for row in rows),
        orders=bytes(row.order for row in rows) if any(row.order for row in rows) else b"",
    )
