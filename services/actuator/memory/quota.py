"""Hard and soft quota of a pool, with the generation that commands are made on, and the soft one's account.

The hard quota bounds physical blocks and mapped groups; the soft one what admission has promised (DESIGN section 1).
"""

from __future__ import annotations

from services.actuator.memory.errors import BadGeometry, OutOfBlocks, StaleGeneration


class Quota:
    """``hard_groups`` page groups may be mapped, ``soft_blocks`` may be promised (None: no bound);
    ``floor_groups`` stay the worker's whatever is commanded."""

    def __init__(self, groups: int, hard_groups: int | None, soft_blocks: int | None, floor_groups: int) -> None:
        self.groups = groups
        self.floor_groups = floor_groups
        self.generation = 0
        if not 0 <= floor_groups <= groups:
            raise BadGeometry("floor_groups", floor_groups, f"0 to {groups}")
        self.hard_groups = groups if hard_groups is None else hard_groups
        self.soft_blocks = soft_blocks
        self._check(self.hard_groups, soft_blocks)
        self.promised_blocks = 0
        self._promises: dict[int, int] = {}

    def set(self, hard_groups: int, soft_blocks: int | None, generation: int) -> int:
        """Put a quota in force and give the generation in force; a repeat changes nothing.

        ``generation`` is the one the command was made on: StaleGeneration if a newer is in force. BadGeometry for
        a quota below the floor or beyond the arena. Below what is mapped it only stops growth: see shrink.
        """
        if generation < self.generation:
            raise StaleGeneration(generation, self.generation)
        self._check(hard_groups, soft_blocks)
        if (hard_groups, soft_blocks) != (self.hard_groups, self.soft_blocks):
            self.hard_groups, self.soft_blocks = hard_groups, soft_blocks
            self.generation = generation + 1
        return self.generation

    def promise(self, owner: int, blocks: int) -> None:
        """``owner`` may come to hold ``blocks`` in all; OutOfBlocks beyond the soft quota. 0 ends the promise."""
        before = self._promises.get(owner, 0)
        total = self.promised_blocks - before + blocks
        if blocks < 0 or (self.soft_blocks is not None and blocks > before and total > self.soft_blocks):
            raise OutOfBlocks(blocks, max(0, (self.soft_blocks or 0) - self.promised_blocks + before), "soft quota")
        self.promised_blocks = total
        if blocks:
            self._promises[owner] = blocks
        else:
            self._promises.pop(owner, None)

    def promises(self) -> dict[int, int]:
        """Blocks promised by owner."""
        return dict(self._promises)

    def _check(self, hard_groups: int, soft_blocks: int | None) -> None:
        if not self.floor_groups <= hard_groups <= self.groups:
            raise BadGeometry("hard_groups", hard_groups, f"{self.floor_groups} (the floor) to {self.groups}")
        if soft_blocks is not None and soft_blocks < 0:
            raise BadGeometry("soft_blocks", soft_blocks, "0 or more")
