"""The planning benchmark plans a pool of the stated size; how fast is not a test's business."""

from __future__ import annotations

from loadgen.bench.memory_planning import plan_ms_100k_blocks, scattered_pool
from services.actuator.memory.planner import plan_blocks


def test_measures_a_plan_of_100000_blocks_that_has_work_to_do() -> None:
    assert plan_ms_100k_blocks(repeats=1) > 0.0
    pool = scattered_pool()
    assert pool.geometry.blocks >= 100_000
    assert plan_blocks(pool.blocks).bytes > 0
