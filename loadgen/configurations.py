"""Randomised fleets: unlike cards, tenants, host pools, links and loads, drawn to train on and fixed to be examined on.

A configuration is one kind of card with its tenants, one a worker. Its load is told in units of load 1.0, where
vLLM-like with offload, first-come, meets the SLO for 85 % of offered tokens. Training configurations are drawn;
those held out are written down, with (card, tenants), host pools and links that :func:`training_configurations`
never draws. Deterministic given seeds.
"""

from __future__ import annotations

from typing import Final

import msgspec
import numpy as np

from loadgen.engine.calibration import coefficients
from loadgen.engine.specs import CARDS, MODELS, FleetConfig
from loadgen.workload.published import FIGURES
from schemas.classes import ServiceClass

TRANSFER_FAILURES: Final = 0.002
"""Share of transfers that fail and are repeated: an assumption, enough to be met in every run."""
HOST_SHARES: Final = (0.1, 4.0)
"""Host pool over the card's HBM."""
LINKS_BYTES_PER_S: Final = (6e9, 55e9)
"""From a shared Gen4 link to Gen5 x16."""
LOADS: Final = (0.4, 1.5)
KV_SHARE_LEAST: Final = 0.1
"""Share of a card's HBM that its tenants must leave to KV."""
_BAND: Final = 0.08
"""How far, as a share, training's host pools and links keep from those held out."""
CONTEXTS_LEAST: Final = 6.0
"""Mean contexts that fit a worker's Q0: an operator of long sessions on less would not get far."""

_SMALL_BATCH: Final = (8, 8 * 1000)
"""Sequences and their KV tokens."""
_TPOT_SHARE: Final = 0.8
_TTFT_SHARE: Final = 0.5


class Tenant(msgspec.Struct, frozen=True, kw_only=True):
    """What one worker of a card serves."""

    model: str
    kind: str
    """A built-in workload: chat, code, long or agent."""
    service_class: ServiceClass | None = None
    """None: the kind's own."""
    share: float
    """Of the card's time at load 1.0 (roughly: at one nominal utilisation of the card) and of its KV capacity; a
    card's tenants sum to 1."""


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """How the load moves over time; mean rate and lengths stay about what they are."""

    swing: float = 0.0
    """Depth of the diurnal swing, 0 to 0.9."""
    period_s: float = 600.0
    """Length of its day."""
    opposed: bool = False
    """Tenants of a card have their peaks at different times of the day; else at the same."""
    burst: float = 1.0
    """In bursts of some 15 s, every 75 s or so, requests come at this multiple of the rate."""
    length_shift: float = 0.0
    """Standard deviation of the logarithm of a factor that prompts and outputs of all sessions that begin in the
    same stretch share; 0 = none."""
    stretch_s: float = 60.0


class Configuration(msgspec.Struct, frozen=True, kw_only=True):
    """A fleet, its tenants and their load."""

    name: str
    fleet: FleetConfig
    tenants: tuple[Tenant, ...]
    """One per worker of a card."""
    load: float
    """In units of load 1.0."""
    shape: Shape = Shape()
    regime: str = "mixed"
    """Why it is there: unlike tenants, small host pool, slow link, overload, light, ..."""


def fleet_of(card: str, tenants: tuple[Tenant, ...], host_share: float, link_bytes_per_s: float) -> FleetConfig:
    """One card with these tenants and honest costs: sessions end silently, transfers fail."""
    return FleetConfig(
        card=card,
        model=tuple(tenant.model for tenant in tenants),
        workers_per_card=len(tenants),
        shares=tuple(tenant.share for tenant in tenants),
        host_bytes_per_card=host_share * CARDS[card].hbm_bytes,
        link_bytes_per_s=link_bytes_per_s,
        silent_ends=True,
        transfer_failures=TRANSFER_FAILURES,
    )


def can_serve(fleet: FleetConfig, tenant: Tenant) -> bool:
    """Whether a small batch keeps its class's time per token and a mean prompt its first token's while all of the
    card's workers compute: an operator would not have put a tenant where that is ruled out."""
    figures = FIGURES[tenant.kind]
    limits = fleet.limits[figures.service_class if tenant.service_class is None else tenant.service_class]
    times = coefficients(fleet.card_spec().name, tenant.model)
    step_s = times.iteration_s(*_SMALL_BATCH, 0, 0) + fleet.overhead_s
    fresh = figures.prompt[0] * (1.0 - figures.prefix_reuse)
    prompt_s = fresh * (times.gemm_token + times.prefill_token) * 1e-3
    first_s = limits.ttft_base_s + limits.ttft_per_token_s * fresh
    late = prompt_s * fleet.workers_per_card > _TTFT_SHARE * first_s
    return not late and step_s * fleet.workers_per_card <= _TPOT_SHARE * limits.tpot_s


def q0_tokens(fleet: FleetConfig, place: int) -> float:
    """Tokens of KV in the Q0 of a card's worker ``place``."""
    model = fleet.model_specs()[place]
    return fleet.kv_capacity_bytes() * fleet.worker_shares()[place] / model.kv_bytes_per_token


def longest_tokens(fleet: FleetConfig, place: int) -> int:
    """Tokens of the longest context that a card's worker ``place`` takes: its ``max_model_len``."""
    return int(min(fleet.model_specs()[place].context_tokens, q0_tokens(fleet, place)))


_8B, _14B, _70B = "Llama-3.1-8B", "Qwen2.5-14B", "Llama-3.1-70B-4bit"
_BATCH = ServiceClass.BATCH
_HELD_OUT: Final[tuple[tuple[str, str, str, tuple[tuple[str, str, float], ...], float, float, float, Shape], ...]] = (
    # name, regime, card, (model, kind, share)..., host share, link GB/s, load, shape
    ("a100-2x8b-chat-agent", "unlike tenants", "A100-80G",
     ((_8B, "chat", 0.5), (_8B, "agent", 0.5)), 0.9, 28, 1.0, Shape(swing=0.4, opposed=True)),
    ("h100-8b-14b-chat-code", "unlike tenants", "H100-80G",
     ((_14B, "chat", 0.6), (_8B, "code", 0.4)), 0.9, 28, 1.0, Shape(burst=3.0)),
    ("a100-70b-chat", "one tenant", "A100-80G", ((_70B, "chat", 1.0),), 0.9, 28, 1.0, Shape(swing=0.3)),
    ("a100-70b-batch-8b-chat", "unlike tenants", "A100-80G",
     ((_70B, "batch", 0.4), (_8B, "chat", 0.6)), 2.5, 14, 1.0, Shape(swing=0.5, opposed=True)),
    ("a100-3x8b-small-host", "small host pool", "A100-80G",
     ((_8B, "long", 0.4), (_8B, "agent", 0.3), (_8B, "chat", 0.3)), 0.12, 28, 1.0, Shape(length_shift=0.3)),
    ("h100-2x8b-slow-link", "slow link", "H100-80G",
     ((_8B, "agent", 0.5), (_8B, "long", 0.5)), 0.9, 7, 1.0, Shape()),
    ("h100-14b-8b-overload", "overload", "H100-80G",
     ((_14B, "chat", 0.5), (_8B, "long", 0.5)), 0.9, 46, 1.5, Shape(burst=2.0)),
    ("h100-8b-agent-light", "light", "H100-80G", ((_8B, "agent", 1.0),), 2.5, 46, 0.5, Shape(swing=0.4)),
    ("h100-70b-8b-code", "unlike tenants", "H100-80G",
     ((_70B, "chat", 0.7), (_8B, "code", 0.3)), 0.35, 14, 1.0, Shape(burst=3.0)),
    ("h100-2x14b-small-slow", "small host pool, slow link", "H100-80G",
     ((_14B, "agent", 0.5), (_14B, "chat", 0.5)), 0.12, 7, 1.2, Shape(swing=0.3)),
    ("h200-3x-unlike", "unlike tenants", "H200-141G",
     ((_70B, "chat", 0.5), (_14B, "agent", 0.3), (_8B, "code", 0.2)), 0.9, 46, 1.0, Shape(swing=0.5, opposed=True)),
    ("h200-2x70b-chat-agent", "unlike tenants", "H200-141G",
     ((_70B, "chat", 0.5), (_70B, "agent", 0.5)), 2.5, 46, 1.2, Shape(length_shift=0.4)),
    ("h200-8b-chat-overload", "overload", "H200-141G", ((_8B, "chat", 1.0),), 0.35, 28, 1.5, Shape(burst=2.5)),
    ("h200-2x8b-batch-chat", "unlike tenants", "H200-141G",
     ((_8B, "batch", 0.5), (_8B, "chat", 0.5)), 0.35, 14, 1.2, Shape(swing=0.4, opposed=True)),
    ("h200-14b-long-small-host", "small host pool", "H200-141G",
     ((_14B, "long", 0.6), (_14B, "agent", 0.4)), 0.12, 46, 1.1, Shape(length_shift=0.3, swing=0.3)),
    ("h200-3x8b-agents-slow", "slow link", "H200-141G",
     ((_8B, "agent", 0.4), (_8B, "agent", 0.3), (_8B, "long", 0.3)), 0.9, 7, 1.2, Shape(swing=0.3)),
)  # fmt: skip


def _tenant(model: str, kind: str, share: float) -> Tenant:
    """``batch`` is the long workload judged as batch: completion within ten minutes."""
    if kind == "batch":
        return Tenant(model=model, kind="long", service_class=_BATCH, share=share)
    return Tenant(model=model, kind=kind, share=share)


def held_out_configurations() -> tuple[Configuration, ...]:
    """The sixteen that are examined on, and never trained on."""
    found = []
    for name, regime, card, told, host_share, link_gb, load, shape in _HELD_OUT:
        tenants = tuple(_tenant(*one) for one in told)
        fleet = fleet_of(card, tenants, host_share, link_gb * 1e9)
        found.append(Configuration(name=name, fleet=fleet, tenants=tenants, load=load, shape=shape, regime=regime))
    return tuple(found)


_TAKEN: Final = frozenset((card, tuple(sorted(one[:2] for one in told))) for _, _, card, told, *_ in _HELD_OUT)
_KINDS: Final = (("chat", 0.32), ("code", 0.13), ("long", 0.22), ("agent", 0.23), ("batch", 0.10))
_WORKERS: Final = (0.25, 0.5, 0.25)
"""How often a card has 1, 2 or 3 workers."""


def _apart(low: float, high: float, taken: tuple[float, ...], rng: np.random.Generator) -> float:
    """Log-uniform within [low, high] and away from what is held out."""
    while True:
        drawn = float(np.exp(rng.uniform(np.log(low), np.log(high))))
        if all(abs(drawn / one - 1.0) > _BAND for one in taken):
            return drawn


def _drawn(name: str, rng: np.random.Generator) -> Configuration:
    hosts = tuple(sorted({one[4] for one in _HELD_OUT}))
    links = tuple(sorted({one[5] * 1e9 for one in _HELD_OUT}))
    names = [name for name, _ in _KINDS]
    while True:
        card = str(rng.choice(sorted(CARDS)))
        count = int(rng.choice([1, 2, 3], p=_WORKERS))
        models = [str(one) for one in rng.choice(sorted(MODELS), count)]
        kinds = [str(one) for one in rng.choice(names, count, p=[share for _, share in _KINDS])]
        parts = rng.uniform(0.5, 1.5, count)
        needed = sum(MODELS[one].weights_bytes + 3e9 for one in models)
        if needed > (1.0 - KV_SHARE_LEAST) * CARDS[card].hbm_bytes:
            continue
        if (card, tuple(sorted(zip(models, kinds, strict=True)))) in _TAKEN:
            continue
        shares = np.round(parts / parts.sum(), 3)
        shares[-1] = 1.0 - shares[:-1].sum()
        tenants = tuple(_tenant(*one) for one in zip(models, kinds, shares.tolist(), strict=True))
        host, link = _apart(*HOST_SHARES, hosts, rng), _apart(*LINKS_BYTES_PER_S, links, rng)
        fleet = fleet_of(card, tenants, host, link)
        if not all(can_serve(fleet, tenant) for tenant in tenants):
            continue
        shape = Shape(
            swing=float(rng.choice([0.0, rng.uniform(0.1, 0.6)])),
            period_s=float(rng.uniform(120.0, 900.0)),
            opposed=bool(rng.integers(2)),
            burst=float(rng.choice([1.0, rng.uniform(1.5, 4.0)])),
            length_shift=float(rng.choice([0.0, rng.uniform(0.15, 0.5)])),
            stretch_s=float(rng.uniform(40.0, 160.0)),
        )
        return Configuration(
            name=name, fleet=fleet, tenants=tenants,
            load=float(rng.uniform(*LOADS)), shape=shape, regime="training",
        )  # fmt: skip


def training_configurations(seed: int, n: int) -> tuple[Configuration, ...]:
    """``n`` drawn configurations; the first ones of a longer drawing are the same."""
    streams = np.random.SeedSequence([0x7E57, seed]).spawn(n)
    return tuple(_drawn(f"train-{seed}-{k}", np.random.default_rng(stream)) for k, stream in enumerate(streams))
