"""Which requests are refused: those that cannot be served in time any more, told at once instead of kept waiting."""

from __future__ import annotations

MARGIN = 0.1
"""Share of the limit by which a prediction may be wrong."""


def hopeless(now_s: float, deadline_s: float, first_token_in_s: float, limit_s: float) -> bool:
    """Whether the first token would be late by more than the margin even if the request were admitted now.

    ``limit_s``: what the client was promised, arrival to deadline; without a limit nobody is hopeless.
    """
    return now_s + first_token_in_s > deadline_s + MARGIN * limit_s
