"""Which source gives which metric and which feature, as the tables of docs/telemetry.md. A test keeps them the same."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

from schemas.features import FEATURES
from schemas.metrics import METRICS
from services.telemetry.sources import dcgm, kvcached, nvml, sglang, triton, vllm
from services.telemetry.sources.said import Presence, provides

EMULATED: Final = provides({Presence.MEASURED: tuple(metric.name for metric in METRICS)})
SOURCES: Final[Mapping[str, Mapping[str, Presence]]] = {
    "emulated": EMULATED,
    "vLLM": vllm.PROVIDES,
    "SGLang": sglang.PROVIDES,
    "Triton": triton.PROVIDES,
    "NVML": nvml.PROVIDES,
    "DCGM": dcgm.PROVIDES,
    "kvcached": kvcached.PROVIDES,
}
_WORST_FIRST: Final = (
    Presence.ABSENT,
    Presence.SOMETIMES,
    Presence.ASSUMED,
    Presence.DERIVED,
    Presence.MEASURED,
    Presence.FACT,
)
_INPUTS: Final[Mapping[str, tuple[str, ...]]] = {
    "du_alloc": ("kv_bytes", "q0_bytes"),
    "f_frag": ("frag",),
    "t_len_mean": ("finished", "finished_context_tokens"),
    "t_len_std": ("finished", "finished_context_tokens", "finished_context_tokens_sq"),
    "rho": ("rho",),
    "tpot_p95": ("tpot_00",),
    "ttft_p95": ("ttft_00",),
    "host_free": ("host_capacity_bytes", "host_used_bytes", "card_kv_capacity_bytes"),
    "neighbour_use": ("kv_bytes", "card_kv_capacity_bytes"),
    "idle_return": ("idle_return_s",),
    "max_running": ("max_running",),
}
"""Of features whose formula does not name all their metrics."""
_NAMES: Final = {metric.name for metric in METRICS}


def inputs(feature: str, formula: str) -> tuple[str, ...]:
    """The metrics that a feature is made of; none for those that the featurizer knows by itself."""
    if feature in _INPUTS:
        return _INPUTS[feature]
    if feature.startswith("context_"):
        return ("context_00",)
    return tuple(dict.fromkeys(word for word in re.findall(r"\w+", formula) if word in _NAMES))


def metrics_table() -> str:
    """Markdown: metric x source; histograms in one line each."""
    shown = [metric.name for metric in METRICS if not re.search(r"_(0[1-9]|1\d)$", metric.name)]
    lines = [(f"{name[:-3]}_00..15" if name.endswith("_00") else name, name) for name in shown]
    return _table("metric", [(label, [source[name].value for source in SOURCES.values()]) for label, name in lines])


def features_table() -> str:
    """Markdown: feature x source, each as present as the least present of its metrics."""
    rows = []
    for feature in FEATURES:
        made_of = inputs(feature.name, feature.formula)
        if not made_of or re.search(r"^context_(0[1-9]|1\d)$", feature.name):
            continue
        label = "context_00..15" if feature.name == "context_00" else feature.name
        told = [min((source[name] for name in made_of), key=_WORST_FIRST.index) for source in SOURCES.values()]
        rows.append((label, [presence.value for presence in told]))
    return _table("feature", rows)


def _table(first: str, rows: Sequence[tuple[str, Sequence[str]]]) -> str:
    head = f"| {first} | {' | '.join(SOURCES)} |\n|{'---|' * (len(SOURCES) + 1)}\n"
    return head + "".join(
        f"| `{label}` | {' | '.join('-' if cell == 'absent' else cell for cell in cells)} |\n" for label, cells in rows
    )
