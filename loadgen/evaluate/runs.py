"""One policy on many traces at once: their fleets stand side by side under one control (``loadgen.joint``).

What a policy sees and does is what it would alone; side by side a control step costs a tenth of it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from loadgen.configurations import Configuration, longest_tokens
from loadgen.control import Control
from loadgen.engine.fleet import Fleet
from loadgen.engine.report import Results
from loadgen.evaluate.entrants import Entrant
from loadgen.evaluate.rows import Row, row_of
from loadgen.fleets import tables_for
from loadgen.joint import JointFleet
from loadgen.requests import RequestTable
from schemas.actions import ACTION_COUNT
from schemas.classes import ServiceClass
from schemas.identity import STEP_S


class Block(msgspec.Struct, frozen=True, kw_only=True):
    """Several cards of a configuration, each under a draw of requests of its own: a card is a trace."""

    configuration: Configuration
    """Its fleet has as many cards as there are traces."""
    factor: float
    """Load 1.0 over nominal rates."""
    seed: int
    duration_s: float

    @classmethod
    def of(cls, configuration: Configuration, factor: float, seed: int, cards: int, duration_s: float) -> Block:
        """``cards`` traces of a configuration; the seed tells blocks apart."""
        wide = msgspec.structs.replace(configuration.fleet, cards=cards)
        configuration = msgspec.structs.replace(configuration, fleet=wide)
        return cls(configuration=configuration, factor=factor, seed=seed, duration_s=duration_s)


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """A policy under an admission."""

    entrant: Entrant
    admission: str
    timeouts: bool = True
    """Clients give up without a first token after twice its limit."""


class Task(NamedTuple):
    """A cell on some blocks."""

    cell: Cell
    blocks: tuple[Block, ...]


class Done(NamedTuple):
    """A task's rows and the CPU seconds that it took."""

    rows: list[Row]
    cpu_s: float


def key(cell: Cell, block: Block) -> str:
    """What a block's rows depend on, but for the program: settings, network, configuration, requests."""
    entrant = msgspec.structs.replace(cell.entrant, weights="")
    told = msgspec.json.encode((entrant, cell.entrant.mode(cell.admission), cell.admission, cell.timeouts, block))
    return hashlib.sha256(told).hexdigest()[:20]


def run(task: Task) -> Done:
    """A row for every card of every block."""
    began_s = time.process_time()
    cell, blocks = task
    fleets = [_fleet(cell, block) for block in blocks]
    counts = _act(cell.entrant, JointFleet([fleet for fleet, _ in fleets]), fleets, blocks)
    rows = []
    for (fleet, _), block, actions in zip(fleets, blocks, counts, strict=True):
        results, name = fleet.results(), key(cell, block)
        per_card = fleet.config.workers_per_card
        for card in range(fleet.config.cards):
            names = (cell.entrant.name, cell.admission, cell.timeouts, block.configuration.name)
            row = row_of(
                one_card(results, card, per_card), names, actions[card * per_card : (card + 1) * per_card].sum(axis=0)
            )
            rows.append(msgspec.structs.replace(row, block=block.seed, card=card, key=name))
    return Done(rows, time.process_time() - began_s)


def one_card(results: Results, card: int, per_card: int) -> Results:
    """What became of one card's requests; its workers are numbered from 0."""
    low, high = card * per_card, (card + 1) * per_card
    mine = (results.worker >= low) & (results.worker < high)
    parts: dict[str, Any] = {}
    for field in dataclasses.fields(results):
        whole = getattr(results, field.name)
        if field.name in _PER_CARD:
            parts[field.name] = whole[card : card + 1]
        elif field.name in _PER_WORKER:
            parts[field.name] = whole[low:high]
        elif field.name != "duration_s":
            parts[field.name] = whole[mine]
    return dataclasses.replace(results, **parts | {"worker": parts["worker"] - low})


_PER_CARD: Final = ("hbm_utilisation", "hbm_utilisation_idle")
_PER_WORKER: Final = ("produced_tokens", "recomputed_tokens", "preemption_events", "oom")


def _fleet(cell: Cell, block: Block) -> tuple[Fleet, list[RequestTable]]:
    tables, fleet = _tables(block), block.configuration.fleet
    if cell.entrant.max_tokens is not None:
        tables = [
            promising(table, cell.entrant.max_tokens, longest_tokens(fleet, worker % fleet.workers_per_card))
            for worker, table in enumerate(tables)
        ]
    config = msgspec.structs.replace(fleet, mode=cell.entrant.mode(cell.admission), client_timeouts=cell.timeouts)
    return Fleet(config, tables), tables


def promising(table: RequestTable, max_tokens: int, context_tokens: int) -> RequestTable:
    """The table with another default of max_tokens for all but code completion, which has its own."""
    most = np.minimum(max_tokens, context_tokens - table.prompt_tokens)
    asked = np.where(table.service_class == int(ServiceClass.COPILOT), table.max_tokens, most)
    return dataclasses.replace(table, max_tokens=np.maximum(asked, table.output_tokens))


def _act(
    entrant: Entrant,
    joint: JointFleet,
    fleets: Sequence[tuple[Fleet, list[RequestTable]]],
    blocks: Sequence[Block],
) -> list[NDArray[np.int64]]:
    """Let the time of ``joint`` pass; executed actions int64 [workers, 5] of each fleet."""
    counts = np.zeros((joint.workers, ACTION_COUNT), np.int64)
    steps = round(blocks[0].duration_s / STEP_S)
    if entrant.acts:
        tables = [table for _, of_fleet in fleets for table in of_fleet]
        control = Control(joint, joint.config, tables)
        choose = entrant.rule(joint.rows, [block.seed for block in blocks])
        places = np.arange(joint.workers)
        for step in range(steps):
            seen = control.observe(step)
            executed = control.act(choose(seen), entrant.goal_rho)
            np.add.at(counts, (places, executed), (seen.holds == 0).astype(np.int64))
            joint.advance(STEP_S)
    else:
        for _ in range(steps):
            joint.advance(STEP_S)
    return [counts[at] for at in joint.rows]


def _tables(block: Block) -> list[RequestTable]:
    """The same for every policy; kept, since a process meets a block again and again."""
    name = msgspec.json.encode(block)
    if name not in _kept_tables:
        if len(_kept_tables) >= _KEPT_TABLES:
            _kept_tables.clear()
        _kept_tables[name] = tables_for(block.configuration, block.seed, block.duration_s, block.factor)
    return _kept_tables[name]


_KEPT_TABLES: Final = 128
_kept_tables: Final[dict[bytes, list[RequestTable]]] = {}
