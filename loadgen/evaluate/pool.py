"""Tasks run by a few processes, rows kept as they come, progress told."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Final, NamedTuple, TypeVar

from loadgen.evaluate.cache import Cache
from loadgen.evaluate.rows import Row
from loadgen.evaluate.runs import Block, Cell, Task, key, run
from schemas.identity import STEP_S

A = TypeVar("A")
B = TypeVar("B")
Tell = Callable[[str], None]

_THREADS: Final = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


class Cost(NamedTuple):
    """What the runs took."""

    worker_steps: int
    """Simulated now; those from the cache are not among them."""
    cached_worker_steps: int
    cpu_s: float
    """Of the processes that ran them."""
    wall_s: float

    def line(self) -> str:
        """For a report."""
        speed = self.worker_steps / self.cpu_s if self.cpu_s else 0.0
        told = f"{self.worker_steps:,} worker-steps in {self.cpu_s:,.0f} s of CPU ({speed:,.0f} a second), "
        told += f"{self.wall_s:,.0f} s of wall time"
        return told + (f"; {self.cached_worker_steps:,} more from the cache" if self.cached_worker_steps else "")


def steps_of(block: Block) -> int:
    """Worker-steps of a cell on a block."""
    fleet = block.configuration.fleet
    return round(block.duration_s / STEP_S) * fleet.cards * fleet.workers_per_card


def run_all(
    cells: Sequence[Cell], groups: Sequence[tuple[Block, ...]], cache: Cache, jobs: int, tell: Tell
) -> tuple[list[Row], Cost]:
    """Every cell on every block of ``groups`` (blocks of a group run side by side); rows in no order.

    What the cache has is not run again. ``jobs`` processes; 1: this one.
    """
    began_s = time.monotonic()
    rows: list[Row] = []
    tasks: list[Task] = []
    cached = 0
    for cell in cells:
        for blocks in groups:
            missing = []
            for block in blocks:
                found = cache.rows(key(cell, block), block.configuration.fleet.cards)
                if found is None:
                    missing.append(block)
                else:
                    rows += found
                    cached += steps_of(block)
            if missing:
                tasks.append(Task(cell, tuple(missing)))
    total = sum(steps_of(block) for task in tasks for block in task.blocks)
    done, cpu_s = 0, 0.0
    for count, (task, result) in enumerate(results(run, tasks, jobs), 1):
        cache.add(result.rows)
        rows += result.rows
        cpu_s += result.cpu_s
        done += sum(steps_of(block) for block in task.blocks)
        spent_s = time.monotonic() - began_s
        tell(
            f"{count}/{len(tasks)} {task.cell.entrant.name} {task.cell.admission}"
            f"{'' if task.cell.timeouts else ' without timeouts'}: {100 * done / total:.0f} %, "
            f"{done / cpu_s:,.0f} worker-steps a CPU second, about {spent_s * (total - done) / done:,.0f} s left"
        )
    return rows, Cost(total, cached, cpu_s, time.monotonic() - began_s)


def results(function: Callable[[A], B], tasks: Sequence[A], jobs: int) -> Iterator[tuple[A, B]]:
    """Each task with what ``function``, which other processes can import, makes of it; in the order in which they
    end. ``jobs`` 1: one after the other in this process."""
    if jobs == 1 or len(tasks) < 2:
        for task in tasks:
            yield task, function(task)
        return
    # A run's matrices are small: threads of its own would only take the other process's core.
    for name in _THREADS:
        os.environ.setdefault(name, "1")
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), initializer=_modest) as executor:
        waiting = {executor.submit(function, task): task for task in tasks}
        try:
            for future in as_completed(waiting):
                yield waiting[future], future.result()
        except BaseException:
            executor.shutdown(wait=False, cancel_futures=True)
            raise


def _modest() -> None:
    os.nice(5)
