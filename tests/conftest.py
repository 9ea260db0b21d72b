"""Fixtures that every test may use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """Traces and calibration files: TIDEGATE_SHARED, else ../shared beside the project, else a skip."""
    named = os.environ.get("TIDEGATE_SHARED")
    path = Path(named) if named else Path(__file__).parents[2] / "shared"
    if not path.is_dir():
        pytest.skip(f"no shared data at {path}: set TIDEGATE_SHARED to the folder with traces/ and calibration/")
    return path
