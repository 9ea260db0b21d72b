"""Mixed into vLLM's worker (``--worker-extension-cls``): copies the bytes of moved blocks and re-points the runner.

Called by ``collective_rpc`` between two steps, so it runs on every worker of a tensor-parallel engine, each on its own
shard, in the same order as the steps.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from services.actuator.engines.vllm import shards

I8 = NDArray[np.int64]


class TidegateWorker:
    """Its methods become methods of vLLM's worker; names begin so that they meet none of its own."""

    model_runner: Any
    vllm_config: Any

    def tidegate_problem(self) -> str:
        """Why blocks cannot be moved here; empty: they can, and everything needed for it is loaded."""
        try:
            self._tidegate_copy(np.empty((0, 2), np.int64))  # the first copy compiles and loads
        except (TypeError, ValueError, RuntimeError, ImportError) as error:
            return str(error)
        return ""

    def tidegate_relocate(self, moves: list[tuple[int, int]]) -> float:
        """Copy source to destination of each move in every layer, then re-point the runner's tables; seconds, without
        the wait for the steps under way."""
        plan = np.array(moves, np.int64).reshape(-1, 2)
        self._tidegate_shards().settle()
        started = time.perf_counter()
        self._tidegate_copy(plan)
        self._tidegate_repoint(plan)
        return time.perf_counter() - started

    def tidegate_undo(self, moves: list[tuple[int, int]]) -> None:
        """Point to the sources again, which still hold what they held; for moves that failed on some worker. Where
        nothing was re-pointed it changes nothing: no table named the destinations, which were free."""
        self._tidegate_repoint(np.array(moves, np.int64).reshape(-1, 2)[:, ::-1])

    def _tidegate_copy(self, plan: I8) -> None:
        own = self._tidegate_shards()
        for arena in own.arenas:
            own.mover.move(arena, plan)

    def _tidegate_shards(self) -> shards.Shards:
        own: shards.Shards | None = getattr(self, "_tidegate_own", None)
        if own is None:
            own = self._tidegate_own = shards.open_shards(self.model_runner, self.vllm_config)
        return own

    def _tidegate_repoint(self, plan: I8) -> None:
        runner = self.model_runner
        into = dict(plan.tolist())
        for state in runner.requests.values():
            for numbers in state.block_ids:
                numbers[:] = [into.get(number, number) for number in numbers]
        rows = runner.input_batch.num_reqs
        blocks = runner.input_batch.block_table[0]
        width = int(blocks.num_blocks_per_row[:rows].max(initial=0))  # the rest is as wide as the longest context
        table = blocks.block_table.np[:rows, :width]
        remap = np.arange(max(int(table.max(initial=0)), int(plan.max(initial=0))) + 1)
        remap[plan[:, 0]] = plan[:, 1]
        table[:] = remap[table]
