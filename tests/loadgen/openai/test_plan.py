"""Who asks what: a function of the options alone."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from loadgen.openai.draws import draw_of
from loadgen.openai.options import Options, classes_of
from loadgen.openai.plan import TOO_LONG, Session, open_plan, slot_sessions, trace_plan
from loadgen.openai.prompts import TokenConversation, WordConversation
from loadgen.traces import read
from schemas.classes import ServiceClass
from services.errors import UserError

TRACE = """trace_id,t_s,prompt_tokens,output_tokens,think_time_s
a,0,100,10,0
a,5,150,20,4
a,9,90,5,2
b,0,3000,10,0
"""


def closed(**more: object) -> Options:
    return Options(url="http://h", sessions=3, requests=10, max_tokens="8:64", **more).check()  # type: ignore[arg-type]


def asked(options: Options, limit: int = 4096) -> list[Session]:
    return [one for slot in range(options.sessions) for one in slot_sessions(options, slot, limit)]


def test_a_closed_loop_shares_its_requests_out_and_repeats_itself() -> None:
    sessions = asked(closed(seed=7))
    assert sum(len(one.turns) for one in sessions) == 10, "neither more nor fewer than --requests"
    assert len({one.number for one in sessions}) == len(sessions)
    assert sessions == asked(closed(seed=7)), "two runs must ask the same to be compared"
    assert sessions != asked(closed(seed=8))


def test_a_slot_goes_on_without_end_for_a_duration() -> None:
    options = Options(url="http://h", sessions=2, duration_s=1)
    numbers = [one.number for one in itertools.islice(slot_sessions(options, 1, 0), 4)]
    assert numbers == [1, 3, 5, 7]


def test_turns_beyond_the_context_are_left_out_and_counted() -> None:
    options = closed(turns="5", prompt_tokens="100", turn_tokens="100")
    for session in asked(options, limit=400):
        assert 100 * len(session.turns) + sum(turn.max_tokens for turn in session.turns) <= 400
    assert open_plan(Options(url="http://h", rate_per_s=5, requests=20, turns="5"), 400).left_out[TOO_LONG] > 0


def test_nothing_that_fits_is_a_mistake_and_no_endless_loop() -> None:
    with pytest.raises(UserError, match="fits into the context of 100"):
        list(slot_sessions(closed(), 0, 100))
    with pytest.raises(UserError, match="fits into the context of 100"):
        open_plan(Options(url="http://h", rate_per_s=5, requests=20), 100)


@pytest.mark.parametrize("burstiness", [0.5, 1.0, 4.0])
def test_an_open_loop_has_the_rate_it_was_asked_for(burstiness: float) -> None:
    plan = open_plan(Options(url="http://h", rate_per_s=50, duration_s=60, burstiness=burstiness), 4096)
    starts = np.array([one.start_s for one in plan.sessions])
    assert (np.diff(starts) >= 0).all()
    assert len(starts) / 60 == pytest.approx(50, rel=0.15 * burstiness)
    assert np.std(np.diff(starts)) * 50 == pytest.approx(burstiness, rel=0.25)


def test_an_open_loop_without_duration_holds_all_requests() -> None:
    plan = open_plan(Options(url="http://h", rate_per_s=2, requests=33, turns="1:4", seed=3), 4096)
    assert sum(len(one.turns) for one in plan.sessions) == 33


def test_a_trace_is_asked_with_its_lengths_shared_prefixes_and_pace(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(TRACE)
    options = Options(url="http://h", trace=tmp_path / "t.csv", speed=2.0)
    plan = trace_plan(options, read(tmp_path / "t.csv"), 2048)
    assert sum(plan.left_out.values()) == 1, "the call of 3,010 tokens is left out, and said"
    (session,) = plan.sessions
    assert [turn.prompt_tokens for turn in session.turns] == [100, 150, 90]
    assert [turn.max_tokens for turn in session.turns] == [10, 20, 5]
    assert [turn.think_s for turn in session.turns] == [2.0, 1.0, 0.0], "twice as fast"
    assert session.service_class is ServiceClass.AGENT

    talk = TokenConversation(0, session.number, (10, 250), 0, False)
    prompts = []
    for turn in session.turns:
        prompts.append(talk.ask(turn))
        talk.answered(turn, list(range(1000, 1000 + turn.max_tokens)), "", turn.max_tokens)
    first, second, third = (one.value for one in prompts)
    assert [len(one) for one in (first, second, third)] == [100, 150, 90]
    assert second[:110] == [*first, *range(1000, 1010)], "the history is the prompt and the server's own answer"
    assert [one.kept_tokens for one in prompts] == [0, 110, 0]
    assert third[:10] != second[:10], "a shorter prompt is a rewritten context: nothing is shared"


def test_a_trace_that_nothing_is_left_of_is_a_mistake(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(TRACE)
    with pytest.raises(UserError, match="nothing is left to send"):
        trace_plan(Options(url="http://h", trace=tmp_path / "t.csv"), read(tmp_path / "t.csv"), 20)


def test_sessions_share_the_common_prefix_and_nothing_else() -> None:
    turn = asked(closed())[0].turns[0]
    a, b = (TokenConversation(0, number, (10, 250), 32, False).ask(turn).value for number in (1, 2))
    assert a[:32] == b[:32]
    assert a[32:] != b[32:]


def test_synthetic_history_does_not_depend_on_the_answers() -> None:
    first, second = asked(closed(turns="2"))[0].turns

    def later(answer: list[int]) -> object:
        talk = TokenConversation(0, 1, (10, 250), 0, True)
        talk.ask(first)
        talk.answered(first, answer, "", len(answer))
        return talk.ask(second).value

    assert later([1, 2]) == later([3])


def test_chat_history_alternates_and_is_dropped_in_whole_exchanges() -> None:
    first, second = asked(closed(turns="2"))[0].turns
    talk = WordConversation(0, 1, 8, False)
    prompt = talk.ask(first)
    assert [one["role"] for one in prompt.value] == ["system", "user"]  # type: ignore[call-overload]
    assert prompt.tokens == sum(len(one["content"].split()) for one in prompt.value)  # type: ignore[call-overload]
    talk.answered(first, None, "an answer", 2)
    grown = talk.ask(second)
    assert [one["role"] for one in talk.messages] == ["system", "user", "assistant", "user"]
    assert grown.kept_tokens == prompt.tokens + 2
    talk.answered(second, None, "more", 1)
    cut = type(second)(0, 5, prompt.tokens + 2, 8, 0.0)
    talk.ask(cut)
    assert [one["role"] for one in talk.messages] == ["system", "user", "assistant", "user"]


@pytest.mark.parametrize(
    ("text", "wrong"),
    [("0", True), ("3:2", True), ("exp:0", True), ("lognormal:9:3", True), ("nan", True), ("1:2:3", True), ("", True),
     ("x", True), ("1.2:1.8", True), ("inf", True), ("5", False), ("5:9", False), ("exp:3", False),
     ("lognormal:3:9", False)],
)  # fmt: skip
def test_distributions_that_cannot_be_meant_are_refused(text: str, wrong: bool) -> None:
    if wrong:
        with pytest.raises(UserError, match="--turns: found"):
            draw_of("--turns", text, 1)
        return
    drawn = [draw_of("--turns", text, 1).whole(np.random.default_rng(at)) for at in range(200)]
    assert min(drawn) >= 1
    if text == "5:9":
        assert set(drawn) == {5, 6, 7, 8, 9}


def test_a_lognormal_has_the_median_and_p99_that_were_asked_for() -> None:
    rng = np.random.default_rng(0)
    drawn = [draw_of("--think", "lognormal:10:80").value(rng) for _ in range(20_000)]
    assert np.quantile(drawn, [0.5, 0.99]) == pytest.approx([10, 80], rel=0.1)


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"url": "h:1"}, "--url"),
        ({"rate_per_s": 1.0}, "found 2 of them"),
        ({"sessions": 0}, "found 0 of them"),
        ({"requests": 0}, "--duration, --requests"),
        ({"requests": 1}, "one or more for each"),
        ({"duration_s": float("nan")}, "--duration"),
        ({"timeout_s": 0.0}, "--timeout"),
        ({"history": "none"}, "--history"),
        ({"token_ids": (9, 9)}, "--token-ids"),
        ({"is_plain": True, "priority": 1}, "--plain"),
        ({"think_s": "-1"}, "--think"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(more: dict[str, object], told: str) -> None:
    fields: dict[str, object] = {"url": "http://h", "sessions": 2, "requests": 4, **more}
    with pytest.raises(UserError, match=told):
        Options(**fields).check()  # type: ignore[arg-type]


def test_classes_are_read_and_drawn_by_weight() -> None:
    weights = classes_of("--class", "agent=1,chat=3")
    sessions = open_plan(Options(url="http://h", rate_per_s=9, requests=2000, service_class=weights), 4096).sessions
    agents = sum(one.service_class is ServiceClass.AGENT for one in sessions)
    assert agents / len(sessions) == pytest.approx(0.25, abs=0.04)
    for wrong in ("nobody", "agent=x", "agent,agent", "chat=nan"):
        with pytest.raises(UserError, match="--class"):
            classes_of("--class", wrong)
