"""Files for the user: told before the work when they cannot be written, never there in part."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from loadgen.outputs import check_file, write_atomically
from services.errors import UserError


def test_a_file_is_replaced_as_a_whole_and_can_be_read_as_others_of_its_user(tmp_path: Path) -> None:
    file, plain = tmp_path / "figures.json", tmp_path / "plain"
    file.write_text("before, and longer than what comes")
    write_atomically(file, "after\n")
    plain.touch()
    assert file.read_text() == "after\n"
    assert file.stat().st_mode == plain.stat().st_mode, "the user's umask, nothing stricter"
    assert {path.name for path in tmp_path.iterdir()} == {"figures.json", "plain"}


def test_what_cannot_be_written_leaves_the_former(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    file = tmp_path / "figures.json"
    file.write_text("before")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomically(file, "after")
    assert file.read_text() == "before"
    assert {path.name for path in tmp_path.iterdir()} == {"figures.json"}


def test_places_that_cannot_take_a_file(tmp_path: Path) -> None:
    check_file("--json", None)
    check_file("--json", tmp_path / "new.json")
    with pytest.raises(UserError, match=r"--json: folder .*absent does not exist"):
        check_file("--json", tmp_path / "absent" / "new.json")
    with pytest.raises(UserError, match="expected the name of a file"):
        check_file("--json", tmp_path)
