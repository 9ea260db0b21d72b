"""States and policies in, ActionBatches out: every message of a drained batch in one matrix. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from schemas.actions import (
    ACTION_COUNT,
    BASELINE_HOLDS,
    NO_DECISION,
    OPERATOR,
    RHO_MIN,
    ActionBatch,
    Hold,
    MaskReason,
    ShadowDecisions,
)
from schemas.codec import pack, pack_row
from schemas.features import FEATURE_COUNT
from schemas.identity import SCHEMA_VERSION
from services.decision.book import InForce
from services.decision.intake import Admitted
from services.decision.modes import ACTION_OF, Standing, in_share
from services.decision.policy import Policy, explore
from services.decision.probation import merged, tried_on
from services.decision.settings import Settings, shield_settings
from services.decision.shield import ALLOWED, masks, rho_caps
from services.decision.targets import targets

ACTING: Final = 0
FORMER: Final = 1
ORDERED: Final = 2
_Q_ROW_BYTES: Final = 4 * ACTION_COUNT


class Decided(NamedTuple):
    """The answers to a drained batch, and what they came to."""

    batches: list[ActionBatch]
    """One per admitted message, in its order."""
    actions: NDArray[np.int8]
    """[n] over all workers."""
    reasons: NDArray[np.uint8]
    """[n, 5] over all workers."""
    holds: NDArray[np.uint8]
    """[n] over all workers."""


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

    def decide(
        self, admitted: Sequence[Admitted], in_force: InForce, standings: Sequence[Standing] | None = None
    ) -> Decided:
        """Answer ``admitted`` (with n workers in all): one mask computation, one forward pass a policy.

        ``standings`` [n] say whom operators keep from being commanded; None: nobody.
        """
        features = (
            np.concatenate([a.features.reshape(-1, FEATURE_COUNT) for a in admitted])
            if admitted
            else np.empty((0, FEATURE_COUNT), np.float32)
        )
        classes = np.frombuffer(b"".join([a.classes for a in admitted]), np.uint8)
        doubts = np.frombuffer(b"".join([a.holds for a in admitted]), np.uint8)
        mask, reasons = masks(features, classes, doubts, self._shield)
        acting, shadow, former, split = in_force
        choice = acting.choose(features, mask)
        stays, its = None, None
        if former is not None:
            tried = [tried_on(a.batch.workers, acting.version, *split) for a in admitted]
            stays = ~np.array([one for node in tried for one in node], np.bool_)
            its = former.choose(features, mask)
            choice = merged(choice, its, stays)
        if choice.vetoed is not None:
            reasons[choice.vetoed] = MaskReason.RISK_VETO
        shadows: list[ShadowDecisions] = []
        if shadow is not None:
            other = shadow.choose(features, mask)
            shadows.append(ShadowDecisions(shadow.name, pack(other.actions, "u1"), _q_column(other.q_values, doubts)))
        ordered = None if standings is None else np.frombuffer(bytes([one.hold for one in standings]), np.uint8)
        if ordered is not None and not ordered.any():
            ordered = None
        recommended = choice.actions
        if self._settings.epsilon > 0.0:
            free = doubts == 0 if ordered is None else (doubts | ordered) == 0
            canary = self._canaries(admitted, standings) & free
            choice = explore(choice, mask, canary, self._settings.epsilon, self._rng)
        actions, probabilities, holds = choice.actions, choice.probabilities, doubts
        if ordered is not None and standings is not None:
            told = ordered != Hold.NONE
            actions = np.where(told, _ordered_actions(standings, ordered, mask), actions).astype(np.int8)
            probabilities = np.where(told, 1.0, probabilities)
            # A doubt about the state stays to be seen, unless the worker is told something all the same.
            holds = np.where(told & ((doubts == 0) | (ordered >= Hold.OVERRIDE)), ordered, doubts).astype(np.uint8)
            shadows += _recommended(acting, former, stays, recommended)
        rho, ceiling = targets(actions, features, classes, self._shield, choice.goal_rho)
        if stays is not None and its is not None and its.goal_rho != choice.goal_rho:
            theirs = targets(actions, features, classes, self._shield, its.goal_rho)
            rho, ceiling = np.where(stays, theirs[0], rho), np.where(stays, theirs[1], ceiling)
        if ordered is not None and standings is not None:
            self._impose(standings, ordered, rho, ceiling, rho_caps(classes, self._shield))
        columns = _Columns(
            pack(actions, "u1"),
            pack(rho, "<f8"),
            pack(ceiling, "<i8"),
            pack(probabilities, "<f4"),
            pack(mask, "u1"),
            pack(reasons, "u1"),
            pack(holds, "u1"),
            _q_column(choice.q_values, doubts),
            _chosen_by(stays, ordered),
            b"" if ordered is None else ordered.tobytes(),
        )
        return Decided(self._batches(admitted, columns, shadows, in_force), actions, reasons, holds)

    def _impose(
        self,
        standings: Sequence[Standing],
        ordered: NDArray[np.uint8],
        rho: NDArray[np.float64],
        ceiling: NDArray[np.int64],
        caps: NDArray[np.float64],
    ) -> None:
        """Write the operators' numbers over the targets [n], in place; a class's highest rho stands above them."""
        baseline = np.isin(ordered, list(BASELINE_HOLDS))
        rho[baseline], ceiling[baseline] = RHO_MIN, self._shield.max_running_start
        for row in np.flatnonzero(ordered == Hold.OVERRIDE).tolist():
            override = standings[row].override
            if override is not None:
                if override.rho is not None:
                    rho[row] = min(override.rho, caps[row])
                if override.max_running is not None:
                    ceiling[row] = override.max_running

    def _batches(
        self, admitted: Sequence[Admitted], columns: _Columns, shadows: Sequence[ShadowDecisions], in_force: InForce
    ) -> list[ActionBatch]:
        """The columns of all workers, cut by node."""
        acting = in_force.acting
        names = (acting.name,) if in_force.former is None else (acting.name, in_force.former.name)
        out: list[ActionBatch] = []
        end = 0
        for state in admitted:
            batch = state.batch
            start, end = end, end + len(batch.workers)
            ordered = any(columns.ordered[start:end])
            policies, index = _named(names, columns.chosen_by[start:end])
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
                    index,
                    columns.actions[start:end],
                    columns.target_rho[8 * start : 8 * end],
                    columns.target_max_running[8 * start : 8 * end],
                    pack_row(batch.generations, "q"),
                    columns.probabilities[4 * start : 4 * end],
                    columns.masks[start:end],
                    columns.mask_reasons[ACTION_COUNT * start : ACTION_COUNT * end],
                    columns.holds[start:end],
                    columns.q_values[_Q_ROW_BYTES * start : _Q_ROW_BYTES * end],
                    tuple([_cut(one, start, end) for one in shadows if ordered or one.policy not in names]),
                    columns.ordered[start:end] if ordered else b"",
                )
            )
        return out

    def _canaries(self, admitted: Sequence[Admitted], standings: Sequence[Standing] | None) -> NDArray[np.bool_]:
        """bool [n]: those of the setting's share, and those that a canary mode commands."""
        workers = [worker for state in admitted for worker in state.batch.workers]
        chosen = np.array([in_share(worker, self._settings.canary_share) for worker in workers], np.bool_)
        if standings is not None:
            chosen |= np.array([one.canary for one in standings], np.bool_)
        return chosen


class _Columns(NamedTuple):
    """What is decided of all workers, as it travels; see :class:`ActionBatch`."""

    actions: bytes
    target_rho: bytes
    target_max_running: bytes
    probabilities: bytes
    masks: bytes
    mask_reasons: bytes
    holds: bytes
    q_values: bytes
    chosen_by: bytes
    """uint8 [n]: ACTING, FORMER or ORDERED; empty: all ACTING."""
    ordered: bytes
    """uint8 [n]: the operator's word, a Hold; empty: there is none on anybody."""


def _recommended(
    acting: Policy, former: Policy | None, stays: NDArray[np.bool_] | None, actions: NDArray[np.int8]
) -> list[ShadowDecisions]:
    """What the acting policies chose, each for its own workers, whatever operators said."""
    if former is None or stays is None:
        return [ShadowDecisions(acting.name, pack(actions, "u1"))]
    return [
        ShadowDecisions(policy.name, pack(np.where(rows, actions, NO_DECISION), "u1"))
        for policy, rows in ((former, stays), (acting, ~stays))
    ]


def _chosen_by(stays: NDArray[np.bool_] | None, ordered: NDArray[np.uint8] | None) -> bytes:
    if ordered is None:
        return b"" if stays is None else stays.astype(np.uint8).tobytes()
    return np.where(ordered != 0, ORDERED, np.uint8(0) if stays is None else stays).astype(np.uint8).tobytes()


def _named(names: tuple[str, ...], chosen_by: bytes) -> tuple[tuple[str, ...], bytes]:
    """The behaviour policies of a node's rows, and each row's place among them: empty where there is one for all."""
    kinds = sorted(set(chosen_by))
    if kinds in ([], [ACTING]):
        return names[:1], b""
    if kinds == [FORMER]:
        return names[1:], b""
    policies = (*names, OPERATOR) if ORDERED in kinds else names
    # Without a former policy there is no place of its own between the two.
    return policies, chosen_by.replace(bytes([ORDERED]), bytes([len(names)])) if ORDERED in kinds else chosen_by


def _ordered_actions(
    standings: Sequence[Standing], ordered: NDArray[np.uint8], mask: NDArray[np.uint8]
) -> NDArray[np.int8]:
    """int8 [n]: hold, but for an override's action where the mask allows it."""
    actions = np.zeros(len(mask), np.int8)
    for row in np.flatnonzero(ordered == Hold.OVERRIDE).tolist():
        override = standings[row].override
        if override is not None and override.action is not None:
            action = ACTION_OF[override.action]
            if ALLOWED[mask[row], action]:
                actions[row] = action
    return actions


def _q_column(q_values: NDArray[np.float32] | None, holds: NDArray[np.uint8]) -> bytes:
    """Q values float32 [n, actions] as they travel, absent in held rows: such a worker's state is not to be
    trusted, and what a network makes of it says nothing."""
    if q_values is None:
        return b""
    return pack(np.where(holds[:, None] != 0, np.float32(np.nan), q_values), "<f4")


def _cut(shadow: ShadowDecisions, start: int, end: int) -> ShadowDecisions:
    q_values = shadow.q_values[_Q_ROW_BYTES * start : _Q_ROW_BYTES * end]
    return ShadowDecisions(shadow.policy, shadow.actions[start:end], q_values)
