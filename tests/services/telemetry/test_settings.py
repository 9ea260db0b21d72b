"""Engines in the settings: tables in TOML, JSON elsewhere, clear errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from schemas.classes import ServiceClass
from services.errors import SettingsError
from services.settings import load
from services.telemetry.settings import Engine, Settings

TABLES = """
[telemetry]
node = "n0"
source = "engines"

[[telemetry.engines]]
kind = "vllm"
url = "http://127.0.0.1:8000"

[[telemetry.engines]]
kind = "sglang"
url = "http://127.0.0.1:30000"
gpu = 1
name = "w1"
service_class = "agent"
q0_share = 0.5
"""


def of(tmp_path: Path, text: str, **environ: str) -> Settings:
    file = tmp_path / "tidegate.toml"
    file.write_text(text)
    return load(Settings, "telemetry", file=file, environ=environ)


def test_engines_are_tables_of_the_settings_file(tmp_path: Path) -> None:
    settings = of(tmp_path, TABLES)
    assert settings.engines == (
        Engine(kind="vllm", url="http://127.0.0.1:8000"),
        Engine(kind="sglang", url="http://127.0.0.1:30000", gpu=1, name="w1", service_class="agent", q0_share=0.5),
    )
    assert settings.engines[1].class_number is ServiceClass.AGENT


def test_engines_are_json_in_a_variable_and_on_the_command_line() -> None:
    text = '[{"kind": "vllm", "url": "http://h:1"}]'
    expected = (Engine(kind="vllm", url="http://h:1"),)
    by_variable = load(
        Settings,
        "telemetry",
        file=None,
        environ={"TIDEGATE_TELEMETRY_ENGINES": text, "TIDEGATE_TELEMETRY_SOURCE": "engines"},
    )
    by_option = load(Settings, "telemetry", file=None, environ={}, overrides={"engines": text, "source": "engines"})
    assert by_variable.engines == by_option.engines == expected


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("url = ", "urll = "), r"engines\[0\]\.urll: found an unknown key, expected the known key"),
        (('kind = "vllm"', 'kind = "vlm"'), r"engines\[0\]\.kind: found .vlm., expected .vllm. or .sglang."),
        (('kind = "vllm"\n', ""), r"engines\[0\]\.kind: found nothing"),
        (("http://127.0.0.1:8000", "127.0.0.1:8000"), "expected http://host:port"),
        (("gpu = 1", "gpu = -1"), r"engines\[1\]\.gpu"),
        (('name = "w1"', 'name = "a/b"'), "without '/'"),
        (("gpu = 1\nname = \"w1\"", ""), "two engines named 'w0' on card 0"),
        (("q0_share = 0.5", "q0_share = 1.5"), r"engines\[1\]\.q0_share"),
        (("gpu = 1", "gpu = 0\n"), ""),
        (('[[telemetry.engines]]\nkind = "vllm"', "[telemetry.engines]\nkind = \"vllm\""), "valid TOML"),
    ],
)  # fmt: skip
def test_a_mistake_says_where_it_is(tmp_path: Path, change: tuple[str, str], said: str) -> None:
    text = TABLES.replace(*change, 1)
    assert text != TABLES
    if not said:
        assert len(of(tmp_path, text).engines) == 2, "two on one card are no mistake"
        return
    with pytest.raises(SettingsError, match=said):
        of(tmp_path, text)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("", "without any"),
        ("scrape_timeout_s = 2.0\n", "less than step_s"),
    ],
)
def test_a_source_without_engines_or_time_for_them_is_refused(tmp_path: Path, settings: str, said: str) -> None:
    text = TABLES.replace("\n[[", f"{settings}\n[[", 1) if settings else TABLES.split("[[")[0]
    with pytest.raises(SettingsError, match=said):
        of(tmp_path, text)


def test_shares_of_a_card_leave_something_for_each(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="q0_share of card 0"):
        of(tmp_path, TABLES.replace("gpu = 1\n", "").replace("q0_share = 0.5", "q0_share = 1.0"))


def test_engines_are_of_one_node() -> None:
    settings = Settings(node="a", nodes=("b",), source="engines", engines=(Engine(kind="vllm", url="http://h:1"),))
    with pytest.raises(SettingsError, match="one node"):
        _ = settings.served
