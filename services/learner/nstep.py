"""n-step returns out of one-step transitions (DESIGN section 2: the learner joins, and cuts).

Rows are stored as they come; each knows the row that followed it on the same worker. A return is joined when
its first row is sampled, so that "off-policy" is judged by the policy that is being learned *now*, and a row
that has no follower yet is used at once as a shorter return instead of waiting for it.

A return from row 0 goes on through row k (k = 1 .. n-1) while

- row k-1 did not end the trajectory: its discount is above 0;
- row k is known: no gap in steps, no missing outcome, no other boot in between;
- row k's executed action is *on policy*. In ``greedy`` judgement (Watkins' cut, the default) this means it is
  the masked argmax of the online network in that state: Q-learning's target is the greedy policy's value, and
  what another action brought says nothing about it. In ``behaviour`` judgement it means that the policy which
  acted preferred it (probability of at least one half): only exploration is cut, so demonstrations of a
  heuristic are joined whole, at the price of a return that is the heuristic's and not the greedy policy's.

The action of row 0 is never judged: Q(s, a) asks what happens after this a, whoever chose it.

    R = sum_{k=0}^{m-1} (prod_{j<k} g_j) r_k          m <= n rows joined
    G = prod_{j=0}^{m-1} g_j                          discount of the bootstrap value; 0 after a terminal row
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

ON_POLICY_PROBABILITY = 0.5
"""From which on the behaviour policy preferred an action rather than explored."""


class Joined(msgspec.Struct, frozen=True):
    """n-step returns of b first rows."""

    returns: NDArray[np.float32]
    """R, [b]."""
    discounts: NDArray[np.float32]
    """G, [b]."""
    lengths: NDArray[np.int64]
    """m, [b]: rows joined, 1 to n. The bootstrap state is the next state of row m-1."""


def join(
    rewards: NDArray[np.float32],
    discounts: NDArray[np.float32],
    known: NDArray[np.bool_],
    on_policy: NDArray[np.bool_],
) -> Joined:
    """Join n rows of b chains; every argument is [n, b], row 0 first.

    ``discounts`` are the one-step g (gamma, 0 for a terminal row), ``known`` whether the chain reaches that
    row, ``on_policy`` whether its action may be joined; both are ignored for row 0. Values of unknown rows are
    never read into a result. ValueError when the shapes differ or there is no row.
    """
    shape = rewards.shape
    if len(shape) != 2 or shape[0] < 1 or {discounts.shape, known.shape, on_policy.shape} != {shape}:
        raise ValueError(
            f"rewards {shape}, discounts {discounts.shape}, known {known.shape}, on_policy {on_policy.shape}: "
            "expected four equal [n, b] with n of at least 1"
        )
    going = np.ones(shape[1], np.bool_)
    returns = rewards[0].astype(np.float64)
    carried = discounts[0].astype(np.float64)
    lengths = np.ones(shape[1], np.int64)
    for k in range(1, shape[0]):
        going = going & (carried > 0) & known[k] & on_policy[k]
        returns = np.where(going, returns + carried * rewards[k], returns)
        carried = np.where(going, carried * discounts[k], carried)
        lengths += going
    return Joined(returns.astype(np.float32), carried.astype(np.float32), lengths)
