from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True, scope="package")
def _one_torch_thread() -> None:
    """As the service does: on few cores several threads wait for each other and a test takes ten times as long."""
    torch.set_num_threads(1)
