"""One run of the reclaim benchmark: engines over a card's pools, or over the two references' counts of blocks."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from loadgen.bench.reclaim_arena import CountArena, PoolArena, Share
from loadgen.bench.reclaim_card import IDLE_LIMIT_S, Card
from loadgen.bench.reclaim_engine import PREFILL_TOKENS, SUBSTEP_S, Arena, Engine, Memory
from loadgen.bench.reclaim_methods import HBM_SHARE, Account, Clocks, Costs, Host, Method, Want
from loadgen.bench.reclaim_tenants import Demand, Results, TenantSpec
from loadgen.engine.calibration import coefficients
from loadgen.engine.specs import CARDS, MODELS, CardSpec, FleetConfig, ModelSpec
from services.actuator.memory.geometry import Geometry

F8 = NDArray[np.float64]

CARD: Final = "H200-141G"
"""Four engines with their weights do not fit on an A100; mapping and link are charged at the A100's costs."""
MODEL: Final = "Llama-3.1-8B"
WARM_UP_S: Final = 60.0
IDLE_CYCLE_S: Final = 0.02
GIVEN_BYTES: Final = 10e9
"""What a tenant is to get when it becomes the busy one."""
HOST_SHARE: Final = 1.0
"""Host tier over the card's HBM."""


class Setup:
    """The card, its costs, and how much KV it has room for."""

    def __init__(self, specs: tuple[TenantSpec, ...], reserve_groups: int) -> None:
        self.specs = specs
        self.card: CardSpec = CARDS[CARD]
        self.model: ModelSpec = MODELS[MODEL]
        config = FleetConfig(card=CARD, model=MODEL, workers_per_card=len(specs))
        self.capacity_groups = int(config.kv_capacity_bytes() // self.model.group_bytes)
        self.blocks_per_group = self.model.blocks_per_group()
        self.geometry = Geometry(
            block_bytes=self.model.block_bytes(), blocks_per_group=self.blocks_per_group, groups=self.capacity_groups
        )
        self.costs = Costs(
            copy_bytes_per_s=0.5 * HBM_SHARE * self.card.hbm_bytes_per_s, group_bytes=self.model.group_bytes
        )
        self.reserve_groups = reserve_groups
        self.host_tokens = HOST_SHARE * self.card.hbm_bytes / self.model.kv_bytes_per_token


@dataclasses.dataclass(frozen=True, eq=False)
class Run:
    """What one run gave; a reference has results alone. Arrays are per sub-step after the warm-up, float64 [k]."""

    results: list[Results]
    wants: list[Want] = dataclasses.field(default_factory=list)
    """In the order of asking; those that were never met included."""
    account: Account = dataclasses.field(default_factory=Account)
    mapping_s: float = 0.0
    """In which a group was being mapped."""
    mapped: F8 = dataclasses.field(default_factory=lambda: np.zeros(0))
    """All mapped groups, the reserves included, over the fewest that could hold the blocks."""
    unreserved: F8 = dataclasses.field(default_factory=lambda: np.zeros(0))
    """The same without the reserves."""
    in_use: F8 = dataclasses.field(default_factory=lambda: np.zeros(0))
    """The same for groups with a block in them alone."""
    stranded: F8 = dataclasses.field(default_factory=lambda: np.zeros(0))
    """Free blocks of groups in use over all blocks of these."""


class Reference:
    """Memory without groups: static shares, or one share for all (reclaim_engine.Memory)."""

    def __init__(self, engines: list[Engine], arenas: list[CountArena], setup: Setup, host: Host) -> None:
        self._engines, self._arenas, self._host = engines, arenas, host
        self._clocks = Clocks(setup.costs)
        self._token_bytes = setup.model.kv_bytes_per_token

    def find(self, tenant: Engine, blocks: int, now: float) -> bool:
        """Idle KV of whoever shares the memory goes, least recently used first."""
        share = self._arenas[tenant.number].share
        while share.capacity_blocks - share.used_blocks < blocks:
            oldest = [
                (next(iter(engine.idle.values())).since_s, engine.number)
                for engine in self._engines
                if engine.idle and self._arenas[engine.number].share is share
            ]
            if not oldest:
                return False
            number = min(oldest)[1]
            session, idle = self._engines[number].idle.popitem(last=False)
            self._arenas[number].drop(session)
            self._clocks.swapped_out(now, self._host.put(session, idle.tokens) * self._token_bytes)
        return True

    def away_tokens(self, session: int) -> int:
        return self._host.has(session)

    def load(self, now: float, session: int) -> float:
        return self._clocks.loaded(now, self._host.has(session) * self._token_bytes)

    def step(self, now: float) -> None:
        """Room for the heads of the queues; idle KV of long ago goes."""
        for engine, arena in zip(self._engines, self._arenas, strict=True):
            for session in engine.expired(now - IDLE_LIMIT_S):
                arena.drop(session)
            while engine.wants_admission():
                if not self.find(engine, engine.needed(engine.waiting[0]) + engine.headroom(), now):
                    break
                before = len(engine.waiting)
                engine.admit(now, self)
                if len(engine.waiting) == before and not self.find(
                    engine, engine.needed(engine.waiting[0]) + engine.headroom(), now
                ):
                    break


def run_method(setup: Setup, asked: Demand, method: Method, order: str, seconds: float, check_every: int = 0) -> Run:
    """One method over one allocation order; ``check_every`` sub-steps the accounts are verified."""
    arenas = [PoolArena(setup.geometry, order) for _ in setup.specs]
    engines = _engines(setup, asked, arenas)
    host = Host(setup.host_tokens)
    card = Card(
        engines, arenas, method, setup.costs, setup.capacity_groups, setup.reserve_groups,
        setup.model.kv_bytes_per_token, host,
    )  # fmt: skip
    shifts = list(asked.shifts)
    want_groups = setup.geometry.groups_for(-(-int(GIVEN_BYTES) // setup.geometry.block_bytes))
    rows: list[tuple[float, ...]] = []
    cycle_s, steps = IDLE_CYCLE_S, round(seconds / SUBSTEP_S)
    for k in range(steps):
        now = k * SUBSTEP_S
        for engine in engines:
            engine.arrive(now)
        while shifts and shifts[0][0] <= now:
            card.shift(shifts.pop(0)[1], want_groups, now)
        card.step(now, cycle_s)
        for engine in engines:
            engine.admit(now, card)
        cycle_s = _iterate(engines, now, card) or IDLE_CYCLE_S
        if check_every and k % check_every == 0:
            card.check()
        if now >= WARM_UP_S:
            used = sum(arena.used_groups() for arena in arenas)
            mapped = sum(arena.mapped_groups() for arena in arenas)
            held = sum(arena.occupied() for arena in arenas)
            floor = sum(setup.geometry.groups_for(arena.occupied()) for arena in arenas)
            if floor:
                counts = (mapped + sum(card.reserve), mapped, used)
                rows.append((*(count / floor for count in counts), 1.0 - held / (used * setup.blocks_per_group)))
    for engine in engines:
        engine.end(seconds)
    columns = np.array(rows).reshape(-1, 4).T
    wants = sorted(card.done + card.wants, key=lambda want: want.asked_s)
    return Run([engine.results for engine in engines], wants, card.account, card.clocks.map.busy_s, *columns)


def run_reference(setup: Setup, asked: Demand, shares: tuple[float, ...] | None, seconds: float) -> Run:
    """Static ``shares`` of the capacity (sum 1), or None: one memory for all, packed perfectly."""
    capacity = setup.capacity_groups * setup.blocks_per_group
    if shares:
        arenas = [CountArena(Share(int(share * capacity))) for share in shares]
    else:
        whole = Share(capacity)
        arenas = [CountArena(whole) for _ in setup.specs]
    engines = _engines(setup, asked, arenas)
    reference = Reference(engines, arenas, setup, Host(setup.host_tokens))
    for k in range(round(seconds / SUBSTEP_S)):
        now = k * SUBSTEP_S
        for engine in engines:
            engine.arrive(now)
        reference.step(now)
        _iterate(engines, now, reference)
    for engine in engines:
        engine.end(seconds)
    return Run([engine.results for engine in engines])


def _engines(setup: Setup, asked: Demand, arenas: Sequence[Arena]) -> list[Engine]:
    timing = coefficients(CARD, MODEL)
    return [
        Engine(number, spec, timing, arenas[number], asked.sessions[number]) for number, spec in enumerate(setup.specs)
    ]


def _iterate(engines: list[Engine], now: float, memory: Memory) -> float:
    """One sub-step of all engines, which take turns on the GPU: the seconds of a cycle, 0 when all are at rest."""
    prefilling = [engine.prefills(now) for engine in engines]
    tokens = PREFILL_TOKENS / max(sum(prefilling), 1)
    decode_s = sum(engine.iteration_s(0.0) for engine in engines)
    for engine in engines:
        engine.decode_s = decode_s
    each_s = [engine.iteration_s(tokens) for engine in engines]
    cycle_s = sum(each_s)
    for engine, own_s in zip(engines, each_s, strict=True):
        if own_s:
            engine.advance(now, now + SUBSTEP_S, SUBSTEP_S / cycle_s, tokens, memory)
    return cycle_s
