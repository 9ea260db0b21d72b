"""What it brings and costs to let a long-tail model's weights leave a shared card: both sides on the same requests.

One card, a busy model beside one that few ask for. On one side the second model's weights stay; on the other the
actuator's rule (``services.actuator.cold_weights``) sends them off and calls them back, with every cost the emulated
engine knows: copies over the card's link, room that a full neighbour has to give up first, requests that wait.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from loadgen.bench.engine import chat_table
from loadgen.engine.fleet import Fleet
from loadgen.engine.records import Phase, Reason, Weights
from loadgen.engine.report import Results
from loadgen.engine.specs import EngineMode, FleetConfig
from loadgen.load import tables_at
from loadgen.workload import builtin
from schemas.classes import ServiceClass
from schemas.engine import SnapshotReply
from schemas.identity import STEP_S
from schemas.metrics import COLUMN
from services.actuator.cold_weights import CardWeights, ColdWeightSettings, Plan, Seat
from services.actuator.effects import DEFAULTS

CARD: Final = "A100-80G"
MODELS: Final = ("Llama-3.1-8B", "Qwen2.5-14B")
"""The busy one and the one that few ask for."""
SHARES: Final = (0.8, 0.2)
BUSY, RARE = 0, 1
WORKLOAD: Final = "agent"
"""Of the busy model: long conversations, whose KV between turns fills what memory there is."""
RARE_EVERY_S: Final = 300.0
"""Mean time between requests of the other, in conversations of two turns on average."""
HOST_BYTES: Final = 512e9
"""Host pool of the card (article 2): a smaller one that is full of sessions has no room for weights."""
RHO: Final = 1.6
CONTEXT_TOKENS: Final = 131_072
SETTINGS: Final = ColdWeightSettings(enabled=True)


@dataclasses.dataclass
class Lent:
    """What the rule did on one card."""

    sleeps: int = 0
    refused: int = 0
    """Wakings for which no room came in time."""
    asleep_steps: int = 0
    hold_back_steps: int = 0
    """Steps in which the neighbour had to give room up."""


class Driver:
    """The rule on an emulated card, a step at a time, as the actuator runs it on a live one."""

    def __init__(self, fleet: Fleet, settings: ColdWeightSettings = SETTINGS) -> None:
        self.fleet = fleet
        self.ledger = CardWeights(settings)
        self.lent = Lent()
        self._full_bytes = float(fleet.state.card[0]["capacity"])

    def step(self) -> None:
        """Look, order, let two seconds pass."""
        fleet, ledger, now_s = self.fleet, self.ledger, self.fleet.t_s
        rows = fleet.metrics()
        seats = [self._seat(w, rows) for w in range(fleet.workers)]
        ledger.see(seats, now_s)
        for worker in ledger.moving():
            state = fleet.weights(int(worker)).state
            ledger.receipt(worker, state in (Weights.AWAKE, Weights.ASLEEP), "", now_s)
        plan = ledger.plan(seats, self._full_bytes, now_s)
        self.lent.refused += len(plan.words)
        for order in plan.orders:
            answer = fleet.set_weights(int(order.worker), order.on_card)
            if answer > 1:
                ledger.refused(order.worker, "busy", now_s)
            else:
                self.lent.sleeps += not order.on_card
        self._quotas(rows, plan)
        self.lent.asleep_steps += fleet.weights(RARE).state == Weights.ASLEEP
        fleet.advance(STEP_S)

    def _quotas(self, rows: np.ndarray, plan: Plan) -> None:
        """Hard quotas, and movements that empty page groups where room is to be given up."""
        held = np.maximum(rows[:, COLUMN["kv_mapped_bytes"]], rows[:, COLUMN["floor_bytes"]])
        capacity = self._full_bytes + self.ledger.extra_bytes
        hard = capacity - (held.sum() - held) - DEFAULTS.reserve_bytes
        shrink = np.array([plan.shrink_bytes.get(str(w), 0.0) for w in range(self.fleet.workers)])
        idle = rows[:, COLUMN["kv_idle_bytes"]]
        holes = rows[:, COLUMN["kv_mapped_bytes"]] - rows[:, COLUMN["kv_bytes"]]
        closes = (shrink > 0) & ((holes >= shrink) | (idle < rows[:, COLUMN["page_group_bytes"]]))
        self.lent.hold_back_steps += bool(plan.shrink_bytes)
        self.fleet.command(
            hard_bytes=np.where(capacity < self.fleet.state.card[0]["capacity"], hard, np.inf),
            compact_bytes=np.where(closes, np.minimum(holes, DEFAULTS.compact_limit_bytes), 0.0),
            evict_bytes=np.where((shrink > 0) & ~closes, np.minimum(shrink, idle), 0.0),
        )

    def _seat(self, w: int, rows: np.ndarray) -> Seat:
        def metric(name: str) -> int:
            return int(np.nan_to_num(rows[w, COLUMN[name]]))

        weights = self.fleet.weights(w)
        kv, idle, mapped = metric("kv_bytes"), metric("kv_idle_bytes"), metric("kv_mapped_bytes")
        said = SnapshotReply(
            0, RHO, metric("quota_soft_bytes"), metric("quota_hard_bytes"), metric("max_running"), kv - idle, idle, 0,
            0, 0, 0, mapped, mapped - kv, metric("floor_bytes"), 0, waiting=metric("waiting"),
            weights_bytes=weights.bytes, weights_on_card=weights.state != Weights.ASLEEP, quiet_s=weights.quiet_s,
        )  # fmt: skip
        return Seat(str(w), w == RARE, True, True, said, mapped, metric("floor_bytes"), metric("page_group_bytes"))


@dataclasses.dataclass(frozen=True)
class Case:
    """What is compared on both sides."""

    name: str
    offload: bool
    """Whether the engine copies KV to the host pool, where a session that was dropped is found again."""
    rare: ServiceClass
    """Of the requests to the model that sleeps: it says how long their first token may take."""


CASES: Final = (
    Case("no_kv_offload_rare_chat", False, ServiceClass.CHAT),
    Case("no_kv_offload_rare_agent", False, ServiceClass.AGENT),
    Case("kv_offload_rare_chat", True, ServiceClass.CHAT),
)


def bench_cold_weights(
    seeds: Sequence[int] = (0, 1, 2), duration_s: float = 3600.0, load: float = 0.4
) -> dict[str, Any]:
    """Each case's figures of both sides, pooled over ``seeds``, and their ratios (asleep over awake). ``load``: times
    the workload's own rate."""
    return {
        "card": CARD, "models": MODELS, "shares": SHARES, "workload": WORKLOAD, "load": load, "rho": RHO,
        "rare_every_s": RARE_EVERY_S, "seeds": list(seeds), "duration_s": duration_s,
        **{case.name: _compare(case, seeds, duration_s, load) for case in CASES},
    }  # fmt: skip


def _compare(case: Case, seeds: Sequence[int], duration_s: float, load: float) -> dict[str, Any]:
    mode = EngineMode(offload=case.offload, order="deadline", shed=True)
    config = FleetConfig(card=CARD, model=MODELS, shares=SHARES, mode=mode, host_bytes_per_card=HOST_BYTES)
    sides: dict[str, list[Results]] = {"awake": [], "asleep": []}
    lent = Lent()
    for seed in seeds:
        workload = builtin(WORKLOAD, duration_s=duration_s, seed=seed).within_context(CONTEXT_TOKENS)
        rare = chat_table(1.0 / RARE_EVERY_S, duration_s, np.random.default_rng(seed))
        rare = dataclasses.replace(rare, service_class=np.full(len(rare), int(case.rare), np.uint8))
        tables = [*tables_at(workload, load, 1, duration_s, seed), rare]
        for name, results in sides.items():
            fleet = Fleet(config, tables)
            fleet.command(rho=RHO)
            driver = Driver(fleet)
            for _ in range(int(duration_s / STEP_S)):
                if name == "asleep":
                    driver.step()
                else:
                    fleet.advance(STEP_S)
            results.append(fleet.results())
            for field in dataclasses.fields(Lent):
                setattr(lent, field.name, getattr(lent, field.name) + getattr(driver.lent, field.name))
    awake, asleep = _figures(sides["awake"]), _figures(sides["asleep"])
    return {
        "busy_goodput_ratio": asleep["busy_goodput_tokens_per_s"] / awake["busy_goodput_tokens_per_s"],
        "card_goodput_ratio": asleep["card_goodput_tokens_per_s"] / awake["card_goodput_tokens_per_s"],
        "sleeps": lent.sleeps, "wakings_refused": lent.refused,
        "asleep_share": lent.asleep_steps * STEP_S / (len(seeds) * duration_s),
        "steps_with_room_to_give": lent.hold_back_steps, "awake": awake, "asleep": asleep,
    }  # fmt: skip


def _figures(results: Sequence[Results]) -> Mapping[str, float]:
    seconds = sum(one.duration_s for one in results)
    worker = np.concatenate([one.worker for one in results])
    good = np.concatenate([one.good for one in results])
    output = np.concatenate([one.output_tokens for one in results])
    phase = np.concatenate([one.phase for one in results])
    reason = np.concatenate([one.reason for one in results])
    ttft = np.concatenate([one.first_token_s - one.arrival_s for one in results])
    came = phase != int(Phase.FUTURE)
    rare, busy = came & (worker == RARE), came & (worker == BUSY)
    lost = np.isin(reason, (int(Reason.CLIENT_TIMEOUT), int(Reason.SHED)))
    first = ttft[rare & np.isfinite(ttft)]
    return {
        "busy_goodput_tokens_per_s": float(output[busy & good].sum()) / seconds,
        "card_goodput_tokens_per_s": float(output[came & good].sum()) / seconds,
        "busy_slo_share": float(good[busy].mean()),
        "busy_recomputed_tokens_per_s": sum(float(one.recomputed_tokens[BUSY]) for one in results) / seconds,
        "busy_preemptions": sum(int(one.preemption_events[BUSY]) for one in results),
        "rare_requests": int(rare.sum()),
        "rare_slo_share": float(good[rare].mean()),
        "rare_lost": int((rare & lost).sum()),
        "rare_ttft_p50_s": float(np.median(first)),
        "rare_ttft_max_s": float(first.max()),
        "oom": sum(int(one.oom.sum()) for one in results),
    }
