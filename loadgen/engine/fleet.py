"""Fleet: many emulated cards stepped together, deterministic given settings and request tables.

The state is a tuple of preallocated arrays (``records``), the kernels are plain numba functions over it; this class
is the only thing that the rest of ``loadgen`` sees. It is not thread-safe, but ``advance`` releases the interpreter
lock, so several fleets may run in threads.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from loadgen.engine.build import build
from loadgen.engine.calibration import coefficients, reference_tokens_per_s
from loadgen.engine.gauges import gauges, idle_sessions
from loadgen.engine.records import Phase, State
from loadgen.engine.relocation import FREE, owners, relocate
from loadgen.engine.report import Results
from loadgen.engine.specs import FleetConfig
from loadgen.engine.stepper import advance, obey, premap, refresh_floors
from loadgen.requests import RequestTable
from schemas.identity import STEP_S
from schemas.metrics import COLUMN, METRICS

F8 = npt.NDArray[np.float64]
I8 = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True, eq=False)
class Effects:
    """What commands brought since the last call, every array ``(W,)``."""

    evict_started_bytes: F8
    evicted_bytes: F8
    """KV whose copy is done and whose blocks on the card are free."""
    loaded_bytes: F8
    compacted_bytes: F8
    groups_freed: I8
    """Page groups given back by compaction."""
    pause_us: F8


@dataclasses.dataclass(frozen=True)
class IdleSession:
    """A conversation between turns whose KV is on the card."""

    sequence: int
    blocks: int
    idle_since_s: float
    expected_return_s: float
    """From now."""
    copied: bool
    """Its KV is in the host tier too."""
    pinned: bool
    """In a transfer, or its next turn waits in the queue."""


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """What the engine protocol's ``snapshot`` tells of one worker: blocks by state and idle sessions, LRU first."""

    blocks_live: int
    blocks_idle: int
    blocks_free: int
    blocks_in_transfer: int
    """Of the idle ones, those that a transfer pins."""
    groups_mapped: int
    groups_empty: int
    idle: tuple[IdleSession, ...]


class Fleet:
    """``cards x workers_per_card`` emulated engines; worker w is on card ``card_of[w]``."""

    def __init__(self, config: FleetConfig, tables: Sequence[RequestTable]) -> None:
        """One table per worker, card by card. UserError for impossible settings, ValueError for bad tables."""
        self.config = config
        self.state: State = build(config, tables)
        self.workers = len(self.state.worker)
        self.card_of: I8 = self.state.worker["card"].astype(np.int64)
        self._tables = tuple(tables)
        self._last_step_s = STEP_S
        for w in range(self.workers):
            premap(self.state, w)
        for c in range(config.cards):
            refresh_floors(self.state, c)
        self._constants = self._constant_columns()

    @property
    def substeps(self) -> int:
        """Sub-steps done."""
        return int(self.state.card[0]["substeps"])

    @property
    def t_s(self) -> float:
        """Simulated time, seconds since the start."""
        return self.substeps * self.config.substep_s

    @property
    def step(self) -> int:
        """Whole control periods done."""
        return self.substeps // round(STEP_S / self.config.substep_s)

    @property
    def done(self) -> bool:
        """Every request of every table has ended."""
        return bool((self.state.request["phase"] >= int(Phase.FINISHED)).all())

    def command(
        self,
        *,
        rho: npt.ArrayLike | None = None,
        max_running: npt.ArrayLike | None = None,
        evict_bytes: npt.ArrayLike | None = None,
        compact_bytes: npt.ArrayLike | None = None,
        generation: npt.ArrayLike | None = None,
    ) -> None:
        """Act on all workers; each argument has shape ``(W,)`` or is one number for all.

        ``rho`` (NaN: as it is) is clipped to [1, rho_max], ``max_running`` (-1: as it is) to [4, 1024]; a changed
        one raises the worker's generation unless ``generation`` (-1: as it is) sets it. ``evict_bytes`` starts
        swap-outs of idle sessions, ``compact_bytes`` moves at most so much; 0 or NaN: nothing.
        """
        orders = np.full((5, self.workers), math.nan)
        for row, given in zip(orders, (rho, max_running, evict_bytes, compact_bytes, generation), strict=True):
            if given is not None:
                row[:] = given
        obey(self.state, orders, self.config.rho_max)

    def advance(self, step_s: float = STEP_S) -> None:
        """Let ``step_s`` seconds pass; ValueError unless it is a positive multiple of the sub-step."""
        count = round(step_s / self.config.substep_s)
        if count < 1 or abs(count * self.config.substep_s - step_s) > 1e-9:
            raise ValueError(f"step of {step_s} s: expected a multiple of the sub-step {self.config.substep_s} s")
        advance(self.state, count)
        self._last_step_s = step_s

    def metrics(self) -> F8:
        """float64 [W, len(METRICS)]: the rows of a NodeSample, nothing missing but gauges without a subject
        (mean iteration time when none ran, expected return when nothing is idle)."""
        out = self._constants.copy()
        gauges(self.state, self._last_step_s, out)
        return out

    def effects(self) -> Effects:
        """Effects since the last call of this method (or the start)."""
        worker = self.state.worker
        found = Effects(
            evict_started_bytes=worker["e_started"].copy(),
            evicted_bytes=worker["e_evicted"].copy(),
            loaded_bytes=worker["e_loaded"].copy(),
            compacted_bytes=worker["e_compacted"].copy(),
            groups_freed=worker["e_groups"].astype(np.int64),
            pause_us=worker["e_pause_us"].copy(),
        )
        for name in ("e_started", "e_evicted", "e_loaded", "e_compacted", "e_groups", "e_pause_us"):
            worker[name] = 0.0
        return found

    def snapshot(self, worker: int) -> Snapshot:
        """Blocks by state and idle sessions of one worker."""
        row = self.state.worker[worker]
        rows = np.zeros((int(row["n_idle"]), 6))
        idle_sessions(self.state, worker, self.t_s, rows)
        idle = tuple(
            IdleSession(int(q), int(blocks), since, back, bool(copied), bool(pinned))
            for q, blocks, since, back, copied, pinned in rows.tolist()
        )
        bpg = int(row["bpg"])
        at, end = int(row["group_at"]), int(row["group_at"]) + int(row["groups"])
        full = np.uint64(2**bpg - 1)
        groups = self.state.group[at:end]
        used = int(row["mapped"]) * bpg - int(row["free"])
        return Snapshot(
            blocks_live=used - int(row["idle_blocks"]),
            blocks_idle=int(row["idle_blocks"]),
            blocks_free=int(row["free"]),
            blocks_in_transfer=sum(one.blocks for one in idle if self.state.sequence[one.sequence]["lane"] >= 0),
            groups_mapped=int(row["mapped"]),
            groups_empty=int(((groups["free"] == full) & (groups["mapped"] == 1)).sum()),
            idle=idle,
        )

    def owners(self, worker: int) -> tuple[I8, npt.NDArray[np.uint8]]:
        """Who holds each block of one worker: int64 [groups x blocks per group], a sequence's number, -1 for free, -2
        for a block of a group that is not mapped; and uint8 alike, 1 where a transfer pins the block."""
        row = self.state.worker[worker]
        out = np.empty(int(row["groups"] * row["bpg"]), np.int64)
        pinned = np.empty(len(out), np.uint8)
        owners(self.state, worker, out, pinned)
        return out, pinned

    def relocate(self, worker: int, moves: I8) -> int:
        """Re-point int64 [n, 2] (source, destination) blocks of one worker and give emptied groups back to the card;
        the groups freed. ValueError, with nothing changed, for a source that nobody holds or a transfer pins and for
        a destination that is not free."""
        held, pinned = self.owners(worker)
        inside = (moves >= 0).all() and (moves < len(held)).all()
        if not inside or len(np.unique(moves)) != moves.size:
            raise ValueError(f"{len(moves)} moves on {len(held)} blocks: expected each block once and inside")
        sources, destinations = moves[:, 0], moves[:, 1]
        wrong = (held[sources] < 0) | (pinned[sources] != 0) | (held[destinations] != FREE)
        if wrong.any():
            at = int(np.flatnonzero(wrong)[0])
            raise ValueError(f"move {at}, {moves[at].tolist()}: source not held or pinned, or destination not free")
        return int(relocate(self.state, worker, np.ascontiguousarray(moves), held[sources]))

    def results(self) -> Results:
        """What became of every request so far."""
        card = self.state.card
        worker = self.state.worker
        steps = max(1, self.substeps)
        return Results.from_records(
            self.state.request,
            np.concatenate([table.session for table in self._tables]),
            duration_s=self.t_s,
            hbm_utilisation=card["utilisation"] / steps,
            hbm_utilisation_idle=card["utilisation_idle"] / steps,
            output_tokens=worker["output_tokens"].copy(),
            recomputed_tokens=worker["recomputed"].copy(),
            preemptions=worker["preemptions"].copy(),
            oom=worker["oom"].copy(),
        )

    def _constant_columns(self) -> F8:
        out = np.full((self.workers, len(METRICS)), math.nan)
        worker, card = self.state.worker, self.state.card[self.card_of]
        spec, models = self.config.card_spec(), self.config.model_specs()
        reference = [reference_tokens_per_s(coefficients(spec.name, model.name)) for model in models]
        for name, value in {
            "hbm_bytes": card["hbm"], "card_kv_capacity_bytes": card["capacity"], "q0_bytes": worker["q0"],
            "weights_bytes": worker["weights"], "block_bytes": worker["block_bytes"],
            "page_group_bytes": worker["group_bytes"], "kv_bytes_per_token": worker["kv_token_bytes"],
            "host_capacity_bytes": card["host_capacity"], "link_bytes_per_s": card["link"],
            "reference_tokens_per_s": np.full(self.workers, float(np.mean(reference))),
        }.items():  # fmt: skip
            out[:, COLUMN[name]] = value
        return out
