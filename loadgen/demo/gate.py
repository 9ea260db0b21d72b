"""The promotion gate of the demo: the examiner on two built-in workloads, run by the demo's own process."""

from __future__ import annotations

from typing import Final

import msgspec

from loadgen.engine.specs import FleetConfig
from loadgen.examiner.examination import Examination, Verdict
from loadgen.examiner.pointers import Pointers
from loadgen.examiner.settings import Settings, ShadowLimits
from loadgen.examiner.trials import Trials, workload_trials
from schemas.policies import HEURISTIC_POINTER, KEY_CHAMPION
from schemas.subjects import BUCKET_POLICY
from services.bus import Bus

GATE_KINDS: Final = ("agent", "mixed")
GATE_SEEDS: Final = (11, 12, 13)
GATE_DURATION_S: Final = 400.0
GATE_LOAD: Final = 1.2
GATE_SETTINGS: Final = Settings(shadow=ShadowLimits(steps=10, decisions=10, limit_s=60.0), probation_share=1.0)


class Gate(Examination):
    """Follows the ``candidate`` pointer; ``verdicts`` grows by one for each candidate examined."""

    def __init__(self, bus: Bus, config: FleetConfig) -> None:
        trials = Trials(lambda: workload_trials(config, GATE_KINDS, GATE_LOAD, GATE_DURATION_S, GATE_SEEDS))
        super().__init__(bus, GATE_SETTINGS, trials, Pointers(bus))

    async def put_heuristic(self) -> None:
        """The champion to begin with, unless there is one."""
        if await self._bus.kv_get(BUCKET_POLICY, KEY_CHAMPION) is None:
            await self._bus.kv_put(BUCKET_POLICY, KEY_CHAMPION, msgspec.json.encode(HEURISTIC_POINTER), revision=0)


__all__ = ["GATE_SETTINGS", "Gate", "Verdict"]
