"""Sessions whose every byte is known: they write into a pool's blocks, rest, come back and end.

Content is random, so a block that lies anywhere but where its table says has another checksum. Iterations overlap
as in a serving engine: what was launched reads and writes by the tables of its launch, and ends when the next one
has been launched already. Deterministic given ``rng``; knows neither sockets nor time.
"""

from __future__ import annotations

import zlib
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from services.actuator.memory.errors import OutOfBlocks
from services.actuator.memory.pool import Pool

U1 = NDArray[np.uint8]
I8 = NDArray[np.int64]

WRONG_KEPT: Final = 20
"""Wrong blocks described in the figures; the rest is only counted."""


class Mix(msgspec.Struct, frozen=True):
    """What sessions do, per iteration."""

    running: int = 10
    """Sessions that write at a time."""
    token_bytes: int = 256
    tokens_limit: int = 4
    """Tokens that a session writes in an iteration: 1 to so many."""
    blocks_limit: int = 24
    """Blocks that a turn adds: 1 to so many, most of them few."""
    pause_probability: float = 0.5
    """A turn's end makes its session idle; otherwise the session is freed."""
    resume_probability: float = 0.3
    """A free place goes to an idle session; otherwise to a new one."""
    drop_probability: float = 0.002
    """An idle session ends."""
    read: int = 2
    """Running sessions whose launch is read back whole."""


class Session(msgspec.Struct):
    """``sums[i]``: CRC-32 of what is written in block i of its table. ``launched_bytes`` are on their way,
    ``written_bytes`` there, ``target_bytes`` the turn's end. ``flight``: its latest launch."""

    owner: int
    target_bytes: int
    launched_bytes: int = 0
    written_bytes: int = 0
    flight: int = -1
    sums: list[int] = []


class Launch(msgspec.Struct):
    """One session in one iteration, by the table of its launch: int64 [n]."""

    session: Session
    table: I8
    first_byte: int
    end_byte: int
    sums: tuple[int, ...] = ()
    """Of the whole table, where it is read back."""
    read_bytes: int = 0


class Figures(msgspec.Struct):
    """Counts since the start."""

    iterations: int = 0
    sessions: int = 0
    turns: int = 0
    idled: int = 0
    resumed: int = 0
    freed: int = 0
    evicted: int = 0
    written_bytes: int = 0
    checked_blocks: int = 0
    wrong_blocks: int = 0
    """Blocks whose bytes were not their session's: served wrong."""
    wrong: list[str] = []


class Sessions:
    """``pool`` and ``view`` uint8 [blocks, block_bytes] are the arena. An iteration is the caller's boundary,
    :meth:`launch`, and :meth:`finish` of the launch before."""

    def __init__(self, pool: Pool, view: U1, rng: np.random.Generator, mix: Mix | None = None) -> None:
        self.pool = pool
        self.figures = Figures()
        self._view = view
        self._rng = rng
        self._mix = mix or Mix()
        self._block_bytes = pool.geometry.block_bytes
        self._running: list[Session] = []
        self._idle: list[Session] = []
        self._next_owner = 0
        self._finished = -1

    @property
    def count(self) -> int:
        """Sessions that hold blocks."""
        return len(self._running) + len(self._idle)

    def launch(self) -> list[Launch]:
        """The next iteration: who ended its turn leaves, who comes gets blocks, everybody's write is on its way."""
        self.figures.iterations += 1
        self._settle()
        self._admit()
        number = self.figures.iterations
        reading = set(self._rng.choice(len(self._running), self._mix.read).tolist()) if self._running else set()
        launched = []
        for k, session in enumerate(list(self._running)):
            if session.launched_bytes >= session.target_bytes:
                continue  # its last write is in flight
            size = self._mix.token_bytes * int(self._rng.integers(1, self._mix.tokens_limit + 1))
            end = min(session.launched_bytes + size, session.target_bytes)
            if not self._grow(session, end):
                continue
            session.flight = number
            launch = Launch(session, self.pool.table(session.owner), session.launched_bytes, end)
            if k in reading:
                launch.sums, launch.read_bytes = tuple(session.sums), session.written_bytes
            session.launched_bytes = end
            launched.append(launch)
        return launched

    def finish(self, launched: list[Launch], number: int) -> None:
        """Iteration ``number``'s reads and writes happen, by the tables of its launch."""
        for launch in launched:
            if launch.sums:
                self._compare(launch.session, launch.table, launch.sums, launch.read_bytes, "in flight")
            self._write(launch)
        self._finished = number

    def verify(self) -> int:
        """Read every session through its table; gives the blocks checked."""
        before = self.figures.checked_blocks
        for session in (*self._running, *self._idle):
            self._read(session, "sweep")
        return self.figures.checked_blocks - before

    def _settle(self) -> None:
        """Turns that ended and have nothing in flight any more; idle sessions that give up."""
        for session in list(self._running):
            if session.written_bytes >= session.target_bytes and session.flight <= self._finished:
                self._running.remove(session)
                self.figures.turns += 1
                if self._rng.random() < self._mix.pause_probability:
                    self.pool.make_idle(session.owner, float(self.figures.iterations))
                    self._idle.append(session)
                    self.figures.idled += 1
                else:
                    self._end(session)
        if self._idle and self._rng.random() < self._mix.drop_probability * len(self._idle):
            self._end(self._idle.pop(int(self._rng.integers(len(self._idle)))))

    def _admit(self) -> None:
        while len(self._running) < self._mix.running:
            if self._idle and self._rng.random() < self._mix.resume_probability:
                session = self._idle.pop(int(self._rng.integers(len(self._idle))))
                self._read(session, "resume")
                self.pool.resume(session.owner)
                self.figures.resumed += 1
            else:
                session = Session(self._next_owner, 0)
                self._next_owner += 1
                self.figures.sessions += 1
            blocks = 1 + int((self._mix.blocks_limit - 1) * self._rng.random() ** 2)
            # A turn may end anywhere inside a block: the partial last one is what must not be moved.
            size = int(self._rng.integers(1, self._block_bytes)) + (blocks - 1) * self._block_bytes
            session.target_bytes = session.written_bytes + size
            if not session.sums and not self._grow(session, 1):
                self.figures.sessions -= 1
                return
            self._running.append(session)

    def _grow(self, session: Session, end_byte: int) -> bool:
        """Blocks up to ``end_byte``; idle sessions go, the longest idle first, where there are none. False: this
        session has to wait."""
        missing = -(-end_byte // self._block_bytes) - len(session.sums)
        while missing > 0:
            try:
                self.pool.allocate(session.owner, missing)
            except OutOfBlocks:
                if not self._idle:
                    return False
                self.figures.evicted += 1
                self._end(self._idle.pop(0))
            else:
                session.sums += [0] * missing
                missing = 0
                self.pool.fill(session.owner, session.written_bytes // self._block_bytes)
        return True

    def _end(self, session: Session) -> None:
        self._read(session, "end")
        self.pool.free(session.owner)
        self.figures.freed += 1

    def _write(self, launch: Launch) -> None:
        session, at = launch.session, launch.first_byte
        while at < launch.end_byte:
            index, offset = divmod(at, self._block_bytes)
            size = min(self._block_bytes - offset, launch.end_byte - at)
            content = self._rng.bytes(size)
            self._view[launch.table[index], offset : offset + size] = np.frombuffer(content, np.uint8)
            session.sums[index] = zlib.crc32(content, session.sums[index])
            at += size
        self.figures.written_bytes += launch.end_byte - launch.first_byte
        session.written_bytes = launch.end_byte
        self.pool.fill(session.owner, session.written_bytes // self._block_bytes)

    def _read(self, session: Session, when: str) -> None:
        table = self.pool.table(session.owner)
        self._compare(session, table, tuple(session.sums), session.written_bytes, when)

    def _compare(self, session: Session, table: I8, sums: tuple[int, ...], size: int, when: str) -> None:
        for index in range(-(-size // self._block_bytes)):
            filled = min(self._block_bytes, size - index * self._block_bytes)
            self.figures.checked_blocks += 1
            if zlib.crc32(self._view[table[index], :filled].data) != sums[index]:
                self.figures.wrong_blocks += 1
                if len(self.figures.wrong) < WRONG_KEPT:
                    self.figures.wrong.append(
                        f"session {session.owner}, block {index} of {len(table)} at {table[index]}, {when}"
                    )
