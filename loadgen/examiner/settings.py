"""Settings of the examiner: table ``[examiner]``, variables ``TIDEGATE_EXAMINER_<KEY>``."""

from __future__ import annotations

from typing import Annotated

import msgspec

from services.learner.promotion import Limits

_Count = Annotated[int, msgspec.Meta(ge=1, le=100_000)]
_Seconds = Annotated[float, msgspec.Meta(gt=0.0)]
_Share = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]


class ShadowLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long a candidate decides in shadow, and what it must look like there."""

    steps: Annotated[int, msgspec.Meta(ge=0, le=100_000)] = 150
    """Steps of the busiest node: five minutes; 0: no shadow."""
    decisions: _Count = 100
    """Decisions at least, rows without a choice left out."""
    limit_s: _Seconds = 1800.0
    """Seconds after which a fleet that says too little ends the examination without a promotion."""
    agreement: _Share = 0.2
    """Share of decisions, at least, that are those of the acting policy."""
    one_action: _Share = 0.995
    """A candidate that answers with one and the same other action than hold in more than this share is refused."""
    spread: Annotated[float, msgspec.Meta(ge=0.0)] = 1e-5
    """Standard deviation over states that the advantages must have at least: else the output is constant."""


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a candidate must show, and how long it then acts."""

    configurations: _Count = 8
    """Emulated fleets, drawn by ``seed``, that candidates are replayed on: none of those of the published
    examination, which must stay unseen."""
    traces: _Count = 2
    """Request traces of each."""
    trace_s: Annotated[float, msgspec.Meta(ge=60.0, le=86_400.0)] = 400.0
    """Their length, simulated seconds."""
    seed: Annotated[int, msgspec.Meta(ge=0)] = 0xE7A
    """Of fleets, traces and the bootstrap."""
    needed_ratio: _Seconds = 1.0
    """Lower bound of the paired interval of goodput over the champion's must be above this."""
    worst_ratio: Annotated[float, msgspec.Meta(ge=0.0)] = 0.98
    """Goodput over the champion's on the worst configuration, at least."""
    confidence: Annotated[float, msgspec.Meta(gt=0.5, lt=1.0)] = 0.95
    """Of that interval, two-sided."""
    draws: _Count = 2000
    """Of the bootstrap."""
    shadow: ShadowLimits = msgspec.field(default_factory=ShadowLimits)
    """What it must look like on live states."""
    live: Limits = msgspec.field(default_factory=Limits)
    """When it is taken back."""
    probation_share: Annotated[float, msgspec.Meta(gt=0.0, le=1.0)] = 0.5
    """Share of the cards on whose workers a new champion acts until its live window is sound, at least one and not all;
    the others stay on the former one. A fleet of one card is parted by worker. 1: all at once, compared with the window
    before, as it is where there is but one worker."""
    validity_s: _Seconds = 7 * 86_400.0
    """How long a promotion is valid. Candidates that do not beat the champion confirm it, so that it expires only when
    the learner or the examiner has stopped."""
    durable: str = "examiner"
    """Name of the consumer on TG_TRANSITIONS."""
    lookback_messages: Annotated[int, msgspec.Meta(ge=0)] = 2000
    """Messages of the stream that are read at the start: what the policy before did."""
    fetch_messages: Annotated[int, msgspec.Meta(ge=1, le=5000)] = 250
    """Messages a fetch."""
    fetch_timeout_s: _Seconds = 1.0
    """How long a fetch waits for the first."""
