"""The state of a fresh fleet: records filled from settings and request tables."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from loadgen.engine.calibration import coefficients, prefill_tokens_per_s
from loadgen.engine.records import (
    BINS,
    CARD,
    CHUNK,
    GROUP,
    LANES,
    MAX_BATCH,
    REQUEST,
    SEQUENCE,
    WORKER,
    Reason,
    Records,
    State,
)
from loadgen.engine.specs import FleetConfig
from loadgen.requests import RequestTable
from schemas.classes import DEFAULT_LIMITS, ClassLimits, ServiceClass
from schemas.identity import STEP_S
from services.errors import UserError

PREFETCH_EVERY_S = 1.0
TIMEOUT_EVERY_S = 0.5
SPARE_SHARE = 0.1
"""Of Q0: what a worker below its share keeps mapped and empty beside a neighbour in need, at most."""
FIRST_THINK_S = (30.0, 10.0, 5.0, 10.0, 60.0)
"""What is expected of a session before any came back, by class; learned from then on."""


def _limits(config: FleetConfig) -> list[ClassLimits]:
    return [config.limits.get(kind, DEFAULT_LIMITS[kind]) for kind in ServiceClass]


def _requests(config: FleetConfig, tables: Sequence[RequestTable]) -> tuple[Records, Records, list[int]]:
    """REQUEST [N], SEQUENCE [M] and where each worker's requests start (one more than workers)."""
    starts = [0]
    for table in tables:
        starts.append(starts[-1] + len(table))
    models = config.model_specs()
    limits = _limits(config)
    request = np.zeros(starts[-1], REQUEST)
    owner: list[int] = []
    for w, table in enumerate(tables):
        rows = request[starts[w] : starts[w + 1]]
        context = models[w % config.workers_per_card].context_tokens
        kinds = table.service_class.astype(np.int64)
        base = np.array([one.ttft_base_s for one in limits])[kinds]
        token = np.array([one.ttft_per_token_s for one in limits])[kinds]
        rows["arrival"] = table.arrival_s
        rows["think"] = table.think_s
        rows["prompt"] = table.prompt_tokens
        rows["output"] = table.output_tokens
        rows["cached"] = table.cached_tokens
        rows["klass"] = kinds
        room = context - table.prompt_tokens
        default = np.array([one.default_max_tokens for one in limits])[kinds]
        asked = np.where(table.max_tokens > 0, table.max_tokens, default)
        rows["max_tokens"] = np.maximum(np.minimum(asked, room), table.output_tokens)
        rows["ttft_limit"] = base + token * (table.prompt_tokens - table.cached_tokens)
        rows["tpot_limit"] = np.array([one.tpot_s for one in limits])[kinds]
        rows["completion_limit"] = np.array([one.completion_s for one in limits])[kinds]
        rows["patience"] = np.array([one.timeout_factor for one in limits])[kinds] * rows["ttft_limit"]
        rows["next"] = np.where(table.next_turn >= 0, table.next_turn + starts[w], -1)
        rows["worker"] = w
        rows["expected"] = math.nan if table.expected_think_s is None else table.expected_think_s
        rows["reason"] = np.where(table.output_tokens > room, int(Reason.TOO_LONG), 0)
        first = np.isfinite(table.arrival_s)
        numbers = np.full(len(table), -1, np.int64)
        numbers[first] = len(owner) + np.arange(int(first.sum()))
        owner.extend([w] * int(first.sum()))
        for i in np.flatnonzero(table.next_turn >= 0):  # later turns follow their session's first
            numbers[table.next_turn[i]] = numbers[i]
        if (numbers < 0).any():
            row = int(np.flatnonzero(numbers < 0)[0])
            raise ValueError(f"request {row} of worker {w}: no arrival and no turn before it")
        rows["seq"] = numbers
    for name in ("first_token", "finish", "wait"):
        request[name] = math.nan
    for name in ("q_prev", "q_next"):
        request[name] = -1
    sequence = np.zeros(len(owner), SEQUENCE)
    for name in ("head", "tail", "lane", "x_prev", "x_next", "l_prev", "l_next", "h_prev", "h_next"):
        sequence[name] = -1
    sequence["worker"] = owner
    order = np.arange(len(request))[np.isfinite(request["arrival"])]
    sequence["request"][request["seq"][order]] = order
    sequence["klass"][request["seq"][order]] = request["klass"][order]
    return request, sequence, starts


def _cards(config: FleetConfig) -> Records:
    spec = config.card_spec()
    models = config.model_specs()
    card = np.zeros(config.cards, CARD)
    card["hbm"] = spec.hbm_bytes
    card["capacity"] = config.kv_capacity_bytes()
    card["weights"] = sum(model.weights_bytes for model in models)
    card["runtime"] = spec.runtime_reserve_bytes * len(models)
    card["slack"] = spec.slack_bytes
    card["reserve"] = config.reserve_bytes
    card["host_capacity"] = spec.hbm_bytes if config.host_bytes_per_card is None else config.host_bytes_per_card
    card["link"] = spec.link_bytes_per_s if config.link_bytes_per_s is None else config.link_bytes_per_s
    card["hbm_rate"] = spec.hbm_bytes_per_s
    card["substep"] = config.substep_s
    card["restart_s"] = config.restart_s
    card["first"] = np.arange(config.cards) * config.workers_per_card
    card["last_mapper"] = card["first"]
    card["workers"] = config.workers_per_card
    card["guard"] = int(config.guard)
    card["timeouts"] = int(config.client_timeouts)
    card["control_every"] = max(1, round(STEP_S / config.substep_s))
    card["prefetch_every"] = max(1, round(PREFETCH_EVERY_S / config.substep_s))
    card["timeout_every"] = max(1, round(TIMEOUT_EVERY_S / config.substep_s))
    if not 0.0 <= config.transfer_failures <= 0.5:
        raise UserError(f"transfer_failures {config.transfer_failures}: expected 0 to 0.5")
    card["failures"] = config.transfer_failures
    card["silent"] = int(config.silent_ends)
    card["h_head"] = -1
    card["h_tail"] = -1
    return card


def _worker_row(row: Records, config: FleetConfig, place: int) -> None:
    """Fill what the settings say about the ``place``-th worker of a card."""
    spec, model, mode = config.card_spec(), config.model_specs()[place], config.mode
    share = config.worker_shares()[place]
    block_bytes = model.block_bytes(config.block_tokens)
    bpg = model.blocks_per_group(config.block_tokens)
    if not 1 <= bpg <= 64:
        raise ValueError(f"{bpg} blocks of {config.block_tokens} tokens in a page group: expected 1 to 64")
    capacity = config.kv_capacity_bytes()
    row["kv_token_bytes"] = model.kv_bytes_per_token
    row["block_bytes"] = block_bytes
    row["group_bytes"] = model.group_bytes
    row["weights"] = model.weights_bytes
    row["q0"] = capacity * share
    row["q0_net"] = max(float(model.group_bytes), (capacity - mode.air_bag_bytes) * share)
    row["map_s"] = 0.0 if mode.admission == "physical" else spec.map_page_s * 2 * model.layers
    row["unmap_s"] = 0.0 if mode.admission == "physical" else spec.unmap_page_s * 2 * model.layers
    row["guard_s"] = config.guard_s
    row["premap_s"] = row["map_s"] * config.premapped_groups
    row["credit"] = row["premap_s"]
    row["load_patience"] = mode.load_patience
    row["overhead"] = config.overhead_s
    times = coefficients(spec.name, model.name)
    for name, value in {
        "gemm_floor": times.gemm_floor, "gemm_sequence": times.gemm_sequence, "gemm_base": times.gemm_base,
        "gemm_token": times.gemm_token, "decode_base": times.decode_base,
        "decode_sequence": times.decode_sequence, "decode_kv": times.decode_kv_token,
        "prefill_base": times.prefill_base, "prefill_token": times.prefill_token,
        "prefill_context": times.prefill_token_context, "act_base": model.activation_base_bytes,
        "act_token": model.activation_token_bytes, "act_sequence": model.activation_sequence_bytes,
    }.items():  # fmt: skip
        row[name] = value
    row["activation"] = model.activation_base_bytes
    row["prefill_rate"] = prefill_tokens_per_s(times, config.overhead_s) / config.workers_per_card
    row["by_deadline"] = int(mode.order == "deadline")
    row["sheds"] = int(mode.shed)
    row["capped"] = int(mode.running_cap)
    row["watermark"] = int(mode.watermark)
    row["expects"] = int(mode.reservation == "expected")
    row["returns"] = ("median", "table", "oracle").index(mode.returns)
    row["rho"] = 1.0
    row["next_timeout"] = math.inf
    # Without the guard an engine may map past the card's HBM: that is what the check is for.
    row["groups"] = math.ceil(spec.hbm_bytes / model.group_bytes)
    row["quota_groups"] = row["groups"]
    row["bpg"] = bpg
    row["block_tokens"] = config.block_tokens
    physical = mode.admission == "physical"
    row["physical"] = int(physical)
    room = capacity - (config.reserve_bytes if config.workers_per_card > 1 else 0.0)
    alone = physical or config.workers_per_card == 1
    row["premapped"] = int(row["q0_net"] / model.group_bytes) if alone else 0
    row["pool"] = bpg * (row["premapped"] if physical else int(room / model.group_bytes))
    row["spare"] = bpg * min(config.premapped_groups, math.ceil(SPARE_SHARE * row["q0"] / model.group_bytes))
    row["offload"] = int(mode.offload)
    row["prefetch"] = int(mode.prefetch and not physical)
    row["page_aware"] = int(mode.page_aware)
    row["batch_tokens"] = config.batch_tokens
    row["max_preemptions"] = config.max_preemptions
    row["max_retries"] = config.max_retries
    row["max_running"] = min(config.max_running, MAX_BATCH)
    row["cap"] = row["max_running"]
    for name in ("chunk_free", "q_head", "q_tail", "q_late", "l_head", "l_tail"):
        row[name] = -1


def build(config: FleetConfig, tables: Sequence[RequestTable]) -> State:
    """All arrays of a fleet at time 0; ValueError when the tables are not one per worker."""
    workers = config.cards * config.workers_per_card
    if len(tables) != workers:
        raise ValueError(f"{len(tables)} request tables for {workers} workers")
    request, sequence, starts = _requests(config, tables)
    worker = np.zeros(workers, WORKER)
    firsts: list[int] = []
    groups = chunks = 0
    ends = np.cumsum(np.bincount(sequence["worker"], minlength=workers))
    for w in range(workers):
        row = worker[w]
        _worker_row(row, config, w % config.workers_per_card)
        row["card"] = w // config.workers_per_card
        row["request_at"], row["request_end"] = starts[w], starts[w + 1]
        arrival = request["arrival"][starts[w] : starts[w + 1]]
        order = np.argsort(arrival, kind="stable")[: int(np.isfinite(arrival).sum())]
        row["seq_at"], row["seq_end"] = (ends[w - 1] if w else 0), ends[w]  # numbered worker by worker
        row["first_at"] = len(firsts)
        firsts.extend((order + starts[w]).tolist())
        row["first_end"] = len(firsts)
        row["group_at"] = row["freed_last"] = groups
        row["chunk_at"] = row["chunk_new"] = chunks
        groups += int(row["groups"])
        chunks += int(row["groups"]) * int(row["bpg"])
        row["chunk_end"] = chunks
    limits = _limits(config)
    return State(
        request=request,
        sequence=sequence,
        worker=worker,
        card=_cards(config),
        group=np.zeros(groups, GROUP),
        chunk=np.zeros(chunks, CHUNK),
        open=np.zeros((workers, int(worker["groups"].max()) // 64 + 1), np.uint64),
        first=np.array(firsts, np.int64),
        heap_t=np.zeros(len(request)),
        heap_r=np.zeros(len(request), np.int64),
        dec_request=np.zeros((workers, MAX_BATCH), np.int64),
        dec_next=np.zeros((workers, MAX_BATCH)),
        pre_request=np.zeros((workers, MAX_BATCH), np.int64),
        scratch=np.zeros((workers, MAX_BATCH), np.int64),
        mark=np.zeros(groups, np.int64),
        sizes=np.zeros((workers, 65), np.int64),
        pick=np.zeros(len(sequence), np.int64),
        score=np.zeros(len(sequence)),
        lane=np.full((config.cards, LANES, 2), -1, np.int64),
        ttft=np.zeros((workers, BINS)),
        tpot=np.zeros((workers, BINS)),
        swap_allowed=np.array([int(one.swap_allowed) for one in limits], np.int64),
        shed_margin=np.array([one.shed_margin for one in limits]),
        idle_before=np.array([one.idle_before_evict_s for one in limits]),
        think=np.tile(np.array(FIRST_THINK_S), (workers, 1)),
        finished=np.zeros((workers, len(limits), 3)),
    )
