"""The promotion gate of the demo: a candidate acts only after it has beaten the heuristic.

Until the examiner takes over, the demo's parent process alone moves the champion pointer. Every candidate that the
learner names is fetched, checked and replayed on fixed built-in workloads against the heuristic; a better one
becomes champion, any other stays in shadow. Killed at any line it leaves either the old pointer or the new one.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import threading
from typing import Final

import msgspec

from loadgen.demo.background import in_background
from loadgen.engine.specs import FleetConfig
from loadgen.load import find_unit_load, tables_at
from loadgen.policies import policy_named
from loadgen.replay import replay
from loadgen.requests import RequestTable
from loadgen.workload import builtin
from schemas.policies import HEURISTIC_POINTER, KEY_CANDIDATE, KEY_CHAMPION, PolicyPointer
from schemas.subjects import BUCKET_POLICY, BUCKET_WEIGHTS
from services import qweights
from services.bus import Bus
from services.errors import BusError, PolicyError

log = logging.getLogger(__name__)

GATE_WORKLOADS: Final = (("agent", 11), ("mixed", 12))
"""Kind and seed of each fixed workload."""
GATE_DURATION_S: Final = 600.0
GATE_LOAD: Final = 1.2
NEEDED_RATIO: Final = 1.01
"""Goodput over the heuristic's, summed over the workloads; on none of them below 0.98."""
WORST_RATIO: Final = 0.98


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What the gate found of one candidate."""

    version: str
    promoted: bool
    ratio: float = 0.0
    worst_ratio: float = 0.0
    why: str = ""


class Gate:
    """Follows the ``candidate`` pointer; ``verdicts`` grows by one for each candidate examined."""

    def __init__(self, bus: Bus, config: FleetConfig) -> None:
        self._bus = bus
        self._config = config
        self._trials: list[tuple[list[RequestTable], float]] = []
        self._stopping = threading.Event()
        self.verdicts: list[Verdict] = []
        self.examining = ""

    async def put_heuristic(self) -> None:
        """The champion to begin with, unless there is one."""
        if await self._bus.kv_get(BUCKET_POLICY, KEY_CHAMPION) is None:
            await self._bus.kv_put(BUCKET_POLICY, KEY_CHAMPION, msgspec.json.encode(HEURISTIC_POINTER), revision=0)

    async def run(self) -> None:
        """Examine candidates until cancelled; of several that came meanwhile only the newest."""
        newest: asyncio.Queue[PolicyPointer] = asyncio.Queue(maxsize=1)

        async def follow() -> None:
            async for entry in self._bus.kv_watch(BUCKET_POLICY, KEY_CANDIDATE):
                if entry.value is None:
                    continue
                try:
                    pointer = msgspec.json.decode(entry.value, type=PolicyPointer)
                except msgspec.DecodeError as error:
                    self.verdicts.append(Verdict(version="?", promoted=False, why=f"unreadable pointer: {error}"))
                    continue
                with contextlib.suppress(asyncio.QueueEmpty):
                    newest.get_nowait()
                newest.put_nowait(pointer)

        following = asyncio.create_task(follow())
        try:
            while True:
                pointer = await newest.get()
                self.examining = pointer.version
                self.verdicts.append(await self._judge(pointer))
                self.examining = ""
        finally:
            self._stopping.set()
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)

    async def _judge(self, pointer: PolicyPointer) -> Verdict:
        try:
            weights = await self._fetch(pointer)
        except (BusError, PolicyError) as error:
            return Verdict(version=pointer.version, promoted=False, why=str(error))
        ratios = await in_background(self._ratios, weights)
        ratio, worst = sum(ratios) / len(ratios), min(ratios)
        if ratio < NEEDED_RATIO or worst < WORST_RATIO:
            return Verdict(
                version=pointer.version, promoted=False, ratio=ratio, worst_ratio=worst, why="not above the heuristic"
            )
        champion = msgspec.structs.replace(pointer, evaluation={"vs_heuristic": ratio, "worst": worst})
        try:
            await self._bus.kv_put(BUCKET_POLICY, KEY_CHAMPION, msgspec.json.encode(champion))
        except BusError as error:
            return Verdict(version=pointer.version, promoted=False, ratio=ratio, worst_ratio=worst, why=str(error))
        return Verdict(version=pointer.version, promoted=True, ratio=ratio, worst_ratio=worst)

    async def _fetch(self, pointer: PolicyPointer) -> qweights.Weights:
        data = await self._bus.object_get(BUCKET_WEIGHTS, pointer.version)
        if data is None:
            raise PolicyError(f"no object {pointer.version} in {BUCKET_WEIGHTS}")
        found = hashlib.sha256(data).hexdigest()
        if found != pointer.sha256:
            raise PolicyError(f"{pointer.version}: sha256 {found}, the pointer names {pointer.sha256}")
        return qweights.load(data)

    def _ratios(self, weights: qweights.Weights) -> list[float]:
        """Goodput of the network over the heuristic's on each fixed workload; runs in a thread and ends early with
        zeros once the gate stops."""
        network = policy_named("dqn")
        ratios = []
        for number, (kind, seed) in enumerate(GATE_WORKLOADS):
            if self._stopping.is_set():
                return [0.0]
            if number == len(self._trials):
                self._trials.append(self._trial(kind, seed))
            tables, heuristic = self._trials[number]
            run = replay(self._config, tables, network, GATE_DURATION_S, weights=weights)
            ratios.append(run.summary.goodput_tokens_per_s / max(heuristic, 1e-9))
        return ratios

    def _trial(self, kind: str, seed: int) -> tuple[list[RequestTable], float]:
        context = min(model.context_tokens for model in self._config.model_specs())
        workload = builtin(kind, duration_s=GATE_DURATION_S, seed=seed).within_context(context)
        unit = find_unit_load(self._config, workload, GATE_DURATION_S, seed)
        workers = self._config.cards * self._config.workers_per_card
        tables = tables_at(workload, unit.factor * GATE_LOAD, workers, GATE_DURATION_S, seed)
        run = replay(self._config, tables, policy_named("heuristic"), GATE_DURATION_S)
        return tables, run.summary.goodput_tokens_per_s
