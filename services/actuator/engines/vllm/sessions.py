"""Conversations of one engine, told apart by what they hold: a chain of block hashes, each of a whole prefix. Pure.

A turn that begins with the whole of a former one's prompt and answer belongs to the same conversation; where the client
names its session (``x-tidegate-session``, vLLM's own ``X-Session-ID``) the name counts. Nothing here survives the
engine's process, and neither does its cache.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from schemas.endings import Ending
from schemas.engine import AwaySession, IdleSession
from services.actuator.memory.returns import ReturnEstimator, UnknownSession

I4 = NDArray[np.int32]
SESSIONS_MOST: Final = 20_000
"""Conversations remembered; the one that was quiet longest is forgotten first."""
BLOCKS_MOST: Final = 1_000_000
"""Blocks in the chains of all, unless the engine says what its memories hold: each takes some 300 bytes here."""
AWAY_MOST: Final = 32
"""Conversations that :meth:`Sessions.away` lists: each is looked up block by block while the engine waits."""
NO_TOKENS: Final[I4] = np.empty(0, np.int32)


class Session(msgspec.Struct):
    """One conversation."""

    number: int
    name: str
    kind: int
    """ServiceClass of its latest turn."""
    chain: list[bytes] = []
    """Hashes of the full blocks of prompt and answer, in order."""
    tokens: I4 = NO_TOKENS
    """Token ids of those blocks, int32 [n]; empty where nothing can bring them back to the card."""
    turns: int = 0
    """Requests under way."""
    since_s: float = 0.0
    """When its latest turn ended."""
    idle_blocks: int = 0
    """Blocks of its chain that idle on the card and were last its own."""


class Sessions:
    """All conversations. ``block_bytes`` and ``block_tokens``: of a KV block. ``blocks_most``: of all chains together;
    beyond it the quietest conversations are forgotten, for neither card nor host memory has them any more."""

    def __init__(
        self,
        block_bytes: int,
        block_tokens: int,
        estimator: ReturnEstimator | None = None,
        blocks_most: int = BLOCKS_MOST,
    ) -> None:
        self.block_bytes = block_bytes
        self.block_tokens = block_tokens
        self.blocks_most = blocks_most
        self.known: dict[int, Session] = {}
        """By number, quiet longest first."""
        self.returns = estimator or ReturnEstimator()
        self._of_name: dict[str, Session] = {}
        self._of_tail: dict[bytes, Session] = {}
        self._owner: dict[bytes, Session] = {}
        self._uses: Counter[bytes] = Counter()
        """In how many chains a hash is."""
        self._blocks = 0
        """Of all chains together."""
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
        elif session.turns == 0:
            with contextlib.suppress(UnknownSession):  # it has not finished a turn yet
                self.returns.returned(session.number, now_s)
        session.kind = kind
        session.turns += 1
        self._latest(session)
        self._forget(now_s)
        return session

    def finished(self, session: Session, chain: Sequence[bytes], tokens: I4, now_s: float, ending: Ending) -> None:
        """A turn ended with these hashes of full blocks and their tokens; call it while its blocks are still held."""
        self._replace(session, list(chain))
        session.tokens = tokens
        self._ended(session, now_s, ending)
        self._forget(now_s)

    def abandoned(self, session: Session, now_s: float) -> None:
        """A turn ended before it computed a block: the conversation holds what it held before, and waits again."""
        self._ended(session, now_s, Ending.CUT)

    def _ended(self, session: Session, now_s: float, ending: Ending) -> None:
        session.turns = max(session.turns - 1, 0)
        session.since_s = now_s
        self._latest(session)
        if session.turns == 0 and session.chain:
            self.returns.finished(session.number, session.kind, now_s, ending)

    def idle(self, most: int, now_s: float, copied: Callable[[bytes], bool]) -> tuple[IdleSession, ...]:
        """Conversations between turns with KV on the card, quiet longest first, at most ``most``. ``copied`` tells
        whether a lower tier has a block: only then may it leave."""
        found = [one for one in self.known.values() if one.turns == 0 and one.idle_blocks > 0 and one.chain][:most]
        back_s = self._expected(found, now_s)
        return tuple(
            IdleSession(
                one.number,
                one.idle_blocks * self.block_bytes,
                now_s - one.since_s,
                back_s[row],
                # The last full block is stored last: where it is, the others are.
                copied(one.chain[-1]),
                len(one.chain) * self.block_tokens,
            )
            for row, one in enumerate(found)
        )

    def away(self, within_s: float, now_s: float, missing: Callable[[Session], int]) -> tuple[AwaySession, ...]:
        """Conversations between turns of which a lower tier has ``missing`` blocks that the card lacks, if they are
        expected within ``within_s``: the soonest first, at most AWAY_MOST are looked up."""
        quiet = [one for one in self.known.values() if one.turns == 0 and one.idle_blocks < len(one.chain)]
        back_s = self._expected(quiet, now_s)
        soon = sorted((back_s[row], row) for row in range(len(quiet)) if back_s[row] <= within_s)[:AWAY_MOST]
        listed = []
        for expected_s, row in soon:
            if (blocks := missing(quiet[row])) > 0:
                number = quiet[row].number
                listed.append(AwaySession(number, blocks * self.block_bytes, expected_s, blocks * self.block_tokens))
        return tuple(listed)

    def leaving(self, chosen: Iterable[Session]) -> Iterator[bytes]:
        """Hashes of the chosen conversations that are between turns, one conversation after the other and each from its
        end, as a prefix cache can lose blocks. What several share goes with the last of them; left out is what
        somebody who stays has too, such as a system prompt. Stop asking when it is enough."""
        going: Counter[bytes] = Counter()
        for session in chosen:
            if session.turns:
                continue
            going.update(session.chain)
            for block_hash in reversed(session.chain):
                if going[block_hash] == self._uses[block_hash]:
                    yield block_hash

    def cleared(self) -> None:
        """The cache was emptied: no conversation has anything on the card or is told by it any more."""
        for session in self.known.values():
            self._drop(session)
            session.chain, session.tokens, session.idle_blocks = [], NO_TOKENS, 0
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
        self._uses.update(chain)
        self._blocks += len(chain)
        self._drop(session)
        session.chain = chain
        session.idle_blocks = 0  # its blocks are held by the turn that ends: they come to rest one by one
        for block_hash in chain:
            self._owner[block_hash] = session
        if chain:
            self._of_tail[chain[-1]] = session

    def _drop(self, session: Session) -> None:
        """Its chain counts no more."""
        if session.chain and self._of_tail.get(session.chain[-1]) is session:
            del self._of_tail[session.chain[-1]]
        self._blocks -= len(session.chain)
        for block_hash in session.chain:
            self._uses[block_hash] -= 1
            if not self._uses[block_hash]:
                del self._uses[block_hash]
            if self._owner.get(block_hash) is session:
                del self._owner[block_hash]

    def _forget(self, now_s: float) -> None:
        while len(self.known) > SESSIONS_MOST or self._blocks > self.blocks_most:
            session = next((one for one in self.known.values() if not one.turns), None)
            if session is None:
                return
            del self.known[session.number]
            if self._of_name.get(session.name) is session:
                del self._of_name[session.name]
            self._drop(session)
            with contextlib.suppress(UnknownSession):
                self.returns.closed(session.number, now_s)
