"""What is written into CUDA_MPS_PINNED_DEVICE_MEM_LIMIT, and that a card's clients fit it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.actuator.mps.fence import (
    MIB,
    Card,
    Client,
    check_budget,
    client_environment,
    format_limits,
    limit_text,
    parse_limits,
    tightened,
)
from services.errors import UserError

GIB = 1 << 30
UUID = "GPU-74d43ed3-cdf7-e667-3644-bf5b4f46ed65"


def test_the_format_is_whole_mib_by_device() -> None:
    assert format_limits([(0, 10752 * MIB), ("1", 10 * GIB)]) == "0=10752M,1=10240M"
    assert format_limits([(UUID, GIB)]) == f"{UUID}=1024M"


def test_a_limit_is_rounded_down_never_up() -> None:
    assert limit_text(2 * MIB - 1) == "1M"


@pytest.mark.parametrize("limit", [0, -5, MIB - 1])
def test_nothing_is_no_limit_and_refused(limit: int) -> None:
    with pytest.raises(UserError, match="expected 1048576"):
        format_limits([(0, limit)])


@pytest.mark.parametrize(
    ("limits", "match"),
    [([], "no device"), ([(0, GIB), ("0", GIB)], "named twice"), ([("00", GIB)], "expected an ordinal"),
     ([("0=1G,1", GIB)], "expected an ordinal"), ([("-1", GIB)], "expected an ordinal"), ([("MIG-1", GIB)], "UUID")],
)  # fmt: skip
def test_a_device_that_is_none_or_twice_there_is_refused(limits: list[tuple[str | int, int]], match: str) -> None:
    with pytest.raises(UserError, match=match):
        format_limits(limits)


@settings(max_examples=30)
@given(st.dictionaries(st.integers(0, 63), st.integers(MIB, 1 << 45), min_size=1))
def test_what_is_written_reads_back_as_no_more_and_less_than_a_mib_less(limits: dict[int, int]) -> None:
    back = parse_limits(format_limits(limits.items()))
    assert [int(device) for device in back] == list(limits)
    for device, limit in limits.items():
        assert limit - MIB < back[str(device)] <= limit


@pytest.mark.parametrize("text", ["", "0", "0=5", "0=5K", "0=M", "0=-1G", "0=1G,", "0=1G,0=2G", "0=1.5G"])
def test_a_text_that_mps_would_not_read_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT|named twice"):
        parse_limits(text)


def test_documented_forms_are_read() -> None:
    assert parse_limits("0=1G,1=512MB") == {"0": GIB, "1": 512 * MIB}


def test_a_client_can_only_tighten_what_the_server_allows() -> None:
    assert tightened({"0": 20 * GIB, "1": GIB}, {"0": 10 * GIB, "2": 5}) == {"0": 10 * GIB, "1": GIB, "2": 5}


def test_clients_that_fit_leave_the_rest() -> None:
    cards = [Card("0", 80 * GIB, 4 * GIB)]
    assert check_budget(cards, [Client("a", {"0": 40 * GIB}), Client("b", {"0": 30 * GIB})]) == {"0": 6 * GIB}


@pytest.mark.parametrize(
    ("clients", "match"),
    [
        ([Client("a", {"0": 40 * GIB}), Client("b", {"0": 37 * GIB})], "2 clients may hold 82678120448 bytes"),
        ([Client("a", {"1": GIB})], "no card 1"),
        ([Client("a", {})], "no limit on card 0"),
        ([Client("a", {"0": GIB}), Client("a", {"0": GIB})], "named twice"),
        ([Client("a", {"0": 0})], "expected 1048576"),
    ],
)
def test_clients_that_do_not_fit_or_have_no_limit_are_refused(clients: list[Client], match: str) -> None:
    with pytest.raises(UserError, match=match):
        check_budget([Card("0", 80 * GIB, 4 * GIB)], clients)


@pytest.mark.parametrize("reserve", [-1, 80 * GIB])
def test_a_reserve_that_leaves_nothing_is_refused(reserve: int) -> None:
    with pytest.raises(UserError, match="reserve"):
        check_budget([Card("0", 80 * GIB, reserve)], [])


def test_a_clients_environment_names_pipes_and_the_order_of_cards() -> None:
    environment = client_environment([(0, GIB)], pipes=Path("/run/mps"), visible=(UUID,))
    assert environment == {
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=1024M",
        "CUDA_MPS_PIPE_DIRECTORY": "/run/mps",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": UUID,
    }
    with pytest.raises(UserError, match="absolute"):
        client_environment([(0, GIB)], pipes=Path("mps"))
