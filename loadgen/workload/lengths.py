"""Length distributions from three published figures: mean, median and 99th percentile.

Pure. A lognormal has two parameters and cannot meet three figures (Azure's outputs: from median and p99 its
mean comes out a quarter too low), so the quantile function itself is fitted.
"""

from __future__ import annotations

import functools
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from loadgen.requests import F8, I8

TAIL: Final = 0.3
"""Above p99 the logarithm goes on by this share of its way from median to p99: a bounded tail, since nothing
is published about it."""

_Z99: Final = 2.3263478740408408
_GRID: Final = (np.arange(4096) + 0.5) / 4096


class Lengths(msgspec.Struct, frozen=True):
    """A distribution of token counts (or seconds) with the wanted median, p99 and, through ``shape``, mean.

    In logarithms: lognormal below the median (as wide as above it, mirrored), a power of the way from median
    to p99 between them, a short straight tail above.
    """

    p50: float
    p99: float
    shape: float
    """Exponent of the way from median to p99, > 0: the smaller, the heavier the upper half."""

    def quantile(self, share: F8) -> F8:
        """The value below which ``share`` (in [0, 1)) of the draws lie; any shape, float64."""
        way = np.log(self.p99 / self.p50)
        upper = np.clip((share - 0.5) / 0.49, 0.0, 1.0) ** self.shape
        tail = TAIL * np.clip((share - 0.99) / 0.01, 0.0, 1.0)
        lower = np.minimum(_normal_quantile(np.minimum(share, 0.5)) / _Z99, 0.0)
        return np.asarray(self.p50 * np.exp(way * (lower + upper + tail)), dtype=np.float64)

    def mean(self) -> float:
        """The distribution's mean, by quadrature."""
        return float(self.quantile(_GRID).mean())

    def scaled(self, factor: float) -> Lengths:
        """All values times ``factor``."""
        return Lengths(p50=self.p50 * factor, p99=self.p99 * factor, shape=self.shape)

    def draw(self, count: int, rng: np.random.Generator) -> I8:
        """``count`` token counts, int64, at least 1."""
        return tokens(self.quantile(rng.random(count)))


@functools.lru_cache(maxsize=64)
def fitted(mean: float, p50: float, p99: float) -> Lengths:
    """The distribution with these figures; ValueError when no mean like that fits the two quantiles."""
    if not 0 < p50 < p99:
        raise ValueError(f"p50 {p50}, p99 {p99}: expected 0 < p50 < p99")
    low, high = 0.02, 50.0
    lightest, heaviest = Lengths(p50, p99, high).mean(), Lengths(p50, p99, low).mean()
    if not lightest <= mean <= heaviest:
        raise ValueError(f"mean {mean}: expected {lightest:.0f} to {heaviest:.0f} for p50 {p50}, p99 {p99}")
    for _ in range(60):  # the mean falls as the exponent grows
        middle = (low + high) / 2
        if Lengths(p50, p99, middle).mean() > mean:
            low = middle
        else:
            high = middle
    return Lengths(p50, p99, (low + high) / 2)


def tokens(values: F8) -> I8:
    """Rounded to whole tokens, at least 1, int64."""
    return np.maximum(np.rint(values), 1).astype(np.int64)


def _normal_quantile(share: F8) -> F8:
    """The standard normal's quantile for shares up to 0.5 (Abramowitz and Stegun 26.2.23, error < 4.5e-4)."""
    t = np.sqrt(-2.0 * np.log(np.maximum(share, 1e-12)))
    above = 2.515517 + t * (0.802853 + t * 0.010328)
    below = 1.0 + t * (1.432788 + t * (0.189269 + t * 0.001308))
    result: npt.NDArray[np.float64] = above / below - t
    return result
