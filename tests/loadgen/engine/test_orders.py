"""Whatever is reserved, moved, swapped out and brought back between steps: accounts and block owners agree."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.engine.fleet import Fleet
from loadgen.engine.relocation import FREE, RESERVED, UNMAPPED
from loadgen.engine.specs import EngineMode, FleetConfig
from tests.loadgen.engine.accounts import check_accounts
from tests.loadgen.engine.tables import random_table

WORKERS = 2


class Orders:
    """Random orders to one fleet, remembering what was reserved."""

    def __init__(self, fleet: Fleet, rng: np.random.Generator) -> None:
        self.fleet = fleet
        self.rng = rng
        self.kept: list[set[int]] = [set() for _ in range(WORKERS)]
        self.crashes = np.zeros(WORKERS)

    def reserve(self, w: int) -> None:
        free = np.flatnonzero(self.fleet.owners(w)[0] == FREE)
        chosen = self.rng.permutation(free)[: self.rng.integers(0, 60)]
        self.fleet.reserve(w, chosen)
        self.kept[w] |= set(chosen.tolist())

    def unreserve(self, w: int) -> None:
        chosen = [one for one in sorted(self.kept[w]) if self.rng.random() < 0.5]
        self.fleet.unreserve(w, chosen)
        self.kept[w] -= set(chosen)

    def relocate(self, w: int) -> None:
        held, pinned = self.fleet.owners(w)
        movable = (held >= 0) & (pinned == 0)
        group = np.arange(len(held)) // int(self.fleet.state.worker[w]["bpg"])
        drained = int(self.rng.choice(group[movable])) if movable.any() and self.rng.random() < 0.7 else -1
        if drained >= 0:
            movable &= group == drained
        sources = self.rng.permutation(np.flatnonzero(movable))
        destinations = np.flatnonzero(((held == FREE) | (held == RESERVED)) & (group != drained))
        destinations = self.rng.permutation(destinations)
        count = min(len(sources), len(destinations), int(self.rng.integers(0, 80)))
        moves = np.stack([sources[:count], destinations[:count]], axis=1)
        mapped = self.fleet.snapshot(w).groups_mapped
        freed = self.fleet.relocate(w, moves)
        assert self.fleet.snapshot(w).groups_mapped == mapped - freed
        after, _ = self.fleet.owners(w)
        assert (after[moves[:, 1]] == held[moves[:, 0]]).all()
        self.kept[w] -= set(moves[:, 1].tolist())

    def evict(self, w: int) -> None:
        before = self.fleet.sessions(w)
        may = before.idle & (before.lane < 0)
        chosen = self._some(before.sequence[may])
        started = self.fleet.evict_sessions(w, chosen)
        assert not started[~np.isin(chosen, before.sequence[may])].any(), "only idle ones of the worker, in no transfer"

    def prefetch(self, w: int) -> None:
        before, running = self.fleet.sessions(w), self.fleet.state.worker[w]["preemptions"]
        away = (before.blocks == 0) & (before.host_blocks > 0) & (before.lane < 0)
        chosen = self._some(before.sequence[away])
        started = self.fleet.prefetch_sessions(w, chosen)
        assert not started[~np.isin(chosen, before.sequence[away])].any(), "only those in the host tier alone"
        assert self.fleet.state.worker[w]["preemptions"] == running, "nobody who runs gives way"

    def _some(self, able: np.ndarray) -> np.ndarray:
        """Some of those for whom the order is meant, and some of anybody."""
        anybody = self.rng.integers(0, len(self.fleet.state.sequence), 10)
        return self.rng.permutation(np.concatenate([self.rng.permutation(able)[:10], anybody]))

    def command(self, w: int) -> None:
        capacity = float(self.fleet.state.card[0]["capacity"])
        self.fleet.command(
            rho=self.rng.choice([1.0, 1.6, np.nan], WORKERS),
            hard_bytes=self.rng.choice([0.1, 0.4, np.inf, np.nan], WORKERS) * capacity,
            evict_bytes=self.rng.choice([0.0, 1e10], WORKERS),
            compact_bytes=self.rng.choice([0.0, 4e9], WORKERS),
        )

    def check(self) -> None:
        """Block owners, free blocks and mapped groups say the same."""
        for w in range(WORKERS):
            row = self.fleet.state.worker[w]
            if row["oom"] > self.crashes[w]:
                self.crashes[w] = row["oom"]
                self.kept[w] = set()
            held, _ = self.fleet.owners(w)
            now = self.fleet.sessions(w)
            assert set(np.flatnonzero(held == RESERVED).tolist()) == self.kept[w], "reserved until taken or given back"
            assert (held == FREE).sum() == row["free"], "free blocks"
            assert (held != UNMAPPED).sum() == row["mapped"] * row["bpg"], "mapped groups"
            blocks = np.bincount(held[held >= 0], minlength=len(self.fleet.state.sequence))
            assert (blocks[now.sequence] == now.blocks).all(), "blocks of each session"
            assert blocks.sum() == now.blocks.sum(), "and of no other worker's"


@settings(max_examples=8, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10_000), offload=st.booleans(), guard=st.booleans())
def test_accounts_and_owners_agree_whatever_is_ordered(seed: int, offload: bool, guard: bool) -> None:
    rng = np.random.default_rng(seed)
    tables = [random_table(rng, 4.0, 40.0, float(rng.choice([0.5, 4.0]))) for _ in range(WORKERS)]
    for table in tables:
        table.think_s[:] *= 3.0  # long enough to leave and to come back
    mode = EngineMode(offload=offload, prefetch=bool(rng.integers(2)))
    fleet = Fleet(FleetConfig(mode=mode, guard=guard, restart_s=4.0, link_bytes_per_s=2e9), tables)
    orders = Orders(fleet, rng)
    for _ in range(25):
        for _ in range(4):
            name = rng.choice(["reserve", "unreserve", "relocate", "evict", "prefetch", "command"])
            getattr(orders, name)(int(rng.integers(WORKERS)))
            orders.check()
        check_accounts(fleet)
        fleet.advance(float(rng.choice([0.1, 2.0, 4.0])))
        orders.check()
    assert not guard or fleet.state.worker["oom"].sum() == 0
