"""Who holds which block, read from tables that grow."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from services.actuator.engines.vllm.holders import Holders


def blocks(*numbers: int) -> list[Any]:
    return [SimpleNamespace(block_id=number) for number in numbers]


def where(holders: Holders, table: dict[str, list[Any]], *sources: int) -> dict[int, list[tuple[int, int]]]:
    """(length of the table, place) of each that names a source."""
    found = holders.find(table, np.array(sources, np.int64))
    return {number: [(one.length, place) for one, place in places] for number, places in found.items()}


def test_every_table_that_names_a_block_is_found_with_its_place() -> None:
    table = {"a": blocks(1, 2, 3), "empty": [], "b": blocks(1, 2, 9, 10)}
    assert where(Holders(), table, 2, 10, 77) == {2: [(3, 1), (4, 1)], 10: [(4, 3)], 77: []}


def test_tables_are_followed_as_they_grow_end_and_begin_anew() -> None:
    holders, table = Holders(), {"a": blocks(1), "b": blocks(5)}
    where(holders, table, 1)
    table["a"] += blocks(*range(20, 60))
    table["b"] = blocks(6)  # preempted, and resumed with other blocks
    table["c"] = blocks(1)
    assert where(holders, table, 1, 5, 6, 59) == {1: [(41, 0), (1, 0)], 5: [], 6: [(1, 0)], 59: [(41, 40)]}
    del table["a"]
    assert where(holders, table, 59) == {59: []}


def test_without_tables_or_sources_nothing_is_found() -> None:
    assert where(Holders(), {}, 1) == {1: []}
    assert where(Holders(), {"a": blocks(1)}) == {}


def test_what_changed_inside_a_table_shows_once_it_is_read_anew() -> None:
    holders, table = Holders(), {"a": blocks(1, 2)}
    where(holders, table, 1)
    (table["a"][0],) = blocks(8)
    assert where(holders, table, 8) == {8: []}
    holders.forget()
    assert where(holders, table, 8) == {8: [(2, 0)]}
