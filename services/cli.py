"""The `tidegate` command.

Every subcommand imports what it needs when it runs, so that `--help` and a mistake answer at once. A UserError
is one line on stderr and exit code 2; Ctrl-C is exit code 130.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import importlib.metadata
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from services.errors import TidegateError, UserError

SERVICES = {
    **{name: f"services.{name}.service" for name in ("telemetry", "featurizer", "decision", "actuator", "learner")},
    "examiner": "loadgen.examiner.service",
}
"""What `tidegate run` starts. The examiner is in loadgen: it runs the emulator, which no service imports."""
OWN_PARSER = {
    "train": ("loadgen.train.cli", "train a network on randomised emulated fleets"),
    "evaluate": ("loadgen.evaluate.cli", "examine policies on held-out fleets, or on the article's cluster"),
    "loadgen": ("loadgen.openai.cli", "load a real server, and compare what it answered"),
    "validate-engine": ("loadgen.validate_engine", "the emulated engine against measured timings"),
}
"""Commands whose module declares their options: what it imports is slow, so it is asked only when it is needed."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is 0, 1 (it failed), 2 (a mistake in what was asked) or 130 (Ctrl-C)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if arguments[:1] == ["run"]:
            return _run(arguments[1:])
        if arguments and arguments[0] in OWN_PARSER:
            return _own(arguments[0], arguments[1:])
        namespace = _parser().parse_args(arguments)
        code = int(namespace.command(namespace) or 0)
        sys.stdout.flush()
        return code
    except UserError as error:
        print(f"tidegate: {error}", file=sys.stderr)
        return 2
    except TidegateError as error:  # raised on purpose: its message says what went wrong, a trace would hide it
        print(f"tidegate: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader of our output left: nothing is wrong, and nothing more can be said
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        print(f"tidegate: {error.strerror}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    from loadgen.demo.options import add_arguments as add_demo_arguments
    from services.operator.arguments import add_commands

    parser = argparse.ArgumentParser(
        prog="tidegate", description="Overcommit GPU memory for LLM inference without running out of it."
    )
    parser.add_argument("--version", action="version", version=f"tidegate {importlib.metadata.version('tidegate')}")
    commands = parser.add_subparsers(dest="name", required=True, metavar="COMMAND")

    run = commands.add_parser("run", help="run one service", add_help=False)
    run.set_defaults(command=lambda _: _run([]))

    demo = commands.add_parser("demo", help="the closed loop on this machine, with a comparison at the end")
    add_demo_arguments(demo)
    demo.set_defaults(command=_demo)

    add_commands(commands)
    for name, (_, told) in OWN_PARSER.items():
        commands.add_parser(name, help=told, add_help=False)

    trace = commands.add_parser("trace", help="look at a request trace").add_subparsers(dest="what", required=True)
    info = trace.add_parser("info", help="rates, lengths, burstiness, sessions")
    info.add_argument("file", type=Path)
    info.add_argument("--format", help="recognised if left out")
    info.add_argument("--skip-bad", action="store_true", help="leave out malformed lines and count them")
    info.set_defaults(command=_trace_info)

    bench = commands.add_parser("bench", help="measure").add_subparsers(dest="what", required=True)
    engine = bench.add_parser("engine", help="worker-steps per second and core of the emulated engine")
    engine.add_argument("--steps", type=int, default=200, help="simulated steps of 2 s (default %(default)s)")
    engine.add_argument("--seed", type=int, default=1)
    engine.add_argument(
        "--calibration", type=Path, metavar="FOLDER", help="also the error against this folder's measured timings"
    )
    engine.add_argument("--json", type=Path, metavar="FILE")
    engine.set_defaults(command=_bench_engine)
    loop = bench.add_parser("loop", help="telemetry-to-action latency and CPU of the five services")
    loop.add_argument("--workers", type=int, default=10_000)
    loop.add_argument("--per-node", type=int, default=8)
    loop.add_argument("--seconds", type=float, default=30.0)
    loop.add_argument("--json", type=Path, metavar="FILE")
    loop.set_defaults(command=_bench_loop)
    memory = bench.add_parser("memory", help="moves of KV blocks against plain copies of the same bytes")
    memory.add_argument("--backend", choices=("auto", "numpy", "cupy"), default="auto")
    memory.add_argument("--json", type=Path, metavar="FILE")
    memory.set_defaults(command=_bench_memory)
    reclaim = bench.add_parser("reclaim", help="tenants on one card: how fast memory changes hands, by method")
    reclaim.add_argument("--tenants", type=int, nargs="+", metavar="N", help="2 to 4 (default: each of them)")
    reclaim.add_argument("--seconds", type=float, help="simulated, of each run (default 240)")
    reclaim.add_argument("--seeds", type=int, nargs="+", metavar="SEED", help="none that the rules were tuned on")
    reclaim.add_argument("--json", type=Path, metavar="FILE")
    reclaim.set_defaults(command=_bench_reclaim)
    returns = bench.add_parser("returns", help="how well the times at which sessions come back are estimated")
    returns.add_argument(
        "--trace", type=Path, metavar="FILE", help="sessions of this trace; left out, the built-in agent workload's"
    )
    returns.add_argument("--goodput", action="store_true", help="also what it is worth on emulated fleets (minutes)")
    returns.add_argument("--json", type=Path, metavar="FILE")
    returns.set_defaults(command=_bench_returns)
    cartpole = bench.add_parser("cartpole", help="the agent's code on CartPole-v1: solved within 100k steps?")
    cartpole.add_argument("--seeds", type=int, default=5, metavar="N", help="so many (default %(default)s)")
    cartpole.add_argument("--json", type=Path, metavar="FILE")
    cartpole.set_defaults(command=_bench_cartpole)
    gradient = bench.add_parser("gradient", help="gradient steps per second beside Stable-Baselines3's DQN")
    gradient.add_argument("--json", type=Path, metavar="FILE")
    gradient.set_defaults(command=_bench_gradient)
    headroom = bench.add_parser(
        "headroom", help="what the slow control could gain at all: the heuristic with foresight"
    )
    headroom.add_argument("--admission", default="deadline_cap_shed", metavar="NAME", help="(default %(default)s)")
    headroom.add_argument("--seconds", type=float, default=240.0, help="simulated of each fleet (default %(default)g)")
    headroom.add_argument("--horizon", type=int, default=45, metavar="STEPS", help="seen ahead (default %(default)s)")
    headroom.add_argument("--every", type=int, default=4, metavar="STEPS", help="between looks (default %(default)s)")
    headroom.add_argument("--fleets", nargs="+", default=[], metavar="NAME", help="held-out ones (default: all)")
    headroom.add_argument("--jobs", type=int, default=2, metavar="N", help="processes (default %(default)s)")
    headroom.add_argument("--json", type=Path, metavar="FILE")
    headroom.set_defaults(command=_bench_headroom)
    cold = bench.add_parser("cold-weights", help="a long-tail model's weights off the card: what it brings and costs")
    cold.add_argument("--seconds", type=float, default=3600.0, help="simulated of each run (default %(default)g)")
    cold.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], metavar="SEED")
    cold.add_argument("--load", type=float, default=0.4, help="of the busy model's workload (default %(default)g)")
    cold.add_argument("--json", type=Path, metavar="FILE")
    cold.set_defaults(command=_bench_cold_weights)
    return parser


def _run(arguments: list[str]) -> int:
    if arguments in (["--help"], ["-h"]):
        print(f"usage: tidegate run {{{','.join(SERVICES)}}} [--config FILE] [--node NODE] [--set KEY=VALUE ...]")
        print("Runs one service until it is told to stop; `tidegate run SERVICE --help` says more.")
        return 0
    if not arguments or arguments[0] not in SERVICES:
        found = repr(arguments[0]) if arguments else "nothing"
        raise UserError(f"tidegate run: found {found}, expected one of {', '.join(SERVICES)}")
    from services import runtime

    name, *rest = arguments
    service: Any = importlib.import_module(SERVICES[name])
    return runtime.main(name, service.Settings, service.build, rest)


def _own(name: str, arguments: list[str]) -> int:
    where, told = OWN_PARSER[name]
    module: Any = importlib.import_module(where)
    parser = argparse.ArgumentParser(prog=f"tidegate {name}", description=told)
    module.add_arguments(parser)
    code = int(module.run(parser.parse_args(arguments)) or 0)
    sys.stdout.flush()
    return code


def _demo(namespace: argparse.Namespace) -> int:
    from loadgen.demo import options, run

    return run.main(options.parse(namespace))


def _trace_info(namespace: argparse.Namespace) -> None:
    from loadgen.traces import trace_info

    print(trace_info(namespace.file, namespace.format, namespace.skip_bad))


def _bench_engine(namespace: argparse.Namespace) -> None:
    from loadgen.bench import engine
    from loadgen.outputs import check_file

    check_file("--json", namespace.json)
    if namespace.steps < 10:
        raise UserError(f"--steps: found {namespace.steps}, expected 10 or more")
    _report(
        engine.bench_all(steps=namespace.steps, seed=namespace.seed, calibration=namespace.calibration), namespace.json
    )


def _bench_loop(namespace: argparse.Namespace) -> None:
    from loadgen.bench import loop
    from loadgen.outputs import check_file

    check_file("--json", namespace.json)
    _report(
        loop.bench_loop(workers=namespace.workers, per_node=namespace.per_node, seconds=namespace.seconds),
        namespace.json,
    )


def _bench_memory(namespace: argparse.Namespace) -> None:
    from loadgen.bench import memory
    from loadgen.outputs import check_file

    check_file("--json", namespace.json)
    _report(memory.bench_memory(backend=namespace.backend), namespace.json)


def _bench_cold_weights(namespace: argparse.Namespace) -> None:
    from loadgen.bench import cold_weights
    from loadgen.outputs import check_file

    check_file("--json", namespace.json)
    if namespace.seconds < 600 or namespace.load <= 0:
        raise UserError(f"--seconds {namespace.seconds:g}, --load {namespace.load:g}: expected 600 or more, above 0")
    figures = cold_weights.bench_cold_weights(namespace.seeds, namespace.seconds, namespace.load)
    _report(figures, namespace.json)


def _bench_reclaim(namespace: argparse.Namespace) -> None:
    from loadgen.bench import reclaim
    from loadgen.outputs import check_file

    check_file("--json", namespace.json)
    asked = {name: getattr(namespace, name) for name in ("tenants", "seeds", "seconds")}
    result = reclaim.bench_reclaim(**{name: value for name, value in asked.items() if value is not None})
    print(reclaim.table(result))
    _write(result, namespace.json)


def _bench_returns(namespace: argparse.Namespace) -> None:
    import msgspec

    from loadgen.bench import returns
    from loadgen.outputs import check_file

    check_file("--json", namespace.json)
    report = returns.bench_returns(namespace.trace)
    print("\n".join(returns.render(report)))
    found = msgspec.to_builtins(report)
    if namespace.goodput:
        from loadgen.bench import returns_worth

        worth = returns_worth.returns_worth(namespace.trace)
        print("\n".join(returns_worth.render(worth)))
        found["goodput"] = msgspec.to_builtins(worth)
    _write(found, namespace.json)


def _bench_cartpole(namespace: argparse.Namespace) -> None:
    from loadgen.bench import cartpole
    from loadgen.outputs import check_file

    check_file("--json", namespace.json)
    if namespace.seeds < 1:
        raise UserError(f"--seeds: found {namespace.seeds}, expected 1 or more")
    _report(cartpole.bench_cartpole(seeds=namespace.seeds), namespace.json)


def _bench_gradient(namespace: argparse.Namespace) -> None:
    from loadgen.bench import gradient
    from loadgen.outputs import check_file

    check_file("--json", namespace.json)
    _report(gradient.bench_gradient(), namespace.json)


def _bench_headroom(namespace: argparse.Namespace) -> None:
    import msgspec

    from loadgen.bench import headroom
    from loadgen.outputs import check_file
    from loadgen.policies import ADMISSIONS

    check_file("--json", namespace.json)
    if namespace.admission not in ADMISSIONS:
        raise UserError(f"--admission: found {namespace.admission!r}, expected one of {', '.join(ADMISSIONS)}")
    if min(namespace.seconds, namespace.horizon, namespace.every, namespace.jobs) <= 0:
        raise UserError("--seconds, --horizon, --every, --jobs: expected more than 0")
    found = headroom.bench_headroom(
        admission=namespace.admission, seconds=namespace.seconds, horizon_steps=namespace.horizon,
        every_steps=namespace.every, names=namespace.fleets, jobs=namespace.jobs, tell=print,
    )  # fmt: skip
    _report(msgspec.to_builtins(found), namespace.json)


def _report(result: dict[str, Any], path: Path | None) -> None:
    """Print the figures, and write them to ``path`` whole or not at all."""
    print(json.dumps(result, indent=2))
    _write(result, path)


def _write(result: dict[str, Any], path: Path | None) -> None:
    if path is not None:
        from loadgen.outputs import write_atomically

        write_atomically(path, json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
