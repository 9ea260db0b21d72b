"""The built-in workloads meet the published figures."""

from __future__ import annotations

import numpy as np
import pytest

from loadgen.workload import KINDS, builtin, info, render
from loadgen.workload.lengths import fitted
from loadgen.workload.published import FIGURES
from schemas.classes import ServiceClass
from services.errors import UserError

LONG_ENOUGH_S = {"chat": 10_000.0, "code": 40_000.0, "long": 12_000.0, "agent": 30_000.0}


@pytest.mark.parametrize("kind", list(FIGURES))
def test_lengths_fit_the_published_mean_p50_and_p99(kind: str) -> None:
    figures = FIGURES[kind]
    for wanted in (figures.prompt, figures.output):
        lengths = fitted(*wanted)
        shares = np.array([0.5, 0.99])
        assert lengths.mean() == pytest.approx(wanted[0], rel=0.001)
        assert lengths.quantile(shares).tolist() == pytest.approx(wanted[1:], rel=0.001)
    described = info(builtin(kind, LONG_ENOUGH_S[kind], seed=1, context_scale=1.0, swing=0.0))
    for spread, wanted in ((described.prompt, figures.prompt), (described.output, figures.output)):
        found = (spread.mean, spread.p50, spread.p99)
        assert found == pytest.approx(wanted, rel=0.1), f"{kind}: {found}, published {wanted}"


@pytest.mark.parametrize("kind", list(FIGURES))
def test_rate_burstiness_reuse_and_think_time_fit(kind: str) -> None:
    figures = FIGURES[kind]
    described = info(builtin(kind, LONG_ENOUGH_S[kind], seed=2, swing=0.0))
    few = figures.cv > 3 or figures.turns_mean > 10  # bursts and long sessions: few independent draws
    assert described.requests_per_s == pytest.approx(figures.rate_per_s, rel=0.2 if few else 0.08)
    assert described.arrival_cv == pytest.approx(figures.cv, rel=0.2)
    assert described.prefix_reuse == pytest.approx(figures.prefix_reuse, abs=0.02)
    if figures.think_p50_s:
        assert described.think.p50 == pytest.approx(figures.think_p50_s, rel=0.1)
        assert described.think.p90 == pytest.approx(figures.think_p90_s, rel=0.15)


def test_agent_lengths_are_a_quarter_and_it_says_so() -> None:
    agent = builtin("agent", 3000.0, seed=1)
    assert any("divided by 4" in note for note in agent.notes)
    full = builtin("agent", 3000.0, seed=1, context_scale=1.0)
    assert not any("divided" in note for note in full.notes)
    assert info(full).prompt.p50 / info(agent).prompt.p50 == pytest.approx(4.0, rel=0.01)


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_gives_one_workload_and_another_seed_another(kind: str) -> None:
    first, again, other = (builtin(kind, 300.0, seed=seed) for seed in (1, 1, 2))
    assert first.requests.prompt_tokens.tolist() == again.requests.prompt_tokens.tolist()
    assert first.requests.arrival_s.tolist() == pytest.approx(again.requests.arrival_s.tolist(), nan_ok=True)
    assert first.requests.prompt_tokens.tolist() != other.requests.prompt_tokens.tolist()


def test_mixed_holds_every_class_and_can_be_made_one() -> None:
    mixed = builtin("mixed", 1200.0, seed=1)
    assert set(info(mixed).classes) == {"chat", "agent", "copilot"}
    batch = builtin("mixed", 1200.0, seed=1, service_class=ServiceClass.BATCH)
    assert set(info(batch).classes) == {"batch"}


def test_a_swing_shows_over_its_period() -> None:
    swinging = builtin("chat", 4000.0, seed=1, swing=0.4, swing_period_s=4000.0)
    early = (swinging.requests.arrival_s < 2000).mean()
    assert early == pytest.approx(0.5 + 0.4 / np.pi, abs=0.03)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"kind": "chatt"}, "found 'chatt', expected one of: chat, code, long, agent, mixed"),
        ({"kind": "chat", "duration_s": -1.0}, "duration_s"),
        ({"kind": "chat", "rate_scale": float("nan")}, "rate_scale"),
        ({"kind": "agent", "context_scale": 0.0}, "context_scale"),
        ({"kind": "chat", "swing": 1.0}, "swing"),
    ],
)
def test_nonsense_is_a_users_mistake(arguments: dict[str, object], said: str) -> None:
    with pytest.raises(UserError, match=said):
        builtin(**arguments)  # type: ignore[arg-type]


def test_a_short_and_thin_workload_still_holds_together() -> None:
    for kind in KINDS:
        tiny = builtin(kind, 1.0, rate_scale=0.001, seed=0).check()
        assert render(info(tiny)), "even without a request there is something to say"
        tiny.scaled(2.0).check()
        tiny.looped(10.0).check()
        assert len(tiny.assign(2)) == 2


def test_render_tells_rates_lengths_burstiness_and_sessions() -> None:
    text = "\n".join(render(info(builtin("agent", 600.0, seed=1))))
    for word in ("requests", "burstiness", "prompt tokens", "output tokens", "think time", "sessions", "divided by 4"):
        assert word in text
