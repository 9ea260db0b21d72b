"""Mooncake JSON lines: timestamp (ms), input_length, output_length, hash_ids of 512-token prompt blocks.

Equal leading ids are a reusable prefix. The file names no sessions; they are read out of the ids: a request
continues the latest earlier one with which it shares its longest prefix, when that prefix is at least half of
the earlier prompt. That takes in conversations (the prompt grows) and several questions about one document
alike: both come back to the same KV. Two things start a session of their own: a shared template (system prompt,
tools), told by more than ``MAX_FORKS`` different continuations, and a second continuation of the same turn.

Reuse across sessions is not replayed; a note says how much there is of both. The think time is what the time
stamps leave after a nominal call (``loadgen.workload.chains``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec
import numpy as np

from loadgen.requests import F8, I8, NO_TURN
from loadgen.traces.assembly import Columns, duration_of, served, workload
from loadgen.traces.errors import BadLines, MalformedLine
from loadgen.traces.fields import MAX_SECONDS, MAX_TOKENS, shown
from loadgen.workload.chains import NOMINAL_PREFILL_TOKENS_PER_S, NOMINAL_TPOT_S
from loadgen.workload.table import Workload
from schemas.classes import ServiceClass

BLOCK_TOKENS: Final = 512
STEP_MS: Final = 3000.0
"""Time stamps of the conversation and toolagent sets step by this much; the synthetic set's do not."""
MAX_FORKS: Final = 32
"""More continuations than one conversation or document gets: a template that unlike clients share."""


class _Line(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int] = []


_DECODER: Final = msgspec.json.Decoder(_Line)
_EXPECTED: Final = {
    "timestamp": f"milliseconds, a number from 0 to {MAX_SECONDS * 1000:,.0f}",
    "input_length": f"a whole number from 0 to {MAX_TOKENS:,}",
    "output_length": f"a whole number from 0 to {MAX_TOKENS:,}",
    "hash_ids": "a list of whole numbers",
}


def read_mooncake(
    lines: Iterable[tuple[int, str]], bad: BadLines, service_class: ServiceClass = ServiceClass.CHAT
) -> Workload:
    """Requests with prefix reuse; those that share a prefix linked to sessions."""
    times_ms: list[float] = []
    prompts: list[int] = []
    outputs: list[int] = []
    ids: list[list[int]] = []
    for number, text in lines:
        try:
            line = _parsed(text)
        except MalformedLine as problem:
            bad.add(number, problem)
            continue
        times_ms.append(line.timestamp)
        prompts.append(line.input_length)
        outputs.append(line.output_length)
        ids.append(line.hash_ids)
    prompt_tokens = np.array(prompts, dtype=np.int64)
    output_tokens = np.array(outputs, dtype=np.int64)
    rows, left_out = served(prompt_tokens, output_tokens, bad)
    at_ms = np.array(times_ms, dtype=np.float64)
    notes = bad.notes()
    backwards = int((np.diff(at_ms[rows]) < 0).sum())
    if backwards:
        notes.append(f"{backwards:,} lines were earlier than the line before them: sorted by timestamp")
    rows = rows[np.argsort(at_ms[rows], kind="stable")]
    spread_ms, step_ms = spread(at_ms[rows])
    if step_ms:
        notes.append(f"time stamps step by {step_ms / 1000:g} s: arrivals spread evenly inside each step")
    at_s = (spread_ms - spread_ms[0]) / 1000.0
    prompt_tokens, output_tokens = prompt_tokens[rows], output_tokens[rows]
    previous, shared, seen = linked([ids[row] for row in rows])
    columns = _chained(at_s, prompt_tokens, output_tokens, previous, shared * BLOCK_TOKENS)
    reusable = np.minimum(seen * BLOCK_TOKENS, prompt_tokens).sum() / prompt_tokens.sum()
    inside = columns.cached_tokens.sum() / prompt_tokens.sum()
    if reusable > 0:
        notes.append(
            f"{reusable:.0%} of prompt tokens repeat an earlier prompt's start; {inside:.0%} within sessions read "
            "from hash_ids, and only those are replayed as reuse"
        )
    return workload(bad.path, "mooncake", columns, service_class, duration_of(at_s), left_out, notes)


def _parsed(text: str) -> _Line:
    try:
        line = _DECODER.decode(text)
    except msgspec.ValidationError as error:
        named = re.search(r"`?\$?\.?(timestamp|input_length|output_length|hash_ids)", str(error))
        column = named[1] if named else "line"
        reason = str(error).split(" - at ")[0]
        expected = _EXPECTED.get(column, "a JSON object with timestamp, input_length, output_length, hash_ids")
        raise MalformedLine(column, f"{shown(text)} ({reason})", expected) from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise MalformedLine("line", f"{shown(text)} ({error})", "a JSON object") from error
    for column, value, high in (
        ("timestamp", line.timestamp, MAX_SECONDS * 1000),
        ("input_length", line.input_length, MAX_TOKENS),
        ("output_length", line.output_length, MAX_TOKENS),
    ):
        if not 0 <= value <= high:
            raise MalformedLine(column, shown(f"{value}"), _EXPECTED[column])
    return line


def spread(at_ms: F8) -> tuple[F8, float]:
    """(rising arrival times in ms, the step found or 0): k requests of one stamp spread over its step.

    ``at_ms`` rises, shape ``(n,)``. The stamps step when all their differences are whole multiples of at least
    a second and several share one; a step is taken as 3 s at most.
    """
    stamps, member, counts = np.unique(at_ms, return_inverse=True, return_counts=True)
    if len(stamps) < 2 or counts.max() < 2 or (stamps != np.rint(stamps)).any():
        return at_ms, 0.0
    step_ms = float(np.gcd.reduce(np.diff(stamps).astype(np.int64)))
    if step_ms < 1000.0:
        return at_ms, 0.0
    step_ms = min(step_ms, STEP_MS)
    first = np.cumsum(counts) - counts
    within = np.arange(len(at_ms)) - first[member]
    return stamps[member] + step_ms * within / counts[member], step_ms


def linked(ids: Sequence[Sequence[int]]) -> tuple[I8, I8, I8]:
    """(previous turn or -1, blocks shared with it, blocks of the prompt seen before at all), each ``(n,)``.

    A trie over the ids: a block counts as the same only after the same blocks.
    """
    child: dict[tuple[int, int], int] = {}
    latest: list[int] = [-1]
    forks: list[int] = [0]
    candidate: list[tuple[int, int]] = []
    seen = np.zeros(len(ids), dtype=np.int64)
    for row, blocks in enumerate(ids):
        node = depth = 0
        for block in blocks:
            following = child.get((node, block))
            if following is None:
                break
            node = following
            depth += 1
        candidate.append((latest[node] if depth else -1, node))
        seen[row] = depth
        node = 0
        for block in blocks:
            following = child.get((node, block))
            if following is None:
                following = len(latest)
                child[node, block] = following
                latest.append(row)
                forks.append(0)
                forks[node] += 1
            node = following
            latest[node] = row
    previous = np.full(len(ids), NO_TURN, dtype=np.int64)
    shared = np.zeros(len(ids), dtype=np.int64)
    continued = set()
    for row, (before, node) in enumerate(candidate):
        if before < 0 or before in continued or forks[node] > MAX_FORKS:
            continue
        if 2 * seen[row] >= len(ids[before]):
            previous[row] = before
            shared[row] = seen[row]
            continued.add(before)
    return previous, shared, seen


def _chained(at_s: F8, prompt: I8, output: I8, previous: I8, shared_tokens: I8) -> Columns:
    count = len(at_s)
    later = np.flatnonzero(previous != NO_TURN)
    before = previous[later]
    context = prompt[before] + output[before]
    cached = np.zeros(count, dtype=np.int64)
    cached[later] = np.minimum(np.minimum(shared_tokens[later], context), prompt[later] - 1)
    call_s = (prompt - cached) / NOMINAL_PREFILL_TOKENS_PER_S + output * NOMINAL_TPOT_S
    think_s = np.zeros(count)
    think_s[before] = np.maximum(at_s[later] - at_s[before] - call_s[before], 0.0)
    next_turn = np.full(count, NO_TURN, dtype=np.int64)
    next_turn[before] = later
    session = np.arange(count, dtype=np.int64)
    for row in later:  # in order of time, so a predecessor's number is final
        session[row] = session[previous[row]]
    arrival_s = np.where(previous == NO_TURN, at_s, np.nan)
    return Columns(arrival_s, prompt, output, cached, session, session, next_turn, think_s)
