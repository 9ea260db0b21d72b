"""`tidegate evaluate`: its options and what they start."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from loadgen.outputs import check_file, write_atomically, write_json
from services.errors import PolicyError, UserError

SHIPPED = Path(__file__).parents[1] / "policy" / "shipped.safetensors"
_LEAST_S = 2.0
"""One decision: a shorter trace counts nothing."""
_HELD_OUT_ONLY = ("traces", "seconds", "extra", "cache", "training_log", "returns")
"""Options that the article's cluster and the adversarial run have no use for."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("--scenario", choices=("held-out", "article"), default="held-out",
                        help="held-out configurations (default), or the article's cluster")  # fmt: skip
    parser.add_argument("--policy", type=Path, nargs="+", metavar="FILE",
                        help="networks: the first ships, the others are its other training seeds "
                        "(default: the shipped one, if there is one)")  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="the result")
    parser.add_argument("--html", type=Path, metavar="FILE", help="the result as one page with plots")
    parser.add_argument("--quick", action="store_true", help="a first look: three configurations, two short traces")
    parser.add_argument("--traces", type=int, metavar="N", help="of each configuration (default 8)")
    parser.add_argument("--seconds", type=float, help="simulated and counted of each trace (default 600)")
    parser.add_argument("--extra", nargs="+", default=[], metavar="POLICY",
                        help="ablations as well, such as heuristic-no_evict or dqn-no_machine")  # fmt: skip
    parser.add_argument("--cache", type=Path, metavar="FOLDER", help="keep rows there, and go on from them")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="processes (default %(default)s)")
    parser.add_argument("--training-log", type=Path, nargs="+", default=[], metavar="PATH",
                        help="for learning curves: JSON lines, or the folder of a training run")  # fmt: skip
    parser.add_argument("--returns", type=Path, metavar="FILE",
                        help="what `tidegate bench returns --json` wrote, for its reliability diagram")  # fmt: skip
    parser.add_argument("--adversarial", type=int, metavar="STEPS",
                        help="instead: random commands for so many worker-steps, with the check armed")  # fmt: skip
    parser.add_argument("--seed", type=int, default=1, help="of the adversarial run")


def run(namespace: argparse.Namespace) -> int:
    """Examine; the exit code."""
    check_file("--json", namespace.json)
    check_file("--html", namespace.html)
    if (
        namespace.json is not None
        and namespace.html is not None
        and namespace.json.resolve() == namespace.html.resolve()
    ):
        raise UserError(f"--json, --html: found {namespace.json} for both, expected two files")
    if namespace.jobs < 1:
        raise UserError(f"--jobs: found {namespace.jobs}, expected 1 or more")
    if namespace.cache is not None and namespace.cache.exists() and not namespace.cache.is_dir():
        raise UserError(f"--cache: found the file {namespace.cache}, expected a folder")
    if namespace.adversarial is not None:
        _refuse_unused(namespace, "--adversarial", (*_HELD_OUT_ONLY, "policy", "html"))
        return _adversarial(namespace)
    if namespace.scenario == "article":
        _refuse_unused(namespace, "--scenario article", _HELD_OUT_ONLY)
        return _article(namespace)
    return _held_out(namespace)


def policies(namespace: argparse.Namespace) -> list[Path]:
    """The networks asked for, else the shipped one where there is one."""
    found = list(namespace.policy or ([SHIPPED] if SHIPPED.exists() else []))
    from loadgen.evaluate.entrants import loaded

    for path in found:
        try:
            loaded(str(path.absolute()))
        except PolicyError as error:
            raise UserError(f"--policy {path}: {error}") from error
    return found


def _refuse_unused(namespace: argparse.Namespace, asked: str, options: Sequence[str]) -> None:
    """UserError for the options that ``asked`` would pass over in silence."""
    given = [f"--{name.replace('_', '-')}" for name in options if getattr(namespace, name) not in (None, [])]
    if given:
        raise UserError(f"{', '.join(given)}: found beside {asked}, which has no use for it")


def _held_out(namespace: argparse.Namespace) -> int:
    from loadgen.evaluate import examination, page, records, text
    from loadgen.evaluate.matrix import QUICK, Plan

    plan = QUICK if namespace.quick else Plan()
    asked = {name: getattr(namespace, name) for name in ("traces", "seconds") if getattr(namespace, name) is not None}
    if asked.get("traces", 2) < 2:
        raise UserError(f"--traces: found {asked['traces']}, expected at least 2 traces: intervals are over traces")
    if not (math.isfinite(seconds := asked.get("seconds", _LEAST_S)) and seconds >= _LEAST_S):
        raise UserError(f"--seconds: found {seconds:g}, expected {_LEAST_S:g} or more, the time of one decision")
    plan = msgspec.structs.replace(plan, **asked)
    curves = records.curves(namespace.training_log)
    reliability = records.reliability(namespace.returns)
    found = examination.examine(
        plan, policies(namespace), namespace.extra, cache=namespace.cache, jobs=namespace.jobs, tell=_tell
    )
    _say(text.lines(found.result))
    _say([found.cost.line()])
    if namespace.json is not None:
        write_json(namespace.json, found.result)
    if namespace.html is not None:
        write_atomically(namespace.html, page.html(found, curves, reliability))
    return 0


def _article(namespace: argparse.Namespace) -> int:
    from loadgen.evaluate import article_report

    return article_report.main(namespace, policies(namespace), _tell, _say)


def _adversarial(namespace: argparse.Namespace) -> int:
    from loadgen.evaluate import adversarial

    if namespace.adversarial < 1:
        raise UserError(f"--adversarial: found {namespace.adversarial}, expected 1 or more worker-steps")
    found = adversarial.run_all(namespace.adversarial, namespace.seed, namespace.jobs, _tell)
    _say(adversarial.lines(found))
    if namespace.json is not None:
        write_json(namespace.json, found)
    return 1 if found.oom else 0


def _tell(line: str) -> None:
    """Progress: beside what is asked for."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def _say(lines: list[str]) -> None:
    sys.stdout.write("\n".join(lines) + "\n")
