"""The negative control: a worker that re-points tables and forgets to copy. Loaded by a vLLM process of the tests."""

from typing import Any

from services.actuator.engines.vllm.worker import TidegateWorker


class ForgetfulWorker(TidegateWorker):
    def _tidegate_copy(self, plan: Any) -> None:
        """Nothing."""
