"""States and policies in, ActionBatches out: every message of a drained batch in one matrix. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from schemas.actions import ACTION_COUNT, ActionBatch, ShadowDecisions
from schemas.codec import pack, pack_row
from schemas.features import FEATURE_COUNT
from schemas.identity import SCHEMA_VERSION
from services.decision.book import InForce
from services.decision.intake import Admitted
from services.decision.policy import Policy, explore
from services.decision.settings import Settings, shield_settings
from services.decision.shield import masks
from services.decision.targets import targets

_Q_ROW_BYTES: Final = 4 * ACTION_COUNT


class Decided(NamedTuple):
    """The answers to a drained batch, and what they came to."""

    batches: list[ActionBatch]
    """One per admitted message, in its order."""
    actions: NDArray[np.int8]
    """[n] over all workers."""
    reasons: NDArray[np.uint8]
    """[n, 5] over all workers."""


class Decider:
    """Turns states into commands under the policies in force.

    The same states and policies give the same commands, except for exploration, whose draws come from
    ``rng``. Copies of the service may therefore share the nodes in any way.
    """

    def __init__(self, settings: Settings, rng: np.random.Generator) -> None:
        self._settings = settings
        self._shield = shield_settings(settings)
        self._rng = rng
        self._deadline_ns = round(settings.deadline_steps * settings.step_s * 1e9)
        self._lease_ns = round(settings.lease_steps * settings.step_s * 1e9)
        self._canary_below = round(settings.canary_share * 2**32)

    def decide(self, admitted: Sequence[Admitted], in_force: InForce) -> Decided:
        """Answer ``admitted`` (with n workers in all): one mask computation, one forward pass a policy."""
        features = (
            np.concatenate([a.features.reshape(-1, FEATURE_COUNT) for a in admitted])
            if admitted
            else np.empty((0, FEATURE_COUNT), np.float32)
        )
        classes = np.frombuffer(b"".join([a.classes for a in admitted]), np.uint8)
        holds = np.frombuffer(b"".join([a.holds for a in admitted]), np.uint8)
        mask, reasons = masks(features, classes, holds, self._shield)
        acting, shadow = in_force
        choice = acting.choose(features, mask)
        if self._settings.epsilon > 0.0 and self._canary_below:
            canary = self._canaries(admitted) & (holds == 0)
            choice = explore(choice, mask, canary, self._settings.epsilon, self._rng)
        rho, ceiling = targets(choice.actions, features, classes, self._shield, choice.goal_rho)
        columns = _Columns(
            pack(choice.actions, "u1"),
            pack(rho, "<f8"),
            pack(ceiling, "<i8"),
            pack(choice.probabilities, "<f4"),
            pack(mask, "u1"),
            pack(reasons, "u1"),
            _q_column(choice.q_values, holds),
        )
        shadows: list[ShadowDecisions] = []
        if shadow is not None:
            other = shadow.choose(features, mask)
            shadows.append(ShadowDecisions(shadow.name, pack(other.actions, "u1"), _q_column(other.q_values, holds)))
        return Decided(self._batches(admitted, columns, shadows, acting), choice.actions, reasons)

    def _batches(
        self, admitted: Sequence[Admitted], columns: _Columns, shadows: Sequence[ShadowDecisions], acting: Policy
    ) -> list[ActionBatch]:
        """The columns of all workers, cut by node."""
        policies = (acting.name,)
        out: list[ActionBatch] = []
        end = 0
        for state in admitted:
            batch = state.batch
            start, end = end, end + len(batch.workers)
            out.append(
                ActionBatch(
                    batch.node,
                    batch.boot_id,
                    batch.step,
                    SCHEMA_VERSION,
                    batch.t_ns,
                    batch.workers,
                    acting.version,
                    batch.t_ns + self._deadline_ns,
                    batch.t_ns + self._lease_ns,
                    policies,
                    b"",
                    columns.actions[start:end],
                    columns.target_rho[8 * start : 8 * end],
                    columns.target_max_running[8 * start : 8 * end],
                    pack_row(batch.generations, "q"),
                    columns.probabilities[4 * start : 4 * end],
                    columns.masks[start:end],
                    columns.mask_reasons[ACTION_COUNT * start : ACTION_COUNT * end],
                    state.holds,
                    columns.q_values[_Q_ROW_BYTES * start : _Q_ROW_BYTES * end],
                    tuple([_cut(one, start, end) for one in shadows]),
                )
            )
        return out

    def _canaries(self, admitted: Sequence[Admitted]) -> NDArray[np.bool_]:
        """bool [n]: by a hash of the worker id, so that a worker is one in every step and every copy."""
        workers = [worker for state in admitted for worker in state.batch.workers]
        return np.array([crc32(worker.encode()) < self._canary_below for worker in workers], np.bool_)


class _Columns(NamedTuple):
    """What is decided of all workers, as it travels; see :class:`ActionBatch`."""

    actions: bytes
    target_rho: bytes
    target_max_running: bytes
    probabilities: bytes
    masks: bytes
    mask_reasons: bytes
    q_values: bytes


def _q_column(q_values: NDArray[np.float32] | None, holds: NDArray[np.uint8]) -> bytes:
    """Q values float32 [n, actions] as they travel, absent in held rows: such a worker's state is not to be
    trusted, and what a network makes of it says nothing."""
    if q_values is None:
        return b""
    return pack(np.where(holds[:, None] != 0, np.float32(np.nan), q_values), "<f4")


def _cut(shadow: ShadowDecisions, start: int, end: int) -> ShadowDecisions:
    q_values = shadow.q_values[_Q_ROW_BYTES * start : _Q_ROW_BYTES * end]
    return ShadowDecisions(shadow.policy, shadow.actions[start:end], q_values)
