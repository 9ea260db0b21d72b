"""Settings of the learner: table ``[learner]``, variables ``TIDEGATE_LEARNER_<KEY>``."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

Positive = Annotated[int, msgspec.Meta(ge=1)]
Share = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
Seconds = Annotated[float, msgspec.Meta(gt=0.0)]


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the learner does and how much."""

    objective: Literal["goodput", "article"] = "goodput"
    """Column of rewards that is learned from. ``article`` is the reward as the article gives it, whose -1000
    for a crash ruins the scale of Q; ``goodput`` is the default for that reason."""
    gamma: Annotated[float, msgspec.Meta(ge=0.0, lt=1.0)] = 0.97
    """Discount a step: a horizon of some 33 steps, about a minute, in which an eviction has paid off or not."""
    n_step: Annotated[int, msgspec.Meta(ge=1, le=16)] = 3
    """One-step transitions joined into a return, at most."""
    off_policy_cut: Literal["greedy", "behaviour"] = "greedy"
    """What an action must be for its reward to be joined: the online network's greedy one (unbiased), or one
    that the policy which acted preferred (joins demonstrations whole, biased towards them)."""
    updates_per_transition: Annotated[float, msgspec.Meta(ge=0.0, le=100.0)] = 0.25
    """Gradient steps a transition received, not a second: a replay at any speed learns the same. 0: ingest and
    store only."""
    max_updates_per_fetch: Positive = 256
    """Gradient steps after one fetch at most; what is owed beyond is forgiven and counted, so that a fleet too
    large for one core makes learning thinner instead of later."""
    updates_at_once: Annotated[int, msgspec.Meta(ge=1, le=64)] = 8
    """Gradient steps whose batches are sampled and aimed together, at most: sampling and targets then cost less
    each, and are older by so many steps, which a target network that follows by ``tau`` a step does not notice."""
    batch: Positive = 64
    """Rows a gradient step."""
    learning_rate: Annotated[float, msgspec.Meta(gt=0.0, le=1.0)] = 5e-4
    """Of Adam."""
    clip_norm: Annotated[float, msgspec.Meta(gt=0.0)] = 10.0
    """Largest gradient norm."""
    tau: Annotated[float, msgspec.Meta(gt=0.0, le=1.0)] = 0.01
    """Polyak: how far the target network follows with each gradient step."""
    hidden: tuple[Positive, ...] = (128, 128)
    """Sizes of the hidden layers."""
    margin: Annotated[float, msgspec.Meta(ge=0.0)] = 0.1
    """Imitation: by how much a shown action's Q must beat every other allowed one's, in units of reward."""
    margin_weight: Annotated[float, msgspec.Meta(ge=0.0)] = 0.0
    """Weight of the imitation loss beside the TD loss; 0: none. From the stream nothing is imitated: only training
    on emulated fleets knows a demonstration from an accident."""
    risk_size: Annotated[int, msgspec.Meta(ge=0, le=4096)] = 32
    """Hidden size of the risk head; 0: none. A champion begun from keeps what it has."""
    risk_steps: Annotated[int, msgspec.Meta(ge=1, le=64)] = 5
    """Steps ahead in which exhaustion counts: 10 s, in which a guard that had to preempt shows."""
    warmup_rows: Positive = 256
    """Rows in the replay before the first gradient step; what comes earlier owes none."""
    capacity_rows: Positive = 200_000
    """Rows the replay holds: 490 bytes each, 98 MB when full; memory is occupied as rows come."""
    alpha: Share = 0.6
    """Prioritization exponent; 0: uniform."""
    beta_start: Share = 0.4
    """Importance exponent of the first update; it rises to 1 on a straight line."""
    beta_updates: Positive = 20_000
    """Updates until it is 1."""
    reward_low: float = -1100.0
    """Least reward believed: the article's crash penalty with room beside it."""
    reward_high: float = 100.0
    """Largest reward believed."""
    max_age_s: Seconds = 14 * 86_400.0
    """Rows of a step that lies further back are dropped: the fleet was another then. A step's time is that of its
    boot plus its number times the control period."""
    max_ahead_s: Seconds = 60 * 86_400.0
    """Rows of a step that lies further ahead are dropped, since every true one after it would be stale. Emulated nodes
    may run ahead of the clock by as much as they replay."""
    worker_share: Annotated[float, msgspec.Meta(ge=1.0)] = 8.0
    """Of the replay a worker may hold this many times its fair share among those heard of in the last ten minutes;
    what it sends beyond is dropped."""
    max_workers: Positive = 1_000_000
    """Workers whose trajectories are followed; transitions of further ones are dropped and counted."""
    publish_updates: Positive = 100
    """Updates between candidates."""
    start_from_champion: bool = True
    """Without a checkpoint, begin with the champion's weights when that is a DQN of this feature table."""
    seed: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Of the first weights and of sampling."""
    checkpoint_dir: str = "tidegate-state/learner"
    """Folder of checkpoints, made when missing; empty: none, and every start learns the stream anew."""
    checkpoint_every_s: Seconds = 30.0
    """So much work at most is done again after a kill; beside it, one is written before every candidate."""
    checkpoint_replay: bool = False
    """Keep the replay's rows in the checkpoint too. Without them a start reads the rows again from the stream,
    which must then hold them."""
    stream_max_age_s: Seconds = 7 * 86_400.0
    """How long TG_TRANSITIONS keeps a message."""
    stream_max_bytes: Positive = 2 * 1024**3
    """How much it keeps; a transition takes about 500 bytes."""
    durable: str = "learner"
    """Name of the consumer on the stream."""
    fetch_messages: Annotated[int, msgspec.Meta(ge=1, le=5000)] = 250
    """Messages a fetch."""
    fetch_timeout_s: Seconds = 1.0
    """How long a fetch waits for the first."""
    queue_fetches: Annotated[int, msgspec.Meta(ge=1, le=64)] = 2
    """Fetches that may wait for the learning thread; then fetching waits, and the stream holds the rest. Few,
    because what waits longer than the consumer's acknowledgement time comes again (a duplicate, counted)."""

    def __post_init__(self) -> None:
        if self.warmup_rows > self.capacity_rows:
            raise ValueError(f"warmup_rows {self.warmup_rows} not above capacity_rows {self.capacity_rows}")
        if self.reward_low >= self.reward_high:
            raise ValueError(f"reward_low {self.reward_low} below reward_high {self.reward_high}")
        if not self.hidden:
            raise ValueError("hidden: at least one layer")
