"""Real servers, started side by side when the first of these tests runs."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.vllm.servers import BLOCK_BYTES, PYTHON, VllmServer

HERE = Path(__file__).parent
LONGEST_S = 1200
CARD_BYTES = 240 * BLOCK_BYTES
"""KV capacity of the card that two servers share, less than their pools together: what one takes the other lacks."""
TOLD: list[str] = []
"""What the tests found, for the end of the run."""
collect_ignore = ["inside"]
"""Run by vLLM's interpreter: test_inside.py starts them."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in Path(item.path).parents:
            item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.timeout(LONGEST_S))
            if not PYTHON.exists():
                item.add_marker(pytest.mark.skip(f"no vLLM at {PYTHON}: run make test-vllm"))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    subprocess.run([str(PYTHON), str(HERE / "tiny_model.py"), str(folder)], check=True, capture_output=True)
    return folder


@pytest.fixture(scope="session")
def servers(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, VllmServer]]:
    """All of them, starting: two that share a card's KV capacity, one that forgets to copy, one without Tidegate, and
    one with it but without a host tier."""
    folder = tmp_path_factory.mktemp("v")
    made = {name: VllmServer(tiny, folder, name) for name in ("w0", "w1", "forgetful", "stock", "bare")}
    try:
        for name in ("w0", "w1"):
            made[name].start(environment={"TIDEGATE_Q0_SHARE": "0.5", "TIDEGATE_CARD_KV_BYTES": str(CARD_BYTES)})
        made["forgetful"].start(offloading=False, worker_class="tests.vllm.forgetful_worker.ForgetfulWorker")
        made["stock"].start(steered=False, offloading=False)
        made["bare"].start(offloading=False)
        yield made
    finally:
        for one in made.values():
            one.stop()


@pytest.fixture
def steered(servers: dict[str, VllmServer]) -> VllmServer:
    return servers["w0"].until_ready()


@pytest.fixture
def neighbour(servers: dict[str, VllmServer]) -> VllmServer:
    return servers["w1"].until_ready()


@pytest.fixture
def forgetful(servers: dict[str, VllmServer]) -> VllmServer:
    return servers["forgetful"].until_ready()


@pytest.fixture
def stock(servers: dict[str, VllmServer]) -> VllmServer:
    return servers["stock"].until_ready()


@pytest.fixture
def tell() -> Callable[[str], None]:
    """Say a figure at the end of the run."""
    return TOLD.append


@pytest.fixture
def bare(servers: dict[str, VllmServer]) -> VllmServer:
    return servers["bare"].until_ready()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if TOLD:
        terminalreporter.section("test-vllm summary")
        for line in TOLD:
            terminalreporter.write_line(line)
