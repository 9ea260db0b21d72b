"""Log lines: one line a message, as key=value text or as JSON, on standard error.

``log.info("policy taken up", extra={"fields": {"version": 7}})`` becomes
``time=2026-01-31T12:00:00.123Z level=info service=decision instance=n0-4711 msg="policy taken up" version=7``,
with ``trace=<id>`` when it was written inside a sampled span.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from collections.abc import Mapping
from typing import Any, Literal, TextIO

from services.spans import current_trace_id

_PLAIN = re.compile(r"[^\s\"=\\]+")


class LineFormatter(logging.Formatter):
    """One record as one line; an exception's trace stays on it, its line ends escaped."""

    def __init__(self, service: str, instance: str, form: Literal["text", "json"]) -> None:
        super().__init__()
        self._fixed = {"service": service, "instance": instance}
        self._json = form == "json"

    def format(self, record: logging.LogRecord) -> str:
        fields = self._fields(record)
        if self._json:
            return json.dumps(fields, separators=(",", ":"), default=str)
        return " ".join(f"{key}={_quoted(value)}" for key, value in fields.items())

    def _fields(self, record: logging.LogRecord) -> dict[str, Any]:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        fields: dict[str, Any] = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            **self._fixed,
            "logger": record.name,
            "msg": record.getMessage(),
        }
        trace_id = current_trace_id.get()
        if trace_id:
            fields["trace"] = trace_id
        extra = getattr(record, "fields", None)
        if isinstance(extra, Mapping):
            # A field must not overwrite what every line has.
            fields.update({key if key not in fields else f"{key}_": value for key, value in extra.items()})
        if record.exc_info:
            fields["error"] = self.formatException(record.exc_info)
        return fields


def configure(
    service: str, instance: str, level: str, form: Literal["text", "json"], stream: TextIO | None = None
) -> None:
    """Send this process's log to ``stream`` (standard error), replacing whatever was set up before."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(LineFormatter(service, instance, form))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # Every scrape and probe is a line there, which says nothing.
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)


def _quoted(value: Any) -> str:
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text, ensure_ascii=False)
