"""Which row belongs to which worker, and which message of a node is the newest.

Rows are small numbers that index all arrays of the featurizer. They are given out per (node, worker), so that
a node which claims another's workers disturbs nobody, and taken back when a worker has been gone for a while.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from schemas.identity import Order

MAX_NUMBER: Final = 2**62
"""Beyond it a step, boot or clock is no number that a node counted."""


class Layout:
    """A node's workers as one of its samples listed them; cached, because it seldom changes."""

    __slots__ = ("card_count", "cards", "class_numbers", "classes", "local_cards", "row_list", "rows", "workers")

    def __init__(
        self,
        workers: tuple[str, ...],
        cards: tuple[int, ...],
        classes: tuple[int, ...],
        rows: NDArray[np.int64],
    ) -> None:
        self.workers = workers
        self.cards = cards
        self.classes = classes
        self.rows = rows
        self.row_list: list[int] = rows.tolist()
        seen: dict[int, int] = {}
        self.local_cards = np.array([seen.setdefault(card, len(seen)) for card in cards], np.int64)
        self.card_count = len(seen)
        self.class_numbers = np.array([c if 0 <= c < 256 else 255 for c in classes], np.int64)

    def same(self, workers: tuple[str, ...], cards: tuple[int, ...], classes: tuple[int, ...]) -> bool:
        return self.workers == workers and self.cards == cards and self.classes == classes


class Node:
    """What is known of a node: its newest sample's order and clock, its workers' rows."""

    __slots__ = (
        "boot_id", "gone", "layout", "name", "outcome_step", "rows", "seen_ns", "step", "t0_ns", "t_ns",
    )  # fmt: skip

    def __init__(self, name: str) -> None:
        self.name = name
        self.boot_id = -1
        self.step = -1
        self.t_ns = 0
        self.t0_ns = 0
        self.seen_ns = 0
        self.outcome_step = -1
        self.rows: dict[str, int] = {}
        self.gone: dict[str, int] = {}
        """Workers that the newest sample did not list, by the step they were missed first."""
        self.layout: Layout | None = None

    @property
    def order(self) -> Order:
        return Order(self.boot_id, self.step)

    def all_rows(self) -> NDArray[np.int64]:
        """int64 [workers]: of all that are remembered, listed now or not."""
        return np.fromiter(self.rows.values(), np.int64, len(self.rows))


class Roster:
    """Nodes and the rows of their workers. Free rows are used again, so memory follows the fleet's size."""

    def __init__(self, max_workers: int) -> None:
        self.max_workers = max_workers
        self.nodes: dict[str, Node] = {}
        self.capacity = 0
        self._free: list[int] = []
        self._next = 0

    @property
    def workers(self) -> int:
        return self._next - len(self._free)

    def node(self, name: str) -> Node:
        node = self.nodes.get(name)
        if node is None:
            node = self.nodes[name] = Node(name)
        return node

    def room_for(self, more: int) -> bool:
        return self.workers + more <= self.max_workers

    def lay_out(
        self, node: Node, workers: tuple[str, ...], cards: tuple[int, ...], classes: tuple[int, ...], step: int
    ) -> tuple[Layout, list[int]]:
        """The node's new layout and the rows that are new in it; the caller has asked :meth:`room_for`."""
        fresh: list[int] = []
        for worker in workers:
            if worker not in node.rows:
                if self._free:
                    row = self._free.pop()
                else:
                    row = self._next
                    self._next += 1
                node.rows[worker] = row
                fresh.append(row)
        listed = set(workers)
        node.gone = {worker: node.gone.get(worker, step) for worker in node.rows if worker not in listed}
        if self._next > self.capacity:
            self.capacity = max(64, 2 * self.capacity, self._next)
        rows = np.array([node.rows[worker] for worker in workers], np.int64)
        node.layout = Layout(workers, cards, classes, rows)
        return node.layout, fresh

    def forget_gone(self, node: Node, step: int, after_steps: int) -> int:
        """Take back the rows of workers missing for more than ``after_steps``; how many they were."""
        old = [worker for worker, since in node.gone.items() if step - since >= after_steps]
        for worker in old:
            self._free.append(node.rows.pop(worker))
            del node.gone[worker]
        return len(old)

    def forget_nodes(self, before_ns: int) -> list[str]:
        """Take back the rows of nodes not seen since ``before_ns`` (the caller's clock)."""
        silent = [name for name, node in self.nodes.items() if node.seen_ns < before_ns]
        for name in silent:
            self._free.extend(self.nodes.pop(name).rows.values())
        return silent
