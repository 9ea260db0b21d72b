"""States and policies in, ActionBatches out: every message of a drained batch in one matrix. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from schemas.actions import ActionBatch, ShadowDecision, WorkerAction
from schemas.features import FEATURE_COUNT
from schemas.identity import SCHEMA_VERSION
from services.decision.book import InForce
from services.decision.intake import Admitted
from services.decision.policy import explore
from services.decision.settings import Settings, shield_settings
from services.decision.shield import masks
from services.decision.targets import targets


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
        q_rows = _tuples(choice.q_values, len(features))
        shadow_rows: list[tuple[ShadowDecision, ...]] = [()] * len(features)
        if shadow is not None:
            other = shadow.choose(features, mask)
            q_other = _tuples(other.q_values, len(features))
            named = map(ShadowDecision, repeat(shadow.name), other.actions.tolist(), q_other)
            shadow_rows = [(decision,) for decision in named]
        # A held worker's state is not to be trusted, and what a network makes of it says nothing.
        for row in np.flatnonzero(holds):
            q_rows[row] = ()
            shadow_rows[row] = ()
        columns = (
            choice.actions.tolist(), rho.tolist(), ceiling.tolist(), choice.probabilities.tolist(), mask.tolist(),
            list(map(tuple, reasons.tolist())), holds.tolist(), q_rows, shadow_rows,
        )  # fmt: skip
        return Decided(self._batches(admitted, columns, acting.name, acting.version), choice.actions, reasons)

    def _batches(
        self, admitted: Sequence[Admitted], columns: tuple[list[Any], ...], policy: str, version: str
    ) -> list[ActionBatch]:
        out: list[ActionBatch] = []
        end = 0
        for state in admitted:
            batch = state.batch
            start, end = end, end + len(batch.workers)
            action, rho, ceiling, probability, mask, reason, hold, q, shadow = [c[start:end] for c in columns]
            # schemas.identity.action_id, with its part that is the same for all workers made once.
            suffix = f"@{batch.boot_id}.{batch.step}"
            actions = map(
                WorkerAction,
                batch.workers,
                [worker + suffix for worker in batch.workers],
                action,
                rho,
                ceiling,
                batch.generations,
                repeat(batch.t_ns + self._deadline_ns),
                repeat(batch.t_ns + self._lease_ns),
                repeat(policy),
                probability,
                mask,
                reason,
                hold,
                q,
                shadow,
            )
            out.append(
                ActionBatch(batch.node, batch.boot_id, batch.step, SCHEMA_VERSION, batch.t_ns, tuple(actions), version)
            )
        return out

    def _canaries(self, admitted: Sequence[Admitted]) -> NDArray[np.bool_]:
        """bool [n]: by a hash of the worker id, so that a worker is one in every step and every copy."""
        workers = [worker for state in admitted for worker in state.batch.workers]
        return np.array([crc32(worker.encode()) < self._canary_below for worker in workers], np.bool_)


def _tuples(matrix: NDArray[np.float32] | None, rows: int) -> list[tuple[float, ...]]:
    return [()] * rows if matrix is None else list(map(tuple, matrix.tolist()))
