"""The error tree.

TidegateError
├── UserError             the caller's mistake: one clear line, exit code 2, no stack trace
│   └── SettingsError     a setting that is unknown, of the wrong type or out of range
├── BusError              the message bus
│   ├── BusUnavailable    not connected, or no answer in time
│   └── Conflict          a KV entry changed since it was read
├── ProtocolError         the engine protocol on a node's Unix socket
│   ├── EngineUnreachable socket missing, refused, closed or silent
│   └── EngineRefused     the engine understood and said no
├── ScrapeFailed          an engine's or exporter's metrics page that cannot be used
├── DeviceError           a GPU, its driver or a daemon of its cannot be asked
├── SegmentError          a shared-memory segment of kvcached that cannot be used
├── PolicyError           weights or a policy that must not act
└── MemoryPlaneError      pool, planner, mover or tier; its kinds are in services/actuator/memory/errors.py

Beside it, ``schemas.codec.DecodeError`` is a ValueError, because schemas know no service.
Each error carries its numbers as attributes and builds its own message.
"""

from __future__ import annotations


class TidegateError(Exception):
    """Base of all errors that Tidegate raises on purpose."""


class UserError(TidegateError):
    """The caller's mistake; the message names the file, key or field, what was found and what was expected."""


class SettingsError(UserError):
    """A setting that cannot be used."""

    def __init__(self, where: str, key: str, found: str, expected: str) -> None:
        super().__init__(f"{where}: {key}: found {found}, expected {expected}")
        self.where = where
        self.key = key
        self.found = found
        self.expected = expected


class BusError(TidegateError):
    """The message bus could not do what was asked."""


class BusUnavailable(BusError):
    """Not connected, or no answer in time."""


class Conflict(BusError):
    """A KV entry changed since it was read."""

    def __init__(self, bucket: str, key: str, expected_revision: int) -> None:
        super().__init__(f"{bucket}/{key}: revision {expected_revision} was expected, somebody wrote since")
        self.bucket = bucket
        self.key = key
        self.expected_revision = expected_revision


class ProtocolError(TidegateError):
    """A frame of the engine protocol that cannot be understood."""


class EngineUnreachable(ProtocolError):
    """The engine's socket is missing, refuses, closed or stays silent."""

    def __init__(self, worker: str, detail: str) -> None:
        super().__init__(f"{worker}: {detail}")
        self.worker = worker
        self.detail = detail


class EngineRefused(ProtocolError):
    """The engine understood the request and refused it; ``reason`` is a label, ``numbers`` what it compared."""

    def __init__(self, worker: str, reason: str, numbers: dict[str, float] | None = None) -> None:
        self.worker = worker
        self.reason = reason
        self.numbers = numbers or {}
        told = ", ".join(f"{key} {value:g}" for key, value in self.numbers.items())
        super().__init__(f"{worker}: refused: {reason}" + (f" ({told})" if told else ""))


class ScrapeFailed(TidegateError):
    """A metrics page that could not be had, or says nothing that can be used: nobody acts on it."""

    def __init__(self, url: str, reason: str) -> None:
        super().__init__(f"{url}: {reason}")
        self.url = url
        self.reason = reason


class PolicyError(TidegateError):
    """Weights or a policy that must not act."""


class MemoryPlaneError(TidegateError):
    """The memory plane was asked for something impossible; the state is as it was."""


class DeviceError(TidegateError):
    """A GPU, its driver or its daemon cannot be asked, or cannot do what was asked.

    ``reason`` is a label, ``remedy`` one line for whoever runs the node.
    """

    def __init__(self, reason: str, detail: str, remedy: str = "") -> None:
        super().__init__(f"{detail} ({reason})" + (f": {remedy}" if remedy else ""))
        self.reason = reason
        self.detail = detail
        self.remedy = remedy


class SegmentError(TidegateError):
    """A shared-memory segment of kvcached that cannot be used; ``reason``: ``vanished``, ``truncated``, ``garbage``,
    ``empty``, ``busy``, ``forbidden``, ``owned``, ``changed`` or ``contested``."""

    def __init__(self, path: str, reason: str, detail: str) -> None:
        super().__init__(f"{path}: {reason}: {detail}")
        self.path = path
        self.reason = reason
        self.detail = detail
