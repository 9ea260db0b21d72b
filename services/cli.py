"""The `tidegate` command.

Every subcommand imports what it needs when it runs, so that `--help` and a mistake answer at once. A UserError
is one line on stderr and exit code 2; Ctrl-C is exit code 130.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import importlib.metadata
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
    from services.bench_commands import add_benches
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

    add_benches(commands)
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


if __name__ == "__main__":
    sys.exit(main())
