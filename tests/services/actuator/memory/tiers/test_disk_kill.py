"""A real process that writes to the tier is killed at any moment: nothing committed is lost, nothing else served."""

from __future__ import annotations

import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from services.actuator.memory.arrays import PrivateArena, host_geometry
from services.actuator.memory.disk_format import SLOT, scan
from services.actuator.memory.disk_tier import DiskTier

BLOCK_BYTES = 65536
LIMIT_BYTES = 6 << 20
START_LIMIT_S = 60.0


def content(key: int, sequence: int, count: int) -> np.ndarray:
    """What the writer puts under (key, sequence): uint8 [count, BLOCK_BYTES]."""
    return np.random.default_rng((key, sequence)).integers(0, 256, (count, BLOCK_BYTES), dtype=np.uint8)


def tell(*what: object) -> None:
    """A line for the parent, at once."""
    sys.stdout.write(" ".join(map(str, what)) + "\n")
    sys.stdout.flush()


def write_for_ever(path: Path) -> None:
    """The child: put, replace and drop, telling after each commit what it committed."""
    tier = DiskTier.open(path, BLOCK_BYTES, LIMIT_BYTES)
    arena = PrivateArena(host_geometry(BLOCK_BYTES, 16))
    rng = np.random.default_rng(0)
    while True:
        key, count = int(rng.integers(0, 12)), int(rng.integers(1, 12))
        if not tier.accepts(count):
            gone = int(rng.choice(tier.account.keys))
            tell("drop", gone, 0, 0)
            tier.drop(gone)
            continue
        ticket = tier.prepare_put(key, count)
        rows = np.arange(count, dtype=np.int64)
        arena.write(rows, content(key, ticket.sequence, count))
        tier.write(ticket, arena, rows)
        tier.commit_put(ticket)
        tell("held", key, ticket.sequence, count)


def killed_after(path: Path, committed: int, delay_s: float) -> list[list[str]]:
    """Lines a child told before it was killed ``delay_s`` after its ``committed``-th."""
    child = subprocess.Popen([sys.executable, "-c", _CHILD, str(path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    lines = []
    try:
        for _ in range(committed):
            assert select.select([child.stdout], [], [], START_LIMIT_S)[0], "the writer does not write"
            lines.append(child.stdout.readline())
        time.sleep(delay_s)  # no event to wait for: the moment of the kill is what varies
    finally:
        child.send_signal(signal.SIGKILL)
        rest, _ = child.communicate()
    lines += [line for line in rest.splitlines() if len(line.split()) == 4]
    return [line.split() for line in lines]


_CHILD = f"""
import sys
from pathlib import Path
from {__name__} import write_for_ever
write_for_ever(Path(sys.argv[1]))
"""


@pytest.mark.parametrize("kill", range(4))
def test_a_kill_loses_nothing_committed_and_serves_nothing_half_written(tmp_path: Path, kill: int) -> None:
    path = tmp_path / "tier"
    told = killed_after(path, committed=15 + 7 * kill, delay_s=0.0017 * kill)
    expected: dict[int, tuple[int, int]] = {}
    for verb, key, sequence, count in told:
        expected.pop(int(key), None)
        if verb == "held":
            expected[int(key)] = (int(sequence), int(count))

    with path.open("rb") as file:
        file.seek(4096)
        slots = DiskTier.open(tmp_path / "other", BLOCK_BYTES, LIMIT_BYTES).layout.slots
        table = np.frombuffer(file.read(slots * SLOT.itemsize), dtype=SLOT)
    on_disk = scan(table).entries
    lost = {key: what for key, what in expected.items() if key not in on_disk}
    dropping = {int(told[-1][1])} if told[-1][0] == "drop" else set()
    assert not set(lost) - dropping, "every commit that was told of is on the disk"
    for key, (sequence, _) in expected.items():
        assert on_disk[key].sequence >= sequence

    known = {key: entry.sequence for key, entry in on_disk.items()}
    tier = DiskTier.open(path, BLOCK_BYTES, LIMIT_BYTES, known=known)
    tier.account.check()
    assert set(tier.recovered.kept) == set(on_disk)
    arena = PrivateArena(host_geometry(BLOCK_BYTES, 16))
    for key, entry in on_disk.items():
        rows = np.arange(len(entry.slots), dtype=np.int64)
        get = tier.prepare_get(key)
        tier.read(get, arena, rows)
        tier.commit_get(get, keep=True)
        assert np.array_equal(arena.read(rows), content(key, entry.sequence, len(rows))), "served as committed"
    held = sum(len(entry.slots) for entry in on_disk.values())
    assert tier.account.free == slots - held, "everything else is free"
