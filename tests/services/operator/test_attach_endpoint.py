"""A server is looked at before anything is started: each way in which it can be wrong is one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.errors import UserError
from services.operator import attach_sight
from services.operator.attach_endpoint import EndpointProblem, Kind, checked, look
from tests.services.operator.inference_server import InferenceServer, sample_page
from tests.services.telemetry.sources.pages import sglang_page, sglang_totals, triton_page


@pytest.fixture
def server(shared_dir: Path) -> InferenceServer:
    return InferenceServer(sample_page(shared_dir))


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("500", "status 500, expected 200: the server is in trouble"),
        ("hang", "no whole answer within 0.2 s: the server hangs"),
        ("half", "the answer ended half-way"),
        ("empty", "an empty answer"),
        ("html", "text/html, expected text/plain (another service?)"),
        ("sglang", "it is sglang's page (tidegate attach sglang)"),
    ],
)
async def test_a_server_that_cannot_be_read_is_told_in_one_line(server: InferenceServer, fault: str, told: str) -> None:
    server.fault = fault
    async with server.running():
        with pytest.raises(EndpointProblem) as caught:
            await look(server.url, "vllm", 0.2)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)
    assert f"{server.url}/metrics: " in str(caught.value), "the address that was asked stands in front"


async def test_nobody_home_is_told_as_that(server: InferenceServer) -> None:
    async with server.running():
        url = server.url
    with pytest.raises(EndpointProblem, match=r"no connection.*: is the server up"):
        await look(url, "vllm")


@pytest.mark.parametrize("url", ["ftp://host", "http://", "http://host:port", "  "])
def test_what_is_no_address_is_a_mistake(url: str) -> None:
    with pytest.raises(UserError, match="expected the server's HTTP address"):
        checked(url)


@pytest.mark.parametrize(
    ("version", "steerable"), [("0.32.0", True), ("0.32.1+cpu", True), ("0.33.0", False), ("", False)]
)
async def test_only_a_known_version_of_vllm_can_be_steered(
    server: InferenceServer, version: str, steerable: bool
) -> None:
    server.version = version
    async with server.running():
        endpoint = await look(server.url, "vllm")
    assert endpoint.steerable is steerable
    remark = (
        f"remark: vLLM {version or 'of a version that it does not tell'} is not known here (0.32.x is): watched only"
    )
    assert (remark in attach_sight.as_text(endpoint, None)) is not steerable


async def test_the_table_says_what_is_measured_derived_assumed_and_absent(server: InferenceServer) -> None:
    async with server.running():
        endpoint = await look(server.url, "vllm")
    rows = {what: (how, now) for what, how, now in attach_sight.rows_of(endpoint)}
    assert rows["queue"] == ("measured", "now 5")
    assert rows["waiting for memory"] == ("measured", "now 4")
    assert rows["KV in use"] == ("derived", "now 90.0% of the capacity")
    assert rows["memory of the card"][0] == "assumed", "no device and no page says it"
    assert rows["idle KV (conversations between turns)"] == ("absent", "so: no eviction")
    assert rows["host link"][0] == "absent", "this server has no offloading connector"
    assert "shadow only" in attach_sight.as_text(endpoint, None)


async def test_what_a_page_lacks_is_absent_whatever_its_kind_can_give(shared_dir: Path) -> None:
    old = "\n".join(
        line for line in sample_page(shared_dir).splitlines() if "by_reason" not in line and "first_token" not in line
    )
    server = InferenceServer(old + "\n")
    async with server.running():
        endpoint = await look(server.url, "vllm")
    rows = {what: how for what, how, _ in attach_sight.rows_of(endpoint)}
    assert rows["waiting for memory"] == "absent"
    assert rows["time to first token"] == "absent"


@pytest.mark.parametrize(
    ("kind", "page", "what", "how"),
    [
        ("sglang", sglang_page() + sglang_totals(), "KV in use", "derived"),
        ("triton", triton_page(), "KV in use", "derived"),
    ],
)
async def test_other_kinds_are_watched_by_the_same_command(kind: Kind, page: str, what: str, how: str) -> None:
    server = InferenceServer(page)
    async with server.running():
        endpoint = await look(server.url, kind)
    assert not endpoint.steerable
    rows = {name: (found, now) for name, found, now in attach_sight.rows_of(endpoint)}
    assert rows["running requests"][0] == "measured"
    assert rows[what][0] == how, rows
