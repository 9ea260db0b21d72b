"""Policies: each sees a matrix of states and masks, and gives every worker one allowed action. Pure."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from schemas.actions import ACTION_COUNT, RHO_MAX, RHO_MIN
from services import qweights
from services.decision import heuristic
from services.decision.heuristic import Actions, HeuristicSettings
from services.decision.shield import ALLOWED
from services.errors import SettingsError
from services.qweights import Weights

_BITS: Final = 1 << np.arange(ACTION_COUNT, dtype=np.uint8)
RULES = ("heuristic", "static", "fixed:RHO", "one_line", "random")


class Choice(NamedTuple):
    """What a policy chose for n workers."""

    actions: Actions
    """int8 [n], each allowed by its mask."""
    probabilities: NDArray[np.float64]
    """[n], of that action under the policy; 1 for a deterministic one."""
    q_values: NDArray[np.float32] | None = None
    """[n, 5], where the policy has such."""
    goal_rho: float | None = None
    """Where widen and tighten jump to, for the policies that name a rho."""
    vetoed: NDArray[np.bool_] | None = None
    """[n, 5]: allowed actions that the policy's own risk head forbids, never the one chosen; None: no such policy."""


class Policy(Protocol):
    """Something that chooses. ``name`` travels with every action, ``version`` with the batch."""

    @property
    def name(self) -> str: ...

    @property
    def version(self) -> str: ...

    def choose(self, features: NDArray[np.float32], mask: NDArray[np.uint8]) -> Choice:
        """Actions for raw states float32 [n, F] under masks uint8 [n]."""
        ...


class RulePolicy:
    """A rule of ``heuristic.py``."""

    def __init__(
        self,
        name: str,
        rule: Callable[[NDArray[np.float32], NDArray[np.uint8]], Actions],
        goal_rho: float | None = None,
    ) -> None:
        self.name = self.version = name
        self._rule = rule
        self._goal_rho = goal_rho

    def choose(self, features: NDArray[np.float32], mask: NDArray[np.uint8]) -> Choice:
        return Choice(self._rule(features, mask), np.ones(len(features)), goal_rho=self._goal_rho)


class RandomPolicy:
    """Any allowed action, all alike."""

    name = version = "random"

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng

    def choose(self, features: NDArray[np.float32], mask: NDArray[np.uint8]) -> Choice:
        return Choice(heuristic.random_masked(mask, self._rng), 1.0 / ALLOWED[mask].sum(axis=1))


class DqnPolicy:
    """The allowed action with the highest Q value (the lowest number among equals) of those whose risk is at most the
    veto that the weights' file names: ``qweights.best``, as in the examination.

    PolicyError for a file whose veto is none.
    """

    def __init__(self, weights: Weights) -> None:
        self.version = weights.version
        self.name = f"dqn:{weights.version}"
        self._weights = weights
        self._veto = qweights.veto_of(weights) if weights.risk_size else 1.0

    def choose(self, features: NDArray[np.float32], mask: NDArray[np.uint8]) -> Choice:
        allowed, certain = ALLOWED[mask], np.ones(len(features))
        if self._veto >= 1.0:  # the risk head has no say: its matrices need not be multiplied
            found = qweights.Values(qweights.q_values(self._weights, features))
            return Choice(qweights.best(found, allowed), certain, found.q)
        found = qweights.values(self._weights, features)
        actions = qweights.best(found, allowed, self._veto)
        assert found.risk is not None  # the weights have a risk head
        vetoed = allowed & ~(found.risk <= self._veto)
        vetoed[np.arange(len(actions)), actions] = False
        return Choice(actions, certain, found.q, vetoed=vetoed)


def explore(
    choice: Choice,
    mask: NDArray[np.uint8],
    canary: NDArray[np.bool_],
    epsilon: float,
    rng: np.random.Generator,
) -> Choice:
    """``choice`` with a random allowed action, by chance ``epsilon``, in the ``canary`` rows [n]. What the policy's
    risk head forbids is not tried either.

    The probability recorded is that of the action taken: epsilon / k for each of the k allowed ones, and
    1 - epsilon on top for the policy's own (times its own probability, where it is itself random).
    """
    if epsilon <= 0.0 or not canary.any():
        return choice
    if choice.vetoed is not None:
        mask = mask & ~(choice.vetoed @ _BITS)
    lucky = canary & (rng.random(len(mask)) < epsilon)
    actions = np.where(lucky, heuristic.random_masked(mask, rng), choice.actions).astype(np.int8)
    uniform = epsilon / ALLOWED[mask].sum(axis=1)
    own = np.where(actions == choice.actions, (1.0 - epsilon) * choice.probabilities, 0.0)
    probabilities = np.where(canary, uniform + own, choice.probabilities)
    return choice._replace(actions=actions, probabilities=probabilities)


def rule(name: str, settings: HeuristicSettings, rng: np.random.Generator) -> Policy:
    """The policy of a rule's name; SettingsError for another name or a rho out of range."""
    if name == "heuristic":
        return RulePolicy(name, partial(heuristic.choose, settings=settings))
    if name == "static":
        return RulePolicy(name, heuristic.static)
    if name == "one_line":
        return RulePolicy(name, heuristic.one_line, heuristic.ONE_LINE_RHO)
    if name == "random":
        return RandomPolicy(rng)
    head, _, text = name.partition(":")
    if head == "fixed":
        try:
            rho = float(text)
        except ValueError:
            rho = float("nan")
        if not RHO_MIN <= rho <= RHO_MAX:
            raise SettingsError("policy", "fixed", repr(text), f"a rho from {RHO_MIN} to {RHO_MAX}, as in fixed:1.3")
        return RulePolicy(name, partial(heuristic.fixed, rho=rho), rho)
    raise SettingsError("settings [decision]", "policy", repr(name), f"champion, dqn or one of {', '.join(RULES)}")
