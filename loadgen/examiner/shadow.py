"""What a candidate decides in shadow on live states, beside the policy that acts. Pure."""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from loadgen.examiner.settings import ShadowLimits
from schemas.actions import ACTION_COUNT, OPERATOR, Action, ActionBatch
from services.decision.shield import ALLOWED


class ShadowReport(msgspec.Struct, frozen=True, kw_only=True):
    """How it looked; shares are of ``decisions``, rows in which more than one action was allowed."""

    decisions: int
    finite: float
    """Share whose Q values are all finite."""
    masked: float
    """Share that chose what the mask forbids."""
    agreement: float
    """Share that chose as the acting policy did."""
    one_action: float
    """Share of its most frequent action, ``one_action_name``."""
    one_action_name: str
    spread: float
    """Largest standard deviation over states of an action's advantage Q - mean Q."""


class Shadow:
    """Sums over ActionBatches of one candidate's shadow decisions."""

    def __init__(self, policy: str, limits: ShadowLimits) -> None:
        self.policy = policy
        self._limits = limits
        self._steps: dict[str, int] = {}
        self._chosen = np.zeros(ACTION_COUNT, np.int64)
        self._finite = self._masked = self._agreed = 0
        self._moments = np.zeros((2, ACTION_COUNT))
        self._q_rows = 0

    @property
    def enough(self) -> bool:
        steps = max(self._steps.values(), default=0)
        return steps >= self._limits.steps and int(self._chosen.sum()) >= self._limits.decisions

    def add(self, batch: ActionBatch) -> None:
        """Take in a message of decision; one without this candidate says nothing."""
        shadow = next((one for one in batch.shadows if one.policy == self.policy), None)
        rows = len(batch.workers)
        if shadow is None or not (
            len(shadow.actions) == len(batch.masks) == len(batch.holds) == len(batch.actions) == rows
            and len(shadow.q_values) in (0, 4 * ACTION_COUNT * rows)
        ):
            return
        self._steps[batch.node] = self._steps.get(batch.node, 0) + 1
        masks = np.frombuffer(batch.masks, np.uint8)
        allowed = ALLOWED[masks]
        free = (np.frombuffer(batch.holds, np.uint8) == 0) & (allowed.sum(axis=1) > 1)
        if OPERATOR in batch.policies and batch.policy_index:
            index = np.frombuffer(batch.policy_index, np.uint8)
            free &= index != batch.policies.index(OPERATOR)
        if not free.any():
            return
        chosen = np.frombuffer(shadow.actions, np.uint8)[free].astype(np.int64)
        acting = np.frombuffer(batch.actions, np.uint8)[free].astype(np.int64)
        inside = chosen < ACTION_COUNT
        self._masked += int((~inside | ~allowed[free][np.arange(len(chosen)), np.where(inside, chosen, 0)]).sum())
        self._agreed += int((chosen == acting).sum())
        self._chosen += np.bincount(np.where(inside, chosen, 0), minlength=ACTION_COUNT)
        if shadow.q_values:
            self._take_q(np.frombuffer(shadow.q_values, "<f4").reshape(rows, ACTION_COUNT)[free].astype(np.float64))

    def _take_q(self, q: NDArray[np.float64]) -> None:
        finite = np.isfinite(q).all(axis=1)
        self._finite += int(finite.sum())
        q = np.clip(q[finite], -1e9, 1e9)
        advantages = q - q.mean(axis=1, keepdims=True)
        self._q_rows += len(q)
        self._moments += np.stack([advantages.sum(axis=0), (advantages**2).sum(axis=0)])

    def report(self) -> ShadowReport:
        count = max(1, int(self._chosen.sum()))
        rows = max(1, self._q_rows)
        mean = self._moments[0] / rows
        variance = np.maximum(self._moments[1] / rows - mean**2, 0.0)
        most = int(self._chosen.argmax())
        return ShadowReport(
            decisions=int(self._chosen.sum()), finite=self._finite / count, masked=self._masked / count,
            agreement=self._agreed / count, one_action=float(self._chosen[most]) / count,
            one_action_name=Action(most).name.lower(),
            spread=float(np.sqrt(variance.max())),
        )  # fmt: skip

    def refusal(self) -> str:
        """Why the candidate must not act, by what it did so far; empty: nothing speaks against it."""
        told, limits = self.report(), self._limits
        if told.finite < 1.0:
            return f"Q values are not finite in {1.0 - told.finite:.2%} of its decisions"
        if told.masked > 0.0:
            return f"it chose forbidden actions in {told.masked:.2%} of its decisions"
        if told.spread < limits.spread:
            return f"constant output: its advantages vary by {told.spread:.1e} over states"
        if told.one_action > limits.one_action and told.one_action_name != "hold":
            return f"constant output: {told.one_action_name} in {told.one_action:.2%} of its decisions"
        if told.agreement < limits.agreement:
            return f"it agrees with the acting policy in {told.agreement:.2%} of decisions"
        return ""
