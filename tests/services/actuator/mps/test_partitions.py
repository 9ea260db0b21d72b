"""MPS v3: set and verified where the machine has it, refused with the reason elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from services.actuator.mps.partitions import Partition, Partitions, unavailable
from services.devices import Device, Versions
from services.errors import DeviceError, UserError
from tests.services.fake_nvml import GIB, FakeNvml, Gpu

NEW = Versions("615.71.09", 13040)


@pytest.fixture
def cgroups(tmp_path: Path) -> Path:
    (tmp_path / "cgroup.controllers").write_text("cpu dmem")
    (tmp_path / "tenant").mkdir()
    return tmp_path


def partitions(library: Any, cgroups: Path, versions: Versions = NEW, **device: Any) -> Partitions:
    return Partitions(library, library.gpus[0], versions, Device(0, "GPU-a", **device), cgroups)


def test_limits_are_set_and_read_back(cgroups: Path) -> None:
    library = FakeNvml(Gpu("GPU-a", used=GIB))
    ours = partitions(library, cgroups)
    assert ours.write(cgroups / "tenant", 4 * GIB, 8 * GIB) == Partition(4 * GIB, 8 * GIB, GIB)
    assert ours.clear(cgroups / "tenant").hard_bytes is None


def test_a_limit_rounded_to_the_drivers_granule_is_what_was_set(cgroups: Path) -> None:
    library = FakeNvml(Gpu("GPU-a"))
    library.rounding = 2 << 20
    assert partitions(library, cgroups).write(cgroups / "tenant", 4 * GIB + 5, 8 * GIB).soft_bytes == 4 * GIB


def test_a_limit_that_reads_back_as_another_is_no_success(cgroups: Path) -> None:
    library = FakeNvml(Gpu("GPU-a"))
    library.rounding = 3 * GIB
    with pytest.raises(DeviceError, match="mps_v3_unverified"):
        partitions(library, cgroups).write(cgroups / "tenant", 4 * GIB, 8 * GIB)


@pytest.mark.parametrize(("soft", "hard"), [(2 * GIB, 8 * GIB), (0, 2 * GIB)])
def test_a_limit_below_use_would_have_clients_killed_and_is_refused(cgroups: Path, soft: int, hard: int) -> None:
    ours = partitions(FakeNvml(Gpu("GPU-a", used=3 * GIB)), cgroups)
    with pytest.raises(DeviceError, match="mps_v3_would_kill"):
        ours.write(cgroups / "tenant", soft, hard)
    assert ours.write(cgroups / "tenant", soft, hard, may_kill=True).soft_bytes == soft


@pytest.mark.parametrize(
    ("versions", "device", "why"),
    [
        (Versions("580.65.06", 13000), {}, "driver 580.65.06"),
        (Versions("", 0), {}, "driver unknown"),
        (Versions("615.71.09", 13030), {}, "CUDA 13.3"),
        (NEW, {"mig": True}, "MIG"),
    ],
)
def test_a_machine_without_it_is_told_why_and_nothing_is_set(
    cgroups: Path, versions: Versions, device: dict[str, Any], why: str
) -> None:
    library = FakeNvml(Gpu("GPU-a"))
    ours = partitions(library, cgroups, versions, **device)
    for act in (lambda: ours.write(cgroups / "tenant", 1, 2), lambda: ours.read(cgroups / "tenant")):
        with pytest.raises(DeviceError, match=why) as caught:
            act()
        assert caught.value.reason == "mps_v3_unavailable"
    assert library.limits == {}


def test_an_old_pynvml_and_an_old_cgroup_are_told(tmp_path: Path, cgroups: Path) -> None:
    assert "pynvml has no" in unavailable(object(), NEW, Device(0, "GPU-a"), cgroups)
    assert "not cgroup v2" in unavailable(FakeNvml(), NEW, Device(0, "GPU-a"), tmp_path / "tenant")


def test_a_driver_that_refuses_says_so(cgroups: Path) -> None:
    library = FakeNvml(Gpu("GPU-a"), fails={"nvmlDeviceSetMemoryLimits_v1": 4})
    with pytest.raises(DeviceError, match="no_permission"):
        partitions(library, cgroups).write(cgroups / "tenant", 1, 2)


@pytest.mark.parametrize("cgroup", ["tenant", "/elsewhere", "{}/away"])
def test_a_path_that_is_no_cgroup_is_refused(cgroups: Path, cgroup: str) -> None:
    with pytest.raises(UserError, match="cgroup"):
        partitions(FakeNvml(Gpu("GPU-a")), cgroups).write(Path(cgroup.format(cgroups)), 1, 2)


@pytest.mark.parametrize(("soft", "hard"), [(-1, 5), (6, 5), (1, 2**64 - 1)])
def test_limits_that_contradict_each_other_are_refused(cgroups: Path, soft: int, hard: int) -> None:
    with pytest.raises(UserError, match="soft"):
        partitions(FakeNvml(Gpu("GPU-a")), cgroups).write(cgroups / "tenant", soft, hard)
