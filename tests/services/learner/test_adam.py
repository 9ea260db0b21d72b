"""The learner's Adam is torch's, without what torch's brings along."""

from __future__ import annotations

import subprocess
import sys

import torch

from services.learner.adam import Adam


def test_steps_are_those_of_torch() -> None:
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(3, 4, generator=generator), torch.randn(4, generator=generator)]
    ours, theirs = ([one.clone().requires_grad_() for one in start] for _ in range(2))
    own = Adam(ours, learning_rate=0.01, eps=1e-5)
    right = torch.optim.Adam(theirs, lr=0.01, eps=1e-5, fused=True)
    for _ in range(5):
        for parameters, optimizer in ((ours, own), (theirs, right)):
            optimizer.zero_grad()
            (parameters[0].square().sum() + (parameters[0].sum(0) * parameters[1]).sum()).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_a_learner_does_not_load_torchs_compiler() -> None:
    code = (
        "import sys; from services.learner.settings import Settings; from services.learner.training import Trainer\n"
        "Trainer(Settings()); print('torch._dynamo' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False", "it costs seconds of every start"
