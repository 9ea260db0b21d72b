"""Cells of a table: numbers and time stamps, each with the limits of the plausible.

Every function raises MalformedLine that names the column, what was found and what was expected.
"""

from __future__ import annotations

import csv
import datetime
import functools
import math
import re
from typing import Final

from loadgen.traces.errors import MalformedLine

MAX_TOKENS: Final = 10_000_000
"""No model reads or writes more in one call."""
MAX_SECONDS: Final = 366 * 86_400.0
"""No trace and no think time is longer than a year."""

_STAMP: Final = re.compile(
    r"(\d{4}-\d\d-\d\d)[ T](\d\d):(\d\d):(\d\d)(?:\.(\d{1,9}))?(?:(Z)|([+-])(\d\d):?(\d\d))?", re.ASCII
)
STAMP_FORM: Final = "a time like 2023-11-16 18:17:03.9799600 or 2024-05-10 00:00:00.009930+00:00"


def shown(text: str) -> str:
    """What was found, quoted and cut to a line's worth."""
    return repr(text if len(text) <= 40 else text[:37] + "...")


class Header:
    """The column names of a CSV table and how a line is cut into their cells."""

    def __init__(self, text: str) -> None:
        self.names = [name.strip() for name in _split(text)]
        self.place = {name.casefold(): index for index, name in reversed(list(enumerate(self.names)))}

    def has(self, *names: str) -> bool:
        """Whether all these columns are there, whatever their case."""
        return all(name.casefold() in self.place for name in names)

    def cells(self, text: str) -> list[str]:
        """The line's cells, as many as there are columns."""
        cells = _split(text)
        if len(cells) != len(self.names):
            short = len(cells) < len(self.names)
            column = self.names[len(cells)] if short else f"after {self.names[-1]}"
            raise MalformedLine(column, f"{len(cells)} cells", f"{len(self.names)}")
        return cells


def _split(text: str) -> list[str]:
    if '"' not in text:
        return text.split(",")
    try:
        rows = list(csv.reader([text], strict=True))
    except csv.Error as error:
        raise MalformedLine("quotes", f"{shown(text)} ({error})", "comma-separated cells") from error
    return rows[0] if rows else []


def whole(column: str, text: str, high: int = MAX_TOKENS) -> int:
    """A whole number in 0 .. ``high``; ``12.0`` counts as one, since spreadsheets write it so."""
    text = text.strip()
    if text.isascii() and text.isdigit() and len(text) < 19:
        value = int(text)
        if value <= high:
            return value
    else:
        number = _number(text)
        if 0 <= number <= high and number.is_integer():
            return int(number)
    raise MalformedLine(column, shown(text), f"a whole number from 0 to {high:,}")


def seconds(column: str, text: str, high: float = MAX_SECONDS) -> float:
    """A number of seconds in 0 .. ``high``."""
    value = _number(text.strip())
    if not 0.0 <= value <= high:
        raise MalformedLine(column, shown(text.strip()), f"seconds, a number from 0 to {high:,.0f}")
    return value


def maybe_seconds(column: str, text: str) -> float:
    """As ``seconds``; NaN for an empty cell."""
    return seconds(column, text) if text.strip() else math.nan


def stamp_ns(column: str, text: str) -> int:
    """A date and time as nanoseconds since 1970; without a zone it is taken as UTC."""
    found = _STAMP.fullmatch(text.strip())
    day_s = _day_s(found[1]) if found else None
    if found is None or day_s is None:
        raise MalformedLine(column, shown(text.strip()), STAMP_FORM)
    hour, minute, second = int(found[2]), int(found[3]), int(found[4])
    if hour > 23 or minute > 59 or second > 60:
        raise MalformedLine(column, shown(text.strip()), STAMP_FORM)
    total_s = day_s + hour * 3600 + minute * 60 + second
    if found[7]:
        offset_s = int(found[8]) * 3600 + int(found[9]) * 60
        total_s -= offset_s if found[7] == "+" else -offset_s
    return total_s * 10**9 + (int(found[5].ljust(9, "0")) if found[5] else 0)


@functools.lru_cache(maxsize=1024)
def _day_s(text: str) -> int | None:
    try:
        day = datetime.date.fromisoformat(text)
    except ValueError:
        return None
    return (day.toordinal() - 719_163) * 86_400  # ordinal of 1970-01-01


def _number(text: str) -> float:
    """NaN for what is no finite number in plain ASCII digits."""
    if not text.isascii() or "_" in text:
        return math.nan
    try:
        value = float(text)
    except ValueError:
        return math.nan
    return value if math.isfinite(value) else math.nan
