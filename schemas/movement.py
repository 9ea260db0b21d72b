"""What one transfer of KV really moved, as receipts and outcomes tell it."""

from __future__ import annotations

import msgspec


class Moved(msgspec.Struct, frozen=True, array_like=True):
    """Transfers of one kind and path that belong to one action, added up."""

    kind: str
    """``move`` within the card, ``out`` to a lower tier, ``back`` from it."""
    path: str
    """The copy path that ran."""
    bytes: int
    """As they lie in the arena: x ``scale`` in the model's bytes."""
    pieces: int
    """Blocks."""
    seconds: float
    """From the first byte to the last."""
    queue_s: float = 0.0
    """From being asked for to the first byte."""
    asked_by: str = ""
    """The action id, or ``engine`` for what the engine did by itself."""
    scale: int = 1
    """The model's bytes per byte of the arena: above 1 where an emulated card keeps a scaled-down arena."""

    @property
    def gb_per_s(self) -> float:
        """Payload rate of the bytes really moved, 1e9 bytes a second; 0 for no time."""
        return self.bytes / self.seconds / 1e9 if self.seconds > 0 else 0.0
