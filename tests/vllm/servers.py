"""Real vLLM servers for these tests: one process group each, on loopback, gone when the tests are."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path

from services.actuator.engines.emulated import connect
from services.actuator.engines.protocol import SocketEngine
from services.actuator.engines.vllm.flags import START_FLAGS

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("TIDEGATE_VLLM_PYTHON", ROOT / ".venv-vllm" / "bin" / "python"))
"""The interpreter of vLLM's environment, which ``make test-vllm`` makes."""
READY_S = 300.0
BLOCK_TOKENS = 32
BLOCK_BYTES = 32768
"""Of the tiny model in float32: 2 layers x K and V x 2 heads x 32 x 32 tokens x 4 bytes."""
CONTEXT_TOKENS = 1024
POOL_BLOCKS = 513
"""Of each server's pool, vLLM's null block among them."""
# float32, because in bfloat16 another batch alone may change a token.
COMMON = (
    "--served-model-name tiny --host 127.0.0.1 --dtype float32 --enforce-eager --kv-cache-memory-bytes 67108864 "
    f"--block-size {BLOCK_TOKENS} --max-model-len {CONTEXT_TOKENS} --max-num-seqs 64 --scheduling-policy priority"
).split()
OFFLOADING = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {
        "spec_name": "TidegateOffloadingSpec",
        "spec_module_path": "services.actuator.engines.vllm.offload",
        "cpu_bytes_to_use": 256 << 20,
        "offload_prompt_only": False,
    },
}


class VllmServer:
    """One server. ``folder`` takes log and socket; ``name`` is the engine's, its worker ``n0/0/<name>``."""

    def __init__(self, model: Path, folder: Path, name: str) -> None:
        self.model = model
        self.folder = folder
        self.name = name
        self.worker = f"n0/0/{name}"
        self.log = folder / f"{name}.log"
        self.port = _free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def sockets(self) -> Path:
        return self.folder / "s"

    def start(
        self,
        *,
        blocks: int = POOL_BLOCKS,
        steered: bool = True,
        offloading: bool = True,
        worker_class: str = "",
        environment: Mapping[str, str] | None = None,
        flags: tuple[str, ...] = (),
    ) -> None:
        """Begin; :meth:`until_ready` waits. ``blocks``: of its KV pool, one of which is vLLM's null block."""
        command = [str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", str(self.model)]
        command += ["--port", str(self.port), "--num-gpu-blocks-override", str(blocks), *COMMON, *flags]
        # One thread: two that wait for each other by spinning take the cores from everybody else.
        told = {
            "VLLM_SERVER_DEV_MODE": "1", "NUMBA_CACHE_DIR": str(self.folder / "numba"),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        if steered:
            command += [word for flag in START_FLAGS for word in flag.split()]
            if worker_class:
                command[command.index("--worker-extension-cls") + 1] = worker_class
            told |= {"TIDEGATE_SOCKET": str(self.sockets / f"0-{self.name}.sock"), "TIDEGATE_GROUP_BLOCKS": "2"}
        if offloading:
            command += ["--kv-transfer-config", json.dumps(OFFLOADING)]
        self.folder.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as out:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd=self.folder, start_new_session=True,
                env={**os.environ, "PYTHONPATH": str(ROOT), **told, **(environment or {})},
            )  # fmt: skip

    def until_ready(self) -> VllmServer:
        deadline = time.monotonic() + READY_S
        while not self.healthy():
            assert self.alive, f"{self.name} ended while it started:\n{self.tail()}"
            assert time.monotonic() < deadline, f"{self.name} is not ready after {READY_S:g} s:\n{self.tail()}"
            time.sleep(0.2)
        return self

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def healthy(self) -> bool:
        with (
            contextlib.suppress(urllib.error.URLError, OSError),
            urllib.request.urlopen(f"{self.url}/health", timeout=5),
        ):
            return True
        return False

    def tail(self, lines: int = 30) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def engine(self, timeout_s: float = 10.0) -> SocketEngine:
        """The adapter that the actuator uses."""
        return connect(self.sockets, self.worker, timeout_s)

    def reset_cache(self, within_s: float = 30.0) -> None:
        """Empty prefix cache and host copies, so that runs begin alike. vLLM says no while copies are under way."""
        url = f"{self.url}/reset_prefix_cache?reset_external=true"
        deadline = time.monotonic() + within_s
        while True:
            with urllib.request.urlopen(urllib.request.Request(url, method="POST"), timeout=30) as answer:
                said = json.load(answer)
            if said == {"success": True}:
                return
            assert time.monotonic() < deadline, f"the cache is still in use after {within_s:g} s: {said}"
            time.sleep(0.2)

    def stop(self) -> None:
        if self._process is None:
            return
        for how in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, how)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(15)
                break
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # its engine may have outlived it


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
