"""What a model's folder tells."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from services.telemetry.sources.model_facts import kv_bytes_per_token, model_folder, read_model_facts

LLAMA_8B = {
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096,
    "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "dtype", "expected"),
    [
        (LLAMA_8B, "auto", 131072),
        (LLAMA_8B, "fp8_e4m3", 65536),
        ({**LLAMA_8B, "torch_dtype": "float32"}, "auto", 262144),
        ({"text_config": LLAMA_8B}, "auto", 131072),
        ({"num_hidden_layers": 60, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "dtype": "bfloat16"}, "auto", 69120),
    ],
    ids=["grouped queries", "8 bit cache", "32 bit", "nested", "latent attention"],
)
def test_kv_of_a_token(config: dict[str, object], dtype: str, expected: int) -> None:
    assert kv_bytes_per_token(config, dtype) == expected


@pytest.mark.parametrize("config", [{}, {"num_hidden_layers": "32"}, {**LLAMA_8B, "num_hidden_layers": -1}])
def test_a_shape_that_is_not_told_is_unknown(config: dict[str, object]) -> None:
    assert math.isnan(kv_bytes_per_token(config))


def test_a_folder_gives_its_shape_and_the_size_of_its_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 2}')
    (tmp_path / "model.safetensors").write_bytes(b"x" * 1000)
    assert read_model_facts(tmp_path) == ({"num_hidden_layers": 2}, 1000.0)


@pytest.mark.parametrize("text", [None, "", "[1]", "{", "[" * 100_000])
def test_a_folder_that_cannot_be_read_tells_nothing(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    facts = read_model_facts(tmp_path)
    assert facts.config == {}
    assert math.isnan(facts.weights_bytes)


def test_models_name_their_folder() -> None:
    body = b'{"data": [{"id": "a", "root": "/models/a"}, {"id": "b", "root": "org/b"}]}'
    assert model_folder(body, "a") == Path("/models/a")
    assert model_folder(body, "other") == Path("/models/a")
    assert model_folder(body, "b") is None, "a name on a hub is no folder"


@pytest.mark.parametrize("body", [b"", b"{}", b"[]", b'{"data": []}', b'{"data": [1]}', b'{"data": 3}', b"\xff"])
def test_an_answer_without_models_names_none(body: bytes) -> None:
    assert model_folder(body, "a") is None
