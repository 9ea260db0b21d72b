"""Estimates are bounds with a basis: nothing where memory was never short, unknown where nobody tells."""

from __future__ import annotations

import math

import pytest

from services.operator.attach_seen import Seen
from services.operator.report_estimates import estimates, never_short, quantile_bound, share_within


def seen(**fields: object) -> Seen:
    base = {"seconds": 100.0, "kv_capacity_bytes": 10e9, "kv_peak_bytes": 6e9, "memory_known_s": 100.0,
            "counted": {"preemptions": 0.0}}  # fmt: skip
    return Seen(worker="n0/0/w0", begin_ns=1, end_ns=2, **{**base, **fields})  # type: ignore[arg-type]


def bounds(one: Seen) -> list[float | None]:
    return [each.bound for each in estimates(one)]


def test_where_memory_was_never_short_there_is_nothing_but_what_a_neighbour_could_have_had() -> None:
    quiet = seen(waiting_s=50.0)
    assert never_short(quiet) is True
    assert bounds(quiet) == [0.0, 0.0, None, 4e9]
    assert [each.words.partition(":")[0] for each in estimates(quiet)][:3] == ["nothing", "nothing", "not known"]


def test_waiting_is_bounded_by_the_part_that_waited_for_memory_while_there_was_room() -> None:
    short = seen(waiting_s=200.0, memory_waiting_s=120.0, memory_short_s=60.0, room_waiting_s=50.0)
    assert never_short(short) is False
    assert bounds(short)[0] == 0.25
    full = seen(waiting_s=200.0, memory_waiting_s=120.0, memory_short_s=60.0)
    assert bounds(full)[0] == 0.0
    assert "running requests held" in estimates(full)[0].words


def test_recomputing_is_bounded_by_what_was_seen() -> None:
    again = seen(
        counted={"preemptions": 3.0, "recomputed_tokens": 500.0, "prompt_tokens": 4000.0, "output_tokens": 1000.0}
    )
    assert bounds(again)[1] == 0.1
    untold = seen(counted={"preemptions": 3.0, "output_tokens": 1000.0})
    assert bounds(untold)[1] is None, "preemptions were seen, but what they cost was not"
    assert "3 preemptions" in estimates(untold)[1].words


def test_what_a_server_does_not_tell_is_not_known() -> None:
    silent = Seen(worker="n0/0/w0", begin_ns=1, end_ns=2, seconds=100.0, waiting_s=10.0)
    assert bounds(silent) == [None, None, None, None]
    assert never_short(silent) is None


def test_idle_kv_is_a_mean_over_the_time_in_which_it_was_told() -> None:
    assert bounds(seen(idle_bytes_s=3e9 * 50, idle_known_s=50.0))[2] == 3e9


def test_every_estimate_has_its_formula() -> None:
    assert all(each.formula and each.unit for each in estimates(seen()))


def test_latency_is_told_by_edges_and_never_between_them() -> None:
    bins = [0.0] * 16
    bins[3], bins[9], bins[15] = 50.0, 45.0, 5.0
    assert share_within(bins) == 0.95
    assert quantile_bound(bins, 0.5) == pytest.approx(0.4)
    assert quantile_bound(bins, 0.95) == 1.0
    assert quantile_bound(bins, 0.99) == math.inf
    assert quantile_bound([0.0] * 16, 0.5) is None
