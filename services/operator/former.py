"""Which champion comes next on the way back, and why others do not. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from schemas.policies import PolicyPointer, Rejections

TAKEN_BACK: Final = "rollback from "
"""How the reason of a move begins that took a champion back; an examiner's reasons begin so too."""


class Former(NamedTuple):
    """A champion of before."""

    pointer: PolicyPointer
    passed_over: str
    """Why nobody goes back to it; empty: one may."""


def formers(history: Sequence[PolicyPointer | None], rejections: Rejections) -> list[Former]:
    """The champions of other versions than the last one's, each once, newest first.

    ``history``: the pointer's kept revisions in order, None for one that cannot be read. A version from which somebody
    rolled back is passed over until it is promoted anew; a rejected one always is.
    """
    taken_back: dict[str, str] = {}
    before: PolicyPointer | None = None
    for pointer in history:
        if pointer is not None:
            taken_back.pop(pointer.version, None)
            if pointer.why.startswith(TAKEN_BACK) and before is not None and before.version != pointer.version:
                taken_back[before.version] = pointer.why
        before = pointer
    seen = set() if before is None else {before.version}
    out = []
    for pointer in reversed(history):
        if pointer is None or pointer.version in seen:
            continue
        seen.add(pointer.version)
        rejected = rejections.of(pointer)
        out.append(Former(pointer, f"rejected: {rejected.why}" if rejected else taken_back.get(pointer.version, "")))
    return out
