"""What telemetry saw while attached, minute by minute, in a file that outlives the process: ``seen.jsonl`` in attach's
folder. The audit stream keeps what was decided; this keeps what it was decided on.

A line is one worker's minute, as sums: time integrals of gauges, differences of counters. Sums of minutes add up to
those of a day, and a minute that is missing is time that nobody claims anything of. A line takes some 700 bytes:
1 MB a day and worker.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from schemas.identity import STEP_NS
from schemas.metrics import COLUMN, HISTOGRAM_BINS, TPOT_SLICE, TTFT_SLICE
from schemas.telemetry import NodeSample, metrics_of

FILE: Final = "seen.jsonl"
MINUTE_NS: Final = 60 * 10**9
KEPT_BYTES: Final = 32 * 1024 * 1024
"""Of a file; at the next start its older half goes: a month of one worker."""
MAX_GAP_NS: Final = 5 * STEP_NS
"""Two samples further apart tell nothing of the time between them."""
MAX_REMARKS: Final = 20
"""Of a minute that are told apart: some carry the numbers of the moment."""
ROOM_LIVE_USE: Final = 0.95
"""Share of the KV capacity in use by running requests below which there is room for one that waits for memory."""
_COUNTED: Final = ("preemptions", "recomputed_tokens", "output_tokens", "prompt_tokens", "finished", "rejected")


class Seen(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Sums over some time of one worker. ``*_s`` are integrals over time: of requests, requests x seconds."""

    worker: str
    begin_ns: int
    """Wall clock of its first moment."""
    end_ns: int
    service_class: int = 0
    samples: int = 0
    seconds: float = 0.0
    """Time between samples that said what they must."""
    unseen_s: float = 0.0
    """Time between samples of which one said nothing that could be believed."""
    kv_bytes_s: float = 0.0
    kv_peak_bytes: float = 0.0
    kv_capacity_bytes: float = 0.0
    """What the worker can hold, the newest value: its Q0."""
    idle_bytes_s: float = 0.0
    idle_known_s: float = 0.0
    """Time in which the source told idle KV at all."""
    running_s: float = 0.0
    running_peak: float = 0.0
    waiting_s: float = 0.0
    waiting_peak: float = 0.0
    queued_s: float = 0.0
    """Time in which anybody waited."""
    memory_waiting_s: float = 0.0
    """Requests that waited for memory x seconds."""
    memory_short_s: float = 0.0
    """Time in which anybody waited for memory."""
    memory_known_s: float = 0.0
    """Time in which the source told who waits for memory."""
    room_waiting_s: float = 0.0
    """Of ``memory_waiting_s``: while running requests held less than ``ROOM_LIVE_USE`` of the capacity."""
    counted: dict[str, float] = {}
    """Growth of counters; one that the source does not have is not in it."""
    ttft: list[float] = []
    """First tokens by time over the class limit, bins of ``LATENCY_RATIO_EDGES``; empty: not told."""
    tpot: list[float] = []
    flags: dict[str, int] = {}
    """What the source said and was not believed, ``metric: why``, samples each."""
    why: dict[str, int] = {}
    """What the acting policy chose and by which rule, ``tighten: preemption_rate >= 0.05 1/s``, steps each."""

    def add(self, other: Seen) -> None:
        """Take in another stretch of time of the same worker."""
        self.begin_ns, self.end_ns = min(self.begin_ns, other.begin_ns), max(self.end_ns, other.end_ns)
        self.kv_capacity_bytes = other.kv_capacity_bytes or self.kv_capacity_bytes
        self.service_class = other.service_class
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("kv_peak_bytes", "running_peak", "waiting_peak"):
            setattr(self, name, max(getattr(self, name), getattr(other, name)))
        for mine, theirs in ((self.counted, other.counted), (self.flags, other.flags), (self.why, other.why)):
            for name, value in theirs.items():
                mine[name] = mine.get(name, 0) + value  # type: ignore[assignment]  # of the same kind
        self.ttft, self.tpot = _sum(self.ttft, other.ttft), _sum(self.tpot, other.tpot)


_SUMS: Final = ("samples", "seconds", "unseen_s", "kv_bytes_s", "idle_bytes_s", "idle_known_s", "running_s",
                "waiting_s", "queued_s", "memory_waiting_s", "memory_short_s", "memory_known_s",
                "room_waiting_s")  # fmt: skip


def _sum(mine: list[float], theirs: list[float]) -> list[float]:
    if not mine or not theirs:
        return mine or theirs
    return [a + b for a, b in zip(mine, theirs, strict=True)]


class Recorder:
    """Turns samples into minutes. Does no I/O: :meth:`take` gives the lines that are ready, :meth:`rest` the others."""

    def __init__(self) -> None:
        self._minutes: dict[str, Seen] = {}
        self._before: dict[str, tuple[int, int, NDArray[np.float64]]] = {}
        """Boot, node clock and row of each worker's newest sample."""

    def take(self, sample: NodeSample, wall_ns: int) -> list[Seen]:
        """One sample, which came at wall clock ``wall_ns``; the minutes that it ended. DecodeError for a bad one."""
        metrics = metrics_of(sample)
        ended = []
        for row, worker in enumerate(sample.workers):
            minute = self._minutes.get(worker)
            if minute is not None and minute.begin_ns // MINUTE_NS != wall_ns // MINUTE_NS:
                ended.append(minute)
                minute = None
            if minute is None:
                minute = self._minutes[worker] = Seen(worker=worker, begin_ns=wall_ns, end_ns=wall_ns)
            minute.end_ns = wall_ns
            minute.samples += 1
            minute.service_class = sample.classes[row]
            boot, t_ns, before = self._before.get(worker, (-1, 0, metrics[row]))
            passed_ns = sample.t_ns - t_ns
            if boot == sample.boot_id and 0 < passed_ns <= MAX_GAP_NS:
                _integrate(minute, before, metrics[row], passed_ns / 1e9)
            self._before[worker] = (sample.boot_id, sample.t_ns, metrics[row])
        for row, metric, why in sample.flags:
            if 0 <= row < len(sample.workers):
                minute = self._minutes[sample.workers[row]]
                remark = f"{metric or 'server'}: {why}"
                if remark not in minute.flags and len(minute.flags) >= MAX_REMARKS:
                    remark = "others"
                minute.flags[remark] = minute.flags.get(remark, 0) + 1
        return ended

    def chose(self, worker: str, words: str) -> None:
        """Remember a choice, in the minute under way."""
        minute = self._minutes.get(worker)
        if minute is not None:
            minute.why[words] = minute.why.get(words, 0) + 1

    def rest(self) -> list[Seen]:
        """The minutes under way; they begin anew."""
        rest, self._minutes = list(self._minutes.values()), {}
        return rest


def _integrate(seen: Seen, before: NDArray[np.float64], now: NDArray[np.float64], dt_s: float) -> None:
    """The time between two rows: gauges as they were at its end, counters by their growth."""

    def gauge(name: str) -> float:
        return float(now[COLUMN[name]])

    kv, running, waiting = gauge("kv_bytes"), gauge("running"), gauge("waiting")
    if not math.isfinite(kv + running + waiting):
        seen.unseen_s += dt_s
        return
    seen.seconds += dt_s
    seen.kv_bytes_s += kv * dt_s
    seen.kv_peak_bytes = max(seen.kv_peak_bytes, kv)
    seen.running_s += running * dt_s
    seen.running_peak = max(seen.running_peak, running)
    seen.waiting_s += waiting * dt_s
    seen.waiting_peak = max(seen.waiting_peak, waiting)
    seen.queued_s += dt_s if waiting > 0 else 0.0
    if math.isfinite(capacity := gauge("q0_bytes")):
        seen.kv_capacity_bytes = capacity
    idle = gauge("kv_idle_bytes")
    if math.isfinite(idle):
        seen.idle_bytes_s += idle * dt_s
        seen.idle_known_s += dt_s
    for_memory = gauge("waiting_for_memory")
    if math.isfinite(for_memory):
        seen.memory_known_s += dt_s
        seen.memory_waiting_s += for_memory * dt_s
        seen.memory_short_s += dt_s if for_memory > 0 else 0.0
        live = kv - (idle if math.isfinite(idle) else 0.0)
        if capacity > 0 and live < ROOM_LIVE_USE * capacity:
            seen.room_waiting_s += for_memory * dt_s
    for name in _COUNTED:
        grown = _grown(before[COLUMN[name]], now[COLUMN[name]])
        if grown is not None:
            seen.counted[name] = seen.counted.get(name, 0.0) + grown
    for name, bins in (("ttft", TTFT_SLICE), ("tpot", TPOT_SLICE)):
        growth = [_grown(a, b) for a, b in zip(before[bins], now[bins], strict=True)]
        if all(one is not None for one in growth):
            setattr(seen, name, _sum(getattr(seen, name) or [0.0] * HISTOGRAM_BINS, [one or 0.0 for one in growth]))


def _grown(before: float, now: float) -> float | None:
    """Growth of a counter; after a reset what it has since; None where it is not known."""
    if not math.isfinite(now) or not math.isfinite(before):
        return None
    return float(now - before if now >= before else now)


def append(path: Path, minutes: Iterable[Seen]) -> None:
    """Add lines; each is written whole or, by a process that dies in it, is passed over by :func:`read`."""
    data = b"".join(msgspec.json.encode(one) + b"\n" for one in minutes)
    if data:
        with path.open("ab") as file:
            file.write(data)


def trim(path: Path) -> None:
    """Drop the older half of a file that has grown too long."""
    with contextlib.suppress(FileNotFoundError):
        if path.stat().st_size <= KEPT_BYTES:
            return
        kept = path.read_bytes()[-KEPT_BYTES // 2 :].partition(b"\n")[2]
        part = path.with_suffix(".part")
        part.write_bytes(kept)
        part.replace(path)


def read(path: Path, since_ns: int = 0, worker: str | None = None) -> dict[str, Seen]:
    """All that a file says since a wall clock, by worker. Nothing for a file that is not there."""
    found: dict[str, Seen] = {}
    for minute in _lines(path):
        if minute.end_ns >= since_ns and worker in (None, minute.worker):
            if minute.worker in found:
                found[minute.worker].add(minute)
            else:
                found[minute.worker] = minute
    return found


def _lines(path: Path) -> Iterator[Seen]:
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return
    for line in lines:
        # A line that was being written when its process was killed, or of another version: no number is made of it.
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
            yield msgspec.json.decode(line, type=Seen)
