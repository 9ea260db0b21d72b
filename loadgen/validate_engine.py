"""``tidegate validate-engine``: the emulated engine against measured timings, with its errors in a table.

Two questions. Are iteration times right: the fitted coefficients against the measured kernels' sums they were fitted
to, per card, phase and batch. Is a whole run right: the requests of a measured vLLM 0.19 run (300 requests,
Llama-3.1-8B, RTX PRO 6000) through the emulated engine with coefficients fitted to that card's *kernel* times, so
that nothing of the run itself was fitted, and what its clients saw beside what ours would have.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from loadgen.engine.calibration import MEASURED_CARD, CalibrationError, errors
from loadgen.engine.fleet import Fleet
from loadgen.engine.specs import GIB, CardSpec, EngineMode, FleetConfig
from loadgen.requests import F8, NO_TURN, RequestTable
from schemas.classes import ServiceClass
from services.errors import UserError

RUN_FILE: Final = "llmservingsim/RTXPRO6000_Llama-3.1-8B_requests.jsonl"
CARD: Final = CardSpec(name=MEASURED_CARD, hbm_bytes=95.6 * GIB, hbm_bytes_per_s=1.792e12, link_bytes_per_s=50e9)
MAX_SEQUENCES: Final = 128
"""The measured engine's ``max_num_seqs``; its token budget was 2048."""
SUBSTEP_S: Final = 0.01
PERCENTILES: Final = (50, 90, 99)


class Measured(msgspec.Struct, frozen=True):
    """One request of the measured run; times in seconds of one clock."""

    input_toks: int
    output_toks: int
    queued_ts: float
    scheduled_ts: float
    first_token_ts: float
    last_token_ts: float


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """One figure of the run, measured and modelled."""

    figure: str
    unit: str
    measured: float
    modelled: float
    error: float
    """(modelled - measured) / measured."""


class RunComparison(msgspec.Struct, frozen=True, kw_only=True):
    """The measured run replayed."""

    card: str
    model: str
    requests: int
    figures: tuple[Compared, ...]
    ttft_mean_abs_error_s: float
    """Mean over requests of |modelled - measured| time to first token."""
    tpot_mean_abs_error: float
    """Mean over requests of |modelled - measured| / measured time per output token."""


class Validation(msgspec.Struct, frozen=True, kw_only=True):
    """All that ``validate-engine`` tells."""

    iteration_times: tuple[CalibrationError, ...]
    run: RunComparison


def measured_run(folder: Path) -> list[Measured]:
    """The run's records in order of arrival; UserError when they are not there or not as expected."""
    path = folder / RUN_FILE
    if not path.is_file():
        raise UserError(f"{path}: no such file; expected the measured run's requests")
    try:
        rows = [msgspec.json.decode(line, type=Measured) for line in path.read_bytes().splitlines()]
    except msgspec.DecodeError as error:
        raise UserError(f"{path}: {error}") from error
    return sorted(rows, key=lambda row: row.queued_ts)


def as_table(rows: list[Measured]) -> RequestTable:
    """The measured requests as the engine takes them: no sessions, reserved exactly what they produced."""
    n = len(rows)
    begin = rows[0].queued_ts
    output = np.array([row.output_toks for row in rows], np.int64)
    return RequestTable(
        arrival_s=np.array([row.queued_ts - begin for row in rows]),
        prompt_tokens=np.array([row.input_toks for row in rows], np.int64),
        cached_tokens=np.zeros(n, np.int64),
        output_tokens=output,
        max_tokens=output.copy(),
        service_class=np.full(n, int(ServiceClass.BATCH), np.uint8),
        session=np.arange(n, dtype=np.int64),
        next_turn=np.full(n, NO_TURN, np.int64),
        think_s=np.zeros(n),
    ).check()


def compare_run(folder: Path) -> RunComparison:
    """Replay the measured run and compare what clients saw."""
    rows = measured_run(folder)
    config = FleetConfig(
        card=CARD, workers_per_card=1, mode=EngineMode(admission="physical"), max_running=MAX_SEQUENCES,
        substep_s=SUBSTEP_S, client_timeouts=False,
    )  # fmt: skip
    fleet = Fleet(config, [as_table(rows)])
    while not fleet.done:
        fleet.advance(2.0)
    found = fleet.results()
    arrival = np.array([row.queued_ts for row in rows])
    first, last = (np.array([getattr(row, name) for row in rows]) for name in ("first_token_ts", "last_token_ts"))
    gaps = np.maximum(1, found.output_tokens - 1)
    ttft, ttft_model = first - arrival, found.first_token_s - found.arrival_s
    tpot, tpot_model = 1e3 * (last - first) / gaps, 1e3 * (found.finish_s - found.first_token_s) / gaps
    wait = np.array([row.scheduled_ts for row in rows]) - arrival
    several = found.output_tokens > 1
    figures = [
        *_percentiles("TTFT", "s", ttft, ttft_model),
        *_percentiles("TPOT", "ms", tpot[several], tpot_model[several]),
        *_percentiles("queue wait", "s", wait, found.wait_s),
        _compared("whole run", "s", float(last.max() - arrival.min()), float(found.finish_s.max())),
    ]
    return RunComparison(
        card=CARD.name, model="Llama-3.1-8B", requests=len(rows), figures=tuple(figures),
        ttft_mean_abs_error_s=float(np.abs(ttft_model - ttft).mean()),
        tpot_mean_abs_error=float(np.abs(tpot_model / tpot - 1.0)[several].mean()),
    )  # fmt: skip


def _percentiles(name: str, unit: str, measured: F8, modelled: F8) -> list[Compared]:
    return [
        _compared(f"{name} p{p}", unit, float(np.percentile(measured, p)), float(np.percentile(modelled, p)))
        for p in PERCENTILES
    ]


def _compared(figure: str, unit: str, measured: float, modelled: float) -> Compared:
    return Compared(figure=figure, unit=unit, measured=measured, modelled=modelled, error=modelled / measured - 1.0)


def validate(folder: Path) -> Validation:
    """Both comparisons; UserError when ``folder`` does not hold the measured files."""
    return Validation(iteration_times=tuple(errors(folder)), run=compare_run(folder))


def render(found: Validation) -> list[str]:
    """The tables as plain text lines."""
    run = found.run
    lines = [
        "iteration times: model against the measured kernels it was fitted to",
        f"{'card':<12} {'model':<14} {'phase':<8} {'batch':>6} {'points':>6} {'mean |error|':>13} {'worst':>8}",
    ]
    for one in found.iteration_times:
        lines.append(
            f"{one.card:<12} {one.model:<14} {one.phase:<8} {one.batch:>6} {one.points:>6} "
            f"{one.mean_abs:>13.1%} {one.worst:>+8.1%}"
        )
    lines += [
        "",
        f"measured run: {run.requests} requests, {run.model} on {run.card}, vLLM 0.19; fitted to kernels, not to it",
        f"{'figure':<16} {'measured':>10} {'modelled':>10} {'error':>8}",
    ]
    for figure in run.figures:
        lines.append(
            f"{figure.figure + ', ' + figure.unit:<16} {figure.measured:>10.3f} {figure.modelled:>10.3f} "
            f"{figure.error:>+8.1%}"
        )
    lines.append(
        f"per request: TTFT off by {run.ttft_mean_abs_error_s:.2f} s, TPOT by {run.tpot_mean_abs_error:.1%} in the mean"
    )
    return lines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``tidegate validate-engine``."""
    parser.add_argument(
        "--calibration", type=Path, required=True, metavar="DIR", help="folder of measured timings (shared/calibration)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def run(arguments: argparse.Namespace) -> int:
    """Print the tables, or JSON; UserError for a folder without the files."""
    found = validate(arguments.calibration)
    text = json.dumps(msgspec.to_builtins(found), indent=2) if arguments.json else "\n".join(render(found))
    print(text)  # noqa: T201
    return 0
