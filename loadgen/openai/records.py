"""One request as it went: the line of a record file."""

from __future__ import annotations

import enum
import math
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import IO

import msgspec

from loadgen.outputs import check_file
from services.errors import UserError

NAN = math.nan


class Failure(enum.StrEnum):
    """How a request failed; the empty one did not."""

    NONE = ""
    REFUSED = "refused"
    """No connection: nobody listens, or no such host."""
    TIMEOUT = "timeout"
    """Not finished within the client's timeout."""
    GAVE_UP = "gave_up"
    """No first token within the client's patience."""
    HTTP_4XX = "http_4xx"
    HTTP_5XX = "http_5xx"
    HTTP_OTHER = "http_other"
    CUT = "cut"
    """The connection or the stream ended before a finish reason."""
    STREAM_ERROR = "stream_error"
    """An error inside a stream that had begun with 200."""
    ABORTED = "aborted"
    """The server finished it with ``abort`` or ``error``."""
    MALFORMED = "malformed"
    """An answer that is no part of the API."""
    INTERRUPTED = "interrupted"
    """The run was stopped while it was under way."""


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Times are seconds; NaN (null in the file) where a thing never happened."""

    session: int
    turn: int
    """From 0."""
    service_class: str
    intended_s: float
    """When it was due, from the run's start: latencies count from here, whatever held the client up."""
    sent_s: float
    end_s: float
    ttft_s: float = NAN
    """To the first token."""
    tpot_s: float = NAN
    """Mean time of a token after the first event."""
    gaps_s: list[float] = []
    """Between one event with tokens and the next, to the microsecond; 0 for two that came at once."""
    prompt_tokens: int = 0
    """As the server counted them, else as they were sent."""
    kept_tokens: int = 0
    """Of the prompt: history that the session had already sent or been answered."""
    cached_tokens: int | None = None
    """As the server says, where it says."""
    prompt_digest: str = ""
    max_tokens: int = 0
    output_tokens: int = 0
    counted_by: str = "ids"
    """What ``output_tokens`` rests on: ids, usage or chunks."""
    is_contradicted: bool = False
    """The server's usage counts other tokens than it sent."""
    finish: str = ""
    status: int = 0
    """HTTP; 0 where no answer came."""
    failure: Failure = Failure.NONE
    detail: str = ""
    token_ids: list[int] | None = None
    text: str = ""

    @property
    def e2e_s(self) -> float:
        """From when it was due to its end; NaN for a failure."""
        return NAN if self.failure else self.end_s - self.intended_s

    @property
    def wait_s(self) -> float:
        """From when it was due until it was sent: the client's own share."""
        return self.sent_s - self.intended_s

    @property
    def key(self) -> tuple[int, int]:
        return self.session, self.turn


class RecordFile:
    """Lines under another name until ``commit``: a file of the asked name is whole, or not there.

    ``with RecordFile(path) as file: file.write(record) ...; file.commit()``.
    """

    def __init__(self, path: Path) -> None:
        check_file("--record", path)
        self._path = path
        self._part = path.absolute().with_name(f".{path.name}.{os.getpid()}")
        self._out: IO[bytes] | None = None

    def __enter__(self) -> RecordFile:
        self._out = self._part.open("wb")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._out is not None:
            self._out.close()
        self._part.unlink(missing_ok=True)

    def write(self, record: RequestRecord) -> None:
        """Add a line."""
        assert self._out is not None, "inside `with` only"
        self._out.write(msgspec.json.encode(record) + b"\n")

    def commit(self) -> None:
        """Everything is on the disk, and under its name."""
        assert self._out is not None, "inside `with` only"
        self._out.flush()
        os.fsync(self._out.fileno())
        self._part.replace(self._path)


class _Line(RequestRecord, frozen=True, kw_only=True):
    """As a file has it: null is NaN."""

    ttft_s: float | None = None  # type: ignore[assignment]
    tpot_s: float | None = None  # type: ignore[assignment]
    sent_s: float | None = None  # type: ignore[assignment]


_LINE = msgspec.json.Decoder(_Line)


def read_records(path: Path) -> list[RequestRecord]:
    """The records of a file; UserError that names the line for anything else."""
    try:
        return list(_records(path))
    except OSError as problem:
        raise UserError(f"{path}: {problem.strerror}") from problem


def _records(path: Path) -> Iterator[RequestRecord]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                read = _LINE.decode(line)
            except (msgspec.MsgspecError, UnicodeDecodeError) as problem:
                raise UserError(f"{path}: line {number}: {problem}, expected what --record writes") from problem
            fields = {name: getattr(read, name) for name in RequestRecord.__struct_fields__}
            for name in ("ttft_s", "tpot_s", "sent_s"):
                fields[name] = NAN if fields[name] is None else fields[name]
            yield RequestRecord(**fields)
