"""What the environment of a vLLM process may say, and what a mistake in it is answered with."""

from __future__ import annotations

from pathlib import Path

import pytest

from schemas.classes import ServiceClass
from services.actuator.engines.vllm.settings import PluginSettings, from_environ
from services.errors import SettingsError

SOCKET = {"TIDEGATE_SOCKET": "/run/tidegate/3-w7.sock"}


def test_without_a_socket_there_is_no_tidegate() -> None:
    assert from_environ({"TIDEGATE_CLASS": "nonsense"}) is None


def test_the_socket_alone_says_who_the_worker_is() -> None:
    assert from_environ(SOCKET) == PluginSettings(socket=Path("/run/tidegate/3-w7.sock"), worker="n0/3/w7")


def test_everything_can_be_said() -> None:
    told = from_environ(
        SOCKET
        | {
            "TIDEGATE_NODE": "east-1", "TIDEGATE_CLASS": "Agent", "TIDEGATE_Q0_SHARE": "0.5",
            "TIDEGATE_CARD_KV_BYTES": "1e9", "TIDEGATE_HBM_BYTES": "80000000000", "TIDEGATE_GROUP_BLOCKS": "2",
            "TIDEGATE_PAUSE_MS": "1.5",
        }
    )  # fmt: skip
    assert told == PluginSettings(
        socket=Path(SOCKET["TIDEGATE_SOCKET"]), worker="east-1/3/w7", service_class=ServiceClass.AGENT, q0_share=0.5,
        card_kv_bytes=10**9, hbm_bytes=80 * 10**9, group_blocks=2, pause_ms=1.5,
    )  # fmt: skip


def test_an_empty_variable_counts_as_none() -> None:
    assert from_environ(SOCKET | {"TIDEGATE_NODE": "", "TIDEGATE_CLASS": "", "TIDEGATE_Q0_SHARE": ""}) == from_environ(
        SOCKET
    )


@pytest.mark.parametrize(
    ("variable", "text", "expected"),
    [
        ("SOCKET", "/run/w0.sock", "<gpu>-<name>.sock"),
        ("SOCKET", "/run/0-w0", "<gpu>-<name>.sock"),
        ("SOCKET", "/run/x-w0.sock", "<gpu>-<name>.sock"),
        ("NODE", "a/b", "a/b"),
        ("CLASS", "gold", "chat, agent"),
        ("Q0_SHARE", "0", "a number from"),
        ("Q0_SHARE", "1.01", "a number from"),
        ("Q0_SHARE", "half", "a number from"),
        ("Q0_SHARE", "nan", "a number from"),
        ("CARD_KV_BYTES", "-1", "a number from"),
        ("PAUSE_MS", "inf", "a number from"),
    ],
)
def test_a_mistake_is_answered_with_the_variable_and_what_is_expected(variable: str, text: str, expected: str) -> None:
    with pytest.raises(SettingsError) as caught:
        from_environ(SOCKET | {f"TIDEGATE_{variable}": text})
    assert f"TIDEGATE_{variable}" in str(caught.value)
    assert expected in str(caught.value)


def test_the_highest_factor_is_the_classs_own() -> None:
    def rho_max(name: str) -> float:
        told = from_environ(SOCKET | {"TIDEGATE_CLASS": name})
        assert told is not None
        return told.rho_max

    assert rho_max("training") == 1.0
    assert rho_max("copilot") < rho_max("chat")
