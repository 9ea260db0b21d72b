"""What `tidegate demo` can be told."""

from __future__ import annotations

import argparse
import contextlib
import math
from pathlib import Path

import msgspec

from loadgen.engine.specs import CARDS, MODELS
from loadgen.outputs import check_file, check_new_folder
from loadgen.policies import ADMISSIONS
from loadgen.traces import FORMATS
from loadgen.workload import KINDS
from schemas.actions import RHO_MAX, RHO_MIN
from services.errors import UserError


class DemoOptions(msgspec.Struct, frozen=True, kw_only=True):
    """One field an option; times are simulated seconds unless they say otherwise."""

    trace: Path | None = None
    trace_format: str | None = None
    skip_bad: bool = False
    workload: str = "agent"
    service_class: str | None = None
    context_scale: float = 0.25
    nodes: int = 1
    card: str = "A100-80G"
    model: str = "Llama-3.1-8B"
    workers_per_card: int = 2
    load: float = 1.2
    speed: float = 40.0
    """Simulated seconds per wall second at most, so that one can watch and the learner has time to be judged; 0 =
    as fast as the loop goes."""
    duration_s: float = 1200.0
    policy: str = "champion"
    admission: str = "deadline_cap_shed"
    seed: int = 1
    json: Path | None = None
    trace_out: Path | None = None
    keep: Path | None = None
    plain: bool = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options on ``parser``; their defaults are those of :class:`DemoOptions`."""
    default = DemoOptions()
    parser.add_argument("--trace", type=Path, metavar="FILE", help="replay this request trace (plain or gzip)")
    parser.add_argument("--format", dest="trace_format", help=f"one of {', '.join(FORMATS)}; recognised if left out")
    parser.add_argument("--skip-bad", action="store_true", help="leave out malformed lines and count them")
    parser.add_argument(
        "--workload",
        default=default.workload,
        help="built-in: chat, code, long, agent or mixed",
    )
    parser.add_argument("--class", dest="service_class", help="service class of the trace's requests")
    parser.add_argument(
        "--context-scale",
        type=float,
        default=default.context_scale,
        help="the agent workload's published lengths are multiplied by this (default %(default)s)",
    )
    parser.add_argument("--nodes", type=int, default=default.nodes)
    parser.add_argument("--card", default=default.card, help="A100-80G, H100-80G or H200-141G (default %(default)s)")
    parser.add_argument("--model", default=default.model, help="Llama-3.1-8B or Llama-3.1-70B-4bit")
    parser.add_argument("--workers-per-card", type=int, default=default.workers_per_card)
    parser.add_argument(
        "--load",
        type=float,
        default=default.load,
        help="1.0 is where vLLM-like with offload meets the SLO for 85 %% of offered tokens (default %(default)s)",
    )
    parser.add_argument(
        "--speed",
        type=float,
        default=default.speed,
        help="simulated seconds per second at most; 0 = as fast as it goes (default %(default)s)",
    )
    parser.add_argument("--duration", dest="duration_s", type=float, default=default.duration_s, metavar="SIMULATED_S")
    parser.add_argument(
        "--policy", default=default.policy, help="champion (default), static, fixed:RHO, heuristic or dqn"
    )
    parser.add_argument(
        "--admission",
        default=default.admission,
        help="of Tidegate's rows: fcfs or deadline, each also with _cap, _shed or _cap_shed (default %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=default.seed)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the comparison as JSON")
    parser.add_argument("--trace-out", type=Path, metavar="FILE", help="write OpenTelemetry spans as OTLP JSON lines")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep logs, stream and results in this folder")
    parser.add_argument("--plain", action="store_true", help="no live view: a line every few seconds")


def parse(namespace: argparse.Namespace) -> DemoOptions:
    """Checked options; UserError names the option, what was found and what was expected."""
    options = DemoOptions(**{name: getattr(namespace, name) for name in DemoOptions.__struct_fields__})
    _within("--nodes", options.nodes, 1, 64)
    _within("--workers-per-card", options.workers_per_card, 1, 3)
    _within("--seed", options.seed, 0, 2**31 - 1)
    if options.card not in CARDS:
        raise UserError(f"--card: found {options.card!r}, expected one of {', '.join(CARDS)}")
    if options.model not in MODELS:
        raise UserError(f"--model: found {options.model!r}, expected one of {', '.join(MODELS)}")
    if options.trace is None and options.workload not in KINDS:
        raise UserError(f"--workload: found {options.workload!r}, expected one of {', '.join(KINDS)}")
    if options.trace is None and options.trace_format is not None:
        raise UserError("--format: found it without --trace, expected both or neither")
    if not 0.05 <= options.load <= 20:
        raise UserError(f"--load: found {options.load:g}, expected 0.05 to 20")
    if not 20 <= options.duration_s <= 1_209_600:
        raise UserError(f"--duration: found {options.duration_s:g}, expected 20 s to 1,209,600 s (two weeks)")
    if not options.speed >= 0:
        raise UserError(f"--speed: found {options.speed:g}, expected 0 or more")
    if not 0.01 <= options.context_scale <= 1:
        raise UserError(f"--context-scale: found {options.context_scale:g}, expected 0.01 to 1")
    if options.admission not in ADMISSIONS:
        raise UserError(f"--admission: found {options.admission!r}, expected one of {', '.join(ADMISSIONS)}")
    _check_policy(options.policy)
    check_file("--json", options.json)
    check_file("--trace-out", options.trace_out)
    check_new_folder("--keep", options.keep)
    return options


def _within(name: str, found: int, least: int, most: int) -> None:
    if not least <= found <= most:
        raise UserError(f"{name}: found {found}, expected {least} to {most}")


def _check_policy(policy: str) -> None:
    kind, _, value = policy.partition(":")
    if kind == "fixed":
        rho = math.nan
        with contextlib.suppress(ValueError):
            rho = float(value)
        if not RHO_MIN <= rho <= RHO_MAX:  # not a number is not within either
            raise UserError(f"--policy: found {policy!r}, expected fixed:RHO with RHO from {RHO_MIN} to {RHO_MAX}")
    elif policy not in {"champion", "static", "heuristic", "dqn"}:
        raise UserError(f"--policy: found {policy!r}, expected champion, static, fixed:RHO, heuristic or dqn")
