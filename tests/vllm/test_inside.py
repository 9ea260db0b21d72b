"""What needs vLLM's own classes, run by vLLM's interpreter."""

from __future__ import annotations

import os
import subprocess

from tests.vllm.conftest import HERE
from tests.vllm.servers import PYTHON, ROOT

FOLDER = HERE / "inside"
LONGEST_S = 600
"""Some 30 s where nothing else runs."""


def test_the_plugin_fits_vllms_own_classes() -> None:
    """pytest is all that vLLM's environment has of ours: neither this project's settings nor its plugins."""
    options = ["-q", "-c", os.devnull, f"--rootdir={FOLDER}", f"--confcutdir={FOLDER}", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [str(PYTHON), "-m", "pytest", *options, str(FOLDER)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=LONGEST_S,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
