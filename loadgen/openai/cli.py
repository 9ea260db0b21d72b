"""`tidegate loadgen openai` and `tidegate loadgen compare`: their options and what they start."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.text import Text

from loadgen.openai.comparing import compare
from loadgen.openai.draws import SYNTAX
from loadgen.openai.driving import Progress, drive
from loadgen.openai.options import BUILT_IN_TURNS, HISTORIES, Options, classes_of
from loadgen.openai.records import RecordFile, read_records
from loadgen.openai.report import Report
from loadgen.openai.view import progress_line, report_lines
from loadgen.outputs import check_file, write_json
from loadgen.traces import FORMATS
from schemas.classes import ServiceClass
from services.errors import UserError

INTERRUPTED = 130


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Both commands."""
    commands = parser.add_subparsers(dest="what", required=True, metavar="COMMAND")
    told = "load a server that speaks the OpenAI API (vLLM, SGLang, ...)"
    _add_openai(commands.add_parser("openai", help=told, description=f"{told[0].upper()}{told[1:]}."))
    comparing = commands.add_parser("compare", help="two --record files, token by token")
    comparing.add_argument("a", type=Path)
    comparing.add_argument("b", type=Path)


def run(namespace: argparse.Namespace) -> int:
    """The exit code: 1 for answers that differ, or failures under --fail-on-error; 130 after Ctrl-C."""
    if namespace.what == "compare":
        return _compare(namespace.a, namespace.b)
    return _openai(namespace)


def options_of(namespace: argparse.Namespace) -> Options:
    """The options that were asked for; UserError for those that cannot be read."""
    low, colon, high = namespace.token_ids.partition(":")
    if not (colon and low.isdecimal() and high.isdecimal()):
        raise UserError(f"--token-ids: found {namespace.token_ids!r}, expected LOW:HIGH")
    key = ""
    if namespace.api_key_env:
        key = os.environ.get(namespace.api_key_env, "")
        if not key:
            raise UserError(f"--api-key-env: the environment has no {namespace.api_key_env}")
    weights = classes_of("--class", namespace.service_class) if namespace.service_class else {}
    if weights and not (min(weights.values()) >= 0 and sum(weights.values()) > 0):
        raise UserError(f"--class: found {namespace.service_class!r}, expected weights of 0 or more, one above 0")
    return Options(
        url=namespace.url, model=namespace.model, sessions=namespace.sessions, rate_per_s=namespace.rate,
        burstiness=namespace.burstiness, trace=namespace.trace, trace_format=namespace.format, speed=namespace.speed,
        duration_s=namespace.duration, requests=namespace.requests, seed=namespace.seed, turns=namespace.turns,
        prompt_tokens=namespace.prompt_tokens, turn_tokens=namespace.turn_tokens, max_tokens=namespace.max_tokens,
        think_s=namespace.think, shared_prefix_tokens=namespace.shared_prefix, context_limit=namespace.context_limit,
        service_class=weights, priority=_priority(namespace.priority), is_chat=namespace.chat,
        token_ids=(int(low), int(high)), history=namespace.history, temperature=namespace.temperature,
        is_ignoring_eos=namespace.ignore_eos, is_plain=namespace.plain, timeout_s=namespace.timeout,
        drain_s=namespace.drain,
        is_giving_up=namespace.give_up, max_concurrency=namespace.max_concurrency, api_key=key,
    ).check()  # fmt: skip


def _add_openai(parser: argparse.ArgumentParser) -> None:
    default = Options(url="")
    add = parser.add_argument
    add("--url", required=True, help="of the server, such as http://127.0.0.1:8000")
    add("--model", default="", metavar="NAME", help="default: the first that /v1/models names")
    who = parser.add_argument_group("who calls (one of)")
    who.add_argument("--sessions", type=int, default=0, metavar="N", help="closed loop: so many sessions at a time")
    who.add_argument("--rate", type=float, default=0.0, metavar="R", help="open loop: new sessions a second")
    who.add_argument("--trace", type=Path, metavar="FILE", help="a request trace (`tidegate trace info FILE`)")
    add("--burstiness", type=float, default=1.0, metavar="CV", help="open loop: of the gaps between sessions "
        "(default %(default)g: Poisson)")  # fmt: skip
    add("--format", choices=FORMATS, help="of the trace; recognised if left out")
    add("--speed", type=float, default=1.0, metavar="X", help="trace: X times as fast")
    add("--duration", type=float, default=0.0, metavar="S", help="no turn starts later, seconds")
    add("--requests", type=int, default=0, metavar="N", help="so many in all")
    add("--seed", type=int, default=0)
    what = parser.add_argument_group(f"what is asked (numbers: {SYNTAX})")
    told = (
        f"of a session (default {BUILT_IN_TURNS['closed']} in a closed loop, {BUILT_IN_TURNS['open']} in an open one)"
    )
    what.add_argument("--turns", default="", metavar="D", help=told)
    for name, value, said in (
        ("prompt-tokens", default.prompt_tokens, "of a session's first prompt"),
        ("turn-tokens", default.turn_tokens, "new ones of every later turn"),
        ("max-tokens", default.max_tokens, "limit of an answer"),
        ("think", default.think_s, "seconds between an answer and the next turn"),
    ):
        what.add_argument(f"--{name}", default=value, metavar="D", help=f"{said} (default %(default)s)")
    add("--shared-prefix", type=int, default=0, metavar="TOKENS", help="with which all sessions begin")
    add("--context-limit", type=int, default=0, metavar="TOKENS", help="longer turns are left out and counted "
        "(default: what the server says)")  # fmt: skip
    add("--class", dest="service_class", default="", metavar="NAME[=WEIGHT],...", help="service classes of sessions")
    add("--priority", metavar="N | NAME=N,...", help="the request field, for all or by class (default: not sent)")
    add("--chat", action="store_true", help="chat completions with words; otherwise completions with token ids")
    add("--token-ids", default="10:250", metavar="LOW:HIGH", help="that prompts are made of (default %(default)s)")
    add("--history", choices=HISTORIES, default="answers", help="what later prompts hold (default %(default)s)")
    add("--temperature", type=float, default=0.0)
    add("--ignore-eos", action="store_true", help="answers run to their limit")
    add("--plain", action="store_true", help="send only fields of OpenAI's own API: no token ids come back")
    add("--timeout", type=float, default=default.timeout_s, metavar="S", help="of a request (default %(default)g)")
    add(
        "--drain", type=float, default=default.drain_s, metavar="S", help="after --duration, for what is under way "
        "(default %(default)g)",
    )  # fmt: skip
    add("--give-up", action="store_true", help="also after 2 x the class's TTFT limit without a token")
    add("--max-concurrency", type=int, default=default.max_concurrency, metavar="N", help="(default %(default)s)")
    add("--api-key-env", metavar="NAME", help="environment variable that holds the key")
    add("--json", type=Path, metavar="FILE", help="the report")
    add("--record", type=Path, metavar="FILE", help="JSON lines of every request, for `tidegate loadgen compare`")
    add("--fail-on-error", action="store_true", help="exit code 1 when a request failed")


def _priority(text: str | None) -> int | dict[ServiceClass, int] | None:
    if text is None:
        return None
    try:
        return int(text)
    except ValueError:
        return {one: int(number) for one, number in classes_of("--priority", text).items()}


def _openai(namespace: argparse.Namespace) -> int:
    check_file("--json", namespace.json)
    if (
        namespace.json is not None
        and namespace.record is not None
        and namespace.json.resolve() == namespace.record.resolve()
    ):
        raise UserError(f"--json, --record: found {namespace.json} for both, expected two files")
    options = options_of(namespace)
    with contextlib.ExitStack() as files:
        record = files.enter_context(RecordFile(namespace.record)) if namespace.record is not None else None
        report, is_interrupted = asyncio.run(_driven(options, record))
        if record is not None:
            record.commit()
    sys.stdout.write("\n".join(report_lines(report)) + "\n")
    if namespace.json is not None:
        write_json(namespace.json, report)
    if is_interrupted:
        return INTERRUPTED
    return 1 if namespace.fail_on_error and report.failed else 0


async def _driven(options: Options, record: RecordFile | None) -> tuple[Report, bool]:
    """The report, and whether Ctrl-C ended the run: what was measured until then is worth telling."""
    stop = asyncio.Event()
    sink = record.write if record is not None else None
    with _screen() as watch:
        work = asyncio.ensure_future(drive(options, sink=sink, watch=watch, stop=stop))
        try:
            return await asyncio.shield(work), False
        except asyncio.CancelledError:  # what asyncio.run makes of the first Ctrl-C; the second one is not caught
            stop.set()
            return await work, True


@contextlib.contextmanager
def _screen() -> Iterator[Callable[[Progress], None] | None]:
    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    with Live(console=console, transient=True, auto_refresh=False) as live:

        def watch(progress: Progress) -> None:
            live.update(Text(progress_line(progress)), refresh=True)

        yield watch


def _compare(a: Path, b: Path) -> int:
    try:
        found = compare(read_records(a), read_records(b))
    except ValueError as problem:
        raise UserError(str(problem)) from problem
    sys.stdout.write("\n".join(found.lines()) + "\n")
    return 0 if found.is_same else 1
