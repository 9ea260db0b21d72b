"""How much idle KV to copy to the host tier ahead of need, so that dropping it later costs nothing."""

from __future__ import annotations

HIGH = 0.7
"""Share of the worker's memory in use from which idle KV is offloaded."""
BACKLOG_S = 0.25
"""Seconds of work on the link from which nothing is added."""
PERIOD_S = 1.0
"""Time between two looks."""


def offload_bytes(
    used_bytes: float, capacity_bytes: float, uncopied_bytes: float, backlog_bytes: float, link_bytes_per_s: float
) -> float:
    """Bytes to start copying now: at most what the link moves until the next look, nothing while it is behind.

    ``uncopied_bytes``: idle KV that the host tier lacks.
    """
    if used_bytes <= HIGH * capacity_bytes or backlog_bytes >= BACKLOG_S * link_bytes_per_s:
        return 0.0
    return min(uncopied_bytes, PERIOD_S * link_bytes_per_s - backlog_bytes)
