"""`tidegate attach`, `doctor` and `report` on the command line: what speaks to servers, not only to a bus, so that
``--url`` is the server's and ``--nats`` the bus's. Imports nothing heavy."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path
from typing import Any

from services.operator.arguments_types import given, seconds

KINDS = ("vllm", "sglang", "triton")
CLASSES = ("agent", "batch", "copilot", "training", "chat")


def add_commands(commands: Any) -> None:
    """Add them to the ``tidegate`` parser's subparsers."""
    attach = _add(commands, "attach", "point Tidegate at a running server; in shadow it only watches")
    attach.add_argument("kind", choices=KINDS)
    attach.add_argument("--url", type=given, required=True, metavar="URL", help="the server, http://127.0.0.1:8000")
    attach.add_argument("--mode", choices=("shadow", "enforce"), default="shadow", help="(default %(default)s)")
    attach.add_argument(
        "--class", dest="class_", choices=CLASSES, default="chat", help="what clients were promised (default chat)"
    )
    attach.add_argument("--gpu", type=_card, metavar="N", help="its card's number on the node (default 0)")
    attach.add_argument("--name", type=given, metavar="NAME", help="the worker's name on its card (default w0)")
    attach.add_argument("--node", type=given, metavar="NODE", help="(default: the host's name, or the engine's)")
    attach.add_argument(
        "--hbm-gb", type=_positive, metavar="X", help="the card's memory, where no device says it (default: assumed)"
    )
    attach.add_argument(
        "--q0-share", type=_share, metavar="X", help="share of the card's KV that is its own (default: equal shares)"
    )
    attach.add_argument(
        "--socket", type=Path, metavar="PATH", help="engine with Tidegate inside (default: /run/tidegate/<node>/...)"
    )
    attach.add_argument("--kvcached", type=given, metavar="NAME", help="its KVCACHED_IPC_NAME, where it is on kvcached")
    attach.add_argument(
        "--sleep", action="store_true", help="its weights may leave the card while nobody asks (vLLM's sleep mode)"
    )
    attach.add_argument(
        "--weights-gb", type=_positive, metavar="X", help="what they take (default: as the model's folder says)"
    )
    attach.add_argument("--folder", type=Path, metavar="DIR", help="what outlives it (default: under ~/.local/state)")
    attach.add_argument("--duration", metavar="TIME", help="such as 10m (default: until Ctrl-C)")
    attach.add_argument(
        "--every", type=seconds, default=10.0, metavar="SECONDS", help="between lines (default %(default)g)"
    )

    doctor = _add(commands, "doctor", "what is missing or wrong on this machine, and how to mend it")
    doctor.add_argument("--url", type=given, action="append", default=[], metavar="[KIND=]URL", help="a server to ask")
    doctor.add_argument("--json", action="store_true")

    report = _add(commands, "report", "what was seen, what would have been done, what it could have brought")
    report.add_argument(
        "--since", metavar="WHEN", help="how long ago (15m, 2h) or ISO 8601 (default: all that is kept)"
    )
    report.add_argument("--worker", type=given, metavar="WORKER")
    report.add_argument("--folder", type=Path, metavar="DIR", help="attach's (default: that of the newest attachment)")
    report.add_argument(
        "--wait", type=seconds, default=3.0, help="seconds to listen where no folder tells (default %(default)g)"
    )
    report.add_argument("--json", action="store_true")


def _add(commands: Any, name: str, told: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=told)

    def run(namespace: argparse.Namespace) -> int:
        return int(getattr(importlib.import_module(f"services.operator.{name}"), name)(namespace))

    parser.set_defaults(command=run)
    default = "attach: one of its own; else as services find it"
    parser.add_argument("--nats", type=given, metavar="URL", help=f"NATS server (default: {default})")
    parser.add_argument("--config", type=Path, metavar="FILE", help="settings file (TOML); default: TIDEGATE_CONFIG")
    return parser


def _card(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"found {text!r}, expected 0 or more")
    return int(text)


def _positive(text: str) -> float:
    return _number(text, 1e6, "above 0")


def _share(text: str) -> float:
    return _number(text, 1.0, "above 0, up to 1")


def _number(text: str, high: float, expected: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= high:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected a number {expected}")
    return value
