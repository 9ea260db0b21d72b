"""The operators' commands on the command line. Imports nothing heavy: ``--help`` must answer at once."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path
from typing import Any

from services.operator import arguments_attach
from services.operator.arguments_types import given, seconds


def add_commands(commands: Any) -> None:
    """Add them to the ``tidegate`` parser's subparsers."""
    arguments_attach.add_commands(commands)
    status = _add(commands, "status", "status", "what every worker is told and does, now")
    _filters(status)
    status.add_argument("--wait", type=seconds, default=3.0, help="seconds to listen (default %(default)s)")
    status.add_argument("--json", action="store_true")

    explain = _add(commands, "explain", "explain", "why a worker was told what it was told, and what came of it")
    explain.add_argument(
        "what",
        type=given,
        metavar="WORKER|DECISION",
        help="n0/0/w0, or its decision in a step: n0/0/w0@[<boot>.]<step>",
    )
    explain.add_argument("--wait", type=seconds, default=4.5, help="seconds to wait for a step (default %(default)s)")
    explain.add_argument("--json", action="store_true")

    audit = _add(commands, "audit", "audit", "what was commanded and done, and what operators changed")
    _filters(audit)
    audit.add_argument("--action", choices=_ACTIONS, help="asked or executed")
    audit.add_argument("--status", choices=("accepted", "clipped", "deferred", "refused"))
    audit.add_argument("--since", metavar="WHEN", help="how long ago (15m, 2h) or ISO 8601")
    audit.add_argument("--until", metavar="WHEN")
    audit.add_argument("--limit", type=int, default=50, help="newest entries to show (default %(default)s)")
    audit.add_argument("--changes", action="store_true", help="only what operators and learners changed")
    audit.add_argument("--json", action="store_true", help="a JSON object a line")
    audit.add_argument("-f", "--follow", action="store_true", help="go on with what comes")

    policy = commands.add_parser("policy", help="which policy acts").add_subparsers(dest="what", required=True)
    _add(policy, "list", "policy", "champion, candidate, former champions, pin", "list_policies")
    show = _add(policy, "show", "policy", "one policy: pointer, evaluation, network")
    show.add_argument(
        "version", type=given, nargs="?", default="champion", help="or champion, candidate (default %(default)s)"
    )
    promote = _add(policy, "promote", "policy", "make a policy the champion", change=True)
    promote.add_argument("version", type=given, help="a network's version, candidate, heuristic, static or fixed:RHO")
    _add(policy, "rollback", "policy", "back to the champion before, if it was not taken back itself", change=True)
    pin = _add(policy, "pin", "policy", "keep examiners from moving the champion", change=True)
    pin.add_argument(
        "version", type=given, nargs="?", help="promoted first if it is not the champion (default: the champion)"
    )
    pin.add_argument("--clear", action="store_true", help="let examiners move it again")
    pin.add_argument("--ttl", metavar="TIME", help="until when (default: until cleared)")

    mode = _add(commands, "mode", "changes", "how far workers may be commanded", change=True)
    mode.add_argument("mode", choices=("off", "shadow", "canary", "enforce", "inherit"))
    mode.add_argument("--worker", type=given, metavar="WORKER", help="one worker; otherwise all")
    mode.add_argument("--class", type=given, dest="class_", metavar="CLASS", help="one class")
    mode.add_argument("--share", type=float, help="of canary: share of the workers that is commanded, 0 to 1")
    mode.add_argument("--ttl", metavar="TIME", help="such as 1h; then what stood beneath counts again")

    pause = _add(commands, "pause", "changes", "keep everything as it is; recommendations go on", change=True)
    pause.add_argument("--ttl", metavar="TIME", help=f"(default {DEFAULT_TTL})")
    pause.add_argument("--resume", action="store_true", help="end the pause")

    override = _add(commands, "override", "changes", "command one worker by hand", change=True)
    override.add_argument("worker", type=given, metavar="WORKER")
    override.add_argument("--rho", type=float, help="overcommit factor, 1.0 to 1.6")
    override.add_argument("--max-running", type=int, help="ceiling of running requests")
    override.add_argument("--action", choices=_ACTIONS, help="in every step in which the shield allows it")
    override.add_argument("--ttl", metavar="TIME", help=f"(default {DEFAULT_TTL})")
    override.add_argument("--clear", action="store_true", help="take the override back")

    kill = _add(commands, "kill-switch", "changes", "every worker to rho 1.0, now", "kill_switch", change=True)
    kill.add_argument("state", choices=("on", "off"))


DEFAULT_TTL = "1h"
"""Of a pause and of an override: neither may be forgotten for ever."""
_ACTIONS = ("hold", "widen", "tighten", "compact", "evict")


def _add(
    commands: Any, name: str, module: str, told: str, function: str = "", change: bool = False
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=told)
    called = function or name

    def run(namespace: argparse.Namespace) -> int:
        from services.operator import session

        return session.run(getattr(importlib.import_module(f"services.operator.{module}"), called), namespace)

    parser.set_defaults(command=run)
    parser.add_argument(
        "--url", type=given, metavar="URL", help="NATS server; default: TIDEGATE_COMMON_NATS_URL or the file's"
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="settings file (TOML); default: TIDEGATE_CONFIG")
    if change:
        parser.add_argument("--why", type=_reason, required=True, help="reason, kept with the change")
        parser.add_argument("--who", type=given, help="default: the user of this shell")
        parser.add_argument(
            "--revision", type=_revision, metavar="N", help="only if the entry still has revision N (0: none yet)"
        )
    return parser


def _filters(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--node", type=given, metavar="NODE")
    parser.add_argument("--worker", type=given, metavar="WORKER")


def _reason(text: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError("found nothing, expected why this is done")
    return text.strip()


def _revision(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"found {text!r}, expected 0 or more")
    return int(text)
