"""Shared arenas between real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from services.actuator.memory import segment
from services.actuator.memory.arrays import PrivateArena, SharedArena, host_geometry
from services.actuator.memory.errors import BadGeometry, OutOfBlocks, SegmentGone
from services.actuator.memory.geometry import Geometry

GEOMETRY = Geometry(512, 4, 3)
ENGINE = """
import sys
from pathlib import Path
import numpy as np
from services.actuator.memory.arrays import SharedArena
from services.actuator.memory.geometry import Geometry
arena = SharedArena.create(sys.argv[1], Geometry(512, 4, 3), Path(sys.argv[2]))
arena.view[:] = np.arange(12, dtype=np.uint8)[:, None]
print("ready", flush=True)
sys.stdin.readline()
arena.unlink()
"""
READER = """
import sys
from pathlib import Path
from services.actuator.memory.arrays import SharedArena
arena = SharedArena.open(sys.argv[1], None, Path(sys.argv[2]))
arena.view[3] = 33
"""


def run(script: str, folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", script, "arena", str(folder)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path.cwd())


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    process = run(ENGINE, tmp_path)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    yield process
    process.kill()
    process.communicate()


def test_two_processes_see_the_same_blocks(engine: subprocess.Popen[str], tmp_path: Path) -> None:
    arena = SharedArena.open("arena", GEOMETRY, tmp_path)
    np.testing.assert_array_equal(arena.view[:, 0], np.arange(12))
    arena.check()
    arena.close()


def test_a_reader_that_ends_takes_nothing_with_it(engine: subprocess.Popen[str], tmp_path: Path) -> None:
    reader = run(READER, tmp_path)
    reader.communicate()
    assert reader.returncode == 0
    arena = SharedArena.open("arena", GEOMETRY, tmp_path)
    assert arena.view[3, 0] == 33, "the segment outlives its readers, with what they wrote"
    arena.close()


def test_a_dead_engines_segment_is_gone_for_those_who_have_it_open(
    engine: subprocess.Popen[str], tmp_path: Path
) -> None:
    arena = SharedArena.open("arena", GEOMETRY, tmp_path)
    os.kill(engine.pid, signal.SIGKILL)
    engine.wait()
    with pytest.raises(SegmentGone, match="dead"):
        arena.check()
    with pytest.raises(SegmentGone, match="dead"):
        SharedArena.open("arena", GEOMETRY, tmp_path)
    arena.close()


def test_a_restarted_engine_replaces_what_its_dead_self_left(engine: subprocess.Popen[str], tmp_path: Path) -> None:
    os.kill(engine.pid, signal.SIGKILL)
    engine.wait()
    with SharedArenaOf(tmp_path) as arena:
        assert not arena.view.any(), "no byte of the former life is served"


def test_a_living_engines_name_is_not_taken(engine: subprocess.Popen[str], tmp_path: Path) -> None:
    with pytest.raises(SegmentGone, match="living engine"):
        SharedArena.create("arena", GEOMETRY, tmp_path)
    SharedArena.open("arena", GEOMETRY, tmp_path).close()


def test_an_unlinked_segment_is_told_at_the_next_check(tmp_path: Path) -> None:
    engine = SharedArena.create("arena", GEOMETRY, tmp_path)
    actuator = SharedArena.open("arena", GEOMETRY, tmp_path)
    engine.unlink()
    with pytest.raises(SegmentGone, match="removed"):
        actuator.check()
    with pytest.raises(SegmentGone, match="No such file"):
        SharedArena.open("arena", GEOMETRY, tmp_path)
    actuator.close()


def test_only_its_engine_can_take_a_segment_away(tmp_path: Path) -> None:
    with SharedArenaOf(tmp_path) as engine:
        SharedArena.open("arena", GEOMETRY, tmp_path).unlink()
        engine.check()


def test_a_segment_cut_short_is_told_with_its_numbers(tmp_path: Path) -> None:
    with SharedArenaOf(tmp_path) as engine:
        os.truncate(tmp_path / "arena", 5000)
        expected = segment.HEADER_BYTES + GEOMETRY.arena_bytes
        with pytest.raises(SegmentGone) as raised:
            engine.check()
        assert (raised.value.found, raised.value.expected) == (5000, expected)
        with pytest.raises(SegmentGone, match="cut short"):
            SharedArena.open("arena", None, tmp_path)


def test_another_geometry_than_described_is_refused(tmp_path: Path) -> None:
    with SharedArenaOf(tmp_path), pytest.raises(SegmentGone, match="blocks_per_group=4"):
        SharedArena.open("arena", Geometry(512, 6, 2), tmp_path)


@pytest.mark.parametrize(
    ("at", "value", "told"), [(0, b"X", "no arena"), (8, b"\x09", "no arena of version 1"), (20, b"\x09", "damaged")]
)
def test_a_damaged_header_is_refused(tmp_path: Path, at: int, value: bytes, told: str) -> None:
    with SharedArenaOf(tmp_path) as engine:
        with (tmp_path / "arena").open("r+b") as file:
            file.seek(at)
            file.write(value)
        with pytest.raises(SegmentGone, match=told):
            SharedArena.open("arena", GEOMETRY, tmp_path)
        with pytest.raises(SegmentGone, match=told):
            engine.check()


def test_an_empty_file_is_no_segment(tmp_path: Path) -> None:
    (tmp_path / "arena").touch()
    with pytest.raises(SegmentGone, match="too short"):
        SharedArena.open("arena", GEOMETRY, tmp_path)


def test_a_full_memory_file_system_is_an_error_and_not_a_dead_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OutOfBlocks, match="bytes wanted") as raised:
        SharedArena.create("arena", GEOMETRY, tmp_path)
    assert raised.value.wanted == segment.HEADER_BYTES + GEOMETRY.arena_bytes
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "x" * 201])
def test_a_name_cannot_lead_elsewhere(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadGeometry, match="segment name"):
        SharedArena.create(name, GEOMETRY, tmp_path)


def test_arrays_taken_before_the_close_stay_readable(tmp_path: Path) -> None:
    arena = SharedArena.create("arena", GEOMETRY, tmp_path)
    view = arena.view
    arena.unlink()
    arena.close()
    assert view.sum() == 0
    with pytest.raises(SegmentGone, match="closed"):
        _ = arena.view
    with pytest.raises(SegmentGone, match="closed"):
        arena.check()


def test_blocks_start_on_a_memory_page() -> None:
    assert PrivateArena(host_geometry(100, 3)).address % 4096 == 0, "pinning and 16-byte words need it"


def test_a_checksum_sees_a_changed_byte_and_words_that_changed_places() -> None:
    arena = PrivateArena(Geometry(37, 1, 4))
    arena.view[:] = np.random.default_rng(1).integers(0, 256, (1, 37), dtype=np.uint8)
    arena.view[1, 36] ^= 1
    arena.view[2, :16] = np.r_[arena.view[2, 8:16], arena.view[2, :8]]
    first, changed, swapped, same = arena.checksum(np.arange(4)).tolist()
    assert first == same
    assert len({first, changed, swapped}) == 3
    with pytest.raises(BadGeometry, match="0 to 3"):
        arena.checksum(np.array([4]))


class SharedArenaOf:
    """An engine's arena for the length of a with-block."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __enter__(self) -> SharedArena:
        self._arena = SharedArena.create("arena", GEOMETRY, self._folder)
        return self._arena

    def __exit__(self, *_: object) -> None:
        self._arena.unlink()


def test_a_sweep_removes_what_dead_engines_left_and_nothing_else(engine: subprocess.Popen[str], tmp_path: Path) -> None:
    engine.kill()
    engine.wait()
    living = SharedArena.create("arena-living", GEOMETRY, tmp_path)
    for name in ("other", "arena-living.gate", "arena-gone.gate"):
        (tmp_path / name).write_bytes(b"x")
    assert segment.sweep("arena", tmp_path) == [], "a file this young may belong to an engine that starts"
    for path in tmp_path.iterdir():
        os.utime(path, (0, 0))
    assert sorted(segment.sweep("arena", tmp_path)) == ["arena", "arena-gone.gate"]
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["arena-living", "arena-living.gate", "other"], "a living engine keeps its gate, used or not"
    living.unlink()
