from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.learner.replay_buffer import ANY_ACTION, NO_ROW, NOTHING_SHOWN, ReplayBuffer, Rows, SumTree


def rows(count: int, start: int = 0) -> Rows:
    values = np.arange(start, start + count)
    return Rows(
        states=values.astype(np.float32).reshape(-1, 1),
        next_states=values.astype(np.float32).reshape(-1, 1) + 1,
        actions=(values % 5).astype(np.uint8),
        next_masks=np.full(count, 31, np.uint8),
        rewards=values.astype(np.float32),
        discounts=np.full(count, 0.9, np.float32),
        probabilities=np.ones(count, np.float32),
        sequences=values.astype(np.int64) + 1,
    )


def nobody(count: int) -> np.ndarray:
    return np.full(count, NO_ROW, np.int64)


@given(st.lists(st.tuples(st.integers(0, 36), st.floats(0, 1e6)), min_size=1, max_size=40), st.integers(1, 37))
@settings(max_examples=60, deadline=None)
def test_the_tree_agrees_with_a_plain_array(sets: list[tuple[int, float]], size: int) -> None:
    tree, plain = SumTree(size), np.zeros(size)
    for leaf, value in sets:
        leaf %= size
        tree.set(np.array([leaf]), np.array([value]))
        plain[leaf] = value
    assert tree.total == pytest.approx(plain.sum())
    if plain.sum() > 0:
        running = np.cumsum(plain)
        masses = (np.arange(50) + 0.5) / 50 * tree.total
        found = tree.find(masses)
        assert (plain[found] > 0).all(), "an empty leaf is never found"
        slack = 1e-9 * running[-1]
        assert ((running[found] >= masses - slack) & (running[found] - plain[found] <= masses + slack)).all()


def test_setting_a_range_is_setting_each_leaf() -> None:
    by_range, by_leaf = SumTree(100), SumTree(100)
    for start, stop, value in ((0, 100, 1.0), (7, 8, 3.0), (33, 81, 0.5), (99, 100, 9.0)):
        by_range.set_range(start, stop, value)
        by_leaf.set(np.arange(start, stop), np.full(stop - start, value))
    every = np.arange(100)
    assert np.array_equal(by_range.values(every), by_leaf.values(every))
    assert by_range.total == by_leaf.total


def test_a_mass_at_or_beyond_the_total_finds_the_last_filled_leaf() -> None:
    tree = SumTree(8)
    tree.set(np.array([1, 4]), np.array([0.1, 0.2]))
    assert tree.find(np.array([tree.total, tree.total * 2])).tolist() == [4, 4], "rounding must not end in nowhere"


def test_sampling_follows_the_priorities() -> None:
    """Chi-square against the probabilities a brute-force sampler would use; 99.9 % quantile, seeded."""
    buffer = ReplayBuffer(16, 1, alpha=0.7, epsilon=0.0)
    buffer.insert(rows(10), nobody(10))
    errors = np.linspace(0.1, 3.0, 10).astype(np.float32)
    buffer.update(np.arange(10), errors)
    expected = errors.astype(float) ** 0.7 / (errors.astype(float) ** 0.7).sum()
    rng, draws = np.random.default_rng(3), 10_000
    # Batches of one: slices of one draw are not independent, and chi-square assumes they are.
    counts = np.bincount([int(buffer.sample(1, 0.5, rng).places[0]) for _ in range(draws)], minlength=10)
    chi_square = ((counts - draws * expected) ** 2 / (draws * expected)).sum()
    assert chi_square < 27.88, f"chi-square {chi_square:.1f} with 9 degrees of freedom"


def test_importance_weights_undo_the_priorities() -> None:
    buffer = ReplayBuffer(4, 1, alpha=1.0, epsilon=0.0)
    buffer.insert(rows(2), nobody(2))
    buffer.update(np.array([0, 1]), np.array([1.0, 3.0], np.float32))
    sample = buffer.sample(64, 1.0, np.random.default_rng(0))
    weight = dict(zip(sample.places.tolist(), sample.weights.tolist(), strict=True))
    assert weight[0] == pytest.approx(1.0), "the rarest row has the largest weight, which is 1"
    assert weight[1] == pytest.approx(1 / 3), "a row drawn three times as often counts a third"
    flat = buffer.sample(64, 0.0, np.random.default_rng(0)).weights
    assert (flat == 1.0).all(), "beta 0 corrects nothing"


def test_new_rows_get_the_greatest_priority_seen() -> None:
    buffer = ReplayBuffer(8, 1)
    buffer.insert(rows(1), nobody(1))
    buffer.update(np.array([0]), np.array([50.0], np.float32))
    buffer.insert(rows(1), nobody(1))
    assert buffer.tree.values(np.array([1]))[0] == buffer.tree.values(np.array([0]))[0]


def test_the_ring_keeps_the_newest_rows_and_knows_its_oldest_sequence() -> None:
    buffer = ReplayBuffer(5, 1)
    assert buffer.first_sequence == 0
    buffer.insert(rows(4), nobody(4))
    buffer.insert(rows(4, start=4), nobody(4))
    assert sorted(buffer.rewards.tolist()) == [3, 4, 5, 6, 7]
    assert buffer.size == 5
    assert buffer.first_sequence == 4, "row 3 came with sequence 4"


def test_chains_follow_the_links_until_they_end() -> None:
    buffer = ReplayBuffer(8, 1)
    first = buffer.insert(rows(2), nobody(2))
    second = buffer.insert(rows(2, 2), first)
    buffer.insert(rows(1, 4), second[:1])
    assert buffer.chain(np.array([0, 1]), 3).T.tolist() == [[0, 2, 4], [1, 3, NO_ROW]]


def test_a_link_to_an_overwritten_row_is_not_made() -> None:
    buffer = ReplayBuffer(4, 1)
    first = buffer.insert(rows(1), nobody(1))
    buffer.insert(rows(3, 1), nobody(3))
    buffer.insert(rows(1, 4), first)  # lands in the place of the row it follows
    assert buffer.chain(np.array([0]), 2)[1, 0] == NO_ROW


def test_contents_survive_a_restore() -> None:
    rng = np.random.default_rng(1)
    buffer = ReplayBuffer(6, 1)
    serials = buffer.insert(rows(5), nobody(5))
    buffer.insert(rows(5, 5), serials)
    buffer.update(np.arange(6), rng.random(6).astype(np.float32))
    other = ReplayBuffer(6, 1)
    other.restore(buffer.contents(), buffer.written, buffer.max_priority)
    one, two = (b.sample(32, 0.5, np.random.default_rng(2)) for b in (buffer, other))
    assert np.array_equal(one.places, two.places)
    assert np.array_equal(one.weights, two.weights)
    assert np.array_equal(buffer.chain(np.arange(6), 3), other.chain(np.arange(6), 3))


def test_masks_and_demonstrations_travel_with_their_rows() -> None:
    buffer = ReplayBuffer(4, 1)
    buffer.insert(rows(3), nobody(3), masks=np.array([1, 3, 7], np.uint8), shown=np.array([1, 255, 0], np.uint8))
    buffer.insert(rows(2, 3), nobody(2))  # closes the ring: row 0 is overwritten
    assert buffer.masks.tolist() == [ANY_ACTION, 3, 7, ANY_ACTION], "nobody said what was allowed"
    assert buffer.shown.tolist() == [NOTHING_SHOWN, NOTHING_SHOWN, 0, NOTHING_SHOWN]
    other = ReplayBuffer(4, 1)
    other.restore(buffer.contents(), buffer.written, buffer.max_priority)
    assert (other.masks == buffer.masks).all()
    assert (other.shown == buffer.shown).all()


def test_contents_from_before_demonstrations_can_be_restored() -> None:
    buffer = ReplayBuffer(4, 1)
    buffer.insert(rows(3), nobody(3))
    old = {name: array for name, array in buffer.contents().items() if name not in ("masks", "shown")}
    other = ReplayBuffer(4, 1)
    other.restore(old, 3, 1.0)
    assert (other.shown == NOTHING_SHOWN).all()


@given(st.lists(st.floats(0.001, 100.0), min_size=1, max_size=60), st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_each_draw_is_that_of_a_brute_force_sampler(priorities: list[float], seed: int) -> None:
    """The same random numbers through a running sum over all rows: the same places, but for rounding at an edge."""
    buffer = ReplayBuffer(len(priorities), 1, alpha=1.0, epsilon=0.0)
    buffer.insert(rows(len(priorities)), nobody(len(priorities)))
    buffer.update(np.arange(len(priorities)), np.array(priorities, np.float32))
    plain = np.array(priorities, np.float32).astype(np.float64)
    sample = buffer.sample(32, 1.0, np.random.default_rng(seed))
    masses = (np.arange(32) + np.random.default_rng(seed).random(32)) / 32 * plain.sum()
    running = np.cumsum(plain)
    brute = np.minimum(np.searchsorted(running, masses, side="right"), len(plain) - 1)
    at_an_edge = np.abs(running[np.minimum(brute, sample.places)] - masses) < 1e-9 * plain.sum()
    assert ((sample.places == brute) | at_an_edge).all()
    expected = plain[sample.places].min() / plain[sample.places]
    np.testing.assert_allclose(sample.weights, expected, rtol=1e-5, err_msg="beta 1: the inverse probability")


def test_mistakes_of_the_caller_are_value_errors() -> None:
    buffer = ReplayBuffer(2, 1)
    with pytest.raises(ValueError, match="empty"):
        buffer.sample(1, 1.0, np.random.default_rng(0))
    with pytest.raises(ValueError, match="at most 2"):
        buffer.insert(rows(3), nobody(3))
