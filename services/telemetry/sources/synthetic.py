"""Made-up nodes for ``bench loop``: plausible numbers that move, at the real clock, at little cost.

No engine is behind them: commands change nothing. Each step every worker's gauges take a small random step
and its counters grow; the increments come from a small pool, since a fresh draw for each of a million
counters would cost more than everything that is to be measured.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from schemas.classes import ServiceClass
from schemas.identity import STEP_S, worker_id
from schemas.metrics import COLUMN, CONTEXT_SLICE, METRICS, TPOT_SLICE, TTFT_SLICE
from services.clock import Clock
from services.telemetry.sources.reading import Reading

GROUPS: Final = 40
"""Into how many moments a spread step is cut."""
_POOL: Final = 64
_LEVELS: Final = (0.05, 0.64)
"""KV use over Q0. Commands do not change it, so what lies above the rules' threshold of 0.6 is evicted every step: a
tenth or so of the workers acts, as in a replay of agent sessions."""
_GB: Final = 1e9
_CONSTANTS: Final = {
    "hbm_bytes": 80 * _GB, "weights_bytes": 16 * _GB, "block_bytes": float(2 << 20),
    "page_group_bytes": float(128 << 20), "kv_bytes_per_token": 131072.0, "floor_bytes": 2 * _GB,
    "host_capacity_bytes": 80 * _GB, "link_bytes_per_s": 22 * _GB, "reference_tokens_per_s": 6000.0,
    "host_used_bytes": 20 * _GB, "link_used_bytes_per_s": 1 * _GB, "idle_return_s": 20.0, "rho": 1.0,
    "max_running": 256.0, "running_cap": 256.0, "starting": 0.0, "generation": 0.0, "swapped": 0.0,
}  # fmt: skip


class Synthetic:
    """The numbers, without time: metrics of ``nodes`` x ``workers_per_node`` workers, two a card."""

    def __init__(self, nodes: int, workers_per_node: int, rng: np.random.Generator) -> None:
        if nodes < 1 or workers_per_node < 1:
            raise ValueError(f"{nodes} nodes of {workers_per_node} workers: expected 1 or more of each")
        self.workers_per_node = workers_per_node
        rows = nodes * workers_per_node
        self._rng = rng
        self.metrics: NDArray[np.float64] = np.zeros((rows, len(METRICS)))
        """float64 [nodes x workers_per_node, len(METRICS)]."""
        for name, value in _CONSTANTS.items():
            self.metrics[:, COLUMN[name]] = value
        capacity = (80 - 32 - 4) * _GB
        self._q0 = capacity / 2
        for name in ("q0_bytes", "quota_soft_bytes", "quota_hard_bytes"):
            self.metrics[:, COLUMN[name]] = self._q0
        self.metrics[:, COLUMN["card_kv_capacity_bytes"]] = capacity
        self.metrics[:, COLUMN["finished"] :] = rng.integers(0, 1000, (rows, 1))
        self._level = rng.uniform(*_LEVELS, rows)
        self._pool = self._increments(rng)

    def step(self) -> None:
        """Move every worker one step on."""
        metrics, rng, rows = self.metrics, self._rng, len(self.metrics)
        self._level = np.clip(self._level + rng.normal(0.0, 0.02, rows), *_LEVELS)
        level = self._level
        kv = level * self._q0
        running = np.round(4 + 28 * level)
        gauges = {
            "kv_bytes": kv, "kv_idle_bytes": 0.2 * kv, "kv_mapped_bytes": np.minimum(1.05 * kv, self._q0),
            "kv_reserved_bytes": np.minimum(1.3 * kv, self._q0), "activation_bytes": 0.5 * _GB * level,
            "card_free_bytes": 2 * self._q0 * (1 - level), "frag": level * 0.5, "running": running,
            "waiting": np.round(8 * np.maximum(level - 0.6, 0)), "prefilling": np.round(running * 0.1),
            "waiting_for_memory": np.round(4 * np.maximum(level - 0.7, 0)), "idle_sessions": np.round(10 * level),
            "iteration_s": 0.02 + 0.02 * level,
        }  # fmt: skip
        for name, value in gauges.items():
            metrics[:, COLUMN[name]] = value
        metrics[:, CONTEXT_SLICE] = np.round(running)[:, None] * 0.125
        offset = int(rng.integers(_POOL))
        grown = np.take(self._pool, np.arange(offset, offset + rows) % _POOL, axis=0)
        metrics[:, COLUMN["finished"] : CONTEXT_SLICE.start] += grown[:, : CONTEXT_SLICE.start - COLUMN["finished"]]
        metrics[:, TTFT_SLICE.start :] += grown[:, TTFT_SLICE.start - COLUMN["finished"] :]

    @staticmethod
    def _increments(rng: np.random.Generator) -> NDArray[np.float64]:
        """float64 [_POOL, columns from ``finished`` on]: what a step may bring."""
        pool = np.zeros((_POOL, len(METRICS)))
        finished = rng.integers(0, 6, _POOL).astype(float)
        context = rng.uniform(500, 4000, _POOL)
        pool[:, COLUMN["finished"]] = finished
        pool[:, COLUMN["finished_context_tokens"]] = finished * context
        pool[:, COLUMN["finished_context_tokens_sq"]] = finished * context**2 * 1.3
        pool[:, COLUMN["output_tokens"]] = rng.integers(200, 2400, _POOL)
        pool[:, COLUMN["prompt_tokens"]] = rng.integers(500, 9000, _POOL)
        pool[:, COLUMN["good_tokens"]] = 0.9 * pool[:, COLUMN["output_tokens"]]
        pool[:, COLUMN["judged"]] = finished
        pool[:, COLUMN["violations"]] = np.minimum(finished, rng.integers(0, 2, _POOL))
        pool[:, COLUMN["preemptions"]] = rng.random(_POOL) < 0.02
        # Nearly all within the limit (bin 9 ends there), as with an operator who has sized his fleet.
        pool[:, TTFT_SLICE.start : TTFT_SLICE.start + 4] = rng.integers(0, 3, (_POOL, 4))
        pool[:, TPOT_SLICE.start + 3 : TPOT_SLICE.start + 8] = rng.integers(0, 3, (_POOL, 5))
        pool[:, TPOT_SLICE.start + 10] = rng.random(_POOL) < 0.02
        return pool[:, COLUMN["finished"] :]


class SyntheticSource:
    """Readings of all made-up nodes every ``step_s``.

    ``spread``: share of the step, 0 to 1, over which the nodes' readings are spread evenly, as those of real
    nodes would be; 0 gives them all in one burst.
    """

    name = "synthetic"

    def __init__(
        self,
        nodes: Sequence[str],
        workers_per_node: int,
        clock: Clock,
        rng: np.random.Generator,
        *,
        step_s: float = STEP_S,
        spread: float = 0.0,
    ) -> None:
        self._nodes = list(nodes)
        self._numbers = Synthetic(len(nodes), workers_per_node, rng)
        self._workers = [
            tuple(worker_id(node, w // 2, f"w{w}") for w in range(workers_per_node)) for node in self._nodes
        ]
        self._cards = tuple(w // 2 for w in range(workers_per_node))
        self._classes = tuple(int(ServiceClass.CHAT) for _ in range(workers_per_node))
        self._clock = clock
        self._step_ns = int(step_s * 1e9)
        self._spread = spread

    async def readings(self) -> AsyncIterator[Reading]:
        begun_ns = self._clock.now_ns()
        row_bytes = 8 * len(METRICS) * self._numbers.workers_per_node
        groups = GROUPS if self._spread > 0 else 1
        step = 0
        while True:
            self._numbers.step()
            data = self._numbers.metrics.astype("<f8", copy=False).tobytes()
            for group in range(groups):
                due_ns = begun_ns + int((step + self._spread * group / groups) * self._step_ns)
                wait_ns = due_ns - self._clock.now_ns()
                await asyncio.sleep(max(0.0, wait_ns / 1e9))
                for place in range(group, len(self._nodes), groups):
                    yield Reading(
                        self._nodes[place],
                        step,
                        self._clock.now_ns(),
                        self._workers[place],
                        self._cards,
                        self._classes,
                        data[place * row_bytes : (place + 1) * row_bytes],
                    )
            step += 1
