"""What attach can see of a server and what it can control: the table that it prints before it starts anything. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Final, NamedTuple

from schemas.engine import Description
from services.actuator.engines.vllm.versions import KNOWN
from services.operator.attach_endpoint import SLOW_S, Endpoint
from services.operator.session import table
from services.telemetry.sources.endpoint import ADAPTERS
from services.telemetry.sources.said import Presence, Said


class Sight(NamedTuple):
    """One thing to see: a column of METRICS that stands for it, and what goes without it."""

    what: str
    metric: str
    without: str = ""


SIGHTS: Final = (
    Sight("KV in use", "kv_bytes", "nothing can be decided"),
    Sight("KV capacity", "q0_bytes", "nothing can be decided"),
    Sight("memory of the card", "hbm_bytes", "nothing can be decided"),
    Sight("running requests", "running", "nothing can be decided"),
    Sight("queue", "waiting", "nothing can be decided"),
    Sight("waiting for memory", "waiting_for_memory", "no widening for memory"),
    Sight("idle KV (conversations between turns)", "kv_idle_bytes", "no eviction"),
    Sight("reserved KV (prompt + max_tokens)", "kv_reserved_bytes", "no widening for memory"),
    Sight("fragmentation", "frag", "no compaction"),
    Sight("requests in prefill", "prefilling"),
    Sight("preemptions", "preemptions", "no tightening on them"),
    Sight("tokens computed again", "recomputed_tokens", "their cost is not estimated"),
    Sight("output tokens", "output_tokens"),
    Sight("time to first token", "ttft_00", "late first tokens do not show"),
    Sight("time per output token", "tpot_00", "late tokens do not show"),
    Sight("lengths of finished requests", "finished_context_tokens"),
    Sight("host tier", "host_capacity_bytes", "no eviction"),
    Sight("host link", "link_bytes_per_s", "no eviction"),
)
CONTROLS: Final = (
    ("quota", "soft and hard quota of KV (rho, ceiling of running requests)", ""),
    ("compact", "compaction", "compact"),
    ("evict", "eviction of idle KV to host memory", "evict"),
    ("prefetch", "bringing idle KV back ahead of time", "prefetch"),
    ("weights", "weights to host memory while nobody asks", "sleep"),
)
"""Name, words, and the capability of a description; empty: every engine with a socket has it."""


def rows_of(
    endpoint: Endpoint, given: Mapping[str, str] | None = None, own: AbstractSet[str] = frozenset()
) -> list[tuple[str, str, str]]:
    """The table: (what, how it is come by on this server, its value now or what goes without it). ``given``: words on
    metrics that the operator himself says; ``own``: metrics that the engine tells over its socket, which win."""
    adapter, gives = ADAPTERS[endpoint.kind], endpoint.probe.gives
    said = [adapter.read(endpoint.page, part) for part in adapter.engines(endpoint.page).values()]
    rows = []
    for sight in SIGHTS:
        if given is not None and sight.metric in given:
            rows.append((sight.what, GIVEN, given[sight.metric]))
            continue
        if sight.metric in own:
            rows.append((sight.what, str(Presence.MEASURED.value), "by the engine itself"))
            continue
        words = next((told for one in said if (told := _now(sight.metric, one))), "")
        how = _how(adapter.provides[sight.metric], sight.metric in gives, words)
        rows.append((sight.what, how, words if how != ABSENT else f"so: {sight.without}" if sight.without else ""))
    return rows


GIVEN: Final = "given"
ABSENT: Final[str] = Presence.ABSENT.value


def _how(declared: Presence, given: bool, words: str) -> str:
    """A metric's presence on this page. What the first look cannot tell, since it takes two scrapes or the card's other
    tenants, stands as it was declared."""
    if declared is Presence.SOMETIMES:
        return str(Presence.MEASURED.value) if given or words else ABSENT
    if declared is Presence.DERIVED and not given and not words:
        return ABSENT
    return str(declared.value)


def _now(metric: str, said: Said) -> str:
    """What an engine says now; empty: nothing."""
    pool = said.pool
    match metric:
        case "kv_bytes":
            share = pool.used_tokens / pool.capacity_tokens if pool.capacity_tokens > 0 else math.nan
            return f"now {share:.1%} of the capacity" if math.isfinite(share) else ""
        case "q0_bytes":
            return f"{pool.capacity_tokens:,.0f} tokens" if math.isfinite(pool.capacity_tokens) else ""
        case "ttft_00" | "tpot_00":
            name = metric.partition("_")[0]
            found = said.histograms.get(name) or (said.histograms.get("gap") if name == "tpot" else None)
            return f"{found.counts[-1]:,.0f} so far" if found is not None else ""
        case "link_bytes_per_s":
            moved_s = said.counters.get("transfer_s", math.nan)
            return f"{moved_s:.3g} s of transfers so far" if math.isfinite(moved_s) else ""
    for numbers in (said.gauges, said.counters):
        if metric in numbers:
            return f"now {numbers[metric]:g}"
    return ""


def as_text(
    endpoint: Endpoint,
    description: Description | None,
    given: Mapping[str, str] | None = None,
    own: AbstractSet[str] = frozenset(),
) -> str:
    """What is printed: the server, what is seen, what is controlled; ``given`` and ``own`` as :func:`rows_of`."""
    version = endpoint.version or "of a version that it does not tell"
    names = ", ".join(f"{key.model or 'a model without a name'}{f' #{key.rank}' if key.rank else ''}"
                      for key in endpoint.probe.engines)  # fmt: skip
    lines = [
        f"{endpoint.kind} {version} at {endpoint.url}, serving {names}; /metrics took {endpoint.took_s * 1e3:.0f} ms"
    ]
    lines.append(table(["what it can see", "how", ""], [list(row) for row in rows_of(endpoint, given, own)]).rstrip())
    lines += [f"remark: {metric or 'the page'}: {why}" for metric, why in endpoint.probe.flags if metric not in own]
    if endpoint.kind == "vllm" and not endpoint.steerable:
        known = ", ".join(f"{one}.x" for one in KNOWN)
        lines.append(f"remark: vLLM {version} is not known here ({known} is): watched only, its metrics may mean "
                     "something else")  # fmt: skip
    if endpoint.took_s > SLOW_S:
        lines.append(f"remark: telemetry waits {SLOW_S:g} s for /metrics: slower answers make the worker stale")
    if description is None:
        lines.append("what it can control: nothing: no Tidegate inside this server, shadow only")
    else:
        lines.append(f"what it can control: {description.worker}, an engine of kind {description.engine}")
        rows = [[f"  {words}", "yes" if not needs or needs in description.capabilities else "no"]
                for _, words, needs in CONTROLS]  # fmt: skip
        lines.append(table(["  control", ""], rows).rstrip())
    return "\n".join(lines) + "\n"
