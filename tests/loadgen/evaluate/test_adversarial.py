"""Nothing that anybody commands runs a card out of memory; and the check would tell."""

from __future__ import annotations

import pytest

from loadgen.evaluate.adversarial import Episode, Tally, added, run

EPISODE = Episode(seed=1, fleets=4, cards=2, steps=100)


def test_random_commands_never_run_out_of_memory() -> None:
    found = run(EPISODE)
    assert found.oom == 0
    assert found.worker_steps > found.masked_worker_steps > 0
    assert min(found.commands, found.evictions, found.prefetches, found.hard_quotas) > 0, "each was tried"


def test_the_check_fires_with_the_guard_off() -> None:
    assert run(Episode(seed=1, fleets=4, cards=2, steps=100, guard=False)).oom > 0


def test_tallies_add_up_and_bound_the_rate() -> None:
    week = 302_400
    whole = added(Tally(worker_steps=week, oom=0), Tally(worker_steps=2 * week, commands=3))
    assert (whole.worker_steps, whole.commands) == (3 * week, 3)
    assert whole.oom_upper_bound_per_week == pytest.approx(1.0), "nothing in three weeks: at most one a week"
