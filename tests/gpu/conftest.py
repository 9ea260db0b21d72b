"""The GPU that the tests of this folder run on, or a skip that says what is missing."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(scope="session")
def device() -> Any:
    """CupyDevice 0."""
    pytest.importorskip("cupy", reason="CuPy is not installed: the extra tidegate[gpu] brings it")
    from services.actuator.memory.cupy_arrays import CupyDevice, device_problem

    if (reason := device_problem()) is not None:
        pytest.skip(f"no GPU: {reason}")
    made = CupyDevice()
    made.load()
    return made
