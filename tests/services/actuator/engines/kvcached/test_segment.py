"""The segment itself: read and written as kvcached does, never made, and survived in any state."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from services.actuator.engines.kvcached.segment import Owner, holders, write_limit
from services.errors import SegmentError, UserError
from services.kvsegment import LAYOUT, Usage, read_usage, segment_path
from tests.services.actuator.engines.kvcached.conftest import POOL, Played
from tests.services.actuator.engines.kvcached.player import PAGE


def reason(path: Path) -> str:
    with pytest.raises(SegmentError) as caught:
        read_usage(path)
    return caught.value.reason


def test_what_the_engine_writes_is_read(played: Played) -> None:
    played.say("alloc 9")
    usage = read_usage(played.path)
    assert usage[:3] == (POOL, 3 * PAGE, 0)


def test_a_limit_is_written_and_the_engine_follows_it(played: Played) -> None:
    written = write_limit(played.path, 4 * PAGE, POOL)
    assert written.after.limit_bytes == 4 * PAGE
    assert played.say("alloc 20").startswith("full 4 4"), "kvcached takes the limit at its next allocation"


def test_use_is_the_engines_to_write(played: Played) -> None:
    played.say("alloc 5")
    write_limit(played.path, 8 * PAGE, POOL)
    assert read_usage(played.path).used_bytes == 2 * PAGE


def test_a_limit_that_changed_since_is_not_overwritten(played: Played) -> None:
    played.say(f"kvctl {6 * PAGE}")
    with pytest.raises(SegmentError, match="changed"):
        write_limit(played.path, 4 * PAGE, POOL)
    assert read_usage(played.path).limit_bytes == 6 * PAGE


@pytest.mark.parametrize("limit", [0, -1, 1 << 60])
def test_a_limit_that_kvcached_would_not_take_is_not_written(played: Played, limit: int) -> None:
    with pytest.raises(ValueError, match="expected 1 to"):
        write_limit(played.path, limit, POOL)
    assert read_usage(played.path).limit_bytes == POOL


def test_a_missing_segment_is_told_and_never_made(tmp_path: Path) -> None:
    path = tmp_path / "away"
    assert reason(path) == "vanished"
    with pytest.raises(SegmentError, match="vanished"):
        write_limit(path, PAGE, PAGE)
    assert list(tmp_path.iterdir()) == [], "a segment of zeros would be a limit of nothing"


def test_a_truncated_segment_is_told_and_kills_nobody(played: Played) -> None:
    os.truncate(played.path, 9)
    assert reason(played.path) == "truncated"
    with pytest.raises(SegmentError, match="truncated"):
        write_limit(played.path, PAGE, POOL)
    assert played.path.stat().st_size == 9, "nothing is half-written"


@pytest.mark.parametrize(
    ("fields", "expected"), [((0, 0, 0), "empty"), ((-1, 0, 0), "garbage"), ((PAGE, 1 << 62, 0), "garbage")]
)
def test_a_content_that_cannot_be_is_told(tmp_path: Path, fields: tuple[int, int, int], expected: str) -> None:
    path = tmp_path / "segment"
    path.write_bytes(LAYOUT.pack(*fields))
    assert reason(path) == expected


def test_a_folder_a_link_and_a_pipe_are_no_segments(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", tmp_path / "link"):
        assert reason(path) == "garbage", f"{path} must neither block nor be followed"


def test_a_lock_that_is_held_for_ever_is_busy_not_a_hang(played: Played) -> None:
    played.say("hold")
    assert reason(played.path) == "busy"
    played.kill()
    assert read_usage(played.path).limit_bytes == POOL, "the lock goes with its holder"


def test_use_above_the_limit_is_an_ordinary_state() -> None:
    usage = Usage(4, 6, 1)
    assert (usage.mapped_bytes, usage.excess_bytes) == (7, 2)


@pytest.mark.parametrize("name", ["", "a/b", "..", "/dev/shm/x"])
def test_a_name_that_is_no_file_name_is_refused(name: str) -> None:
    with pytest.raises(UserError, match="KVCACHED_IPC_NAME"):
        segment_path(name)


def test_one_process_owns_a_limit_and_its_revisions_outlive_it(tmp_path: Path) -> None:
    first, second = Owner(tmp_path / "segment"), Owner(tmp_path / "segment")
    first.take()
    assert first.next_revision(5) == 1
    with pytest.raises(SegmentError, match=f"written by process {os.getpid()}"):
        second.take()
    with pytest.raises(SegmentError, match="owned"):
        second.next_revision(5)
    first.release()
    second.take()
    assert (second.revision, second.limit_bytes) == (1, 5)
    assert second.next_revision(6) == 2
    second.release()


def test_an_owner_that_was_killed_holds_nothing(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; from services.actuator.engines.kvcached.segment import Owner\n"
        f"owner = Owner(pathlib.Path({str(tmp_path / 'segment')!r})); owner.take(); owner.next_revision(7)\n"
        "print('owns', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "owns\n"
        mine = Owner(tmp_path / "segment")
        with pytest.raises(SegmentError, match=f"process {process.pid}"):
            mine.take()
        process.kill()
        process.wait()
    mine.take()
    assert mine.revision == 1
    mine.release()


def test_whoever_has_the_segment_open_can_be_named(played: Played) -> None:
    played.say("hold")
    assert any("python" in holder for holder in holders(played.path))
