"""Policies chosen among others' rows: in hindsight, or on other traces; and tails pooled over runs."""

from __future__ import annotations

import numpy as np
import pytest

from loadgen.evaluate.rows import Row, binned, pooled_percentile
from loadgen.evaluate.table import Name, Table


def _row(policy: str, configuration: str, card: int, goodput: float, timeouts: bool = True) -> Row:
    return Row(
        policy=policy, admission="fcfs", timeouts=timeouts, configuration=configuration, card=card, seconds=600.0,
        workers=1, worker_steps=330, goodput_tokens_per_s=goodput, tokens_per_s=goodput, offered_tokens_per_s=goodput,
        hbm_utilisation=0.5, preemptions=0, oom=0, arrived=1, shed=0, actions=[0] * 5, waits={}, tpots={},
    )  # fmt: skip


def _table(goodput: dict[str, list[float]]) -> Table:
    return Table(_row(name, "a", card, value) for name, line in goodput.items() for card, value in enumerate(line))


def test_the_tuned_heuristic_is_chosen_on_other_traces() -> None:
    table = _table({"heuristic": [1.0, 1.0, 1.0], "heuristic:early": [9.0, 0.0, 0.0]})
    tuned = table.values(Name("heuristic_tuned", "fcfs"))
    assert tuned.tolist() == [[1.0, 0.0, 0.0]], "its own trace would have told it to be early on the first alone"


def test_fixed_best_is_one_rho_a_configuration_and_hindsight_the_best_of_each_trace() -> None:
    table = _table({"rho_1.0": [3.0, 1.0], "fixed:1.6": [1.0, 2.5], "heuristic": [0.0, 7.0], "heuristic:shy": [2, 2]})
    assert table.values(Name("fixed_best", "fcfs")).tolist() == [[3.0, 1.0]]
    assert table.values(Name("hindsight", "fcfs")).tolist() == [[3.0, 7.0]]


def test_a_policy_that_lacks_a_trace_is_not_in_the_table() -> None:
    rows = [_row("heuristic", "a", 0, 1.0), _row("heuristic", "a", 1, 1.0), _row("static", "a", 0, 1.0)]
    assert Table(rows).names == (Name("heuristic", "fcfs"),)


def test_clients_who_wait_for_ever_are_a_name_of_their_own() -> None:
    table = Table([_row("static", "a", 0, 1.0), _row("static", "a", 0, 5.0, timeouts=False)])
    assert table.values(Name("static", "fcfs")).tolist() == [[1.0]]
    assert table.values(Name("static", "fcfs", False)).tolist() == [[5.0]]


def test_percentiles_pool_over_runs_to_a_bin() -> None:
    rng = np.random.default_rng(1)
    parts = [rng.lognormal(0.0, 1.5, size) for size in (5000, 200, 1)]
    pooled = pooled_percentile([binned(part) for part in parts], 99.0)
    assert pooled == pytest.approx(np.percentile(np.concatenate(parts), 99), rel=0.03)
    assert pooled_percentile([binned(np.array([0.0, np.nan]))], 99.0) == 0.0
    assert np.isnan(pooled_percentile([], 99.0))
