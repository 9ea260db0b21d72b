"""kvcached's segments as a source: what an engine on kvcached maps, and the limit it has.

What it gives: ``kv_mapped_bytes`` and ``quota_hard_bytes``. What it cannot: live and idle KV apart (a page counts as
used while one block is taken), queues, tokens, whether the limit is already followed. A missing segment is missing
numbers and a reason, never zeros.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

from services.errors import SegmentError
from services.kvsegment import read_usage
from services.telemetry.sources.said import Presence, provides

COLUMNS: Final = ("kv_mapped_bytes", "quota_hard_bytes")
PROVIDES: Final[Mapping[str, Presence]] = provides({Presence.MEASURED: COLUMNS})


class KvcachedFacts(NamedTuple):
    """Columns by name, NaN where missing, and why."""

    columns: dict[str, float]
    trouble: str = ""
    flags: tuple[tuple[str, str], ...] = ()
    """(column, why) of what was said and not believed."""


def read_facts(path: Path, *, card_bytes: float = math.nan) -> KvcachedFacts:
    """The columns that one segment gives. ``card_bytes``: the card's HBM, NaN when not known; a segment that says
    more than that is mapped is not believed."""
    missing = dict.fromkeys(COLUMNS, math.nan)
    try:
        usage = read_usage(path)
    except SegmentError as error:
        return KvcachedFacts(missing, str(error))
    columns = {"kv_mapped_bytes": float(usage.mapped_bytes), "quota_hard_bytes": float(usage.limit_bytes)}
    flags: list[tuple[str, str]] = []
    if usage.mapped_bytes > card_bytes:
        flags.append(("kv_mapped_bytes", f"{usage.mapped_bytes} bytes mapped on a card of {card_bytes:.0f}"))
        columns["kv_mapped_bytes"] = math.nan
    if usage.limit_bytes == 0:
        # Made anew by a report of use after somebody removed it: kvcached does not take 0 for a limit.
        flags.append(("quota_hard_bytes", "limit 0: the segment was removed under a running engine"))
        columns["quota_hard_bytes"] = math.nan
    return KvcachedFacts(columns, "", tuple(flags))
