"""The doctor: a line a check, and how to mend what is not as it should be."""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path

import pytest

from schemas.engine import Describe, Description, Failure, ReplyBody, RequestBody
from services import cli
from services.actuator.engines.serving import Sockets
from services.bus.embedded import EmbeddedServer
from services.operator import doctor, doctor_machine
from services.operator.doctor_check import Check
from tests.services.operator.inference_server import InferenceServer, sample_page


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEGATE_COMMON_CONNECT_TIMEOUT_S", "0.2")


async def examined(*words: str) -> dict[str, Check]:
    options = cli._parser().parse_args(["doctor", *words])
    checks = await doctor.examine(options, [doctor._asked(text) for text in options.url])
    return {check.name: check for check in checks}


async def test_a_server_and_a_bus_that_work_are_ok(
    shared_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nats = EmbeddedServer(tmp_path / "nats")
    await nats.start()
    monkeypatch.setenv("TIDEGATE_COMMON_NATS_USER", nats.user)
    monkeypatch.setenv("TIDEGATE_COMMON_NATS_PASSWORD", nats.password)
    server = InferenceServer(sample_page(shared_dir))
    async with server.running():
        checks = await examined("--nats", nats.url, "--url", server.url, "--url", f"sglang={server.url}")
    await nats.stop()
    states = {name: check.state for name, check in checks.items()}
    for name in ("settings", "python", "packages", "nats-server", "NATS", "permissions", "JetStream", "tg_config"):
        assert states[name] == "OK", checks[name]
    assert states["TG_AUDIT"] == "WARN", "nobody has made it yet, which the first actuator does"
    assert states[f"version {server.url}"] == "OK"
    assert checks[f"version {server.url}"].found == f"vLLM 0.32.0: {doctor.STEERABLE}"
    assert checks[f"engine {server.url}"].state == "FAIL", "asked as sglang's, it is not"
    assert "it is vllm's page" in checks[f"engine {server.url}"].found


async def test_what_was_named_and_does_not_answer_fails_with_a_remedy(shared_dir: Path) -> None:
    server = InferenceServer(sample_page(shared_dir), version="0.33.0")
    async with server.running():
        checks = await examined("--nats", "nats://127.0.0.1:9", "--url", server.url)
        assert checks[f"version {server.url}"].state == "WARN"
        assert "0.32.x" in checks[f"version {server.url}"].mend
        server.fault = "500"
        broken = await examined("--nats", "nats://127.0.0.1:9", "--url", server.url)
    assert checks["NATS"].state == "FAIL"
    assert checks["NATS"].mend
    assert broken[f"engine {server.url}"].state == "FAIL"
    assert "status 500" in broken[f"engine {server.url}"].found


def test_its_exit_code_and_json_say_whether_something_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--nats", "nats://127.0.0.1:9", "--json"]) == 1
    checks = json.loads(capsys.readouterr().out)
    assert all(set(check) == {"name", "state", "found", "mend"} for check in checks)
    assert [check["name"] for check in checks if check["state"] == "FAIL"] == ["NATS"]


async def test_engine_sockets_are_asked_who_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(body: RequestBody) -> ReplyBody:
        if isinstance(body, Describe):
            return Description("n0/0/w0", 0, "vllm", 1, 1, 1, 1, 1, 0, 0, 0, ("compact",))
        return Failure("unsupported")

    with tempfile.TemporaryDirectory(prefix="tg-") as short:
        for node in ("n0", "n1"):
            (Path(short) / node).mkdir()
        sockets = Sockets(time.monotonic_ns)
        for node in ("n0", "n1"):
            await sockets.serve(Path(short) / node / "0-w0.sock", answer)
        (Path(short) / "n0" / "0-gone.sock").touch()
        monkeypatch.setenv("TIDEGATE_ACTUATOR_SOCKETS", f"{short}/{{node}}")
        checks = await examined()
        await sockets.close()
    assert checks["engine n0/0/w0"].found == "vllm, can: quota, compact"
    assert checks["engine n0/0/gone"].state == "FAIL"
    assert checks["engine n1/0/w0"].mend == "start it with TIDEGATE_NODE=n1", "another node's name is a mix-up"


async def test_settings_that_services_would_refuse_are_told(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text("[telemetry]\nsteps = 2\n")
    check = (await examined("--config", str(file)))["settings"]
    assert check.state == "FAIL"
    assert "'step_s'" in check.mend


def test_packages_are_held_against_what_the_distribution_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"aiohttp": "3.2.0", "msgspec": "0.23.0"}
    monkeypatch.setattr(doctor_machine, "_version", lambda name: versions.get(name))
    monkeypatch.setattr(
        "importlib.metadata.requires",
        lambda _: ["aiohttp>=3.14", "msgspec>=0.23", "torch==2.13.0", 'x>=1; extra == "dev"'],
    )
    first, *_ = doctor_machine._packages()
    assert first.state == "FAIL"
    assert first.found == "aiohttp 3.2.0 (needs >=3.14), torch missing (needs ==2.13.0)"
