"""Copying idle KV ahead of need: above the watermark, while the link keeps up."""

from __future__ import annotations

from services.actuator.fast.watermark import BACKLOG_S, HIGH, offload_bytes


def test_below_the_watermark_nothing_moves() -> None:
    assert offload_bytes(HIGH * 100e9, 100e9, 50e9, 0.0, 25e9) == 0.0


def test_above_it_idle_kv_is_copied_as_fast_as_the_link_goes() -> None:
    assert offload_bytes(90e9, 100e9, 50e9, 0.0, 25e9) == 25e9
    assert offload_bytes(90e9, 100e9, 3e9, 0.0, 25e9) == 3e9
    assert offload_bytes(90e9, 100e9, 50e9, 5e9, 25e9) == 20e9


def test_a_link_that_is_behind_gets_nothing_more() -> None:
    assert offload_bytes(90e9, 100e9, 50e9, BACKLOG_S * 25e9, 25e9) == 0.0
