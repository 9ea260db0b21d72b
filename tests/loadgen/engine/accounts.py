"""Recounts a fleet's accounts from scratch: what the tests compare the kept sums with."""

from __future__ import annotations

import numpy as np

from loadgen.engine.fleet import Fleet
from loadgen.engine.records import ASLEEP, AWAKE, Phase


def _linked(records: np.ndarray, head: int, link: str) -> list[int]:
    found = []
    while head >= 0:
        found.append(int(head))
        head = records[head][link]
        assert len(found) <= len(records), f"list by {link} has a loop"
    return found


def check_accounts(fleet: Fleet) -> None:
    """Every kept sum equals a recount; every block of a mapped group is free, reserved or held by one sequence."""
    s = fleet.state
    held: dict[int, int] = {}
    for q, seq in enumerate(s.sequence):
        blocks = 0
        for c in _linked(s.chunk, seq["head"], "next"):
            mask, g = int(s.chunk[c]["mask"]), int(s.chunk[c]["group"])
            assert mask, f"sequence {q}: an empty chunk"
            assert held.get(g, 0) & mask == 0, f"group {g}: a block with two owners"
            held[g] = held.get(g, 0) | mask
            blocks += mask.bit_count()
        assert blocks == seq["blocks"], f"sequence {q}: {seq['blocks']} blocks kept, {blocks} counted"
    for c, card in enumerate(s.card):
        rows = np.arange(card["first"], card["first"] + card["workers"])
        mapped_bytes = sum(float(s.worker[w]["mapped"] * s.worker[w]["group_bytes"]) for w in rows)
        assert abs(mapped_bytes - card["mapped_bytes"]) < 1.0, "mapped bytes of the card"
        if card["guard"]:
            assert mapped_bytes <= card["capacity"], "the guard let a card map more than its capacity"
        hosted = _linked(s.sequence, card["h_head"], "h_next")
        host = sum(
            float(s.sequence[q]["host_blocks"] * s.worker[s.sequence[q]["worker"]]["block_bytes"]) for q in hosted
        )
        asleep = s.worker["asleep"][rows]
        weights = s.worker["weights"][rows]
        host += float(weights[asleep != AWAKE].sum())
        assert abs(host - card["host_used"]) < 1.0, f"host tier: {card['host_used']} kept, {host} counted"
        assert card["host_used"] <= card["host_capacity"] + 1.0, "more in the host tier than it holds"
        assert card["asleep"] == (asleep != AWAKE).sum(), "workers that are not awake"
        assert card["weights"] == weights[asleep != ASLEEP].sum(), "weights on the card"
        assert (s.worker["mapped"][rows][asleep == ASLEEP] == 0).all(), "KV of a worker that sleeps"
        with_all = fleet.config.kv_capacity_bytes()
        away = float(weights[asleep == ASLEEP].sum())
        assert card["capacity"] == with_all + away, "capacity grows by exactly the weights that are off the card"
        assert card["n_hosted"] == len(hosted), "sequences in the host tier"
        lanes = [q for lane in range(4) for q in _linked(s.sequence, s.lane[c, lane, 0], "x_next")]
        assert sorted(lanes) == sorted(
            int(q) for q in np.flatnonzero(s.sequence["lane"] >= 0) if s.worker[s.sequence[q]["worker"]]["card"] == c
        ), "transfers in lanes"
    for w in range(fleet.workers):
        _check_worker(fleet, w, held)


def _check_worker(fleet: Fleet, w: int, held: dict[int, int]) -> None:
    s = fleet.state
    worker = s.worker[w]
    bpg, at = int(worker["bpg"]), int(worker["group_at"])
    free = mapped = kept = 0
    for g in range(at, at + int(worker["groups"])):
        mask, aside = int(s.group[g]["free"]), int(s.group[g]["aside"])
        if s.group[g]["mapped"]:
            assert mask ^ aside ^ held.get(g, 0) == 2**bpg - 1, f"group {g}: a block neither free nor reserved nor held"
            assert (mask | aside) & held.get(g, 0) == 0, f"group {g}: a held block is free or reserved"
            assert mask & aside == 0, f"group {g}: a reserved block is free"
            mapped += 1
        else:
            assert mask | aside == 0, f"group {g}: free or reserved blocks in an unmapped group"
            assert g not in held, f"group {g}: held blocks in an unmapped group"
        is_open = (int(s.open[w, (g - at) >> 6]) >> ((g - at) & 63)) & 1
        assert is_open == (mask != 0), f"group {g}: open bit"
        free += mask.bit_count()
        kept += aside.bit_count()
    assert (mapped, free) == (worker["mapped"], worker["free"]), "mapped groups and free blocks"
    assert kept == worker["aside"], "reserved blocks"
    numbers = np.flatnonzero(s.sequence["worker"] == w)
    assert (numbers == np.arange(worker["seq_at"], worker["seq_end"])).all(), "sequences are numbered worker by worker"
    idle = _linked(s.sequence, worker["l_head"], "l_next")
    assert len(idle) == worker["n_idle"]
    assert sum(int(s.sequence[q]["blocks"]) for q in idle) == worker["idle_blocks"], "idle blocks"
    rows = s.request[worker["request_at"] : worker["request_end"]]
    phase = rows["phase"]
    running = (phase >= int(Phase.LOADING)) & (phase <= int(Phase.DECODE))
    assert int((phase == int(Phase.WAITING)).sum()) == worker["q_len"], "requests waiting"
    assert int(running.sum()) == worker["n_dec"] + worker["n_pre"], "requests running"
    assert int(rows["reserved"][running].sum()) == worker["reserved"], "blocks promised to running requests"
    rows = s.sequence[worker["seq_at"] : worker["seq_end"]]
    assert int(((rows["hosted"] == 1) & (rows["blocks"] == 0)).sum()) == worker["n_away"], "sequences away"
    _check_queue(fleet, w)
    ended = int((phase == int(Phase.FINISHED)).sum()), int((phase == int(Phase.REJECTED)).sum())
    assert ended == (worker["finished"], worker["rejected"]), "requests ended"
    assert sum(ended) + worker["q_len"] + int(running.sum()) == worker["arrived"], "requests are conserved"
    decoding = s.dec_request[w, : worker["n_dec"]]
    context = s.request["target"][decoding] + worker["v"] - s.request["v_start"][decoding]
    assert abs(float(context.sum()) - worker["kv_decode"]) < 1e-3 * (1 + len(decoding)), "context of decodes"
    covered = s.sequence["blocks"][s.request["seq"][decoding]] * worker["block_tokens"]
    assert (covered > context - 1e-6).all(), "a decoding request lacks a block"


def _check_queue(fleet: Fleet, w: int) -> None:
    s = fleet.state
    worker = s.worker[w]
    queue = _linked(s.request, worker["q_head"], "q_next")
    assert len(queue) == worker["q_len"], "queue"
    assert queue[::-1] == _linked(s.request, worker["q_tail"], "q_prev"), "queue backwards"
    if worker["by_deadline"]:
        rows = s.request[queue]
        late = rows["late"] == 1
        assert (np.diff(late.astype(int)) >= 0).all(), "the late come last"
        assert worker["q_late"] == (queue[int(late.argmax())] if late.any() else -1), "first of the late"
        waiting = rows[~late & np.isnan(rows["first_token"])]
        assert (np.diff(waiting["deadline"][np.isfinite(waiting["deadline"])]) >= 0).all(), "by deadline"
