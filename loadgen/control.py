"""The control of one emulated fleet, a step at a time: the same pure parts as the live loop, called in a row.

    Fleet.metrics -> Tracker -> shield -> | whoever chooses | -> targets -> effects -> Fleet.command

Whoever chooses is a policy (``loadgen.replay``), an agent under training, a Gymnasium agent
(``loadgen.environment``) or an examination; the caller advances the fleet:

    seen = control.observe(step)
    control.act(choose(seen.features, seen.mask))
    fleet.advance(STEP_S)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from loadgen.engine.fleet import Fleet
from loadgen.engine.specs import FleetConfig
from loadgen.joint import JointFleet
from loadgen.requests import RequestTable
from schemas.actions import ACTION_COUNT, Action, MaskReason
from schemas.classes import ServiceClass
from schemas.identity import SCHEMA_VERSION, STEP_NS, worker_id
from schemas.telemetry import NodeSample
from schemas.transitions import REWARD_PARTS
from services.actuator import budget, effects, views
from services.decision import heuristic
from services.decision.shield import ALLOWED, ShieldSettings, masks
from services.decision.targets import targets
from services.featurizer.reward import RewardSettings
from services.featurizer.tracker import States, Tracker, TrackerSettings

Objective = Literal["goodput", "article"]

_NODE: Final = "replay"
_LATE: Final = int(MaskReason.LATENCY_AT_LIMIT)
_OBJECTIVES: Final = [REWARD_PARTS.index("article"), REWARD_PARTS.index("goodput")]
_OOM: Final = REWARD_PARTS.index("oom")


class Controls(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the pure parts; the defaults are those of the services."""

    shield: ShieldSettings = msgspec.field(default_factory=ShieldSettings)
    heuristic: heuristic.HeuristicSettings = msgspec.field(default_factory=heuristic.HeuristicSettings)
    effects: effects.EffectSettings = msgspec.field(default_factory=effects.EffectSettings)
    rewards: RewardSettings = msgspec.field(default_factory=RewardSettings)
    tracker: TrackerSettings = msgspec.field(default_factory=TrackerSettings)


class Seen(NamedTuple):
    """What is known of n workers at the beginning of a step; arrays that nobody writes to again."""

    step: int
    features: NDArray[np.float32]
    """float32 [n, FEATURE_COUNT], raw; NaN = absent."""
    mask: NDArray[np.uint8]
    """uint8 [n]: bit k is action k."""
    reasons: NDArray[np.uint8]
    """uint8 [n, 5]: a ``MaskReason`` each."""
    holds: NDArray[np.uint8]
    """uint8 [n]: a ``Hold`` each, 0 = may act."""
    classes: NDArray[np.int64]
    parts: NDArray[np.float32]
    """float32 [n, REWARD_PARTS] of the step that ended; NaN where there was none."""


class Transitions(NamedTuple):
    """The step that ended, of all n workers; where ``whole``, what the featurizer publishes of it live."""

    states: NDArray[np.float32]
    """float32 [n, FEATURE_COUNT], raw."""
    next_states: NDArray[np.float32]
    actions: NDArray[np.uint8]
    """uint8 [n], executed."""
    masks: NDArray[np.uint8]
    next_masks: NDArray[np.uint8]
    rewards: NDArray[np.float32]
    """float32 [n, REWARD_PARTS]; both objectives are finite where ``whole``."""
    discounts: NDArray[np.float32]
    """float32 [n]: 0 where the worker's card ran out of memory, else 1; the learner's gamma comes on top."""
    held: NDArray[np.bool_]
    """bool [n]: the worker was held at the beginning of the step: its action was no decision."""
    whole: NDArray[np.bool_]
    """bool [n]: to be learned from."""


class Control:
    """Sees one fleet as one node with all its cards; deterministic, one step after the other."""

    def __init__(
        self,
        fleet: Fleet | JointFleet,
        config: FleetConfig,
        tables: Sequence[RequestTable],
        controls: Controls | None = None,
    ) -> None:
        """``tables`` are the fleet's own, one per worker: a worker's class is that of most of its requests."""
        self.controls = controls or Controls()
        self.workers = fleet.workers
        self.counts = np.zeros(ACTION_COUNT, np.int64)
        """int64 [5]: executed actions so far, held workers left out."""
        self._fleet = fleet
        self._limits = config.limits
        self._tracker = Tracker(self.controls.tracker, self.controls.rewards)
        self._cards = np.asarray(fleet.card_of, np.int64)
        self._classes = np.array([class_of(table) for table in tables], np.uint8)
        self._scales = np.ones(config.cards)
        self._listed = (
            tuple(worker_id(_NODE, int(card), f"w{i}") for i, card in enumerate(self._cards)),
            tuple(self._cards.tolist()),
            tuple(self._classes.tolist()),
        )
        self._metrics: NDArray[np.float64] | None = None
        self._rows = np.empty(0, np.int64)
        self._seen: Seen | None = None
        self._before: Seen | None = None
        self._executed: NDArray[np.int64] | None = None
        """Of the step that ``_seen`` began; None until it is commanded."""
        self._executed_before: NDArray[np.int64] | None = None

    def observe(self, step: int) -> Seen:
        """The fleet as it is now, at the beginning of ``step``; steps count up from any number, each once.

        A step that is left out is a gap, as a lost sample is live. ValueError for a step that is not news.
        """
        metrics = self._fleet.metrics()
        states = self._observe(metrics, step)
        mask, reasons = masks(states.features, states.classes, states.holds, self.controls.shield)
        self._before, self._executed_before = self._seen, self._executed
        self._metrics, self._rows, self._executed = metrics, states.rows, None
        self._seen = Seen(step, states.features, mask, reasons, states.holds, states.classes, states.rewards)
        return self._seen

    def act(self, actions: NDArray[np.integer], goal_rho: float | None = None) -> NDArray[np.int64]:
        """Command the fleet for the step observed last; int64 [n], the actions that were executed.

        ``actions`` int [n] of 0 to 4. A held worker holds, and so does one whose mask forbids its action.
        ``goal_rho``: as in ``targets``. ValueError for another shape or number, RuntimeError before ``observe``.
        """
        seen, metrics = self._seen, self._metrics
        if seen is None or metrics is None:
            raise RuntimeError("nothing was observed yet: call observe before act")
        asked = np.asarray(actions, np.int64)
        if asked.shape != (self.workers,) or ((asked < 0) | (asked >= ACTION_COUNT)).any():
            raise ValueError(f"actions {actions!r}: expected {self.workers} numbers from 0 to {ACTION_COUNT - 1}")
        executed = np.where(ALLOWED[seen.mask, asked] & (seen.holds == 0), asked, int(Action.HOLD))
        shield = self.controls.shield
        rho, ceiling = targets(executed, seen.features, seen.classes, shield, goal_rho)
        worker_views = views.views_of(metrics, self._cards, self._classes, self._limits)
        self._scales = budget.next_scales(self._scales, self._late_cards(seen.reasons))
        commands = effects.plan(executed, rho, ceiling, worker_views, self._scales, self.controls.effects)
        self._fleet.command(
            rho=commands.rho,
            max_running=commands.max_running,
            evict_bytes=commands.evict_bytes,
            compact_bytes=commands.compact_bytes,
        )
        self._tracker.executed_rows(self._rows, executed, seen.step)
        self._executed = executed
        self.counts += np.bincount(executed[seen.holds == 0], minlength=ACTION_COUNT)
        return executed

    def rewards(self, objective: Objective) -> NDArray[np.float32]:
        """float32 [n]: what the step that the last ``observe`` ended was worth; NaN where there was none.

        A worker is credited with its card's reward (``services.featurizer.reward``).
        """
        if self._seen is None:
            raise RuntimeError("nothing was observed yet")
        return self._seen.parts[:, REWARD_PARTS.index(objective)]

    def transitions(self) -> Transitions | None:
        """The step that the last ``observe`` ended; None for a first step, or one after which nobody acted.

        The rows that are ``whole`` are those that ``services.featurizer.transitions`` publishes live.
        """
        before, seen, executed = self._before, self._seen, self._executed_before
        if before is None or seen is None or executed is None or seen.step != before.step + 1:
            return None
        crashed = seen.parts[:, _OOM] > 0
        held = before.holds != 0
        whole = ~held & (crashed | (seen.holds == 0)) & np.isfinite(seen.parts[:, _OBJECTIVES]).all(axis=1)
        return Transitions(
            states=before.features,
            next_states=seen.features,
            actions=executed.astype(np.uint8),
            masks=before.mask,
            next_masks=seen.mask,
            rewards=seen.parts,
            discounts=(~crashed).astype(np.float32),
            held=held,
            whole=whole,
        )

    def _observe(self, metrics: NDArray[np.float64], step: int) -> States:
        workers, cards, classes = self._listed
        sample = NodeSample(_NODE, 1, step, SCHEMA_VERSION, step * STEP_NS, workers, cards, classes, b"", "replay")
        states = self._tracker.observe(sample, metrics)
        if states is None:
            raise ValueError(f"step {step}: the emulated fleet's own sample was refused: {self._tracker.counts}")
        return states

    def _late_cards(self, reasons: NDArray[np.uint8]) -> NDArray[np.bool_]:
        late = np.zeros(len(self._scales), np.bool_)
        late[self._cards[(reasons == _LATE).any(axis=1)]] = True
        return late


def class_of(table: RequestTable) -> int:
    """A worker's class is that of most of its requests, as the live node says it."""
    return int(np.bincount(table.service_class).argmax()) if len(table) else int(ServiceClass.CHAT)
