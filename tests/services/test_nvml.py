"""NVML facts: two meanings of memory, processes that cannot be seen, MIG, and errors an operator can act on."""

from __future__ import annotations

import ctypes

import pytest

from services.errors import DeviceError
from services.nvml import Nvml
from tests.services.fake_nvml import GIB, NOT_AVAILABLE, FakeNvml, Gpu


def opened(*gpus: Gpu, **more: object) -> Nvml:
    nvml = Nvml(FakeNvml(*gpus, **more))  # type: ignore[arg-type]
    nvml.open()
    return nvml


def test_memory_version_2_tells_reserved_apart_from_used() -> None:
    (device,) = opened(Gpu("GPU-a", used=10 * GIB)).devices()
    assert (device.used_bytes, device.reserved_bytes, device.used_has_reserved) == (10 * GIB, GIB // 2, False)
    assert device.allocated_bytes == 10 * GIB


@pytest.mark.parametrize("code", [13, 3], ids=["old library", "old driver"])
def test_on_an_old_driver_version_1_is_read_and_says_that_reserved_is_inside(code: int) -> None:
    (device,) = opened(Gpu("GPU-a", used=10 * GIB, fails={"nvmlDeviceGetMemoryInfo_v2": code})).devices()
    assert device.used_bytes == 10 * GIB + GIB // 2, "version 1 counts the reserved part as used"
    assert device.used_has_reserved
    assert device.reserved_bytes is None, "it cannot be told, and is not zero"
    assert device.allocated_bytes is None


def test_a_process_whose_memory_is_not_available_is_missing_not_zero() -> None:
    gpu = Gpu("GPU-a", used=5 * GIB, processes=[(7, 3 * GIB), (8, NOT_AVAILABLE), (9, None)])
    (device,) = opened(gpu).devices()
    assert device.processes == {7: 3 * GIB, 8: None, 9: None}
    assert device.claimed_bytes is None, "a sum with an unknown part is unknown"


def test_clients_of_mps_are_listed_beside_the_others_and_once() -> None:
    gpu = Gpu("GPU-a", used=6 * GIB, processes=[(7, 3 * GIB)], mps=[(7, 1), (12, 2 * GIB)])
    (device,) = opened(gpu).devices()
    assert device.processes == {7: 3 * GIB, 12: 2 * GIB}
    assert device.claimed_bytes == 5 * GIB


def test_a_container_that_sees_no_pids_is_told_from_an_empty_card() -> None:
    busy, empty = opened(Gpu("GPU-a", used=20 * GIB), Gpu("GPU-b")).devices()
    assert busy.processes_hidden
    assert busy.claimed_bytes is None, "20 GiB in use and nobody listed: the list says nothing"
    assert not empty.processes_hidden
    assert empty.claimed_bytes == 0


def test_the_drivers_own_part_is_not_taken_for_a_hidden_process() -> None:
    (empty,) = opened(Gpu("GPU-a", fails={"nvmlDeviceGetMemoryInfo_v2": 13})).devices()
    assert empty.used_bytes == GIB // 2
    assert not empty.processes_hidden


def test_a_refused_process_list_leaves_the_memory_and_says_why() -> None:
    gpu = Gpu("GPU-a", used=GIB, fails={"nvmlDeviceGetComputeRunningProcesses_v3": 4})
    (device,) = opened(gpu).devices()
    assert device.used_bytes == GIB
    assert not device.processes_told
    assert device.claimed_bytes is None
    assert "no_permission" in device.trouble


def test_mig_instances_follow_their_gpu_with_memory_of_their_own() -> None:
    parts = [Gpu("MIG-1", 10 * GIB, 4 * GIB, slot="7/0"), None, Gpu("MIG-2", 20 * GIB, slot="3/0", processes=[(5, 1)])]
    whole, first, second = opened(Gpu("GPU-a", used=4 * GIB, parts=parts)).devices()
    assert whole.mig
    assert whole.instance == ""
    assert (first.gpu, first.instance, first.total_bytes, first.used_bytes) == (0, "7/0", 10 * GIB, 4 * GIB)
    assert (second.instance, second.processes) == ("3/0", {5: 1})


def test_without_the_right_to_see_the_whole_gpu_its_instances_are_still_read() -> None:
    gpu = Gpu("GPU-a", parts=[Gpu("MIG-1", 10 * GIB)], fails={"nvmlDeviceGetMemoryInfo_v2": 4})
    whole, part = opened(gpu).devices()
    assert whole.total_bytes is None
    assert "no_permission" in whole.trouble
    assert part.total_bytes == 10 * GIB


def test_a_lost_gpu_does_not_hide_the_others() -> None:
    lost, well = opened(Gpu("GPU-a", fails={"nvmlDeviceGetMemoryInfo_v2": 15}), Gpu("GPU-b", used=GIB)).devices()
    assert "gpu_lost" in lost.trouble
    assert "Xid 79" in lost.trouble, "it says how to mend it"
    assert lost.total_bytes is None
    assert well.used_bytes == GIB


def test_a_chip_without_memory_of_its_own_tells_none() -> None:
    fails = {"nvmlDeviceGetMemoryInfo_v2": 3, "nvmlDeviceGetMemoryInfo": 3}
    (device,) = opened(Gpu("GPU-a", fails=fails)).devices()
    assert device.total_bytes is None
    assert "not_supported" in device.trouble


@pytest.mark.parametrize(
    ("code", "reason", "remedy"),
    [
        (12, "library_missing", "--gpus"),
        (9, "driver_not_loaded", "modprobe nvidia"),
        (4, "no_permission", "root"),
        (18, "driver_mismatch", "reboot"),
        (777, "failed", "nvidia-smi"),
    ],
)
def test_an_opening_that_fails_says_why_and_how_to_mend_it(code: int, reason: str, remedy: str) -> None:
    with pytest.raises(DeviceError) as caught:
        opened(fails={"nvmlInit": code})
    assert caught.value.reason == reason
    assert remedy in caught.value.remedy


def test_versions_are_told_and_a_cuda_version_may_lack() -> None:
    nvml = Nvml(FakeNvml(driver="470.57.02", fails={"nvmlSystemGetCudaDriverVersion": 13}))
    assert nvml.open() == ("470.57.02", 0)
    assert nvml.versions().driver_major == 470


def test_opening_twice_opens_once_and_closing_gives_it_back() -> None:
    library = FakeNvml()
    nvml = Nvml(library)
    nvml.open()
    nvml.open()
    assert library.opened == 1
    nvml.close()
    nvml.close()
    assert library.opened == 0
    with pytest.raises(DeviceError, match="not_open"):
        _ = nvml.library


def test_a_device_is_asked_again_by_its_uuid() -> None:
    nvml = opened(Gpu("GPU-a"), Gpu("GPU-b", used=3 * GIB))
    assert nvml.memory("GPU-b").used_bytes == 3 * GIB
    with pytest.raises(DeviceError, match="not_found"):
        nvml.memory("GPU-z")


def test_the_real_pynvml_without_a_driver_says_so() -> None:
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        with pytest.raises(DeviceError, match="library_missing"):
            Nvml().open()
    else:
        pytest.skip("an NVIDIA driver is here")
