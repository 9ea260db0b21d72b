#!/usr/bin/env bash
# What only a GPU can confirm of docs/devices.md, in under a minute: NVML facts, and whether an MPS fence holds.
#   deploy/gpu/check_mps.sh [FOLDER]
# FOLDER (default: gpu-checks) gets devices.txt. A control daemon of its own runs in a private pipe directory and is
# ended again; no setting of the GPU is changed. 4 GiB of the card must be free. PYTHON names the interpreter.
# Ends 0 when the fence held, the lack of one was noticed, and the server was found alive.
set -uo pipefail
cd "$(dirname "$0")/../.."
OUT=${1:-gpu-checks}
PYTHON=${PYTHON:-.venv/bin/python}
mkdir -p "$OUT" || exit 2
command -v nvidia-cuda-mps-control >/dev/null || { echo "nvidia-cuda-mps-control is not installed" >&2; exit 2; }

PIPES=$(mktemp -d /tmp/tg-mps.XXXXXX)
export CUDA_MPS_PIPE_DIRECTORY=$PIPES CUDA_MPS_LOG_DIRECTORY=$PIPES
trap 'echo quit | timeout 10 nvidia-cuda-mps-control >/dev/null 2>&1; rm -rf "$PIPES"' EXIT
nvidia-cuda-mps-control -d || exit 2

timeout 120 "$PYTHON" - "$PIPES" <<'PY' | tee "$OUT/devices.txt"
import asyncio
import sys
from pathlib import Path

from services.actuator.mps import health, partitions, probe
from services.actuator.mps.control import Control
from services.actuator.mps.fence import MIB, client_environment
from services.errors import DeviceError
from services.nvml import Nvml

pipes = Path(sys.argv[1])
LIMIT = 2048 * MIB


async def main() -> int:
    nvml = Nvml()
    versions = nvml.open()
    print(versions)
    for device in nvml.devices():
        print(device)
    print("MPS v3:", partitions.unavailable(nvml.library, versions, nvml.devices()[0]) or "available")

    fenced = await probe.run(client_environment([(0, LIMIT)], pipes=pipes), LIMIT)
    free = await probe.run({"CUDA_MPS_PIPE_DIRECTORY": str(pipes)}, LIMIT)
    print("fence set at launch:", fenced)
    print("no fence:           ", free)

    control = Control(pipes)
    alive = False
    for pid in await control.servers():
        server = health.identify(pid)
        alive = health.check(server) is health.Health.ALIVE
        print(server, health.check(server).value, "clients", await control.clients(pid))
        try:
            print("read back after set:", await control.set_server_limit(pid, 0, LIMIT // 2))
            later = await probe.run({"CUDA_MPS_PIPE_DIRECTORY": str(pipes)}, LIMIT // 2)
            print("limit of the server:", later)
        except DeviceError as error:
            print("limit of the server:", error)
    print("ps answers:", await control.ps())
    nvml.close()
    return 0 if (fenced.outcome, free.outcome, alive) == ("held", "not_held", True) else 1


sys.exit(asyncio.run(main()))
PY
exit "${PIPESTATUS[0]}"
