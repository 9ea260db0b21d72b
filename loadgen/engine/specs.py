"""What an emulated fleet is made of: cards, models, the way an engine admits, and the fleet's settings.

Sizes are published figures; timings are in ``calibration``. Sources: NVIDIA data sheets and ``nvidia-smi``
(HBM), model cards (layers, heads, weights), DESIGN sections 1, 4 and 8.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from schemas.actions import MAX_RUNNING_HIGH, MAX_RUNNING_START, RHO_MAX
from schemas.classes import DEFAULT_LIMITS, ClassLimits, ServiceClass
from services.errors import UserError

GIB: Final = 2**30
PAGE_BYTES: Final = 2 * 2**20
"""What one CUDA virtual-memory call maps."""


class CardSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU."""

    name: str
    hbm_bytes: float
    hbm_bytes_per_s: float
    """Peak bandwidth of the HBM."""
    link_bytes_per_s: float
    """Achieved with large blocks to pinned host memory: PCIe Gen4 25 GB/s, Gen5 50 GB/s."""
    runtime_reserve_bytes: float = 1.0 * GIB
    """CUDA context, captured graphs and allocator slack of one engine process."""
    slack_bytes: float = 0.25 * GIB
    """Measured slack of the card's account that the guard keeps free."""
    map_page_s: float = 230e-6
    """Create and set access of one 2 MiB page (A100: 193 + 36 us)."""
    unmap_page_s: float = 26e-6
    """Unmap one 2 MiB page (A100)."""


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One model as an engine process holds it."""

    name: str
    layers: int
    kv_heads: int
    head_dim: int
    kv_dtype_bytes: int
    weights_bytes: float
    context_tokens: int = 131_072
    activation_base_bytes: float
    """Workspace that is there as soon as the engine runs."""
    activation_token_bytes: float
    """What each token of a batch adds: the widest live set of one layer."""
    activation_sequence_bytes: float
    """Logits in float32 of one sampled sequence."""

    @property
    def kv_bytes_per_token(self) -> int:
        """K and V of all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.kv_dtype_bytes

    def block_bytes(self, block_tokens: int = 16) -> int:
        """KV of one block."""
        return self.kv_bytes_per_token * block_tokens

    @property
    def group_bytes(self) -> int:
        """A page group: 2 MiB of each layer's K and V together (DESIGN section 1)."""
        return PAGE_BYTES * 2 * self.layers

    def blocks_per_group(self, block_tokens: int = 16) -> int:
        """Blocks in a page group: 64 for 2 KiB per token, layer and side."""
        return self.group_bytes // self.block_bytes(block_tokens)


CARDS: Final[dict[str, CardSpec]] = {
    card.name: card
    for card in (
        CardSpec(name="A100-80G", hbm_bytes=81_920 * 2**20, hbm_bytes_per_s=2.039e12, link_bytes_per_s=25e9),
        CardSpec(name="H100-80G", hbm_bytes=81_559 * 2**20, hbm_bytes_per_s=3.35e12, link_bytes_per_s=50e9),
        CardSpec(name="H200-141G", hbm_bytes=143_771 * 2**20, hbm_bytes_per_s=4.8e12, link_bytes_per_s=50e9),
    )
}

MODELS: Final[dict[str, ModelSpec]] = {
    model.name: model
    for model in (
        ModelSpec(
            name="Llama-3.1-8B", layers=32, kv_heads=8, head_dim=128, kv_dtype_bytes=2, weights_bytes=16.06e9,
            activation_base_bytes=0.4e9, activation_token_bytes=115e3, activation_sequence_bytes=513e3,
        ),
        ModelSpec(
            name="Llama-3.1-70B-4bit", layers=80, kv_heads=8, head_dim=128, kv_dtype_bytes=2, weights_bytes=38e9,
            activation_base_bytes=0.6e9, activation_token_bytes=230e3, activation_sequence_bytes=513e3,
        ),
        ModelSpec(
            name="Qwen2.5-14B", layers=48, kv_heads=8, head_dim=128, kv_dtype_bytes=2, weights_bytes=29.5e9,
            activation_base_bytes=0.5e9, activation_token_bytes=111e3, activation_sequence_bytes=608e3,
        ),
    )
}  # fmt: skip


class EngineMode(msgspec.Struct, frozen=True, kw_only=True):
    """How a worker admits, caches and allocates."""

    admission: Literal["reserve", "physical"] = "reserve"
    """``reserve``: prompt + max_tokens of all admitted within rho x Q0, physical memory borrowed between
    neighbours. ``physical``: vLLM-like, a fixed pool of Q0, admits while the prompt's blocks are there."""
    offload: bool = False
    """Write-through copy of computed KV to the host tier, dropped from HBM by LRU, loaded on return."""
    air_bag_bytes: float = 0.0
    """Taken from the card's Q0, by share (article 1's static baseline: 20 GB)."""
    prefetch: bool = True
    """Bring sessions back ahead of their expected return, into memory nobody needs."""
    page_aware: bool = True
    """Allocate at the lowest address; else in the page group freed into last, as a LIFO free list does."""
    load_patience: float = 4.0
    """A load may take this many times the recompute it saves: the link idles while the GPU is scarce."""
    order: Literal["fcfs", "deadline"] = "fcfs"
    """``deadline``: who can still meet the first-token limit first, then by deadline (``actuator.fast.admission``)."""
    running_cap: bool = False
    """AIMD on running requests below the commanded ceiling (``actuator.fast.running_cap``)."""
    shed: bool = False
    """Refuse requests that cannot meet their first-token limit any more (``actuator.fast.shedding``)."""
    reservation: Literal["max_tokens", "expected"] = "max_tokens"
    """What ``reserve`` counts for an answer that is still to come: all that the client allows, or what this worker's
    finished requests of the class say (``actuator.fast.reservation``)."""
    watermark: bool = False
    """Offload idle KV above a watermark of use while the link is free (``actuator.fast.watermark``)."""
    returns: Literal["median", "table", "oracle"] = "median"
    """When a session is expected back: after its class's running median and its own mean; as the request table says
    (``RequestTable.expected_think_s``); or as it truly comes."""


class FleetConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of an emulated fleet; all cards are alike."""

    card: str | CardSpec = "A100-80G"
    model: str | tuple[str, ...] = "Llama-3.1-8B"
    """One for all workers, or one per worker of a card."""
    workers_per_card: int = 2
    """1 to 8."""
    cards: int = 1
    shares: tuple[float, ...] | None = None
    """Share of the card's KV capacity per worker, sum 1; None = equal."""
    host_bytes_per_card: float | None = None
    """Host tier; None = as much as the card's HBM."""
    link_bytes_per_s: float | None = None
    """Host link, both directions together; None = the card's."""
    guard: bool = True
    mode: EngineMode = EngineMode()
    limits: dict[ServiceClass, ClassLimits] = msgspec.field(default_factory=lambda: dict(DEFAULT_LIMITS))
    rho_max: float = RHO_MAX
    max_running: int = MAX_RUNNING_START
    """Ceiling of the running cap at the start, at most 1024."""
    substep_s: float = 0.1
    client_timeouts: bool = True
    silent_ends: bool = False
    """Sessions end without saying so: their KV stays idle until it is evicted or dropped. False: the engine knows."""
    transfer_failures: float = 0.0
    """Share of link transfers that fail at their end and are repeated, 0 to 0.5."""
    guard_s: float = 0.0002
    """What asking the card's account takes where an engine waits for a page group (DESIGN section 4)."""
    restart_s: float = 30.0
    """From an out-of-memory crash until the engine serves again."""
    block_tokens: int = 16
    batch_tokens: int = 2048
    """Token budget of one iteration, shared by decodes and prefill chunks."""
    reserve_bytes: float = 1e9
    """Kept out of hard quotas on a card with neighbours."""
    premapped_groups: int = 8
    """Page groups mapped ahead in the background, which hide the mapping cost of the first ones."""
    max_preemptions: int = 64
    """A request preempted more often is rejected."""
    max_retries: int = 1
    """How often a request lost in a crash is tried again."""
    overhead_s: float = 0.001
    """Scheduling and sampling per iteration: an assumption, not in the calibration files."""

    def card_spec(self) -> CardSpec:
        """The card's figures; UserError names the known cards."""
        if isinstance(self.card, CardSpec):
            return self.card
        if self.card not in CARDS:
            raise UserError(f"card {self.card!r}: expected one of {', '.join(CARDS)}")
        return CARDS[self.card]

    def model_specs(self) -> tuple[ModelSpec, ...]:
        """The model of each worker of a card; UserError for an unknown model or a wrong number of them."""
        names = (self.model,) * self.workers_per_card if isinstance(self.model, str) else self.model
        for name in names:
            if name not in MODELS:
                raise UserError(f"model {name!r}: expected one of {', '.join(MODELS)}")
        if len(names) != self.workers_per_card:
            raise UserError(f"{len(names)} models for {self.workers_per_card} workers per card")
        return tuple(MODELS[name] for name in names)

    def worker_shares(self) -> tuple[float, ...]:
        """Share of the card's KV capacity per worker."""
        if self.shares is None:
            return (1.0 / self.workers_per_card,) * self.workers_per_card
        if len(self.shares) != self.workers_per_card or abs(sum(self.shares) - 1.0) > 1e-6:
            raise UserError(f"shares {self.shares}: expected {self.workers_per_card} numbers of sum 1")
        return self.shares

    def worst_activation_bytes(self, model: ModelSpec) -> float:
        """The largest activation any batch of this engine can have, as a profiling run would find it."""
        tokens = max(self.batch_tokens, MAX_RUNNING_HIGH)
        return (
            model.activation_base_bytes
            + model.activation_token_bytes * tokens
            + model.activation_sequence_bytes * MAX_RUNNING_HIGH
        )

    def kv_capacity_bytes(self) -> float:
        """KV capacity of a card: HBM - all weights - worst activation, runtime reserve and slack.

        UserError when the weights leave no room for a page group per worker.
        """
        card = self.card_spec()
        fixed = card.slack_bytes
        groups = 0.0
        for model in self.model_specs():
            fixed += model.weights_bytes + self.worst_activation_bytes(model) + card.runtime_reserve_bytes
            groups += model.group_bytes
        if card.hbm_bytes - fixed < groups:
            raise UserError(
                f"{self.workers_per_card} x {self.model} on {card.name}: weights, activation and runtime take "
                f"{fixed / 1e9:.1f} GB of {card.hbm_bytes / 1e9:.1f} GB, which leaves no room for KV"
            )
        return card.hbm_bytes - fixed
