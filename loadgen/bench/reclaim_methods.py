"""The methods by which memory goes from one tenant to another, what is asked of them, and what they are charged."""

from __future__ import annotations

import collections
import dataclasses
from typing import Final, Literal, NamedTuple

FOR_WANT: Final = 0
FOR_NEED: Final = 1
FOR_RESERVE: Final = 2


class Mapping(NamedTuple):
    """A page group that is to be mapped in ``tenant`` once it is free."""

    ready_s: float
    tenant: int
    purpose: int


class Method(NamedTuple):
    """How memory goes from one tenant to another."""

    name: str
    compaction: bool
    eviction: Literal["none", "lru", "pages"]


METHODS: Final = (
    Method("wait_only", False, "none"),
    Method("lru_eviction", False, "lru"),
    Method("page_aware_eviction", False, "pages"),
    Method("compaction", True, "none"),
    Method("compaction_eviction", True, "lru"),
)


@dataclasses.dataclass(slots=True)
class Want:
    """A tenant is to get ``groups`` more than it had when it asked."""

    tenant: int
    asked_s: float
    groups: int
    givable: bool
    """The neighbours could have given it without preempting: below saturation."""
    scarce: bool
    """Nobody's groups did not suffice: it is about neighbours."""
    given: int = 0
    """Granted or on the way."""
    ready_s: list[float] = dataclasses.field(default_factory=list)
    """When each group was usable in the taker."""


@dataclasses.dataclass(slots=True)
class Account:
    """Bytes of what was done, in blocks, and groups."""

    moved_blocks: int = 0
    evicted_blocks: int = 0
    """For neighbours; what an engine drops for itself is not in it."""
    freed_groups: int = 0
    """Taken from donors."""
    compacted_groups: int = 0
    """Of these, emptied by moves."""


class Host:
    """The host tier: sessions' tokens, least recently written dropped first."""

    def __init__(self, capacity_tokens: float) -> None:
        self._capacity = capacity_tokens
        self._tokens: collections.OrderedDict[int, int] = collections.OrderedDict()
        self._used = 0

    def has(self, session: int) -> int:
        return self._tokens.get(session, 0)

    def put(self, session: int, tokens: int) -> int:
        """Tokens that have to be written: what the tier has of the session already need not be."""
        had = self._tokens.pop(session, 0)
        self._tokens[session] = max(tokens, had)
        self._used += max(tokens - had, 0)
        while self._used > self._capacity:
            _, dropped = self._tokens.popitem(last=False)
            self._used -= dropped
        return max(tokens - had, 0)
