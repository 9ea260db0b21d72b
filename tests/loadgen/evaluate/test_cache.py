"""Rows kept on disk: whole ones come back, a torn line does not, other programs' rows are not mixed in."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from loadgen.evaluate import cache as cache_module
from loadgen.evaluate.cache import Cache
from tests.loadgen.evaluate.test_table import _row as row


def test_rows_come_back_and_a_block_only_whole(tmp_path: Path) -> None:
    rows = [msgspec.structs.replace(row("static", "a", card, 1.5), key="k", waits={3: 4}) for card in range(2)]
    Cache(tmp_path).add(rows)
    again = Cache(tmp_path)
    assert again.load() == 2
    assert again.rows("k", 2) == rows
    assert again.rows("k", 3) is None
    assert again.rows("other", 1) is None


def test_a_line_that_an_interruption_cut_is_dropped_for_good(tmp_path: Path) -> None:
    first = Cache(tmp_path)
    first.add([msgspec.structs.replace(row("static", "a", 0, 1.0), key="k")])
    assert first.path is not None
    whole = first.path.read_bytes()
    first.path.write_bytes(whole + whole[:40])
    again = Cache(tmp_path)
    assert again.load() == 1
    again.add([msgspec.structs.replace(row("static", "a", 1, 2.0), key="k")])
    third = Cache(tmp_path)
    assert third.load() == 2, "the line after the torn one is readable"


def test_rows_of_another_engine_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Cache(tmp_path).add([msgspec.structs.replace(row("static", "a", 0, 1.0), key="k")])
    monkeypatch.setattr(cache_module, "fingerprint", lambda: "0" * 16)
    assert Cache(tmp_path).load() == 0


def test_without_a_folder_nothing_is_written(tmp_path: Path) -> None:
    kept = Cache(None)
    kept.add([msgspec.structs.replace(row("static", "a", 0, 1.0), key="k")])
    assert kept.load() == 0
    assert kept.rows("k", 1) is not None
    assert not list(tmp_path.iterdir())
