"""A process that plays kvcached 0.1.6 on a real segment: its layout, its flock, its deferral of a shrink below use.

Written from its behaviour (``mem_info_tracker.hpp``, ``page_allocator.cpp``, ``kv_cache_manager.py``), with the
standard library alone: one command a line on stdin, one answer a line on stdout. Pages of 4 blocks; a page is in use
while one block of it is. A limit is looked at when it allocates; one below use is deferred until use has fallen.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import sys

PAGE = 1 << 20
BLOCKS = 4
FOLDER = "/dev/shm"


class Player:
    def __init__(self, name: str, pages: int) -> None:
        self.path = f"{FOLDER}/{name}"
        self.pool = pages
        self.total = pages
        self.taken: list[int] = []
        self.target = -1
        self.held: int | None = None
        self.write(total=pages * PAGE)

    def write(self, total: int | None = None) -> None:
        """As MemInfoTracker: made and sized when it is missing, mapped and written under the exclusive lock."""
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
        if os.fstat(descriptor).st_size < 24:
            os.ftruncate(descriptor, 24)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with mmap.mmap(descriptor, 24) as mapped:
            old = struct.unpack("=3q", mapped[:24])
            mapped[:24] = struct.pack("=3q", old[0] if total is None else total, len(self.taken) * PAGE, 0)
        os.close(descriptor)

    def limit(self) -> int:
        try:
            descriptor = os.open(self.path, os.O_RDWR)
        except FileNotFoundError:
            return -1  # as if nothing had changed
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        with mmap.mmap(descriptor, 24, access=mmap.ACCESS_READ) as mapped:
            total: int = struct.unpack("=3q", mapped[:24])[0]
        os.close(descriptor)
        return total

    def resize(self) -> None:
        wanted = self.limit() // PAGE
        if wanted > 0:
            self.target = wanted
        if self.target > 0 and self.target >= len(self.taken):
            self.total, self.target = self.target, -1

    def alloc(self, blocks: int) -> str:
        self.resize()
        for _ in range(blocks):
            partial = [i for i, taken in enumerate(self.taken) if taken < BLOCKS]
            if partial:
                self.taken[partial[0]] += 1
            elif self.target < 0 and len(self.taken) < self.total:
                self.taken.append(1)
            else:
                return "full"
        return "ok"

    def evict(self, blocks: int) -> int:
        """Scattered: one block of each page in turn, so that pages rarely empty by themselves; the first page is a
        running request's and stays."""
        freed = 0
        while freed < blocks and len(self.taken) > 1:
            most = max(range(1, len(self.taken)), key=lambda i: self.taken[i])
            if self.taken[most] == 0:
                break
            self.taken[most] -= 1
            freed += 1
            if max(self.taken[1:]) == 0:
                break
        self.taken = [self.taken[0], *(taken for taken in self.taken[1:] if taken)] if self.taken else []
        return freed

    def compact(self) -> int:
        blocks, pages = sum(self.taken), len(self.taken)
        self.taken = [BLOCKS] * (blocks // BLOCKS) + ([blocks % BLOCKS] if blocks % BLOCKS else [])
        return pages - len(self.taken)

    def answer(self, words: list[str]) -> str:
        verb, number = words[0], int(words[1]) if len(words) > 1 else 0
        if verb == "alloc":
            said = self.alloc(number)
        elif verb == "evict":
            said = str(self.evict(number))
        elif verb == "compact":
            said = str(self.compact())
        elif verb == "restart":  # a new engine on the segment that a killed one left
            self.taken, self.total, self.target = [], self.pool, -1
            self.write(total=self.pool * PAGE)
            return "ok"
        elif verb == "kvctl":  # another program sets the limit
            self.write(total=number)
            return "ok"
        elif verb == "hold":
            self.held = os.open(self.path, os.O_RDWR)
            fcntl.flock(self.held, fcntl.LOCK_EX)
            return "ok"
        else:
            return "?"
        self.write()
        return f"{said} {len(self.taken)} {self.total}"


def main() -> None:
    player: Player | None = None
    for line in sys.stdin:
        words = line.split()
        if words[0] == "play":  # from here on another engine, on a segment of its own
            if player is not None and player.held is not None:
                os.close(player.held)
            player = Player(words[1], int(words[2]))
            said = "ready"
        else:
            said = player.answer(words) if player is not None else "?"
        sys.stdout.write(said + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
