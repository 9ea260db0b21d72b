"""How a vLLM server is started so that Tidegate can command it."""

from __future__ import annotations

from typing import Final

START_FLAGS: Final = (
    "--scheduler-cls services.actuator.engines.vllm.scheduler.TidegateScheduler",
    "--middleware services.actuator.engines.vllm.middleware.TidegateMiddleware",
    "--worker-extension-cls services.actuator.engines.vllm.worker.TidegateWorker",
)
"""Flags of vLLM's API server; the distribution ``tidegate`` must be importable in its environment."""

SOCKET_VARIABLE: Final = "TIDEGATE_SOCKET"
"""Environment variable of the server: path of the Unix socket on which it is commanded."""
