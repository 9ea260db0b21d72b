"""Server-sent events out of a byte stream that is cut anywhere.

Pure. The grammar is the WHATWG's "event stream interpretation": lines end in LF, CR or CR LF, ``data`` lines of one
event are joined by LF, a line that begins with a colon is a comment, an empty line ends an event.
"""

from __future__ import annotations

from typing import Final

MAX_EVENT_BYTES: Final = 16 << 20
"""No answer's event is as large; a server that sends such a thing is not streaming tokens."""
_BOM: Final = b"\xef\xbb\xbf"


class EventTooLarge(ValueError):
    """An event beyond MAX_EVENT_BYTES."""


class EventParser:
    """Feed it bytes as they come; it gives the data of every event that is complete."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._data_bytes = 0
        self._is_start = True
        self._skip_lf = False

    def feed(self, chunk: bytes) -> list[bytes]:
        """Data of the events that ``chunk`` completed, in order. EventTooLarge when one outgrows the bound."""
        if self._skip_lf and chunk:  # a CR ended the last chunk: its LF belongs to it
            self._skip_lf = False
            if chunk.startswith(b"\n"):
                chunk = chunk[1:]
        text = self._rest + chunk
        if self._is_start:
            if len(text) < len(_BOM) and _BOM.startswith(text):
                self._rest = text
                return []
            text = text.removeprefix(_BOM)
            self._is_start = False
        if text.endswith(b"\r"):
            self._skip_lf = True
        if b"\r" in text:
            text = text.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, self._rest = text.split(b"\n")
        if len(self._rest) + self._data_bytes > MAX_EVENT_BYTES:
            raise EventTooLarge(f"an event of more than {MAX_EVENT_BYTES:,} bytes")
        events: list[bytes] = []
        for line in lines:
            if not line:
                if self._data:
                    events.append(b"\n".join(self._data))
                self._data, self._data_bytes = [], 0
            elif line.startswith(b"data"):
                name, _, value = line.partition(b":")
                if name == b"data":
                    value = value.removeprefix(b" ")
                    self._data.append(value)
                    self._data_bytes += len(value)
        return events
