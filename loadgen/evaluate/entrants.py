"""Who is examined: the policies of DESIGN section 7 by name, each as a rule over what ``Control`` sees.

``heuristic:<variant>`` is the heuristic with other thresholds, of which the per-configuration tuning and the hindsight
reference choose; ``<name>-<ablation>`` is a policy without an action, blind to some features or on
engines of another mode. Pure.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from loadgen.control import Seen
from loadgen.engine.specs import EngineMode
from loadgen.policies import TIDEGATE, admission_named, policy_named
from schemas.actions import Action
from schemas.features import FEATURE
from services import qweights
from services.decision import heuristic
from services.decision.heuristic import HeuristicSettings
from services.decision.shield import ALLOWED
from services.errors import UserError

Choose = Callable[[Seen], NDArray[np.integer]]

VARIANTS: Final = {
    "host": HeuristicSettings(evict_host_use=1.0),
    "early": HeuristicSettings(evict_high=0.35, evict_waiting=0.2),
    "late": HeuristicSettings(evict_high=0.85, evict_waiting=0.7),
    "never": HeuristicSettings(evict_high=math.inf, evict_waiting=math.inf),
    "eager": HeuristicSettings(reserved_high=0.6, latency_low=1.2, latency_high=1.5),
    "shy": HeuristicSettings(reserved_high=math.inf, latency_low=0.7, latency_high=0.9),
    "eager_early": HeuristicSettings(
        evict_high=0.35, evict_waiting=0.2, reserved_high=0.6, latency_low=1.2, latency_high=1.5
    ),
    "eager_late": HeuristicSettings(
        evict_high=0.85, evict_waiting=0.7, reserved_high=0.6, latency_low=1.2, latency_high=1.5
    ),
}
"""The grid of the tuned heuristic, beside the universal one: how early contexts leave, how readily quotas widen."""
FIXED_RHOS: Final = (1.0, 1.2, 1.4, 1.6)
"""What ``fixed_best`` chooses from."""
WITHOUT_ACTION: Final = {"no_evict": Action.EVICT, "no_compact": Action.COMPACT}
WITHOUT_FEATURES: Final = {
    "no_slope": ("du_alloc",),
    "no_machine": ("link", "host_free", "kv_per_token", "hbm", "reference_rate"),
}
"""Features that such a policy is told are absent; it was not trained anew without them."""
MODES: Final[dict[str, dict[str, Any]]] = {
    "oracle_returns": {"returns": "oracle"},
    "table_returns": {"returns": "table"},
    "watermark": {"watermark": True},
    "no_offload": {"offload": False},
    "max_tokens": {"reservation": "max_tokens"},
    "no_prefetch": {"prefetch": False},
    "lifo": {"page_aware": False},
    "physical": {"admission": "physical"},
}
"""The same policy on engines of another mode: returns as they truly come or as an estimator wrote them into the
tables, other caching, max_tokens reserved, or vLLM-like admission without reservations."""
MAX_TOKENS: Final = {"max_1024": 1024, "max_8192": 8192}
"""What a request that names no max_tokens is taken to ask for, in the place of 4096."""
_RULES: Final = ("heuristic", "dqn", "one_line", "random")
"""Whose engines are Tidegate's, whatever variant they are."""
ABLATIONS: Final = (*WITHOUT_ACTION, *WITHOUT_FEATURES, *MODES, *MAX_TOKENS)


class Entrant(msgspec.Struct, frozen=True, kw_only=True):
    """A policy to be examined; travels to other processes."""

    name: str
    weights: str = ""
    """Path of its network; empty: it has none."""
    digest: str = ""
    """Of that file."""

    @property
    def base(self) -> str:
        """The name without its ablation."""
        return self.name.partition("-")[0]

    @property
    def ablation(self) -> str:
        """What was taken away; empty: nothing."""
        return self.name.partition("-")[2]

    @property
    def goal_rho(self) -> float | None:
        """Where a policy of fixed rho goes at once."""
        return float(self.name.partition(":")[2]) if self.name.startswith("fixed:") else None

    @property
    def acts(self) -> bool:
        """Whether it ever commands anything."""
        return self.base not in ("static", "rho_1.0", "vllm_recompute", "vllm_offload")

    def mode(self, admission: str) -> EngineMode:
        """How its engines admit and cache."""
        ours = self.base.partition(":")[0] in _RULES
        mode = TIDEGATE if ours else policy_named(self.base).mode
        return msgspec.structs.replace(mode, **{**admission_named(admission), **MODES.get(self.ablation, {})})

    @property
    def max_tokens(self) -> int | None:
        """What requests that name none are taken to ask for; None: as the tables say."""
        return MAX_TOKENS.get(self.ablation)

    def rule(self, rows: Sequence[slice], seeds: Sequence[int]) -> Choose:
        """The rule for fleets whose workers are ``rows``, of traces ``seeds``."""
        return _without(self._rule(rows, seeds), self.ablation)

    def _rule(self, rows: Sequence[slice], seeds: Sequence[int]) -> Choose:
        kind, _, variant = self.base.partition(":")
        if kind == "fixed":
            return lambda seen: heuristic.fixed(seen.features, seen.mask, float(variant))
        if kind == "heuristic":
            settings = VARIANTS[variant] if variant else HeuristicSettings()
            return lambda seen: heuristic.choose(seen.features, seen.mask, settings)
        if kind == "one_line":
            return lambda seen: heuristic.one_line(seen.features, seen.mask)
        if kind == "random":
            return _random(rows, seeds)
        if kind == "dqn":
            return by_network(*loaded(self.weights))
        raise ValueError(f"{self.name}: has no rule")


def entrant(name: str, weights: Path | None = None) -> Entrant:
    """The policy of a name; UserError for an unknown one, a network that is missing or not readable."""
    found = Entrant(
        name=name,
        weights="" if weights is None else str(weights.absolute()),
        digest="" if weights is None else hashlib.sha256(_read(str(weights))).hexdigest(),
    )
    kind, _, variant = found.base.partition(":")
    if kind == "heuristic" and variant and variant not in VARIANTS:
        raise UserError(f"policy {name!r}: expected heuristic:VARIANT of {', '.join(VARIANTS)}")
    if kind not in _RULES:
        try:
            policy_named(found.base)
        except ValueError as error:
            raise UserError(str(error)) from error
    if found.ablation and found.ablation not in ABLATIONS:
        raise UserError(f"policy {name!r}: expected an ablation of {', '.join(ABLATIONS)}")
    if kind == "dqn":
        if weights is None:
            raise UserError(f"policy {name!r}: needs --policy FILE")
        loaded(found.weights)
    return found


@functools.lru_cache(maxsize=32)
def loaded(path: str) -> tuple[qweights.Weights, float]:
    """A network and the risk above which it was trained not to act; PolicyError (a TidegateError) for a bad file."""
    weights = qweights.load(_read(path))
    return weights, qweights.veto_of(weights)


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise UserError(f"policy file {path}: {error.strerror}") from error


def by_network(weights: qweights.Weights, veto: float) -> Choose:
    """The network's best allowed action whose risk is at most ``veto``."""

    def choose(seen: Seen) -> NDArray[np.integer]:
        return qweights.best(qweights.values(weights, seen.features), ALLOWED[seen.mask], veto)

    return choose


def _random(rows: Sequence[slice], seeds: Sequence[int]) -> Choose:
    generators = [np.random.default_rng([seed, 0xA11]) for seed in seeds]

    def choose(seen: Seen) -> NDArray[np.integer]:
        parts = [heuristic.random_masked(seen.mask[at], rng) for at, rng in zip(rows, generators, strict=True)]
        return np.concatenate(parts)

    return choose


def _without(rule: Choose, ablation: str) -> Choose:
    if ablation in WITHOUT_ACTION:
        kept = np.uint8(0xFF & ~(1 << WITHOUT_ACTION[ablation]))
        return lambda seen: rule(seen._replace(mask=seen.mask & kept))
    if ablation in WITHOUT_FEATURES:
        columns = [FEATURE[name] for name in WITHOUT_FEATURES[ablation]]

        def blind(seen: Seen) -> NDArray[np.integer]:
            features = seen.features.copy()
            features[:, columns] = np.nan
            return rule(seen._replace(features=features))

        return blind
    return rule
