"""kvcached segments as a source."""

from __future__ import annotations

import math
from pathlib import Path

from services.kvsegment import LAYOUT
from services.telemetry.sources.kvcached import read_facts

GIB = 1 << 30


def test_mapped_bytes_and_the_limit_are_columns(tmp_path: Path) -> None:
    (tmp_path / "kv").write_bytes(LAYOUT.pack(8 * GIB, 3 * GIB, GIB))
    facts = read_facts(tmp_path / "kv")
    assert facts.columns == {"kv_mapped_bytes": 4 * GIB, "quota_hard_bytes": 8 * GIB}
    assert facts.trouble == ""


def test_a_missing_segment_is_missing_numbers_and_a_reason(tmp_path: Path) -> None:
    facts = read_facts(tmp_path / "kv")
    assert all(math.isnan(value) for value in facts.columns.values())
    assert "vanished" in facts.trouble


def test_more_than_the_card_has_is_not_believed(tmp_path: Path) -> None:
    (tmp_path / "kv").write_bytes(LAYOUT.pack(8 * GIB, 300 * GIB, 0))
    facts = read_facts(tmp_path / "kv", card_bytes=80.0 * GIB)
    assert math.isnan(facts.columns["kv_mapped_bytes"])
    assert facts.flags[0][0] == "kv_mapped_bytes"


def test_a_limit_of_0_is_a_segment_made_anew_and_no_quota(tmp_path: Path) -> None:
    (tmp_path / "kv").write_bytes(LAYOUT.pack(0, 3 * GIB, 0))
    facts = read_facts(tmp_path / "kv")
    assert math.isnan(facts.columns["quota_hard_bytes"])
    assert facts.columns["kv_mapped_bytes"] == 3 * GIB
