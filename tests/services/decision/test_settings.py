"""Settings that do not make sense are told before anything runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from schemas.classes import DEFAULT_LIMITS, ClassLimits, ServiceClass
from services.decision.service import Settings, build
from services.decision.settings import shield_settings
from services.errors import SettingsError
from services.settings import load


def test_classes_are_named_in_the_file_and_replace_the_defaults(tmp_path: Path) -> None:
    file = tmp_path / "tidegate.toml"
    file.write_text(
        "[decision]\npolicy = 'fixed:1.3'\n[decision.shield]\nrho_max = 1.4\n"
        "[decision.classes.chat]\nttft_base_s = 1.0\nttft_per_token_s = 0.0\ntpot_s = 0.04\nrho_max = 1.2\n"
    )
    settings = load(Settings, "decision", file=file, environ={})
    limits = shield_settings(settings).limits
    assert shield_settings(settings).rho_max == 1.4
    assert limits[ServiceClass.CHAT].rho_max == 1.2
    assert limits[ServiceClass.AGENT] == DEFAULT_LIMITS[ServiceClass.AGENT]
    build(settings)


@pytest.mark.parametrize("policy", ["best", "fixed:2", "fixed", ""])
def test_an_unknown_policy_ends_the_start(policy: str) -> None:
    with pytest.raises(SettingsError):
        build(Settings(policy=policy))


def test_an_unknown_class_ends_the_start() -> None:
    with pytest.raises(SettingsError, match="one of chat, agent"):
        build(Settings(classes={"chatty": ClassLimits(ttft_base_s=1.0, ttft_per_token_s=0.0, tpot_s=1.0)}))


@pytest.mark.parametrize(
    ("key", "value"), [("epsilon", "0.5"), ("canary_share", "2"), ("lease_steps", "0"), ("fetch_tries", "0")]
)
def test_out_of_range_is_refused(key: str, value: str) -> None:
    with pytest.raises(SettingsError, match=key):
        load(Settings, "decision", file=None, environ={f"TIDEGATE_DECISION_{key.upper()}": value})
