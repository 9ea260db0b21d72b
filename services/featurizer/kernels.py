"""The featurizer's inner loops, compiled: one pass over the workers each.

With NumPy a step takes some 250 calls: dear for a node of two workers, where each call costs more than its
work. All kernels stand in this one file, because numba's file cache watches only the file of the function it
keeps; for the same reason column numbers of other modules come in as arrays. Types are fixed here, so that
nothing is compiled in the middle of a run. Arrays are C-ordered; n is the number of workers of the batch.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from services.compiled import compiled

F8 = NDArray[np.float64]
F4 = NDArray[np.float32]
I8 = NDArray[np.int64]
B1 = NDArray[np.bool_]

NEVER: Final = -(2**62)
SLACK: Final = 1.0 + 1e-6
"""Sums of bytes taken at slightly different moments, or rounded, are no contradiction."""

DU_ALLOC, T_LEN_MEAN, T_LEN_STD, TPOT_P95, TTFT_P95, PREEMPTION_RATE = range(6)
"""Columns of a window row."""

_LONG: Final = 3
_BINS: Final = 16
_NAN: Final = np.nan


@compiled("b1(f8[:,::1], f8[::1], f8[::1], i8[::1], i8[:,::1], i8[::1], i8, i8, i8, i8)")
def any_odd(
    metrics: F8,
    low: F8,
    high: F8,
    required: I8,
    ordered: I8,
    cards: I8,
    card_count: int,
    kv: int,
    hbm: int,
    starting: int,
) -> bool:
    """Whether any row needs a closer look: a value outside of [low, high], a required column missing, an
    ordered (smaller, larger) pair the wrong way round, more KV than the card has, an engine that starts."""
    used = np.zeros(card_count)
    for i in range(metrics.shape[0]):
        outside = 0
        for j in range(metrics.shape[1]):
            value = metrics[i, j]
            outside += (value < low[j]) | (value > high[j])
        if outside or metrics[i, starting] >= 0.5:
            return True
        for j in required:
            if np.isnan(metrics[i, j]):
                return True
        for k in range(ordered.shape[0]):
            if metrics[i, ordered[k, 0]] > metrics[i, ordered[k, 1]] * SLACK:
                return True
        used[cards[i]] += metrics[i, kv]
    crowded = False
    for i in range(metrics.shape[0]):
        crowded |= used[cards[i]] > metrics[i, hbm] * SLACK
    return crowded


@compiled("f8(f8[::1], f8, f8[::1])")
def quantile_of(counts: F8, q: float, edges: F8) -> float:
    """The q-quantile of one latency histogram [16], in the unit of ``edges`` [17]; linear inside a bin.

    NaN where nothing was counted, a bin is missing or a bin is negative (its counter went back).
    """
    total = 0.0
    for k in range(_BINS):
        if not counts[k] >= 0.0:
            return _NAN
        total += counts[k]
    if not 0.0 < total < np.inf:
        return _NAN
    wanted = q * total
    below = 0.0
    for k in range(_BINS):
        if counts[k] > 0.0 and (below + counts[k] >= wanted or k == _BINS - 1):
            return float(edges[k] + (wanted - below) / counts[k] * (edges[k + 1] - edges[k]))
        below += counts[k]
    return float(edges[_BINS])


@compiled(
    "i8(f8[:,::1], i8[::1], i8[::1], f8[::1], b1[::1], b1[::1], i8[::1], i8[::1], i8[::1], i8, i8, f8[::1], i8,"
    "f8[:,::1], i8[::1], f8[::1], i8[::1], i8[::1], f8[:,:,::1], f8[:,:,::1], f8[:,::1], f8[:,::1],"
    "f8[:,::1], f8[:,::1], f8[::1], b1[::1])"
)
def advance(
    values: F8,
    rows: I8,
    steps: I8,
    t_s: F8,
    rejected: B1,
    starting: B1,
    counter_columns: I8,
    window_places: I8,
    reward_places: I8,
    kv: int,
    q0: int,
    edges: F8,
    max_gap: int,
    counters: F8,
    counter_steps: I8,
    counter_t_s: F8,
    first: I8,
    last: I8,
    long: F8,
    short: F8,
    ring_t_s: F8,
    ring_u: F8,
    windows: F8,
    gained: F8,
    dt_s: F8,
    filling: B1,
) -> int:
    """One step of n workers; the number of those whose counters went back.

    From the batch: ``values`` [n, columns], ``rows``, ``steps``, ``t_s``, ``rejected``, ``starting``. Kept per
    worker row, updated: ``counters`` (as in ``counter_columns``) with the step and time they are of, ``first``
    and ``last`` step of the windows, and the rings [row, slot, ...]: ``long`` (3 counters), ``short`` (the
    others in ``window_places``), ``ring_t_s``, ``ring_u``. Filled: ``windows`` [n, 6], ``gained`` [n, rewards]
    since the step before (NaN where there was none), ``dt_s``, ``filling``.
    """
    resets = 0
    long_slots, short_slots = long.shape[1], short.shape[1]
    width = short.shape[2]
    recent = np.empty(width)
    for i in range(rows.shape[0]):
        row, step, now_s = rows[i], steps[i], t_s[i]
        reset = False
        for k in range(counter_columns.shape[0]):
            if values[i, counter_columns[k]] < counters[row, k]:
                reset = True
        resets += reset
        follows = counter_steps[row] == step - 1
        dt_s[i] = now_s - counter_t_s[row]
        for k in range(reward_places.shape[0]):
            after = values[i, counter_columns[reward_places[k]]]
            before = counters[row, reward_places[k]]
            if not follows:
                gained[i, k] = _NAN
            elif after < before:
                gained[i, k] = after
            else:
                gained[i, k] = after - before
        if reset or starting[i]:
            first[row] = NEVER
            last[row] = NEVER
        for k in range(6):
            windows[i, k] = _NAN
        filling[i] = True
        if rejected[i]:
            continue
        for k in range(counter_columns.shape[0]):
            counters[row, k] = values[i, counter_columns[k]]
        counter_steps[row] = step
        counter_t_s[row] = now_s
        if starting[i]:
            continue

        before_step = last[row]
        gap = step - before_step
        if gap > max_gap or gap <= 0:
            first[row] = step
        else:
            # Lost steps take the counters and the time of the step before them, and no allocation.
            for lost in range(before_step + 1, step):
                for k in range(_LONG):
                    long[row, lost % long_slots, k] = long[row, before_step % long_slots, k]
                to, source = lost % short_slots, before_step % short_slots
                if to == source:
                    continue
                for k in range(width):
                    short[row, to, k] = short[row, source, k]
                ring_t_s[row, to] = ring_t_s[row, source]
                ring_u[row, to] = _NAN
        last[row] = step
        at_long, at_short = step % long_slots, step % short_slots
        for k in range(_LONG):
            long[row, at_long, k] = counters[row, window_places[k]]
        for k in range(width):
            short[row, at_short, k] = counters[row, window_places[_LONG + k]]
        ring_t_s[row, at_short] = now_s
        ring_u[row, at_short] = values[i, kv] / values[i, q0]
        age = step - first[row]
        filling[i] = age < long_slots - 1 or age < short_slots - 1

        if age >= long_slots - 1:
            base = (step + 1) % long_slots
            number = long[row, at_long, 0] - long[row, base, 0]
            total = long[row, at_long, 1] - long[row, base, 1]
            squares = long[row, at_long, 2] - long[row, base, 2]
            if number > 0.0 and total >= 0.0:
                mean = total / number
                windows[i, T_LEN_MEAN] = mean
                if squares >= 0.0:
                    windows[i, T_LEN_STD] = np.sqrt(max(squares / number - mean * mean, 0.0))
        if age >= short_slots - 1:
            base = (step + 1) % short_slots
            for k in range(width):
                recent[k] = short[row, at_short, k] - short[row, base, k]
            rate = recent[0] / (now_s - ring_t_s[row, base])
            if 0.0 <= rate < np.inf:
                windows[i, PREEMPTION_RATE] = rate
            windows[i, TTFT_P95] = quantile_of(recent[1 : 1 + _BINS], 0.95, edges)
            windows[i, TPOT_P95] = quantile_of(recent[1 + _BINS : 1 + 2 * _BINS], 0.95, edges)
            points, sum_t, sum_u = 0, 0.0, 0.0
            for s in range(short_slots):
                if not np.isnan(ring_u[row, s]):
                    points += 1
                    sum_t += ring_t_s[row, s] - now_s
                    sum_u += ring_u[row, s]
            if points >= 2:
                over, under = 0.0, 0.0
                for s in range(short_slots):
                    if not np.isnan(ring_u[row, s]):
                        t = ring_t_s[row, s] - now_s - sum_t / points
                        over += t * (ring_u[row, s] - sum_u / points)
                        under += t * t
                if under > 0.0:
                    windows[i, DU_ALLOC] = over / under
    return resets


@compiled("void(f8[:,::1], i8[::1], i8, i8, i8, f8[:,::1])")
def neighbours(values: F8, cards: I8, card_count: int, waiting: int, kv: int, out: F8) -> None:
    """Sums of ``waiting`` and ``kv`` over the card's other workers, into ``out`` [n, 2]; NaN where one of them
    is absent."""
    sums = np.zeros((card_count, 2))
    for i in range(values.shape[0]):
        sums[cards[i], 0] += values[i, waiting]
        sums[cards[i], 1] += values[i, kv]
    for i in range(values.shape[0]):
        out[i, 0] = sums[cards[i], 0] - values[i, waiting]
        out[i, 1] = max(sums[cards[i], 1] - values[i, kv], 0.0) if sums[cards[i], 1] >= 0.0 else _NAN


@compiled("void(f8[:,::1], f8[:,::1], i8[::1], i8, f8[::1], f8, f8, f8, f8, f8, f8[::1], f4[:,::1])")
def rewards(
    gained: F8,
    gauges: F8,
    cards: I8,
    card_count: int,
    dt_s: F8,
    alpha: float,
    beta: float,
    gamma: float,
    preemption_cost: float,
    recompute_cost: float,
    limits: F8,
    out: F4,
) -> None:
    """Reward parts of n workers into ``out`` [n, 6]; see ``services.featurizer.reward`` for what they mean.

    ``gained`` [n, 7] and ``gauges`` [n, 3] in the order of its COUNTERS and GAUGES; ``limits``: greatest tokens
    ratio, greatest good ratio, cost of running out of memory for either objective.
    """
    crashes = np.zeros(card_count)
    for i in range(gained.shape[0]):
        if gained[i, 6] > 0.0:
            crashes[cards[i]] += 1.0
    # tokens, good, kv, judged, violations, oom of the card
    sums = np.zeros((card_count, 6))
    share = np.empty(6)
    for i in range(gained.shape[0]):
        card = cards[i]
        work = 1.0 / (gauges[i, 2] * dt_s[i])
        if not 0.0 < work < np.inf:
            work = _NAN
        cost = preemption_cost * gained[i, 3] + recompute_cost * gained[i, 2]
        share[0] = gained[i, 0] * work
        share[1] = (gained[i, 1] - cost) * work
        share[2] = gauges[i, 0]
        share[3], share[4], share[5] = gained[i, 4], gained[i, 5], gained[i, 6]
        for k in range(6):
            if not (crashes[card] > 0.0 and np.isnan(share[k])):
                sums[card, k] += share[k]
    for i in range(gained.shape[0]):
        card = cards[i]
        tokens, good, alloc = sums[card, 0], sums[card, 1], sums[card, 2] / gauges[i, 1]
        if tokens > limits[0]:
            tokens = _NAN
        if abs(good) > limits[1]:
            good = _NAN
        violation = sums[card, 4] / sums[card, 3] if sums[card, 3] != 0.0 else 0.0
        if violation > 1.0:
            violation = _NAN
        oom = sums[card, 5]
        armed = 1.0 if oom > 0.0 else (0.0 if oom == 0.0 else _NAN)
        if crashes[card] > 0.0:
            tokens = 0.0 if np.isnan(tokens) else tokens
            good = 0.0 if np.isnan(good) else good
            alloc = 0.0 if np.isnan(alloc) else alloc
            violation = 0.0 if np.isnan(violation) else violation
        out[i, 0] = alpha * tokens + beta * alloc - gamma * violation - limits[2] * armed
        out[i, 1] = good - limits[3] * armed
        out[i, 2], out[i, 3], out[i, 4], out[i, 5] = tokens, alloc, violation, oom


@compiled("void(f8[:,::1], i8[:,::1], f8[::1], f8[:,::1], i8[::1], f8[:,::1], i8[::1], i8[::1], i8[::1], i8[:,::1],"
           "i8[::1], i8[::1], i8, i8, i8, i8, i8, i8, f4[:,::1])")  # fmt: skip
def states(
    values: F8,
    quotients: I8,
    factors: F8,
    windows: F8,
    window_places: I8,
    beside: F8,
    rows: I8,
    steps: I8,
    classes: I8,
    executed: I8,
    beside_places: I8,
    host_free: I8,
    capacity: int,
    class_place: int,
    since_place: int,
    context_place: int,
    context_column: int,
    max_since: int,
    out: F4,
) -> None:
    """Raw states of n workers into ``out`` [n, features].

    ``quotients`` [m, 4]: feature, numerator column, denominator column (-1: none), and what an empty
    denominator gives (-1 absent, 0 zero, 1 one); ``factors`` [m]; ``beside`` [n, 2]: the neighbours' queue and
    KV, at ``beside_places``; ``host_free`` [3]: feature, capacity column and use column of the host tier.
    """
    for i in range(values.shape[0]):
        for m in range(quotients.shape[0]):
            value = values[i, quotients[m, 1]] * factors[m]
            if quotients[m, 2] >= 0:
                under = values[i, quotients[m, 2]]
                if under == 0.0:
                    value = _NAN if quotients[m, 3] < 0 else float(quotients[m, 3])
                else:
                    value /= under
            out[i, quotients[m, 0]] = value
        for k in range(6):
            out[i, window_places[k]] = windows[i, k]
        room = values[i, capacity]
        out[i, beside_places[0]] = beside[i, 0]
        out[i, beside_places[1]] = beside[i, 1] / room
        free = values[i, host_free[1]] - values[i, host_free[2]]
        out[i, host_free[0]] = (free if not free < 0.0 else 0.0) / room
        for k in range(5):
            out[i, class_place + k] = 1.0 if classes[i] == k else 0.0
            since = steps[i] - executed[rows[i], k]
            out[i, since_place + k] = min(max(since, 0), max_since)
        sequences = 0.0
        for k in range(_BINS):
            sequences += values[i, context_column + k]
        if sequences == 0.0:
            sequences = 1.0
        for k in range(_BINS):
            out[i, context_place + k] = values[i, context_column + k] / sequences
