"""The doctor's look at the machine: Python and packages, GPUs, folders, shared memory, the clock."""

from __future__ import annotations

import ctypes
import glob
import importlib.metadata
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from schemas.identity import worker_id
from services.actuator.engines import emulated
from services.operator import attach_folder
from services.operator.doctor_check import Check, fail, ok, warn
from services.telemetry.sources import nvml

SHM: Final = Path("/dev/shm")
SHM_LOW_BYTES: Final = 1 << 30
"""Arenas, kvcached's segments and vLLM's own queues live there; Docker gives 64 MB."""
CUDA_KNOWN: Final = 13000
"""CuPy of the ``gpu`` extra is built for CUDA 13."""
_TIME_ERROR: Final = 5
"""adjtimex: the clock is not synchronised."""
_REQUIREMENT: Final = re.compile(r"([A-Za-z0-9._-]+)(?:\[[^]]*\])?\s*(>=|==)\s*([0-9][0-9.]*)\s*(;.*)?$")


def machine_checks(paths: Sequence[str]) -> list[Check]:
    """``paths``: folders and files of the settings that services write to, ``{node}`` in them standing for a name."""
    return [_python(), *_packages(), *_gpus(), *[_folder(path) for path in paths],
            _folder(str(attach_folder.root(os.environ))), _shared_memory(), _clock()]  # fmt: skip


def sockets_in(pattern: str) -> list[tuple[str, str, str]]:
    """(node, worker, folder) of every engine socket under a folder pattern with ``{node}``."""
    found: list[tuple[str, str, str]] = []
    before, _, after = pattern.partition("{node}")
    for text in sorted(glob.glob(f"{glob.escape(before)}*{glob.escape(after)}/*-*.sock")):
        path = Path(text)
        told = emulated.gpu_and_name(path)
        folder = str(path.parent)
        node = folder[len(before) : len(folder) - len(after)] if "{node}" in pattern else path.parent.name
        if told is not None and node:
            found.append((node, worker_id(node, *told), folder))
    return found


def _python() -> Check:
    return ok("python", f"{'.'.join(map(str, sys.version_info[:3]))} at {sys.executable}")


def _packages() -> list[Check]:
    """What the distribution needs is there and new enough; where its pins are at hand, what differs from them."""
    try:
        needed = importlib.metadata.requires("tidegate") or []
    except importlib.metadata.PackageNotFoundError:
        return [
            warn("packages", "tidegate is not installed: run from a checkout", "pip install -e . -c constraints.txt")
        ]
    bad, count = [], 0
    for text in needed:
        match = _REQUIREMENT.match(text)
        if match is None or match[4]:  # an extra's, or of another form
            continue
        count += 1
        have = _version(match[1])
        if have is None or (_numbers(have) < _numbers(match[3]) if match[2] == ">=" else _differs(have, match[3])):
            bad.append(f"{match[1]} {have or 'missing'} (needs {match[2]}{match[3]})")
    checks = [fail("packages", ", ".join(bad), "pip install -c constraints.txt tidegate") if bad
              else ok("packages", f"{count} needed ones, new enough")]  # fmt: skip
    pins = Path(__file__).resolve().parents[2] / "constraints.txt"
    if pins.exists():
        pinned = [line.partition("==") for line in pins.read_text().splitlines() if "==" in line and line[0] != "#"]
        other = [f"{name} {have} (tested {pin})" for name, _, pin in pinned
                 if (have := _version(name)) is not None and _differs(have, pin)]  # fmt: skip
        more = f" and {len(other) - 3} more" if len(other) > 3 else ""
        checks.append(warn("pins", ", ".join(other[:3]) + more, f"pip install -r {pins}") if other
                      else ok("pins", f"as in {pins}"))  # fmt: skip
    return checks


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:4])


def _differs(have: str, pin: str) -> bool:
    """Whether another version is there; a local part (``+cpu``) is no other version."""
    return have.partition("+")[0] != pin.partition("+")[0]


def _gpus() -> list[Check]:
    probe = nvml.probe()
    if probe.trouble or not probe.devices:
        found = f"none: {probe.trouble}" if probe.trouble else "none"
        return [
            warn(
                "GPU",
                found,
                (probe.remedy + "; " if probe.remedy else "") + "engines on CPUs and the emulator need none",
            )
        ]
    checks = []
    for device in probe.devices:
        name = f"GPU {device.gpu}" + (f" MIG {device.instance}" if device.instance else "")
        if device.total_bytes is None:
            checks.append(fail(name, device.trouble or "it does not tell its memory", "nvidia-smi -q says more"))
        else:
            used = "" if device.used_bytes is None else f", {device.used_bytes / 1e9:.1f} GB in use"
            checks.append(ok(name, f"{device.name}, {device.total_bytes / 1e9:.0f} GB{used}"))
    cuda = f"CUDA {probe.cuda // 1000}.{probe.cuda % 1000 // 10}" if probe.cuda else "CUDA of unknown version"
    found = f"driver {probe.driver}, {cuda}"
    if 0 < probe.cuda < CUDA_KNOWN:
        checks.append(warn("driver", found, "the mover's kernels are built for CUDA 13: update the driver"))
    else:
        checks.append(ok("driver", found))
    return checks


def _folder(pattern: str) -> Check:
    """A folder that a service makes and writes to, or the folder of a file."""
    path = Path(pattern.partition("/{node}")[0])
    path = path.parent if path.suffix else path
    name = f"folder {path}"
    there = path
    while not there.exists() and there != there.parent:
        there = there.parent
    if not os.access(there, os.W_OK | os.X_OK):
        mend = f"mkdir -p {path} && chown {_user()} {path} (as root), or name another in the settings"
        return warn(name, f"{_user()} may not write {there}", mend)
    return ok(name, "writable" if there == path else f"not there yet, can be made under {there}")


def _user() -> str:
    return os.environ.get("USER") or str(os.getuid())


def _shared_memory() -> Check:
    try:
        room = os.statvfs(SHM)
    except OSError as error:
        return warn("shared memory", f"{SHM}: {error.strerror}", "mount a tmpfs there: arenas and kvcached need it")
    free, total = room.f_bavail * room.f_frsize, room.f_blocks * room.f_frsize
    found = f"{free / 1e9:.1f} of {total / 1e9:.1f} GB free in {SHM}"
    if free < SHM_LOW_BYTES:
        return warn("shared memory", found, "docker run --shm-size=8g, or an emptyDir of medium Memory there")
    return ok("shared memory", found)


def _clock() -> Check:
    """Boot ids are wall clock, steps and leases the monotonic one, which cannot go wrong."""
    year = time.gmtime().tm_year
    if year < 2025:
        return fail("clock", f"it is the year {year}", "set the clock: boot ids must grow (chronyd, timedatectl)")
    buffer = ctypes.create_string_buffer(512)  # struct timex, of which nothing but the result is read
    try:
        state = ctypes.CDLL(None, use_errno=True).adjtimex(buffer)
    except (OSError, AttributeError):
        state = -1
    if state == _TIME_ERROR:
        return warn("clock", "it is not synchronised", "run chronyd or systemd-timesyncd: records are told by its time")
    return ok("clock", "synchronised" if state >= 0 else "set; whether it is synchronised cannot be asked here")
