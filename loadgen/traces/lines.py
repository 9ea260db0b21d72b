"""Lines of a plain or gzip file, told apart by their first bytes and not by the name."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Final

from loadgen.traces.errors import BadLines, MalformedLine, TraceError

GZIP_MAGIC: Final = b"\x1f\x8b"
MAX_LINE_BYTES: Final = 16 * 2**20
"""A longer line is no trace; the limit keeps a damaged file from filling the memory."""


def text_lines(path: Path, bad: BadLines) -> Iterator[tuple[int, str]]:
    """(1-based number, text without line end) of every line that is not blank.

    A line that is no UTF-8 goes to ``bad``. TraceError for a file that is missing, unreadable, empty, a
    truncated or damaged gzip, or has a line beyond 16 MiB: those are not skipped, since what follows is lost.
    """
    try:
        with path.open("rb") as opened:
            magic = opened.read(2)
            opened.seek(0)
            if magic == GZIP_MAGIC:
                with gzip.GzipFile(fileobj=opened) as unpacked:
                    yield from _lines(path, unpacked, bad)
            else:
                yield from _lines(path, opened, bad)
    except EOFError:
        raise TraceError(path, "a gzip file that ends too early", "a whole one: copy it again") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise TraceError(path, f"a damaged gzip file ({error})", "a whole one: copy it again") from error
    except OSError as error:
        raise TraceError(path, (error.strerror or str(error)).lower(), "a readable file") from error


def _lines(path: Path, stream: IO[bytes] | gzip.GzipFile, bad: BadLines) -> Iterator[tuple[int, str]]:
    number = 0
    while raw := stream.readline(MAX_LINE_BYTES):
        number += 1
        if len(raw) >= MAX_LINE_BYTES:
            raise TraceError(path, f"more than {MAX_LINE_BYTES >> 20} MiB", "shorter lines", number)
        try:
            text = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
        except UnicodeDecodeError as error:
            found = f"the byte 0x{raw[error.start]:02x} at {error.start}"
            bad.add(number, MalformedLine("text", found, "UTF-8"))
            continue
        if text:
            yield number, text
    if not number:
        raise TraceError(path, "an empty file", "a header and requests")
