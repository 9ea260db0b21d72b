"""Conversations told apart by the hashes of their blocks: whose idle KV is whose, and who may leave."""

from __future__ import annotations

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from schemas.endings import Ending
from services.actuator.engines.vllm.labels import token_array
from services.actuator.engines.vllm.sessions import AWAY_MOST, Session, Sessions

BYTES, TOKENS = 1000, 16


def chain(text: str) -> list[bytes]:
    """Hashes of blocks: each stands for all the text up to it."""
    return [text[: end + 1].encode() for end in range(len(text))]


@pytest.fixture
def sessions() -> Sessions:
    return Sessions(BYTES, TOKENS)


def turn(
    sessions: Sessions, prompt: str, answered: str, now_s: float, name: str = "", ending: Ending = Ending.DONE
) -> Session:
    """A whole turn: it begins, ends one second later and leaves its blocks to idle."""
    session = sessions.started(name, chain(prompt), 0, now_s)
    blocks = chain(answered)
    sessions.finished(session, blocks, token_array(range(99), len(blocks) * TOKENS % 99), now_s + 1.0, ending)
    for block_hash in reversed(blocks):
        sessions.rested(block_hash)
    return session


def copied(block_hash: bytes) -> bool:
    return True


# Who is who.


def test_a_prompt_that_begins_with_prompt_and_answer_is_the_same_conversation(sessions: Sessions) -> None:
    first = turn(sessions, "ab", "abc", 0.0)
    assert turn(sessions, "abcd", "abcde", 10.0) is first
    assert turn(sessions, "abx", "abxy", 20.0) is not first, "it begins alike and goes on otherwise"


def test_a_name_counts_more_than_the_prompt(sessions: Sessions) -> None:
    first = turn(sessions, "ab", "abc", 0.0, name="s")
    assert turn(sessions, "xy", "xyz", 10.0, name="s") is first
    assert turn(sessions, "xyz", "xyzw", 20.0, name="t") is not first


def test_of_two_that_hold_the_same_the_other_one_stays_known(sessions: Sessions) -> None:
    turn(sessions, "ab", "abc", 0.0, name="one")
    second = turn(sessions, "ab", "abc", 1.0, name="two")
    turn(sessions, "abc", "abcd", 10.0, name="one")
    assert sessions.started("", chain("abc"), 0, 20.0) is second, "it still ends with abc"


# Idle and away.


def test_a_conversation_between_turns_idles_with_its_blocks(sessions: Sessions) -> None:
    session = turn(sessions, "ab", "abc", 0.0)
    (idle,) = sessions.idle(10, 5.0, copied)
    assert (idle.session, idle.bytes, idle.idle_s, idle.copied) == (session.number, 3 * BYTES, 4.0, True)
    assert idle.tokens == 3 * TOKENS
    assert idle.expected_return_s > 0


def test_the_quietest_is_told_first_and_who_is_in_a_turn_not_at_all(sessions: Sessions) -> None:
    quiet, later, busy = (turn(sessions, text, text, at) for at, text in enumerate(("ab", "cd", "ef")))
    sessions.started("", chain("efg"), 0, 9.0)
    assert busy.turns == 1
    assert [one.session for one in sessions.idle(10, 9.0, copied)] == [quiet.number, later.number]
    assert [one.session for one in sessions.idle(1, 9.0, copied)] == [quiet.number]


def test_blocks_that_left_the_card_are_away(sessions: Sessions) -> None:
    session = turn(sessions, "ab", "abc", 0.0)
    for block_hash in chain("abc")[1:]:
        sessions.left(block_hash)
    assert sessions.idle(10, 5.0, copied)[0].bytes == BYTES
    (away,) = sessions.away(1e9, 5.0, lambda one: 2)
    assert (away.session, away.bytes, away.tokens) == (session.number, 2 * BYTES, 2 * TOKENS)
    assert sessions.away(1e9, 5.0, lambda one: 0) == (), "no lower tier has them"
    assert sessions.away(0.0, 5.0, lambda one: 2) == (), "not expected so soon"


def test_who_is_expected_soonest_is_looked_up_first_and_not_everybody_is(sessions: Sessions) -> None:
    for place in range(2 * AWAY_MOST):
        text = f"{chr(1000 + place)}x"
        turn(sessions, text, text, float(place))
        for block_hash in chain(text):
            sessions.left(block_hash)
    asked: list[int] = []

    def missing(session: Session) -> int:
        asked.append(session.number)
        return 1

    listed = sessions.away(1e9, 200.0, missing)
    assert len(asked) == len(listed) == AWAY_MOST
    expected = [one.expected_return_s for one in listed]
    assert expected == sorted(expected)


def test_a_turn_that_was_cut_before_it_computed_anything_leaves_all_as_it_was(sessions: Sessions) -> None:
    """A client that hangs up while it waits, and asks again: the engine must neither stumble nor lose the session."""
    session = turn(sessions, "ab", "abc", 0.0)
    again = sessions.started("", chain("abcd"), 0, 10.0)
    sessions.abandoned(again, 11.0)
    assert [one.session for one in sessions.idle(10, 12.0, copied)] == [session.number]
    assert sessions.started("", chain("abcd"), 0, 13.0) is session


def test_a_first_turn_that_was_cut_is_no_return(sessions: Sessions) -> None:
    sessions.abandoned(sessions.started("s", [], 0, 0.0), 1.0)
    assert sessions.idle(10, 2.0, copied) == ()
    sessions.started("s", [], 0, 3.0)


def test_of_two_turns_at_once_the_last_to_end_ends_the_conversations_turn(sessions: Sessions) -> None:
    session = sessions.started("s", chain("a"), 0, 0.0)
    sessions.started("s", chain("b"), 0, 0.0)
    sessions.finished(session, chain("ab"), token_array([], 0), 1.0, Ending.DONE)
    sessions.rested(b"a")
    assert sessions.idle(10, 2.0, copied) == ()
    sessions.abandoned(session, 2.0)
    assert len(sessions.idle(10, 3.0, copied)) == 1


# Who may leave.


def test_a_conversation_leaves_from_its_end(sessions: Sessions) -> None:
    session = turn(sessions, "ab", "abc", 0.0)
    assert list(sessions.leaving([session])) == list(reversed(chain("abc")))


def test_what_somebody_who_stays_has_too_stays(sessions: Sessions) -> None:
    goes = turn(sessions, "sys1", "sys1x", 0.0)
    stays = turn(sessions, "sys2", "sys2y", 1.0)
    assert list(sessions.leaving([goes])) == [b"sys1x", b"sys1"]
    assert list(sessions.leaving([goes, stays]))[-3:] == [b"sys", b"sy", b"s"], "with the last of them it goes"


def test_who_is_in_a_turn_stays(sessions: Sessions) -> None:
    session = turn(sessions, "ab", "abc", 0.0)
    sessions.started("", chain("abcd"), 0, 5.0)
    assert list(sessions.leaving([session])) == []


# Bounds.


def test_beyond_what_the_memories_hold_the_quietest_is_forgotten() -> None:
    sessions = Sessions(BYTES, TOKENS, blocks_most=7)
    first = turn(sessions, "ab", "abc", 0.0)
    turn(sessions, "xy", "xyz", 1.0, name="named")
    turn(sessions, "klm", "klm", 2.0)
    assert first.number not in sessions.known
    assert sessions.returns.waiting == 2
    assert turn(sessions, "abc", "abcd", 3.0) is not first
    assert sessions.started("named", [], 0, 4.0).turns == 1


def test_nobody_is_forgotten_in_a_turn() -> None:
    sessions = Sessions(BYTES, TOKENS, blocks_most=1)
    session = turn(sessions, "a", "a", 0.0, name="s")
    sessions.started("s", chain("a"), 0, 1.0)
    turn(sessions, "xyz", "xyz", 2.0)
    assert list(sessions.known) == [session.number]


def test_after_a_reset_of_the_cache_nobody_has_anything(sessions: Sessions) -> None:
    session = turn(sessions, "ab", "abc", 0.0, name="s")
    sessions.cleared()
    assert sessions.idle(10, 5.0, copied) == ()
    assert sessions.away(1e9, 5.0, lambda one: 1) == ()
    assert list(sessions.leaving([session])) == []
    assert turn(sessions, "ab", "abc", 6.0, name="s") is session
    assert len(sessions.idle(10, 8.0, copied)) == 1


class Histories(RuleBasedStateMachine):
    """Any history of turns, cuts, evictions and resets: what is told of it is sound, and nothing raises."""

    turns = Bundle("turns")

    def __init__(self) -> None:
        super().__init__()
        self.sessions = Sessions(BYTES, TOKENS, blocks_most=30)
        self.now_s = 0.0
        self.idle: set[bytes] = set()

    @rule(target=turns, name=st.sampled_from(["", "", "s", "t"]), prompt=st.text("ab", max_size=4))
    def start(self, name: str, prompt: str) -> tuple[Session, str]:
        self.now_s += 1.0
        return self.sessions.started(name, chain(prompt), 0, self.now_s), prompt

    @rule(one=turns, answer=st.text("ab", max_size=3), cut=st.booleans())
    def end(self, one: tuple[Session, str], answer: str, cut: bool) -> None:
        session, prompt = one
        if not session.turns:
            return
        self.now_s += 1.0
        if cut or not prompt:
            self.sessions.abandoned(session, self.now_s)
            return
        blocks = chain(prompt + answer)
        for block_hash in self.idle & set(blocks):  # the turn had them
            self.sessions.left(block_hash)
            self.idle.discard(block_hash)
        self.sessions.finished(session, blocks, token_array([], 0), self.now_s, Ending.DONE)
        for block_hash in blocks:
            self.sessions.rested(block_hash)
            self.idle.add(block_hash)

    @rule(number=st.integers(0, 5))
    def evict(self, number: int) -> None:
        for block_hash in sorted(self.idle)[:number]:
            self.sessions.left(block_hash)
            self.idle.discard(block_hash)

    @rule()
    def reset(self) -> None:
        self.sessions.cleared()
        self.idle.clear()

    @invariant()
    def sound(self) -> None:
        told = self.sessions.idle(100, self.now_s, copied)
        assert sum(one.bytes for one in told) <= len(self.idle) * BYTES, "more idles than there is"
        self.sessions.away(1e9, self.now_s, lambda one: 1)
        leaving = list(self.sessions.leaving(self.sessions.known.values()))
        assert len(leaving) == len(set(leaving)), "a block leaves once"
        busy = any(one.turns for one in self.sessions.known.values())
        held = sum(len(one.chain) for one in self.sessions.known.values())
        assert busy or held <= 30, "the bound on what is remembered"


TestHistories = Histories.TestCase
TestHistories.settings = hypothesis_settings(max_examples=60, stateful_step_count=30, deadline=None)
