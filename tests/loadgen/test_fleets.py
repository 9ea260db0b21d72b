"""Randomised fleets: what is held out, what is drawn, and that a load means the same everywhere."""

from __future__ import annotations

import numpy as np
import pytest

from loadgen.configurations import HOST_SHARES, LINKS_BYTES_PER_S, LOADS
from loadgen.engine.specs import CARDS
from loadgen.fleet_tables import warped
from loadgen.fleets import (
    UNIT_LOADS,
    Configuration,
    held_out_configurations,
    tables_at,
    tables_for,
    training_configurations,
    unit_factor,
)
from loadgen.policies import policy_named
from loadgen.replay import replay


def _tenants(one: Configuration) -> tuple[object, ...]:
    return one.fleet.card, tuple(sorted((x.model, x.kind, str(x.service_class)) for x in one.tenants))


def test_held_out_cover_the_regimes_and_are_fixed() -> None:
    held = held_out_configurations()
    assert held == held_out_configurations()
    assert len(held) >= 12
    assert len({one.name for one in held}) == len(held)
    regimes = " ".join(one.regime for one in held)
    for regime in ("unlike tenants", "small host pool", "slow link", "overload"):
        assert regime in regimes
    assert {one.fleet.card for one in held} == set(CARDS)
    assert {one.fleet.workers_per_card for one in held} == {1, 2, 3}
    for one in held:
        assert one.fleet.silent_ends
        assert sum(one.fleet.worker_shares()) == pytest.approx(1.0)
        one.fleet.kv_capacity_bytes()  # UserError where it does not fit


def test_training_never_sees_what_is_held_out() -> None:
    held, drawn = held_out_configurations(), training_configurations(3, 300)
    taken = {_tenants(one) for one in held}
    assert not taken & {_tenants(one) for one in drawn}
    for name in ("host_bytes_per_card", "link_bytes_per_s"):
        for one in drawn:
            apart = [
                getattr(one.fleet, name) / getattr(other.fleet, name)
                for other in held
                if other.fleet.card == one.fleet.card
            ]
            assert all(abs(ratio - 1.0) > 0.05 for ratio in apart), name


def test_training_spans_the_ranges_and_is_a_prefix_of_a_longer_drawing() -> None:
    drawn = training_configurations(0, 200)
    assert drawn[:20] == training_configurations(0, 20)
    assert drawn[:20] != training_configurations(1, 20)
    hosts = [one.fleet.host_bytes_per_card / CARDS[one.fleet.card].hbm_bytes for one in drawn]  # type: ignore[index,operator]
    links = [one.fleet.link_bytes_per_s for one in drawn]
    assert HOST_SHARES[0] <= min(hosts) < 0.2
    assert 3.0 < max(hosts) <= HOST_SHARES[1]
    assert LINKS_BYTES_PER_S[0] <= min(links) < 9e9  # type: ignore[type-var,operator]
    assert LOADS[0] <= min(one.load for one in drawn) < 0.5
    assert {one.fleet.workers_per_card for one in drawn} == {1, 2, 3}
    assert any(len(set(one.fleet.model)) > 1 for one in drawn), "unlike models on a card"
    for one in drawn:
        one.fleet.kv_capacity_bytes()


@pytest.mark.parametrize("one", held_out_configurations(), ids=lambda one: one.name)
def test_every_configuration_has_good_tables(one: Configuration) -> None:
    tables = tables_at(one, 7, 120.0, 0.5)
    assert len(tables) == one.fleet.workers_per_card
    for table in tables:
        table.check()
    again = tables_at(one, 7, 120.0, 0.5)
    assert all((a.prompt_tokens == b.prompt_tokens).all() for a, b in zip(tables, again, strict=True))
    assert any(len(a) != len(b) for a, b in zip(tables, tables_at(one, 8, 120.0, 0.5), strict=True))


def test_arrivals_follow_the_rate_and_keep_their_number() -> None:
    even = np.linspace(0.0, 99.9, 1000)
    moved = warped(even, np.where(np.arange(100) < 50, 3.0, 1.0), 100.0)
    assert (np.diff(moved) > 0).all()
    assert 0.0 <= moved[0] <= moved[-1] < 100.0
    assert (moved < 50.0).mean() == pytest.approx(0.75, abs=0.01)


def test_unit_loads_of_all_held_out_are_kept() -> None:
    assert UNIT_LOADS.is_file()
    for one in held_out_configurations():
        assert 0.05 < unit_factor(one) < 4.0


def test_the_quick_search_finds_a_load_that_presses_the_fleet() -> None:
    one = next(one for one in training_configurations(5, 10) if one.fleet.workers_per_card == 2)
    factor = unit_factor(one)
    reference = policy_named("vllm_offload")
    light, heavy = (
        replay(one.fleet, tables_at(one, 3, 120.0, scale * factor), reference, 120.0).summary.slo_token_share
        for scale in (0.3, 3.0)
    )
    assert light > heavy
    assert len(tables_for(one, 3, 60.0, factor)) == 2
