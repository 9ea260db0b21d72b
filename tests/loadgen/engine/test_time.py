"""Time: determinism, calibration, how workers share a card."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from loadgen.engine.calibration import (
    ITERATION_TIMES,
    coefficients,
    errors,
    reference_tokens_per_s,
)
from loadgen.engine.fleet import Fleet
from loadgen.engine.specs import FleetConfig
from schemas.metrics import COLUMN
from services.errors import UserError
from tests.loadgen.engine.tables import empty_table, plain, random_table


def _loaded(seed: int, substep_s: float = 0.1) -> Fleet:
    rng = np.random.default_rng(seed)
    return Fleet(FleetConfig(substep_s=substep_s), [random_table(rng, 3.0, 60.0, 1.0) for _ in range(2)])


def test_same_tables_give_the_same_answer() -> None:
    one, two = _loaded(7), _loaded(7)
    for fleet in (one, two):
        for k in range(30):
            fleet.command(rho=1.0 + 0.1 * (k % 5), evict_bytes=1e9 * (k % 3 == 0), compact_bytes=1e9 * (k % 4 == 0))
            fleet.advance(2.0)
    assert np.array_equal(one.metrics(), two.metrics(), equal_nan=True)
    assert one.state.request.tobytes() == two.state.request.tobytes()


def test_two_short_advances_are_one_long_one() -> None:
    one, two = _loaded(7), _loaded(7)
    one.advance(40.0)
    for _ in range(20):
        two.advance(2.0)
    assert one.state.request.tobytes() == two.state.request.tobytes()


def test_a_step_must_be_a_multiple_of_the_substep() -> None:
    with pytest.raises(ValueError, match="multiple of the sub-step"):
        _loaded(1).advance(0.15)


@pytest.mark.parametrize("card", ["A100-80G", "H100-80G", "H200-141G"])
@pytest.mark.parametrize(("batch", "context"), [(1, 1000), (32, 4000), (64, 1000)])
def test_decoding_alone_takes_the_calibrated_time(card: str, batch: int, context: int) -> None:
    table = plain([0.0] * batch, prompt=context, output=400, max_tokens=400)
    config = FleetConfig(card=card, workers_per_card=1, client_timeouts=False)
    fleet = Fleet(config, [table])
    while fleet.metrics()[0, COLUMN["prefilling"]] or fleet.t_s < 1:
        fleet.advance(0.1)
    fleet.advance(1.0)
    row = fleet.metrics()[0]
    mean_context = row[COLUMN["kv_bytes"]] / row[COLUMN["kv_bytes_per_token"]] / batch
    times = coefficients(card, "Llama-3.1-8B")
    expected = times.iteration_s(batch, batch * mean_context, 0, 0) + config.overhead_s
    assert row[COLUMN["running"]] == batch
    assert row[COLUMN["iteration_s"]] == pytest.approx(expected, rel=0.02)


def test_prefill_alone_takes_the_calibrated_time() -> None:
    for prompt in (512, 8192):
        fleet = Fleet(FleetConfig(workers_per_card=1), [plain([0.0], prompt=prompt, output=2)])
        fleet.advance(2.0)
        whole = coefficients("A100-80G", "Llama-3.1-8B").iteration_s(0, 0, prompt, prompt / 2)
        assert fleet.results().first_token_s[0] == pytest.approx(whole, rel=0.15), "chunks add their overhead"


def test_busy_workers_share_the_card_and_an_idle_one_takes_nothing() -> None:
    table = plain([0.0], prompt=100, output=500, max_tokens=500)
    alone = Fleet(FleetConfig(), [table, empty_table()])
    both = Fleet(FleetConfig(), [table, table])
    for fleet in (alone, both):
        fleet.advance(20.0)
    ratio = both.results().tpot_s[0] / alone.results().tpot_s[0]
    assert ratio == pytest.approx(2.0, rel=0.02)


def test_the_histogram_of_token_times_holds_each_finished_request_once() -> None:
    fleet = Fleet(FleetConfig(workers_per_card=1), [plain([0.0] * 8, prompt=500, output=[300] * 7 + [1])])
    fleet.advance(30.0)
    assert fleet.done
    histogram = fleet.state.tpot[0]
    assert histogram.sum() == 7, "a request of one token has no time between tokens"
    assert histogram[2] == 7, "12 to 14 ms are within 0.2 to 0.3 of chat's 50 ms"
    assert np.nanmedian(fleet.results().tpot_s) == pytest.approx(0.0135, rel=0.1)


def test_a_finer_substep_gives_nearly_the_same_figures() -> None:
    coarse, fine = _loaded(11), _loaded(11, 0.02)
    for fleet in (coarse, fine):
        fleet.advance(120.0)
    a, b = coarse.results(), fine.results()
    assert np.nanmedian(a.tpot_s) == pytest.approx(np.nanmedian(b.tpot_s), rel=0.1)
    assert a.produced_tokens.sum() == pytest.approx(b.produced_tokens.sum(), rel=0.05)


def test_model_is_within_a_tenth_of_every_measured_point(shared_dir: Path) -> None:
    table = errors(shared_dir / "calibration")
    assert {(row.card, row.phase) for row in table} == {
        (card, phase) for card in ("A100-80G", "H100-80G", "H200-141G") for phase in ("decode", "prefill")
    }
    worst = max(table, key=lambda row: abs(row.worst))
    assert abs(worst.worst) < 0.10, f"{worst}"
    assert np.mean([row.mean_abs for row in table]) < 0.03


def test_errors_need_the_calibration_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"derived_iteration_times\.csv"):
        errors(tmp_path)


def test_unmeasured_models_are_labelled_as_extrapolated() -> None:
    for (_, model), times in ITERATION_TIMES.items():
        assert times.extrapolated == (model != "Llama-3.1-8B")


def test_reference_rates_rise_with_the_card() -> None:
    rates = [reference_tokens_per_s(coefficients(c, "Llama-3.1-8B")) for c in ("A100-80G", "H100-80G", "H200-141G")]
    assert rates == sorted(rates)
    assert 5_000 < rates[0] < 8_000


def test_prompts_one_by_one_take_as_long_as_side_by_side() -> None:
    """A chunk attends to what is computed so far, however many prompts wait behind it."""
    took_s = {}
    config = FleetConfig(workers_per_card=1, client_timeouts=False)
    for apart_s in (0.0, 3.0):
        table = plain(np.arange(6) * apart_s, prompt=20_000, output=1, max_tokens=1)
        fleet = Fleet(config, [table])
        fleet.advance(60.0)
        request = fleet.state.request
        alone = request["first_token"] - request["arrival"]
        took_s[apart_s] = request["first_token"].max() if apart_s == 0.0 else alone.sum()
        assert apart_s == 0.0 or alone.max() < apart_s, "each is done before the next comes"
    assert took_s[3.0] == pytest.approx(took_s[0.0], rel=0.05)


def test_an_engine_alone_on_its_card_has_its_memory_mapped_when_it_starts() -> None:
    for workers in (1, 2):
        fleet = Fleet(FleetConfig(workers_per_card=workers), [empty_table()] * workers)
        row = fleet.metrics()[0]
        free = row[COLUMN["card_free_bytes"]]
        assert (free < row[COLUMN["page_group_bytes"]]) == (workers == 1), "neighbours share what nobody has mapped"
