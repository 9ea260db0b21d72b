"""Conversations of one engine, told apart by what they hold: a chain of block hashes, each of a whole prefix. Pure.

A turn that begins with the whole of a former one's prompt and answer belongs to the same conversation; where the client
names its session (``x-tidegate-session``, vLLM's own ``X-Session-ID``) the name counts. Nothing here survives the
engine's process, and neither does its cache.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import msgspec
import numpy as np

from schemas.endings import Ending
from schemas.engine import AwaySession, IdleSession
from services.actuator.memory.returns import ReturnEstimator

SESSIONS_MOST: Final = 20_000
"""Conversations remembered; the one that was quiet longest is forgotten first."""


class Session(msgspec.Struct):
    """One conversation."""

    number: int
    name: str
    kind: int
    """ServiceClass of its latest turn."""
    chain: list[bytes] = []
    """Hashes of the full blocks of prompt and answer, in order."""
    tokens: Sequence[int] = ()
    """Token ids of prompt and answer, for as many as the engine has KV of."""
    turns: int = 0
    """Requests under way."""
    since_s: float = 0.0
    """When its latest turn ended."""
    idle_blocks: int = 0
    """Blocks of its chain that idle on the card and were last its own."""


class Sessions:
    """All conversations. ``block_bytes`` and ``block_tokens``: of a KV block."""

    def __init__(self, block_bytes: int, block_tokens: int, estimator: ReturnEstimator | None = None) -> None:
        self.block_bytes = block_bytes
        self.block_tokens = block_tokens
        self.known: dict[int, Session] = {}
        """By number, quiet longest first."""
        self.returns = estimator or ReturnEstimator()
        self._of_name: dict[str, Session] = {}
        self._of_tail: dict[bytes, Session] = {}
        self._owner: dict[bytes, Session] = {}
        self._uses: Counter[bytes] = Counter()
        """In how many chains a hash is."""
        self._next = 1

    # What the pool tells (pool.Watcher).
    def rested(self, block_hash: bytes) -> None:
        owner = self._owner.get(block_hash)
        if owner is not None:
            owner.idle_blocks += 1

    def left(self, block_hash: bytes) -> None:
        owner = self._owner.get(block_hash)
        if owner is not None and owner.idle_blocks:
            owner.idle_blocks -= 1

    def started(self, name: str, chain: Sequence[bytes], kind: int, now_s: float) -> Session:
        """A turn arrives with the hashes of its prompt's full blocks: its conversation, a new one if it has none."""
        session = self._of_name.get(name) if name else self._by_prefix(chain)
        if session is None:
            session = Session(self._next, name, kind, since_s=now_s)
            self._next += 1
            if name:
                self._of_name[name] = session
            self.known[session.number] = session
            self._forget()
        elif session.turns == 0 and session.chain:
            self.returns.returned(session.number, now_s)
        session.kind = kind
        session.turns += 1
        self._latest(session)
        return session

    def finished(
        self, session: Session, chain: Sequence[bytes], tokens: Sequence[int], now_s: float, ending: Ending
    ) -> None:
        """A turn ended with these hashes of full blocks and these tokens; call it while its blocks are still held."""
        session.turns = max(session.turns - 1, 0)
        self._replace(session, list(chain))
        session.tokens = tokens
        session.since_s = now_s
        self._latest(session)
        if session.turns == 0 and session.chain:
            self.returns.finished(session.number, session.kind, now_s, ending)

    def idle(self, most: int, now_s: float, copied: Callable[[bytes], bool]) -> tuple[IdleSession, ...]:
        """Conversations between turns with KV on the card, quiet longest first, at most ``most``. ``copied`` tells
        whether a lower tier has a block: only then may it leave."""
        found = [one for one in self.known.values() if one.turns == 0 and one.idle_blocks > 0][:most]
        back_s = self._expected(found, now_s)
        return tuple(
            IdleSession(
                one.number,
                one.idle_blocks * self.block_bytes,
                now_s - one.since_s,
                back_s[row],
                # The last full block is stored last: where it is, the others are.
                copied(one.chain[-1]),
                len(one.tokens),
            )
            for row, one in enumerate(found)
        )

    def away(self, within_s: float, now_s: float, missing: Callable[[Session], int]) -> tuple[AwaySession, ...]:
        """Conversations between turns of which a lower tier has ``missing`` blocks that the card lacks, if they are
        expected within ``within_s``."""
        quiet = [one for one in self.known.values() if one.turns == 0 and one.idle_blocks < len(one.chain)]
        back_s = self._expected(quiet, now_s)
        listed = []
        for one, expected_s in zip(quiet, back_s, strict=True):
            if expected_s <= within_s and (blocks := missing(one)) > 0:
                listed.append(
                    AwaySession(one.number, blocks * self.block_bytes, expected_s, blocks * self.block_tokens)
                )
        return tuple(listed)

    def leaving(self, chosen: Sequence[Session]) -> Iterator[bytes]:
        """Hashes of the chosen conversations that are between turns, one conversation after the other and each from its
        end, as a prefix cache can lose blocks. Left out is what somebody who stays has too, such as a system prompt."""
        going = Counter(block_hash for one in chosen if one.turns == 0 for block_hash in one.chain)
        for session in chosen:
            for block_hash in reversed(session.chain) if session.turns == 0 else ():
                if going[block_hash] == self._uses[block_hash]:
                    yield block_hash

    def cleared(self) -> None:
        """The cache was emptied: no conversation has anything on the card or is told by it any more."""
        for session in self.known.values():
            self._drop(session.chain)
            session.chain, session.idle_blocks = [], 0
        self._of_tail.clear()

    def _expected(self, sessions: Sequence[Session], now_s: float) -> list[float]:
        if not sessions:
            return []
        numbers = np.array([one.number for one in sessions], np.int64)
        expected: list[float] = self.returns.quantile(numbers, now_s, 0.5).tolist()
        return expected

    def _by_prefix(self, chain: Sequence[bytes]) -> Session | None:
        for block_hash in reversed(chain):
            session = self._of_tail.get(block_hash)
            if session is not None:
                return session
        return None

    def _latest(self, session: Session) -> None:
        self.known.pop(session.number, None)
        self.known[session.number] = session

    def _replace(self, session: Session, chain: list[bytes]) -> None:
        if session.chain:
            self._of_tail.pop(session.chain[-1], None)
        self._uses.update(chain)
        self._drop(session.chain)
        session.chain = chain
        session.idle_blocks = 0  # its blocks are held by the turn that ends: they come to rest one by one
        for block_hash in chain:
            self._owner[block_hash] = session
        if chain:
            self._of_tail[chain[-1]] = session

    def _drop(self, chain: Sequence[bytes]) -> None:
        for block_hash in chain:
            self._uses[block_hash] -= 1
            if not self._uses[block_hash]:
                del self._uses[block_hash]
                self._owner.pop(block_hash, None)

    def _forget(self) -> None:
        for number in list(self.known) if len(self.known) > SESSIONS_MOST else ():
            if len(self.known) <= SESSIONS_MOST:
                return
            session = self.known[number]
            if session.turns:
                continue
            del self.known[number]
            self._of_name.pop(session.name, None)
            if session.chain:
                self._of_tail.pop(session.chain[-1], None)
            self._drop(session.chain)
