"""Each step once, and a node that begins anew gets a boot of its own."""

from __future__ import annotations

from itertools import count

from services.telemetry.sampler import Sampler
from services.telemetry.sources.reading import Reading


def reading(step: int, node: str = "n0") -> Reading:
    return Reading(node, step, step * 10, ("n0/0/w0",), (0,), (0,), b"")


def begun() -> Sampler:
    sampler = Sampler(count(1).__next__, "test")
    sampler.begin()
    return sampler


def test_a_step_is_given_out_once() -> None:
    sampler = begun()
    assert sampler.take(reading(3)) is not None
    assert sampler.take(reading(3)) is None
    assert sampler.repeated == 1


def test_a_sample_carries_boot_step_and_clock() -> None:
    sample = begun().take(reading(3))
    assert sample is not None
    assert (sample.boot_id, sample.step, sample.t_ns, sample.source) == (1, 3, 30, "test")


def test_steps_that_begin_again_are_a_new_boot_of_that_node_alone() -> None:
    sampler = begun()
    sampler.take(reading(9))
    sampler.take(reading(9, "n1"))
    again = sampler.take(reading(0))
    assert again is not None
    assert (again.boot_id, again.step) == (2, 0), "otherwise everyone would take it for old"
    assert sampler.boot_id("n1") == 1
