"""Gauges that contradict the others: flagged, and blanked rather than believed.

A gauge that says 0 where it cannot be 0 is worse than one that is missing: the policy would widen a worker that is
full. Only contradictions that no ordinary moment can produce are here; a blanked metric that is required has the worker
held.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

MANY_RUNNING: Final = 4
"""One or two requests may not hold a full block each; this many that produce tokens hold some."""
LITTLE_USE: Final = 0.5
"""Below this share of the pool nobody waits for memory: another limit (slots of the batch, budget of tokens) holds
them up."""


def contradictions(
    values: Mapping[str, float], gained: Mapping[str, float], pool_bytes: float
) -> list[tuple[str, str]]:
    """(metric, why) of what is not to be believed.

    ``values``: gauges of METRICS now; ``gained``: differences of counters since the scrape before, empty for the
    first; ``pool_bytes``: the worker's KV capacity, NaN = unknown. A missing value contradicts nothing.
    """
    out: list[tuple[str, str]] = []
    kv, running = values.get("kv_bytes", math.nan), values.get("running", math.nan)
    produced = gained.get("output_tokens", math.nan)
    ended = gained.get("finished", math.nan) + gained.get("rejected", 0.0)
    if kv == 0.0 and running >= MANY_RUNNING and produced != 0.0:
        out.append(("kv_bytes", f"0 while {running:.0f} requests run"))
    if kv > pool_bytes * 1.0001:
        out.append(("kv_bytes", f"{kv:.0f} of a pool of {pool_bytes:.0f} bytes"))
    memory = values.get("waiting_for_memory", math.nan)
    if memory > 0.0 and kv < LITTLE_USE * pool_bytes:
        out.append(("waiting_for_memory", f"{memory:.0f} while KV use is {kv / pool_bytes:.0%}"))
    waiting = values.get("waiting", math.nan)
    if memory > waiting:
        out.append(("waiting_for_memory", f"{memory:.0f} of {waiting:.0f} waiting"))
    if running == 0.0 and produced > 0.0 and ended == 0.0:
        out.append(("running", f"0 while {produced:.0f} tokens were produced and no request ended"))
    prefilling = values.get("prefilling", math.nan)
    if prefilling > running:
        out.append(("prefilling", f"{prefilling:.0f} of {running:.0f} running"))
    return list(dict(reversed(out)).items())[::-1]
