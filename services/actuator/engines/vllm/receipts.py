"""What an engine's actions came to, kept for who asks again. Pure."""

from __future__ import annotations

from typing import Final

from schemas.engine import Receipt

KEPT: Final = 64


class Receipts:
    """By action; the oldest of more than KEPT is forgotten first."""

    def __init__(self) -> None:
        self._of: dict[str, Receipt] = {}

    def keep(self, said: Receipt) -> Receipt:
        """The receipt itself, for whoever answers with it."""
        self._of[said.action_id] = said
        while len(self._of) > KEPT:
            del self._of[next(iter(self._of))]
        return said

    def of(self, action_id: str) -> Receipt | None:
        return self._of.get(action_id)
