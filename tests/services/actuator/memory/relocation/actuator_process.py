"""``python -m tests.services.actuator.memory.relocation.actuator_process SOCKET STAGE LEASE_S``: one relocation that
stops after ``STAGE`` (``prepared``, ``copying``, ``copied``), says so, and goes on at a line on its standard input.

It ends by saying ``committed``, or the name of the error that kept it from that.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from schemas.engine import Description
from services.actuator.memory.arrays import Arena
from services.actuator.memory.attachment import SharedAttachment
from services.actuator.memory.mover import BATCH, NumpyMover
from services.actuator.memory.paths import PathTable
from services.actuator.memory.receipts import Transfer
from services.actuator.memory.relocation import Relocator
from services.errors import EngineRefused, EngineUnreachable, MemoryPlaneError

from .processes import connect

BUDGET_BYTES = 64 * 4096


class HaltingMover(NumpyMover):
    """Stops in the middle of a plan, inside the gate."""

    def move(self, arena: Arena, moves: NDArray[np.int64], *, asked_by: str = "") -> Transfer:
        half = len(moves) // 2
        super().move(arena, moves[:half], asked_by=asked_by)
        halt("copying")
        return super().move(arena, moves[half:], asked_by=asked_by)


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def halt(stage: str) -> None:
    say(stage)
    sys.stdin.readline()


async def run(path: Path, stage: str, lease_s: float) -> None:
    def attach(said: Description) -> SharedAttachment:
        paths = PathTable((said.block_bytes,), {BATCH: (1.0,)})
        return SharedAttachment.open(said, HaltingMover(paths) if stage == "copying" else NumpyMover(paths))

    relocator = Relocator(connect(path), attach)
    relocation = None
    while relocation is None:
        relocation = await relocator.prepare(budget_bytes=BUDGET_BYTES, action_id="halting", lease_s=lease_s)
    if stage == "prepared":
        halt(stage)
    try:
        await relocator.copy(relocation)
        if stage == "copied":
            halt(stage)
        await relocator.commit(relocation)
    except (MemoryPlaneError, EngineRefused, EngineUnreachable) as error:
        say(type(error).__name__)
    else:
        say("committed")


if __name__ == "__main__":
    asyncio.run(run(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])))
