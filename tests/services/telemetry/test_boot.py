"""Boot ids grow, whatever happened to the clock or the file."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.errors import UserError
from services.telemetry.boot import Boots


def test_a_boot_id_is_the_wall_clock(tmp_path: Path) -> None:
    assert Boots(tmp_path / "boot", lambda: 500).next() == 500


def test_boot_ids_grow_across_restarts_even_when_the_clock_was_set_back(tmp_path: Path) -> None:
    first = Boots(tmp_path / "sub" / "boot", lambda: 500).next()
    second = Boots(tmp_path / "sub" / "boot", lambda: 100).next()
    assert second == first + 1


def test_boot_ids_grow_within_a_process_without_a_file() -> None:
    boots = Boots(None, lambda: 7)
    assert [boots.next(), boots.next()] == [7, 8]


@pytest.mark.parametrize("content", [b"", b"\x00\xff", b"12x", b"-5", b"9" * 40, b"\xef\xbc\x91"])
def test_a_damaged_file_is_written_anew(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "boot"
    path.write_bytes(content)
    boots = Boots(path, lambda: 500)
    assert boots.next() == 500
    assert Boots(path, lambda: 1).next() == 501, "and holds again"


def test_a_file_that_cannot_be_written_is_the_users_mistake(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="boot_file"):
        Boots(tmp_path / "file" / "boot", lambda: 1).next()


def test_nothing_half_written_is_left(tmp_path: Path) -> None:
    Boots(tmp_path / "boot", lambda: 500).next()
    assert [path.name for path in tmp_path.iterdir()] == ["boot"]
