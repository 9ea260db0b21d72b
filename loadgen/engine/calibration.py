"""How long an iteration takes: a few coefficients per card and model, and their error.

    gemm = max(weight floor + per sequence up to 256, base + per token x batch tokens)
    attention = constant + per sequence + per live KV token (decode), per token + per token x context (prefill)
    iteration = gemm + attention + overhead

The first line is max(compute, weight traffic); the live KV tokens are the KV traffic. Fitted (least squares on
relative errors) to the per-iteration sums of measured vLLM kernels that aiconfigurator publishes (Apache-2.0);
the figures stand here, the data files are read only to recompute the errors. Llama-3.1-70B 4-bit is measured
nowhere: attention from the measured 70B rows, the decode GEMM's floor scaled by weight bytes (38 of 141 GB), the
prefill GEMM as for bf16, which has the same FLOPs. Qwen2.5-14B is the 8B model's row times ratios of the two
shapes: weight streaming by weight bytes, GEMM per token by matrix parameters, decode attention by layers (KV heads
and their size are the same), prefill attention by layers x heads. Both are extrapolated and have no error figure.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from services.errors import UserError

BOUND_TOKENS: Final = 256.0
"""Beyond this many tokens compute bounds the GEMM on all cards here."""


class IterationTime(msgspec.Struct, frozen=True):
    """Coefficients in milliseconds."""

    gemm_floor: float
    """Streaming the weights once."""
    gemm_sequence: float
    """What each of the batch's first 256 tokens adds while the weights bound the GEMM."""
    gemm_base: float
    gemm_token: float
    """Per batch token, once compute bounds the GEMM."""
    decode_base: float
    decode_sequence: float
    decode_kv_token: float
    """Per token of live KV read."""
    prefill_base: float
    prefill_token: float
    prefill_token_context: float
    """Per prompt token and token of context before it."""
    extrapolated: bool = False

    def iteration_s(self, sequences: float, kv_tokens: float, prefill_tokens: float, context: float) -> float:
        """Seconds of one iteration without overhead.

        ``sequences`` decode over ``kv_tokens`` of KV in all; ``prefill_tokens`` are computed with ``context``
        tokens before each of them on average.
        """
        gemm = max(
            self.gemm_floor + self.gemm_sequence * min(sequences + prefill_tokens, BOUND_TOKENS),
            self.gemm_base + self.gemm_token * (sequences + prefill_tokens),
        )
        attention = self.decode_sequence * sequences + self.decode_kv_token * kv_tokens
        attention += prefill_tokens * (self.prefill_token + self.prefill_token_context * context)
        constant = self.decode_base if sequences else 0.0
        if prefill_tokens:
            constant = max(constant, self.prefill_base)
        return (gemm + attention + constant) * 1e-3


_8B: Final = "Llama-3.1-8B"
_70B: Final = "Llama-3.1-70B-4bit"
_14B: Final = "Qwen2.5-14B"
_Q4: Final = 38.0 / 141.1
"""Weight bytes of the 4-bit model over those of the measured bf16 one."""
_BYTES_14B: Final = 29.5 / 16.06
_PARAMETERS_14B: Final = 13.99 / 7.50
"""Matrix parameters, embeddings left out: 14B over 8B."""
_LAYERS_14B: Final = 48 / 32
_HEADS_14B: Final = 48 * 40 / (32 * 32)
"""Layers x query heads, 14B over 8B."""

ITERATION_TIMES: Final[dict[tuple[str, str], IterationTime]] = {
    ("A100-80G", _8B): IterationTime(
        10.568, 0.014799, 4.6113, 0.050558, 0.66305, 0.0016111, 8.33563e-5, 0.19696, 0.0015169, 2.61711e-6),
    ("H100-80G", _8B): IterationTime(
        5.5275, 0.0041812, -0.79784, 0.018172, 0.38679, 3.9566e-5, 4.36809e-5, 0.43764, 0.00033058, 7.74927e-7),
    ("H200-141G", _8B): IterationTime(
        4.0845, 0.0033867, -0.61108, 0.018168, 0.41424, 0.0011835, 3.16168e-5, 0.43874, 0.000302, 8.04449e-7),
    ("A100-80G", _70B): IterationTime(
        88.531 * _Q4, 0.1319, 29.390 * _Q4, 0.46273, 1.6516, 0.0059078, 2.1137e-4, 0.64487, 0.0043987, 1.35252e-5,
        extrapolated=True),
    ("H100-80G", _70B): IterationTime(
        47.443 * _Q4, 0.028141, -14.717, 0.18466, 0.96362, 0.0061006, 1.07175e-4, 1.0350, 0.0013836, 4.04135e-6,
        extrapolated=True),
    ("H200-141G", _70B): IterationTime(
        34.874 * _Q4, 0.020958, -13.381, 0.19444, 1.0027, 0.010215, 7.8454e-5, 1.0010, 0.0014121, 3.96747e-6,
        extrapolated=True),
}  # fmt: skip


def _as_14b(times: IterationTime) -> IterationTime:
    """The 8B model's coefficients scaled to Qwen2.5-14B's shape."""
    return IterationTime(
        times.gemm_floor * _BYTES_14B, times.gemm_sequence * _PARAMETERS_14B, times.gemm_base * _PARAMETERS_14B,
        times.gemm_token * _PARAMETERS_14B, times.decode_base * _LAYERS_14B, times.decode_sequence * _LAYERS_14B,
        times.decode_kv_token * _LAYERS_14B, times.prefill_base * _LAYERS_14B, times.prefill_token * _HEADS_14B,
        times.prefill_token_context * _HEADS_14B, extrapolated=True,
    )  # fmt: skip


ITERATION_TIMES.update({(card, _14B): _as_14b(ITERATION_TIMES[card, _8B]) for card, _ in tuple(ITERATION_TIMES)})

MEASURED_CARD: Final = "RTX-PRO-6000"
"""Of the measured vLLM run that ``validate-engine`` replays; no card to emulate fleets of."""
ITERATION_TIMES[MEASURED_CARD, _8B] = IterationTime(
    10.654, 0.016573, 5.6676, 0.035474, 0.37034, 0.0046436, 9.13707e-5, 0.34788, 0.0, 2.58e-6)  # fmt: skip
"""Fitted alike to that card's kernel times of one layer, times 32 layers, and of its output head and sampler."""

_GPU: Final = {"A100-80G": "a100", "H100-80G": "h100", "H200-141G": "h200"}
REFERENCE_BATCH: Final = 256
REFERENCE_CONTEXT_TOKENS: Final = 1024
PREFILL_CHUNK_TOKENS: Final = 2048


def coefficients(card: str, model: str) -> IterationTime:
    """Coefficients of a card and model; UserError names what is known."""
    found = ITERATION_TIMES.get((card, model))
    if found is None:
        known = ", ".join(f"{c} with {m}" for c, m in ITERATION_TIMES)
        raise UserError(f"no timings for {model} on {card}; known: {known}")
    return found


def reference_tokens_per_s(times: IterationTime) -> float:
    """The card's calibrated peak decode rate: 256 sequences of 1,024 tokens, the widest measured batch."""
    seconds = times.iteration_s(REFERENCE_BATCH, REFERENCE_BATCH * REFERENCE_CONTEXT_TOKENS, 0, 0)
    return REFERENCE_BATCH / seconds


def prefill_tokens_per_s(times: IterationTime, overhead_s: float) -> float:
    """Prompt tokens per second of iterations that compute nothing else: whole prompts of one chunk."""
    seconds = times.iteration_s(0, 0, PREFILL_CHUNK_TOKENS, PREFILL_CHUNK_TOKENS / 2)
    return PREFILL_CHUNK_TOKENS / (seconds + overhead_s)


class CalibrationError(msgspec.Struct, frozen=True):
    """How far the model is from the measured points of one card, phase and batch (or prompt length)."""

    card: str
    model: str
    phase: str
    batch: int
    """Sequences of a decode step; prompt tokens of a prefill."""
    points: int
    mean_abs: float
    """Mean of |model - measured| / measured."""
    worst: float
    """The signed error of largest size."""


def errors(folder: Path) -> list[CalibrationError]:
    """Error per card, phase and batch against ``aiconfigurator/derived_iteration_times.csv`` in ``folder``.

    Llama-3.1-8B only: nothing else was measured as it is emulated. UserError when the file is not there.
    """
    path = folder / "aiconfigurator" / "derived_iteration_times.csv"
    if not path.is_file():
        raise UserError(f"{path}: no such file; expected measured iteration times (derived_iteration_times.csv)")
    with path.open(newline="") as handle:
        rows = list(csv.DictReader(handle))
    found: dict[tuple[str, str, int], list[float]] = {}
    for card, gpu in _GPU.items():
        times = ITERATION_TIMES[card, _8B]
        for row in rows:
            if row["gpu"] != gpu or row["model"] != _8B:
                continue
            batch, tokens = int(row["batch"]), int(row["context_or_prompt_tokens"])
            if row["phase"] == "decode_step":
                key = (card, "decode", batch)
                modelled = times.iteration_s(batch, batch * tokens, 0, 0)
            else:
                key = (card, "prefill", tokens)
                modelled = times.iteration_s(0, 0, tokens, tokens / 2)
            found.setdefault(key, []).append(modelled * 1e3 / float(row["total_ms"]) - 1.0)
    return [
        CalibrationError(card, _8B, phase, batch, len(values), float(np.mean(np.abs(values))), max(values, key=abs))
        for (card, phase, batch), values in found.items()
    ]
