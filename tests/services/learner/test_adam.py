"""The learner's Adam is that of the paper."""

from __future__ import annotations

import numpy as np
import torch

from services.learner.adam import Adam

LEARNING_RATE, EPS = 0.01, 1e-5


def test_steps_are_those_of_the_paper() -> None:
    """Kingma and Ba 2015, algorithm 1, in double precision beside it; a gradient that changes with the parameters."""
    generator = torch.Generator().manual_seed(0)
    ours = [torch.randn(*shape, generator=generator).requires_grad_() for shape in ((3, 4), (4,))]
    theirs = [one.detach().numpy().astype(np.float64) for one in ours]
    means, squares = ([np.zeros_like(one) for one in theirs] for _ in range(2))
    own = Adam(ours, learning_rate=LEARNING_RATE, eps=EPS)
    for step in range(1, 21):
        for one in ours:
            one.grad = None
        (ours[0].square().sum() + (ours[0].sum(0) * ours[1]).sum()).backward()  # type: ignore[no-untyped-call]
        own.step()
        for k, gradient in enumerate((2 * theirs[0] + theirs[1], theirs[0].sum(0))):
            means[k] = 0.9 * means[k] + 0.1 * gradient
            squares[k] = 0.999 * squares[k] + 0.001 * gradient**2
        for k, (mean, square) in enumerate(zip(means, squares, strict=True)):
            unbiased = np.sqrt(square / (1 - 0.999**step))
            theirs[k] = theirs[k] - LEARNING_RATE * mean / (1 - 0.9**step) / (unbiased + EPS)
        for one, right in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(one.detach().numpy(), right, rtol=1e-5, atol=1e-6, err_msg=f"step {step}")
