"""Which requests are refused: those that cannot be served in time any more, told at once instead of kept waiting."""

from __future__ import annotations


def hopeless(
    now_s: float, deadline_s: float, first_token_in_s: float, alone_s: float, limit_s: float, margin: float
) -> bool:
    """Whether waiting has made the request hopeless: its first token would be late by more than the margin even if it
    were admitted now.

    ``limit_s``: what the client was promised, arrival to deadline; without a limit nobody is hopeless. ``alone_s``:
    what the first token takes with nothing ahead. ``margin``: share of the limit by which it may be late, a class's own
    (``ClassLimits.shed_margin``). A request that could not have been in time at all, since its
    session's KV was lost, is not refused: served late, it is there for the session's next turn.
    """
    return alone_s <= limit_s and now_s + first_token_in_s > deadline_s + margin * limit_s
