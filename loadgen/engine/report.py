"""What a replay brought: per-request arrays, and the figures of DESIGN section 7."""

from __future__ import annotations

import dataclasses
import math

import msgspec
import numpy as np
import numpy.typing as npt

from loadgen.engine.records import Phase, Reason, Records

F8 = npt.NDArray[np.float64]
I8 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]


@dataclasses.dataclass(frozen=True, eq=False)
class Results:
    """Per-request arrays of shape ``(N,)`` (all tables, worker by worker), per-card and per-worker sums.

    Times are simulated seconds; NaN = has not happened.
    """

    worker: I8
    session: I8
    service_class: I8
    arrival_s: F8
    """Of later turns known once the turn before has ended."""
    first_token_s: F8
    finish_s: F8
    """Last token, or rejection."""
    wait_s: F8
    """From arrival to the first admission; for requests that never got in: to their rejection or the end."""
    prompt_tokens: I8
    output_tokens: I8
    phase: I8
    """A ``records.Phase``; FUTURE = has not arrived."""
    reason: I8
    """A ``records.Reason``, of the rejected."""
    preemptions: I8
    good: Bool
    """Finished within all limits of its class."""
    tpot_s: F8
    """Mean time per output token after the first; NaN below two tokens."""
    duration_s: float
    hbm_utilisation: F8
    """Per card: time mean of (weights + KV of running requests + activation) / HBM."""
    hbm_utilisation_idle: F8
    """The same with the KV of idle sessions."""
    produced_tokens: F8
    """Per worker, unfinished requests included."""
    recomputed_tokens: F8
    preemption_events: F8
    oom: F8

    @classmethod
    def from_records(
        cls,
        request: Records,
        session: I8,
        *,
        duration_s: float,
        hbm_utilisation: F8,
        hbm_utilisation_idle: F8,
        output_tokens: F8,
        recomputed_tokens: F8,
        preemptions: F8,
        oom: F8,
    ) -> Results:
        """From REQUEST records [N] and sums; copies what it keeps."""
        phase = request["phase"].astype(np.int64)
        arrived = phase != int(Phase.FUTURE)
        finished = phase == int(Phase.FINISHED)
        first, finish, arrival = request["first_token"], request["finish"], request["arrival"]
        wait = np.where(np.isnan(request["wait"]), np.fmin(finish, duration_s) - arrival, request["wait"])
        tpot = np.full(len(request), math.nan)
        several = finished & (request["output"] > 1)
        tpot[several] = (finish - first)[several] / (request["output"][several] - 1)
        good = finished & (first - arrival <= request["ttft_limit"])
        good &= np.where(several, np.nan_to_num(tpot), 0.0) <= request["tpot_limit"]
        good &= finish - arrival <= request["completion_limit"]
        return cls(
            worker=request["worker"].astype(np.int64),
            session=session.astype(np.int64),
            service_class=request["klass"].astype(np.int64),
            arrival_s=arrival.copy(),
            first_token_s=first.copy(),
            finish_s=finish.copy(),
            wait_s=np.where(arrived, wait, math.nan),
            prompt_tokens=request["prompt"].astype(np.int64),
            output_tokens=request["output"].astype(np.int64),
            phase=phase,
            reason=np.where(phase == int(Phase.REJECTED), request["reason"], 0).astype(np.int64),
            preemptions=request["preemptions"].astype(np.int64),
            good=good,
            tpot_s=tpot,
            duration_s=duration_s,
            hbm_utilisation=hbm_utilisation,
            hbm_utilisation_idle=hbm_utilisation_idle,
            produced_tokens=output_tokens,
            recomputed_tokens=recomputed_tokens,
            preemption_events=preemptions,
            oom=oom,
        )


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """DESIGN section 7's figures of one replay."""

    goodput_tokens_per_s: float
    """Output tokens of requests that met their class limits."""
    tokens_per_s: float
    hbm_utilisation: float
    hbm_utilisation_idle: float
    queue_wait_p99_s: float
    tpot_p99_ms: float
    ttft_p99_s: float
    preemptions: int
    oom: int
    violations: int
    """Finished outside a limit, or timed out, or lost."""
    arrived: int
    finished: int
    in_system: int
    rejected: dict[str, int]
    """By reason."""
    slo_token_share: float
    """Tokens of requests that met their limits over those of all that arrived."""
    recomputed_tokens: float
    cards: int


def _p99(values: F8) -> float:
    kept = values[np.isfinite(values)]
    return float(np.percentile(kept, 99)) if len(kept) else math.nan


def summary(results: Results, from_s: float = 0.0) -> Summary:
    """Figures over the requests that arrived at ``from_s`` or later (rates over the time since then).

    ``tokens_per_s``, utilisation and event counts are those of the whole replay.
    """
    counted = (results.phase != int(Phase.FUTURE)) & (results.arrival_s >= from_s)
    finished = counted & (results.phase == int(Phase.FINISHED))
    rejected = counted & (results.phase == int(Phase.REJECTED))
    good = counted & results.good
    span_s = max(results.duration_s - from_s, 1e-9)
    offered = float(results.output_tokens[counted].sum())
    good_tokens = float(results.output_tokens[good].sum())
    refused = (int(Reason.NEVER_FITS), int(Reason.TOO_LONG))
    reasons = {
        reason.name.lower(): int((rejected & (results.reason == int(reason))).sum())
        for reason in Reason
        if reason is not Reason.NONE
    }
    return Summary(
        goodput_tokens_per_s=good_tokens / span_s,
        tokens_per_s=float(results.produced_tokens.sum()) / max(results.duration_s, 1e-9),
        hbm_utilisation=float(results.hbm_utilisation.mean()),
        hbm_utilisation_idle=float(results.hbm_utilisation_idle.mean()),
        queue_wait_p99_s=_p99(results.wait_s[counted & ~np.isin(results.reason, refused)]),
        tpot_p99_ms=1e3 * _p99(results.tpot_s[finished]),
        ttft_p99_s=_p99((results.first_token_s - results.arrival_s)[finished]),
        preemptions=int(results.preemption_events.sum()),
        oom=int(results.oom.sum()),
        violations=int((finished & ~results.good).sum() + (rejected & ~np.isin(results.reason, refused)).sum()),
        arrived=int(counted.sum()),
        finished=int(finished.sum()),
        in_system=int((counted & ~finished & ~rejected).sum()),
        rejected={name: count for name, count in reasons.items() if count},
        slo_token_share=good_tokens / offered if offered else math.nan,
        recomputed_tokens=float(results.recomputed_tokens.sum()),
        cards=len(results.hbm_utilisation),
    )
