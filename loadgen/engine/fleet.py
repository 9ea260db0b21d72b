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

from loadgen.engine import views
from loadgen.engine.build import build
from loadgen.engine.calibration import coefficients, prefill_tokens_per_s, reference_tokens_per_s
from loadgen.engine.gauges import gauges
from loadgen.engine.named import evict_named, prefetch_named
from loadgen.engine.pages import premap
from loadgen.engine.records import Phase, State
from loadgen.engine.relocation import FREE, RESERVED, owners, relocate, reserve, unreserve
from loadgen.engine.report import Results
from loadgen.engine.specs import FleetConfig
from loadgen.engine.stepper import advance, obey, refresh_floors
from loadgen.engine.views import AwaySession, IdleSession, Sessions, Snapshot, WorkerWeights
from loadgen.engine.weights import Answer, call_back, send_off
from loadgen.requests import RequestTable
from schemas.identity import STEP_S
from schemas.metrics import COLUMN, METRICS

__all__ = ["Answer", "AwaySession", "Effects", "Fleet", "IdleSession", "Sessions", "Snapshot", "WorkerWeights"]

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
        hard_bytes: npt.ArrayLike | None = None,
    ) -> None:
        """Act on all workers; each argument has shape ``(W,)`` or is one number for all.

        ``rho`` (NaN: as it is) is clipped to [1, rho_max], ``max_running`` (-1: as it is) to [4, 1024]; a changed
        one raises the worker's generation unless ``generation`` (-1: as it is) sets it. ``evict_bytes`` starts
        swap-outs of idle sessions, ``compact_bytes`` moves at most so much; 0 or NaN: nothing. ``hard_bytes`` (NaN: as
        it is, inf: none) bounds what the worker may map, in whole page groups and beside what the card's account
        allows; empty groups beyond it go back with the next control period, others once they are empty. It raises the
        generation as the others do. Engines with a fixed pool ignore it.
        """
        orders = np.full((6, self.workers), math.nan)
        told = (rho, max_running, evict_bytes, compact_bytes, generation, hard_bytes)
        for row, given in zip(orders, told, strict=True):
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
        (mean iteration time when none ran, expected return when nothing is idle). A card's KV capacity is that of
        now: weights that are off the card make it larger. Q0 stays: what they leave behind is lent, not promised."""
        out = self._constants.copy()
        out[:, COLUMN["card_kv_capacity_bytes"]] = self.state.card["capacity"][self.card_of]
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
        return views.snapshot(self.state, worker, self.t_s)

    def sessions(self, worker: int) -> Sessions:
        """Where the KV of each sequence of one worker is, and what was transferred of it so far."""
        return views.sessions(self.state, worker)

    def away(self, worker: int, within_s: float) -> tuple[AwaySession, ...]:
        """Sessions of one worker in the host tier only whose next turn is expected within ``within_s`` seconds or
        overdue, those nearest to their time first, at most 256."""
        return views.away(self.state, worker, self.t_s, within_s)

    def prefill_tokens_per_s(self, worker: int) -> float:
        """Prompt tokens per second that the worker computes when it has its card to itself and decodes nothing."""
        model = self.config.model_specs()[worker % self.config.workers_per_card]
        times = coefficients(self.config.card_spec().name, model.name)
        return prefill_tokens_per_s(times, self.config.overhead_s)

    def evict_sessions(self, worker: int, sequences: npt.ArrayLike) -> F8:
        """Start swapping out the sequences int64 [n]; float64 [n], the bytes of each that leave the card, 0 where it
        may not go: not an idle session of this worker, in a transfer, its next turn waits, its class forbids it, or
        the host tier is full. ValueError for a number that is no sequence of the fleet."""
        numbers = self._sequences(sequences)
        started = np.zeros(len(numbers))
        evict_named(self.state, worker, numbers, started)
        return started

    def prefetch_sessions(self, worker: int, sequences: npt.ArrayLike) -> F8:
        """Start loading the sequences int64 [n] ahead of their next turn; float64 [n], the bytes of each that come,
        0 where it may not: not this worker's, on the card, in a transfer, not in the host tier, a turn of it is not
        finished, the worker has a queue, or there is no memory that nobody needs. ValueError as above."""
        numbers = self._sequences(sequences)
        started = np.zeros(len(numbers))
        prefetch_named(self.state, worker, numbers, started)
        return started

    def set_weights(self, worker: int, on_card: bool) -> Answer:
        """Start copying the worker's weights to the host, or back; a repeat does nothing. Only a worker without
        requests falls asleep, and only where the host has room; it wakes only where the card has room for its weights
        (:meth:`weights` says what lacks). ValueError for a number that is no worker."""
        if not 0 <= worker < self.workers:
            raise ValueError(f"worker {worker}: expected 0 to {self.workers - 1}")
        order = call_back if on_card else send_off
        return Answer(int(order(self.state, worker)))

    def weights(self, worker: int) -> WorkerWeights:
        """Where the weights of one worker are, and since when nobody asked its model."""
        return views.weights(self.state, worker, self.t_s)

    def owners(self, worker: int) -> tuple[I8, npt.NDArray[np.uint8]]:
        """Who holds each block of one worker: int64 [groups x blocks per group], a sequence's number, -1 for free, -2
        for a block of a group that is not mapped, -3 for a reserved one; and uint8 alike, 1 where a transfer pins the
        block."""
        row = self.state.worker[worker]
        out = np.empty(int(row["groups"] * row["bpg"]), np.int64)
        pinned = np.empty(len(out), np.uint8)
        owners(self.state, worker, out, pinned)
        return out, pinned

    def reserve(self, worker: int, blocks: npt.ArrayLike) -> None:
        """Keep free blocks int64 [n] of one worker for moves: nobody gets them, their groups stay mapped. ValueError,
        with nothing changed, when one is not free, not mapped, not the worker's or given twice."""
        numbers = self._blocks(worker, blocks)
        at = int(reserve(self.state, worker, numbers))
        if at >= 0:
            raise ValueError(f"block {numbers[at]} of worker {worker}, {at + 1} of {len(numbers)}: not free and mapped")

    def unreserve(self, worker: int, blocks: npt.ArrayLike) -> None:
        """Make reserved blocks int64 [n] free again. Those that are not reserved any more, because a move took them
        or a crash unmapped their group, are left alone. ValueError for a block that is not the worker's."""
        unreserve(self.state, worker, self._blocks(worker, blocks))

    def relocate(self, worker: int, moves: I8) -> int:
        """Re-point int64 [n, 2] (source, destination) blocks of one worker and give emptied groups back to the card;
        the groups freed. ValueError, with nothing changed, for a source that nobody holds or a transfer pins and for
        a destination that is neither free nor reserved."""
        held, pinned = self.owners(worker)
        inside = (moves >= 0).all() and (moves < len(held)).all()
        if not inside or len(np.unique(moves)) != moves.size:
            raise ValueError(f"{len(moves)} moves on {len(held)} blocks: expected each block once and inside")
        sources, destinations = moves[:, 0], moves[:, 1]
        open_ = (held[destinations] == FREE) | (held[destinations] == RESERVED)
        wrong = (held[sources] < 0) | (pinned[sources] != 0) | ~open_
        if wrong.any():
            at = int(np.flatnonzero(wrong)[0])
            raise ValueError(f"move {at}, {moves[at].tolist()}: source not held or pinned, or destination not free")
        return int(relocate(self.state, worker, np.array(moves, np.int64, order="C"), held[sources]))

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

    def _sequences(self, sequences: npt.ArrayLike) -> I8:
        """A copy (kernels are compiled for writable arrays), checked against the fleet's range."""
        numbers, count = np.array(sequences, np.int64), len(self.state.sequence)
        wrong = (numbers < 0) | (numbers >= count)
        if numbers.ndim != 1 or wrong.any():
            raise ValueError(f"sequences {numbers[wrong].tolist()}: expected a list of numbers from 0 to {count - 1}")
        return numbers

    def _blocks(self, worker: int, blocks: npt.ArrayLike) -> I8:
        """A copy, checked against the worker's address space."""
        row = self.state.worker[worker]
        numbers, count = np.array(blocks, np.int64), int(row["groups"] * row["bpg"])
        wrong = (numbers < 0) | (numbers >= count)
        if numbers.ndim != 1 or wrong.any():
            raise ValueError(f"blocks {numbers[wrong].tolist()}: expected a list of numbers from 0 to {count - 1}")
        return numbers

    def _constant_columns(self) -> F8:
        out = np.full((self.workers, len(METRICS)), math.nan)
        worker, card = self.state.worker, self.state.card[self.card_of]
        spec, models = self.config.card_spec(), self.config.model_specs()
        reference = [reference_tokens_per_s(coefficients(spec.name, model.name)) for model in models]
        for name, value in {
            "hbm_bytes": card["hbm"], "q0_bytes": worker["q0"],
            "weights_bytes": worker["weights"], "block_bytes": worker["block_bytes"],
            "page_group_bytes": worker["group_bytes"], "kv_bytes_per_token": worker["kv_token_bytes"],
            "host_capacity_bytes": card["host_capacity"], "link_bytes_per_s": card["link"],
            "reference_tokens_per_s": np.full(self.workers, float(np.mean(reference))),
        }.items():  # fmt: skip
            out[:, COLUMN[name]] = value
        return out
