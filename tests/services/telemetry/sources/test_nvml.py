"""NVML as a source: facts of a card, and nothing made up where nothing is told."""

from __future__ import annotations

import math

from services.devices import Device
from services.telemetry.sources.nvml import card_facts, probe
from services.telemetry.sources.said import Presence
from tests.services.fake_nvml import GIB, FakeNvml, Gpu


def test_the_probe_tells_devices_and_versions() -> None:
    library = FakeNvml(Gpu("GPU-a", used=GIB))
    said = probe(library)
    assert said.can
    assert (said.driver, said.cuda, said.devices[0].used_bytes) == ("615.71.09", 13040, GIB)
    assert library.opened == 0, "it closes what it opened"


def test_the_probe_of_a_machine_without_a_driver_says_how_to_mend_it() -> None:
    said = probe(FakeNvml(fails={"nvmlInit": 9}))
    assert not said.can
    assert "modprobe" in said.remedy


def test_what_is_not_told_is_nan() -> None:
    facts = card_facts(Device(0, "GPU-a"))
    assert all(math.isnan(value) for value in facts[:4])


def test_parts_greater_than_the_card_are_flagged_and_left_out() -> None:
    facts = card_facts(Device(0, "GPU-a", "", 80 * GIB, 70 * GIB, 20 * GIB, GIB))
    assert facts.hbm_bytes == 80 * GIB
    assert math.isnan(facts.used_bytes)
    assert facts.flags[0][0] == "used_bytes"


def test_it_declares_what_it_provides() -> None:
    from services.telemetry.sources.nvml import PROVIDES

    assert PROVIDES["hbm_bytes"] is Presence.MEASURED
    assert PROVIDES["kv_bytes"] is Presence.ABSENT
