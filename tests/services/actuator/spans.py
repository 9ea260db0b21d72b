"""Spans as a trace file holds them."""

from __future__ import annotations

import json
from pathlib import Path

_VALUES = {"stringValue": str, "intValue": int, "doubleValue": float, "boolValue": bool}


def spans_in(path: Path, name: str) -> list[dict[str, object]]:
    """The attributes of all spans called ``name``."""
    return [
        {one["key"]: _value(one["value"]) for one in span.get("attributes", ())}
        for line in path.read_text().splitlines()
        for resource in json.loads(line)["resourceSpans"]
        for scope in resource["scopeSpans"]
        for span in scope["spans"]
        if span["name"] == name
    ]


def _value(told: dict[str, object]) -> object:
    ((kind, value),) = told.items()
    return _VALUES[kind](value) if kind in _VALUES else value  # type: ignore[operator]
