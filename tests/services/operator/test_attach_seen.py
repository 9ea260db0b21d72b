"""What was seen, in sums: nothing is counted twice, nothing that was not told becomes a zero."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from schemas.identity import SCHEMA_VERSION
from schemas.metrics import COLUMN, METRICS, TTFT_SLICE
from schemas.telemetry import NodeSample, pack_metrics
from services.operator import attach_seen
from services.operator.attach_seen import MINUTE_NS, Recorder, Seen

T0 = 1_796_000_040 * 10**9
"""A full minute."""
S = 10**9
BASE = {"kv_bytes": 6e9, "q0_bytes": 10e9, "running": 8.0, "waiting": 4.0, "waiting_for_memory": 3.0}


def sample(step: int, *, boot_id: int = 1, flags: tuple[tuple[int, str, str], ...] = (), **values: float) -> NodeSample:
    row = np.full((1, len(METRICS)), np.nan)
    for name, value in {**BASE, **values}.items():
        row[0, COLUMN[name]] = value
    return NodeSample("n0", boot_id, step, SCHEMA_VERSION, step * 2 * S, ("n0/0/w0",), (0,), (1,), pack_metrics(row),
                      flags=flags)  # fmt: skip


def seen_of(*samples: NodeSample) -> Seen:
    recorder = Recorder()
    for k, one in enumerate(samples):
        assert recorder.take(one, T0 + k * 2 * S) == []
    (minute,) = recorder.rest()
    return minute


def test_gauges_are_integrated_over_the_time_between_samples() -> None:
    seen = seen_of(sample(0), sample(1), sample(2, kv_bytes=8e9, waiting=0.0, waiting_for_memory=0.0))
    assert (seen.samples, seen.seconds, seen.service_class) == (3, 4.0, 1)
    assert seen.kv_bytes_s == 2 * 6e9 + 2 * 8e9
    assert (seen.kv_peak_bytes, seen.kv_capacity_bytes) == (8e9, 10e9)
    assert (seen.waiting_s, seen.queued_s, seen.memory_waiting_s, seen.memory_short_s) == (8.0, 2.0, 6.0, 2.0)


def test_who_waits_for_memory_counts_as_helpable_only_while_there_is_room() -> None:
    seen = seen_of(sample(0), sample(1), sample(2, kv_bytes=9.8e9), sample(3, kv_bytes=9.8e9, kv_idle_bytes=4e9))
    assert seen.memory_waiting_s == 18.0
    assert seen.room_waiting_s == 12.0, "KV full of running requests has no room; KV of idle ones has"


def test_a_server_that_is_away_makes_unseen_time_and_no_zeros() -> None:
    away = dict.fromkeys(BASE, np.nan)
    seen = seen_of(sample(0), sample(1, **away), sample(2), sample(3))
    assert (seen.seconds, seen.unseen_s) == (4.0, 2.0)
    assert seen.idle_known_s == 0.0
    assert "recomputed_tokens" not in seen.counted, "a counter that nobody told is not zero"
    assert seen.ttft == []


def test_counters_that_reset_count_what_they_have_since() -> None:
    seen = seen_of(sample(0, preemptions=100.0), sample(1, preemptions=103.0), sample(2, preemptions=2.0))
    assert seen.counted["preemptions"] == 5.0


def test_a_new_boot_or_a_long_gap_claims_nothing_of_the_time_between() -> None:
    assert seen_of(sample(0), sample(1, boot_id=2)).seconds == 0.0
    assert seen_of(sample(0), sample(30)).seconds == 0.0


def test_minutes_end_with_the_wall_clocks_and_add_up(tmp_path: Path) -> None:
    recorder = Recorder()
    ttft = {METRICS[TTFT_SLICE.start + k].name: 0.0 for k in range(16)}
    ended = []
    for step in range(60):
        grown = ttft | {"ttft_09": float(step)}
        ended += recorder.take(sample(step, preemptions=float(step), **grown), T0 + step * 2 * S)
        recorder.chose("n0/0/w0", "hold")
    minutes = ended + recorder.rest()
    assert [one.samples for one in minutes] == [30, 30]
    path = tmp_path / attach_seen.FILE
    attach_seen.append(path, minutes)
    whole = attach_seen.read(path)["n0/0/w0"]
    assert (whole.samples, whole.seconds, whole.counted["preemptions"]) == (60, 118.0, 59.0)
    assert whole.ttft[9] == 59.0
    assert whole.why == {"hold": 60}
    assert attach_seen.read(path, since_ns=T0 + MINUTE_NS)["n0/0/w0"].samples == 30
    assert attach_seen.read(path, worker="n0/0/w1") == {}


def test_what_was_not_believed_is_counted_with_its_reason() -> None:
    assert seen_of(sample(0, flags=((0, "kv_bytes", "0 while 8 requests run"),))).flags == {
        "kv_bytes: 0 while 8 requests run": 1
    }


def test_a_line_that_was_cut_is_passed_over_and_a_file_that_grew_is_halved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / attach_seen.FILE
    minute = seen_of(sample(0), sample(1))
    attach_seen.append(path, [minute] * 10)
    with path.open("ab") as file:
        file.write(b'{"worker": "n0/0')
    assert attach_seen.read(path)["n0/0/w0"].samples == 20
    monkeypatch.setattr(attach_seen, "KEPT_BYTES", path.stat().st_size // 2)
    attach_seen.trim(path)
    assert 0 < attach_seen.read(path)["n0/0/w0"].samples < 12
    assert attach_seen.read(tmp_path / "none") == {}
