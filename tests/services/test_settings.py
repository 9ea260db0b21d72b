"""Settings say exactly what is wrong, where, and what would be right."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated, Literal, NewType

import msgspec
import pytest

from services.errors import SettingsError
from services.settings import CommonSettings, load, parse_assignments

Seconds = NewType("Seconds", float)


class Mode(enum.Enum):
    OFF = "off"
    ENFORCE = "enforce"


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    ttft_s: Annotated[float, msgspec.Meta(gt=0)] = 2.0
    tpot_ms: float = 50.0


class Example(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    node: str
    rho_max: Annotated[float, msgspec.Meta(ge=1.0, le=1.6)] = 1.6
    step_s: Seconds = Seconds(2.0)
    replicas: int = 1
    shadow: bool = False
    mode: Mode = Mode.OFF
    policy: Literal["static", "dqn"] = "static"
    cards: tuple[str, ...] = ()
    idle_s: float | None = None
    limits: Limits = Limits()

    def __post_init__(self) -> None:
        if self.shadow and self.policy == "static":
            raise ValueError("shadow only with policy 'dqn'")


def read(
    toml: str = "", environ: dict[str, str] | None = None, overrides: dict[str, object] | None = None, *, at: Path
) -> Example:
    file = at / "tidegate.toml"
    file.write_text(toml, encoding="utf-8")
    return load(Example, "example", file=file, environ=environ or {}, overrides={"node": "n0", **(overrides or {})})


def test_the_command_line_wins_over_the_environment_over_the_file_over_the_defaults(tmp_path: Path) -> None:
    toml = "[example]\nreplicas = 2\nrho_max = 1.2\nstep_s = 4\n[common]\nlog_level = 'debug'\n"
    environ = {"TIDEGATE_EXAMPLE_REPLICAS": "3", "TIDEGATE_EXAMPLE_RHO_MAX": "1.3", "TIDEGATE_SHARED": "/nowhere"}
    settings = read(toml, environ, {"replicas": "4"}, at=tmp_path)
    assert settings == Example(node="n0", replicas=4, rho_max=1.3, step_s=Seconds(4.0))


def test_text_is_read_by_the_type_of_its_field(tmp_path: Path) -> None:
    environ = {
        "TIDEGATE_EXAMPLE_NODE": "17",
        "TIDEGATE_EXAMPLE_SHADOW": "true",
        "TIDEGATE_EXAMPLE_POLICY": "dqn",
        "TIDEGATE_EXAMPLE_MODE": "enforce",
        "TIDEGATE_EXAMPLE_CARDS": "a100, h100",
        "TIDEGATE_EXAMPLE_IDLE_S": ".5",
        "TIDEGATE_EXAMPLE_LIMITS": '{"ttft_s": 1}',
    }
    settings = load(Example, "example", file=None, environ=environ)
    assert settings == Example(
        node="17",
        shadow=True,
        policy="dqn",
        mode=Mode.ENFORCE,
        cards=("a100", "h100"),
        idle_s=0.5,
        limits=Limits(ttft_s=1.0),
    )


@pytest.mark.parametrize(
    ("toml", "key", "found", "expected"),
    [
        ("[example]\nrho_maxx = 1.2", "rho_maxx", "an unknown key", "the known key 'rho_max'"),
        ("[exampel]\nrho_max = 1.2", "exampel", "an unknown table", "the known table 'example'"),
        ("rho_max = 1.2", "rho_max", "an unknown key outside of any table", "one of"),
        ("example = 1.2", "example", "1.2", "a table [example]"),
        ("[example]\nrho_max = 1.7", "rho_max", "1.7", "float <= 1.6"),
        ("[example]\nrho_max = nan", "rho_max", "nan", "a number"),
        ("[example]\nreplicas = '2'", "replicas", "'2'", "int"),
        ("[example]\nshadow = 1", "shadow", "1", "bool"),
        ("[example]\nmode = 'on'", "mode", "'on'", "'off' or 'enforce'"),
        ("[example]\npolicy = 'dnq'", "policy", "'dnq'", "'static' or 'dqn'"),
        ("[example.limits]\nttft_s = 0", "limits.ttft_s", "0", "float > 0.0"),
        ("[example.limits]\nttft = 1", "limits.ttft", "an unknown key", "the known key 'limits.ttft_s'"),
        ("[example]\nshadow = true", "values", "a combination", "shadow only with policy 'dqn'"),
        ("[example", "TOML syntax", "Expected", "valid TOML"),
    ],
)
def test_a_mistake_in_the_file_names_key_found_and_expected(
    toml: str, key: str, found: str, expected: str, tmp_path: Path
) -> None:
    with pytest.raises(SettingsError) as caught:
        read(toml, at=tmp_path)
    error = caught.value
    assert error.key == key
    assert error.found.startswith(found)
    assert error.expected.startswith(expected)
    if error.key != "values":
        assert str(tmp_path / "tidegate.toml") in error.where, "whoever reads it must know which file to open"


@pytest.mark.parametrize(
    ("variable", "text", "expected"),
    [
        ("TIDEGATE_EXAMPLE_REPLICA", "2", "the known key 'replicas'"),
        ("TIDEGATE_EXAMPLE_REPLICAS", "two", "int"),
        ("TIDEGATE_EXAMPLE_RHO_MAX", "nan", "a number"),
        ("TIDEGATE_EXAMPLE_RHO_MAX", "0.9", "float >= 1.0"),
        ("TIDEGATE_EXAMPLE_CARDS", "[", "JSON"),
        ("TIDEGATE_EXAMPLE_SHADOW", "maybe", "bool"),
    ],
)
def test_a_mistake_in_the_environment_names_the_variable(
    variable: str, text: str, expected: str, tmp_path: Path
) -> None:
    with pytest.raises(SettingsError) as caught:
        read(environ={variable: text}, at=tmp_path)
    assert variable in str(caught.value)
    assert caught.value.expected.startswith(expected)


def test_a_missing_required_key_is_named() -> None:
    with pytest.raises(SettingsError, match=r"\[example\]: node: found nothing, expected str"):
        load(Example, "example", file=None, environ={})


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"nowhere\.toml.*No such file"):
        load(Example, "example", file=tmp_path / "nowhere.toml", environ={})


def test_a_secret_never_reaches_the_message() -> None:
    with pytest.raises(SettingsError) as caught:
        load(CommonSettings, "common", file=None, environ={}, overrides={"nats_password": 4711})
    assert "4711" not in str(caught.value)


def test_assignments_of_the_command_line() -> None:
    assert parse_assignments(["rho-max=1.2", "node = a=b"]) == {"rho_max": "1.2", "node": "a=b"}
    with pytest.raises(SettingsError, match=r"--set: found 'rho_max', expected key=value"):
        parse_assignments(["rho_max"])
