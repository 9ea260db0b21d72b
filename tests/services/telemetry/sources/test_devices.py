"""The cards' memory, asked of NVML off the event loop; a driver that fails or hangs holds nobody up."""

from __future__ import annotations

import threading
from typing import cast

import aiohttp

from services.clock import ManualClock
from services.devices import Device, Versions
from services.errors import DeviceError, ScrapeFailed
from services.nvml import Nvml
from services.telemetry.sources.devices import AGAIN_NS, DcgmCards, NvmlCards
from tests.services.telemetry.sources.pages import sample
from tests.services.telemetry.sources.servers import served

NO_SESSION = cast(aiohttp.ClientSession, None)
DCGM = (
    "# TYPE DCGM_FI_DEV_FB_USED gauge\n"
    + sample("DCGM_FI_DEV_FB_USED", 100, gpu="0", UUID="GPU-0")
    + sample("DCGM_FI_DEV_FB_FREE", 800, gpu="0", UUID="GPU-0")
    + sample("DCGM_FI_DEV_FB_RESERVED", 100, gpu="0", UUID="GPU-0")
    + sample("DCGM_FI_DEV_FB_USED", 50, gpu="1", UUID="GPU-1", GPU_I_ID="1")
)


class PlayedNvml(Nvml):
    """Faults of a driver that no machine here has."""

    def __init__(self, *devices: Device, error: DeviceError | None = None) -> None:
        super().__init__(library=object())
        self.told = devices
        self.error = error
        self.asked = 0
        self.hang: threading.Event | None = None

    def open(self) -> Versions:
        self.asked += 1
        if self.hang is not None:
            self.hang.wait(5)
        if self.error is not None:
            raise self.error
        return Versions("615.1", 13040)

    def devices(self) -> tuple[Device, ...]:
        return self.told


class Bench:
    def __init__(self, nvml: PlayedNvml, must: bool = False, timeout_s: float = 5.0) -> None:
        self.clock = ManualClock()
        self.errors: list[Exception] = []
        self.cards = NvmlCards(nvml, self.clock, self.errors.append, must=must, timeout_s=timeout_s)


async def test_each_whole_card_has_its_memory() -> None:
    whole = Device(0, "GPU-0", total_bytes=80, used_bytes=30, free_bytes=50, reserved_bytes=0)
    cut = Device(1, "GPU-1", total_bytes=80, used_bytes=30, mig=True)
    part = Device(1, "MIG-1", total_bytes=40, used_bytes=30, mig=True, instance="1/0")
    assert await Bench(PlayedNvml(whole, cut, part)).cards.read(NO_SESSION) == {0: (80.0, 30.0)}, (
        "which instance of a cut card an engine has is not known"
    )


async def test_a_machine_without_nvml_is_ordinary_unless_it_was_asked_for() -> None:
    missing = DeviceError("library_missing", "no libnvidia-ml.so.1")
    for must in (False, True):
        nvml = PlayedNvml(error=missing)
        bench = Bench(nvml, must=must)
        assert await bench.cards.read(NO_SESSION) == {}
        assert await bench.cards.read(NO_SESSION) == {}
        assert nvml.asked == 1, "not every two seconds"
        assert bench.errors == ([missing] if must else [])
        bench.clock.advance_to(AGAIN_NS)
        await bench.cards.read(NO_SESSION)
        assert nvml.asked == 2


async def test_any_other_failure_is_heard_of() -> None:
    lost = DeviceError("gpu_lost", "Xid 79")
    bench = Bench(PlayedNvml(error=lost))
    assert await bench.cards.read(NO_SESSION) == {}
    assert bench.errors == [lost]


async def test_a_driver_that_hangs_is_waited_for_once_and_its_answer_taken_when_it_comes() -> None:
    nvml = PlayedNvml(Device(0, "GPU-0", total_bytes=80, used_bytes=30))
    nvml.hang = threading.Event()
    bench = Bench(nvml, timeout_s=0.05)
    assert await bench.cards.read(NO_SESSION) == {}
    assert await bench.cards.read(NO_SESSION) == {}
    assert nvml.asked == 1, "one thread waits, not one a step"
    nvml.hang.set()
    while not (found := await bench.cards.read(NO_SESSION)):
        pass
    assert found == {0: (80.0, 30.0)}


async def test_a_dcgm_exporter_says_the_same_of_whole_cards() -> None:
    errors: list[Exception] = []
    async with served(DCGM) as exporter, aiohttp.ClientSession() as session:
        cards = DcgmCards(exporter.url, errors.append, timeout_s=5.0)
        assert await cards.read(session) == {0: (1000 * 2**20, 100 * 2**20)}
        exporter.page = "process_cpu_seconds_total 1\n"
        assert await cards.read(session) == {}
        exporter.fault = "empty"
        assert await cards.read(session) == {}
    assert [type(error) for error in errors] == [DeviceError, ScrapeFailed], (
        "an exporter that lost its driver, and none"
    )
