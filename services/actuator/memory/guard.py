"""The guard in the engine's allocation path: may a page group be mapped, and who gives way if not (DESIGN section 4.1).

Deterministic and without a network. It decides; the engine drops, preempts, waits until no running kernel reads the
victims' blocks, and maps. Since those take longer than the decision, it is asked one iteration ahead.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum

import msgspec

from services.actuator.memory.errors import BadGeometry

Candidates = Sequence[tuple[int, int]]
"""(owner, blocks that are free at once when it gives way)."""


class GuardAction(IntEnum):
    """What becomes of a victim, in the order in which the guard resorts to it."""

    DROP_COPIED = 0
    """Drop idle KV whose copy is in a lower tier: a load brings it back."""
    DROP_IDLE = 1
    """Drop the least recently used idle KV: a prefill brings it back."""
    PREEMPT_NEWEST = 2
    """Preempt the newest running request."""
    PREEMPT_REQUESTER = 3
    """Preempt the request that asked: without this a card runs out of memory all the same."""


class GuardStep(msgspec.Struct, frozen=True):
    """One victim and the blocks it gives."""

    action: GuardAction
    owner: int
    blocks: int


class CardAccount(msgspec.Struct, frozen=True):
    """What the guard holds a card to, bytes: mapped + weights + worst-case activation + measured slack <= HBM.

    One owner per card keeps it; groups kept mapped ahead of need count as mapped.
    """

    hbm_bytes: int
    weights_bytes: int
    activation_bytes: int
    slack_bytes: int

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if getattr(self, name) < 0:
                raise BadGeometry(name, getattr(self, name), "0 or more")

    def mappable_bytes(self, mapped_bytes: int) -> int:
        """Bytes that may still be mapped on the card when its workers have ``mapped_bytes`` together; 0 or more."""
        fixed = self.weights_bytes + self.activation_bytes + self.slack_bytes
        return max(0, self.hbm_bytes - fixed - mapped_bytes)

    def may_map(self, mapped_bytes: int, more_bytes: int) -> bool:
        """Whether ``more_bytes`` may be mapped beside ``mapped_bytes``."""
        return more_bytes <= self.mappable_bytes(mapped_bytes)


def victims(
    needed_blocks: int,
    idle_copied: Candidates,
    idle: Candidates,
    running: Candidates,
    requester: tuple[int, int],
) -> list[GuardStep]:
    """Who gives way for ``needed_blocks``, in order, stopping as soon as they suffice; empty for 0.

    ``idle_copied`` and ``idle`` are least recently used first, ``running`` newest first; an owner in both idle lists
    counts once, the ``requester`` only at the very end. If everybody else together is not enough, nobody else is
    bothered beyond dropping idle KV: the requester alone gives way, since preempting all of them would waste their
    work and still not serve it.
    """
    steps: list[GuardStep] = []
    missing = needed_blocks
    taken = {requester[0]}
    for action, candidates in (
        (GuardAction.DROP_COPIED, idle_copied),
        (GuardAction.DROP_IDLE, idle),
        (GuardAction.PREEMPT_NEWEST, running),
    ):
        if missing <= 0:
            break
        if action is GuardAction.PREEMPT_NEWEST and missing > _blocks(candidates, taken):
            break
        for owner, blocks in candidates:
            if missing <= 0:
                break
            if owner not in taken and blocks > 0:
                taken.add(owner)
                steps.append(GuardStep(action, owner, blocks))
                missing -= blocks
    if missing > 0:
        steps.append(GuardStep(GuardAction.PREEMPT_REQUESTER, *requester))
    return steps


def _blocks(candidates: Iterable[tuple[int, int]], taken: set[int]) -> int:
    return sum(blocks for owner, blocks in candidates if owner not in taken)
