"""What the screen shows while the loop runs, read from the bus like any other consumer would."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter

from rich.console import Group
from rich.table import Table
from rich.text import Text

from schemas.actions import ACTION_BATCH, ACTION_COUNT, Action, Hold, MaskReason, WorkerAction, actions_of
from schemas.codec import DecodeError
from schemas.metrics import COLUMN
from schemas.outcomes import OUTCOME_BATCH, Refusal, Status, WorkerOutcome, outcomes_of
from schemas.subjects import wildcard
from schemas.telemetry import NODE_SAMPLE, metrics_of
from services.bus import Bus, Message, Subscription


@dataclasses.dataclass
class WorkerRow:
    """The newest that is known of a worker; NaN where nothing was said yet."""

    u_alloc: float = math.nan
    frag: float = math.nan
    waiting: float = math.nan
    running: float = math.nan
    swapped: float = math.nan
    rho: float = math.nan
    iteration_ms: float = math.nan
    preemptions: float = math.nan
    oom: float = math.nan
    requested_rho: float = math.nan
    action: str = ""
    reason: str = ""
    shadow: str = ""
    refused: str = ""


class LiveView:
    """Subscribes to samples, actions and outcomes; ``render`` draws what came."""

    MAX_ROWS = 16

    def __init__(self) -> None:
        self.workers: dict[str, WorkerRow] = {}
        self.step = -1
        self.policy_versions: list[str] = []
        """All that ever acted, in the order of their first command."""
        self._acting: dict[str, str] = {}
        """By node, the policy of its newest commands."""
        self.actions: Counter[str] = Counter()
        self.undecoded = 0
        self._subscriptions: list[Subscription] = []

    async def attach(self, bus: Bus) -> None:
        for family, take in (("telemetry", self._samples), ("action", self._actions), ("outcome", self._outcomes)):
            self._subscriptions.append(await bus.subscribe(wildcard(family), take))  # type: ignore[arg-type]

    @property
    def acting(self) -> str:
        """What acts now; nodes change policies a step apart."""
        return ", ".join(sorted(set(self._acting.values()))) or "none yet"

    @property
    def dropped(self) -> int:
        return sum(subscription.dropped for subscription in self._subscriptions)

    async def _samples(self, messages: list[Message]) -> None:
        for message in messages:
            try:
                sample = NODE_SAMPLE.decode(message.data)
                matrix = metrics_of(sample)
            except DecodeError:
                self.undecoded += 1
                continue
            self.step = max(self.step, sample.step)
            for worker, values in zip(sample.workers, matrix, strict=True):
                row = self.workers.setdefault(worker, WorkerRow())
                row.u_alloc = float(values[COLUMN["kv_bytes"]] / values[COLUMN["q0_bytes"]])
                for name in ("frag", "waiting", "running", "swapped", "rho", "preemptions", "oom"):
                    setattr(row, name, float(values[COLUMN[name]]))
                row.iteration_ms = 1e3 * float(values[COLUMN["iteration_s"]])

    async def _actions(self, messages: list[Message]) -> None:
        for message in messages:
            try:
                batch = ACTION_BATCH.decode(message.data)
                actions = actions_of(batch)
            except DecodeError:
                self.undecoded += 1
                continue
            if batch.policy_version:
                self._acting[batch.node] = batch.policy_version
                if batch.policy_version not in self.policy_versions:
                    self.policy_versions.append(batch.policy_version)
            for action in actions:
                row = self.workers.setdefault(action.worker, WorkerRow())
                row.action = Action(action.action).name.lower()
                row.requested_rho = action.target_rho
                row.reason = reason_of(action)
                row.shadow = ", ".join(f"{s.policy}: {Action(s.action).name.lower()}" for s in action.shadows)
                self.actions[row.action] += 1

    async def _outcomes(self, messages: list[Message]) -> None:
        for message in messages:
            try:
                outcomes = outcomes_of(OUTCOME_BATCH.decode(message.data))
            except DecodeError:
                self.undecoded += 1
                continue
            for outcome in outcomes:
                self.workers.setdefault(outcome.worker, WorkerRow()).refused = refusal_of(outcome)

    def render(self, headline: str) -> Group:
        # Two-line headings and no frame: this has to fit into 80 columns.
        table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
        for heading in ("worker", "u_\nalloc", "frag", "run/\nwait", "off\ncard", "rho asked\n/real", "TPOT\nms",
                        "pre-\nempt", "OOM", "last action"):  # fmt: skip
            left = heading in {"worker", "last action"}
            table.add_column(heading, justify="left" if left else "right", no_wrap=heading != "last action")
        for worker in sorted(self.workers)[: self.MAX_ROWS]:
            row = self.workers[worker]
            told = row.action + (f" ({row.refused or row.reason})" if row.refused or row.reason else "")
            table.add_row(
                worker,
                _number(row.u_alloc, ".2f"),
                _number(row.frag, ".2f"),
                f"{_number(row.running, '.0f')}/{_number(row.waiting, '.0f')}",
                _number(row.swapped, ".0f"),
                f"{_number(row.requested_rho, '.1f')}/{_number(row.rho, '.1f')}",
                _number(row.iteration_ms, ".1f"),
                _number(row.preemptions, ".0f"),
                _number(row.oom, ".0f"),
                told,
            )
        hidden = len(self.workers) - self.MAX_ROWS
        more = [Text(f"and {hidden} more workers")] if hidden > 0 else []
        shadow = next((row.shadow for row in self.workers.values() if row.shadow), "")
        shadows = [Text(f"in shadow, does not act: {shadow}", style="dim")] if shadow else []
        return Group(Text(headline), table, *more, *shadows)


def reason_of(action: WorkerAction) -> str:
    """Why a worker was held, or what forbade it to widen while it holds."""
    if action.hold:
        return f"held: {Hold(action.hold).name.lower()}"
    if action.action != Action.HOLD:
        return ""
    reasons = action.mask_reasons
    if len(reasons) == ACTION_COUNT and reasons[Action.WIDEN]:
        return f"widen forbidden: {MaskReason(reasons[Action.WIDEN]).name.lower()}"
    return ""


def refusal_of(outcome: WorkerOutcome) -> str:
    if outcome.status not in (Status.REFUSED, Status.CLIPPED):
        return ""
    return f"{Status(outcome.status).name.lower()}: {Refusal(outcome.refusal).name.lower()}"


def _number(value: float, form: str) -> str:
    return "-" if math.isnan(value) else format(value, form)
