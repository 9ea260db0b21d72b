"""Settings of the featurizer: table ``[featurizer]``, variables ``TIDEGATE_FEATURIZER_<KEY>``."""

from __future__ import annotations

from typing import Annotated

import msgspec

from services.featurizer.reward import RewardSettings
from services.featurizer.tracker import TrackerSettings

_Steps = Annotated[int, msgspec.Meta(ge=1, le=10_000)]
_Weight = Annotated[float, msgspec.Meta(ge=0.0, le=1000.0)]
_Seconds = Annotated[float, msgspec.Meta(gt=0.0)]


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How much past is held, what a step is worth, how long transitions are kept."""

    window_steps: _Steps = 30
    """Length of the long window in steps (60 s). A worker is held until it is full: shorter ones act sooner
    after a start and know less of the requests' lengths."""
    forget_steps: _Steps = 60
    """Steps after which a worker that its node no longer lists is forgotten."""
    forget_nodes_s: _Seconds = 600.0
    """Seconds of silence after which a node is forgotten: longer than a host's restart."""
    max_workers: Annotated[int, msgspec.Meta(ge=1, le=10_000_000)] = 131_072
    """Workers followed at most, about 4 KB each; samples that bring more are counted and dropped."""
    queue: str = ""
    """Queue group. Empty, since a worker's history must stay in one process; shards subscribe by subject."""
    alpha: _Weight = 1.0
    """Weight of tokens/s over the card's reference in the article's reward."""
    beta: _Weight = 0.2
    """Weight of the card's KV use in it."""
    gamma: _Weight = 1.0
    """Weight of the share of requests beyond their class limit in it."""
    preemption_cost_tokens: _Weight = 16.0
    """What a preemption costs the goodput objective beside recomputation, output tokens."""
    recompute_cost: _Weight = 0.5
    """What a recomputed prompt token costs it, output tokens."""
    transitions: bool = True
    """Whether transitions are paired and published; without them nothing can learn."""
    stream_max_age_s: _Seconds = 7 * 86_400.0
    """How long TG_TRANSITIONS keeps a message; the same as the learner's, which sets it too."""
    stream_max_bytes: Annotated[int, msgspec.Meta(ge=1)] = 2 * 1024**3
    """How much it keeps; a transition takes about 500 bytes."""

    @property
    def tracker(self) -> TrackerSettings:
        return TrackerSettings(
            window_steps=self.window_steps, forget_steps=self.forget_steps, max_workers=self.max_workers
        )

    @property
    def rewards(self) -> RewardSettings:
        return RewardSettings(
            alpha=self.alpha,
            beta=self.beta,
            gamma=self.gamma,
            preemption_cost_tokens=self.preemption_cost_tokens,
            recompute_cost=self.recompute_cost,
        )
