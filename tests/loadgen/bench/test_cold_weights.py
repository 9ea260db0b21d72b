"""The comparison on a small scale: both sides are offered the same, and nobody runs out of memory."""

from __future__ import annotations

from loadgen.bench.cold_weights import CASES, bench_cold_weights


def test_both_sides_have_the_same_requests_and_no_crash():
    figures = bench_cold_weights(seeds=(0,), duration_s=900.0)
    for case in CASES:
        found = figures[case.name]
        assert found["awake"]["rare_requests"] == found["asleep"]["rare_requests"] > 0
        assert found["awake"]["oom"] == found["asleep"]["oom"] == 0
    assert figures[CASES[0].name]["sleeps"] > 0, "the rule had something to do"
