"""Slot accounts: none lost, none twice, nothing served before its commit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from services.actuator.memory.errors import BadGeometry, IllegalTransition, UnknownTicket
from services.actuator.memory.slots import Entry, SlotAccount, SlotState, SlotTicket
from services.actuator.memory.tier_errors import TierFull, UnknownEntry

KEYS = st.integers(0, 5)


def test_an_entry_is_served_from_its_commit_on() -> None:
    account = SlotAccount("host", 4)
    put = account.prepare_put(7, 3)
    with pytest.raises(UnknownEntry):
        account.prepare_get(7)
    account.commit_put(put.number)
    assert account.prepare_get(7).slots == put.slots


def test_a_full_account_says_what_it_has_and_changes_nothing() -> None:
    account = SlotAccount("host", 4)
    account.commit_put(account.prepare_put(1, 3).number)
    assert not account.accepts(2)
    with pytest.raises(TierFull) as full:
        account.prepare_put(2, 2)
    assert (full.value.wanted, full.value.free, full.value.capacity) == (2, 1, 4)
    assert account.free == 1


def test_a_grown_entry_keeps_its_first_slots_and_an_abort_leaves_it_as_it_was() -> None:
    account = SlotAccount("host", 8)
    first = account.commit_put(account.prepare_put(1, 3).number)
    account.abort(account.prepare_put(1, 5, keep=2).number)
    assert account.held(1) == first, "an aborted put leaves what was held"
    put = account.prepare_put(1, 5, keep=2)
    assert (len(put.slots), put.first) == (3, 2)
    grown = account.commit_put(put.number)
    assert grown.slots[:2] == first.slots[:2]
    assert account.free == 3, "the replaced third slot is free again"


def test_an_entry_being_read_can_neither_go_nor_change() -> None:
    account = SlotAccount("host", 8)
    account.commit_put(account.prepare_put(1, 2).number)
    one, other = account.prepare_get(1), account.prepare_get(1)
    for forbidden in (lambda: account.drop(1), lambda: account.prepare_put(1, 2)):
        with pytest.raises(IllegalTransition):
            forbidden()
    assert not account.commit_get(one.number, keep=False), "somebody still reads it"
    assert account.commit_get(other.number, keep=False)
    assert account.free == 8


def test_slots_of_an_abandoned_put_stay_out_of_use_while_its_copier_may_write() -> None:
    account = SlotAccount("host", 2)
    put = account.prepare_put(1, 2)
    account.abort(put.number, copier_stopped=False)
    assert account.free == 0
    account.release_stranded(put.number)
    assert account.free == 2


def test_tickets_end_once() -> None:
    account = SlotAccount("host", 2)
    put = account.prepare_put(1, 1)
    with pytest.raises(UnknownTicket):
        account.commit_get(put.number, keep=True)
    account.commit_put(put.number)
    for again in (lambda: account.commit_put(put.number), lambda: account.abort(put.number)):
        with pytest.raises(UnknownTicket):
            again()


@pytest.mark.parametrize(("count", "keep"), [(0, 0), (2, 1), (1, -1)])
def test_impossible_counts_are_refused(count: int, keep: int) -> None:
    with pytest.raises(BadGeometry):
        SlotAccount("host", 4).prepare_put(1, count, keep)


def test_an_entry_found_after_a_restart_takes_free_slots_only() -> None:
    account = SlotAccount("disk", 4)
    account.adopt(1, Entry((2, 0), 9))
    with pytest.raises(IllegalTransition):
        account.adopt(2, Entry((1, 2), 10))
    assert account.prepare_put(3, 1).sequence == 10, "sequences go on after those found"


class SlotMachine(RuleBasedStateMachine):
    """Any order of calls against a plain model: key -> what it must be served with."""

    def __init__(self) -> None:
        super().__init__()
        self.account = SlotAccount("tier", 12)
        self.content = np.full(12, -1)
        self.model: dict[int, list[int]] = {}
        self.puts: dict[int, SlotTicket] = {}
        self.gets: list[SlotTicket] = []
        self.stranded: list[SlotTicket] = []
        self.mark = 0

    @rule(key=KEYS, count=st.integers(1, 6), keep=st.integers(0, 6))
    def prepare_put(self, key: int, count: int, keep: int) -> None:
        free = self.account.free
        try:
            ticket = self.account.prepare_put(key, count, keep)
        except (TierFull, IllegalTransition, BadGeometry):
            assert self.account.free == free
            return
        assert free - self.account.free == len(ticket.slots) == count - keep
        self.puts[key] = ticket

    @rule(key=KEYS)
    def commit_put(self, key: int) -> None:
        if (ticket := self.puts.pop(key, None)) is None:
            return
        self.mark += 1
        self.content[list(ticket.slots)] = self.mark
        before = self.model.get(key, [])
        self.account.commit_put(ticket.number)
        self.model[key] = before[: ticket.first] + [self.mark] * len(ticket.slots)

    @rule(key=KEYS, stopped=st.booleans())
    def abort_put(self, key: int, stopped: bool) -> None:
        if (ticket := self.puts.pop(key, None)) is None:
            return
        self.content[list(ticket.slots)] = -2  # half-written
        self.account.abort(ticket.number, copier_stopped=stopped)
        if not stopped:
            self.stranded.append(ticket)

    @rule()
    def release(self) -> None:
        if self.stranded:
            self.account.release_stranded(self.stranded.pop().number)

    @rule(key=KEYS)
    def prepare_get(self, key: int) -> None:
        try:
            ticket = self.account.prepare_get(key)
        except (UnknownEntry, IllegalTransition):
            assert key not in self.model or key in self.puts
            return
        assert self.content[list(ticket.slots)].tolist() == self.model[key], "served as it was written"
        self.gets.append(ticket)

    @rule(keep=st.booleans(), give_up=st.booleans())
    def end_get(self, keep: bool, give_up: bool) -> None:
        if not self.gets:
            return
        ticket = self.gets.pop(0)
        assert self.content[list(ticket.slots)].tolist() == self.model[ticket.key], "unchanged while it is read"
        if give_up:
            self.account.abort(ticket.number)
        elif self.account.commit_get(ticket.number, keep=keep):
            del self.model[ticket.key]

    @rule(key=KEYS)
    def drop(self, key: int) -> None:
        try:
            self.account.drop(key)
        except (UnknownEntry, IllegalTransition):
            return
        del self.model[key]

    @invariant()
    def adds_up(self) -> None:
        self.account.check()
        held = sum(map(len, self.model.values()))
        filling = sum(len(ticket.slots) for ticket in self.puts.values())
        stranded = sum(len(ticket.slots) for ticket in self.stranded)
        assert held + filling + stranded + int((self.account.state == SlotState.FREE).sum()) == 12
        assert set(self.account.keys) == set(self.model)


TestSlotMachine = SlotMachine.TestCase
TestSlotMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
