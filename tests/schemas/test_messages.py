"""Messages: yesterday's bytes decode, garbage is a DecodeError, growth at the end is harmless."""

from __future__ import annotations

import contextlib

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import schemas.actions
import schemas.engine
import schemas.outcomes
import schemas.scaleout
import schemas.states
import schemas.telemetry
import schemas.transitions
from schemas.codec import DecodeError, fit_columns, unpack
from schemas.features import FEATURE_HASH
from schemas.metrics import METRICS
from schemas.telemetry import metrics_of
from schemas.transitions import columns_of
from tests.schemas import samples

_MODULES = (
    schemas.actions, schemas.engine, schemas.outcomes, schemas.scaleout, schemas.states, schemas.telemetry,
    schemas.transitions,
)  # fmt: skip


@pytest.mark.parametrize("name", samples.MESSAGES)
def test_bytes_of_the_first_release_still_decode(name: str) -> None:
    codec, message = samples.MESSAGES[name]
    assert codec.decode((samples.GOLDEN / f"{name}.msgpack").read_bytes()) == message


@pytest.mark.parametrize("name", samples.FRAMES)
def test_engine_frames_of_the_first_release_still_decode(name: str) -> None:
    frame = samples.FRAMES[name]
    decoder = schemas.engine.REQUEST if isinstance(frame, schemas.engine.Request) else schemas.engine.REPLY
    assert decoder.decode((samples.GOLDEN / f"{name}.msgpack").read_bytes()) == frame


def test_every_message_has_a_golden_sample() -> None:
    written = {path.stem for path in samples.GOLDEN.glob("*.msgpack")}
    assert written == {*samples.MESSAGES, *samples.FRAMES}, "run python -m tests.schemas.samples"


@pytest.mark.parametrize("name", samples.MESSAGES)
def test_messages_start_with_identity_and_order(name: str) -> None:
    fields = type(samples.MESSAGES[name][1]).__struct_fields__
    assert fields[:5] == ("node", "boot_id", "step", "schema_version", "t_ns")


def test_no_struct_inherits_from_another() -> None:
    for module in _MODULES:
        for value in vars(module).values():
            if isinstance(value, type) and issubclass(value, msgspec.Struct) and value is not msgspec.Struct:
                assert value.__bases__ == (msgspec.Struct,), f"{value}: a field added to its base shifts its own"
                assert value.__struct_config__.frozen


@pytest.mark.parametrize("name", samples.MESSAGES)
def test_a_field_that_a_newer_sender_appends_is_ignored(name: str) -> None:
    codec, message = samples.MESSAGES[name]
    longer = [*msgspec.msgpack.decode(codec.encode(message)), "tomorrow"]
    assert codec.decode(msgspec.msgpack.encode(longer)) == message


@pytest.mark.parametrize("name", samples.MESSAGES)
def test_an_unknown_version_is_named(name: str) -> None:
    codec, message = samples.MESSAGES[name]
    fields = msgspec.msgpack.decode(codec.encode(message))
    fields[3] = 99
    with pytest.raises(DecodeError, match="schema version 99") as caught:
        codec.decode(msgspec.msgpack.encode(fields))
    assert caught.value.reason == "unknown_version"


@given(data=st.binary(max_size=200), name=st.sampled_from(sorted(samples.MESSAGES)))
def test_arbitrary_bytes_give_a_message_or_a_decode_error(data: bytes, name: str) -> None:
    codec, message = samples.MESSAGES[name]
    with contextlib.suppress(DecodeError):
        assert type(codec.decode(data)) is type(message)


@given(cut=st.integers(0, 400), name=st.sampled_from(sorted(samples.MESSAGES)))
def test_a_truncated_message_is_malformed(cut: int, name: str) -> None:
    codec, message = samples.MESSAGES[name]
    data = codec.encode(message)[:-1][:cut]
    with pytest.raises(DecodeError):
        codec.decode(data)


def test_deep_nesting_is_malformed_and_no_crash() -> None:
    with pytest.raises(DecodeError):
        schemas.telemetry.NODE_SAMPLE.decode(b"\x91" * 100_000)


def test_too_large_is_refused_before_decoding() -> None:
    with pytest.raises(DecodeError) as caught:
        schemas.telemetry.NODE_SAMPLE.decode(bytes(8 * 1024 * 1024 + 1))
    assert caught.value.reason == "too_large"


def test_metrics_of_an_older_sender_read_as_missing() -> None:
    old = np.ones((2, 5))
    sample = msgspec.structs.replace(samples.SAMPLE, metrics=old.tobytes())
    matrix = metrics_of(sample)
    assert matrix.shape == (2, len(METRICS))
    assert np.isnan(matrix[:, 5:]).all()
    assert (matrix[:, :5] == 1).all()


def test_metrics_of_a_newer_sender_lose_only_what_is_not_known() -> None:
    matrix = fit_columns(np.arange(8.0).reshape(2, 4), 3)
    assert matrix.tolist() == [[0, 1, 2], [4, 5, 6]]


def test_parts_that_do_not_agree_are_a_decode_error() -> None:
    with pytest.raises(DecodeError, match="2 workers, 1 cards"):
        metrics_of(msgspec.structs.replace(samples.SAMPLE, cards=(0,)))
    with pytest.raises(DecodeError, match="do not divide"):
        unpack(b"abc", "<f8", 2, "NodeSample")
    good = msgspec.structs.replace(samples.TRANSITION, feature_hash=FEATURE_HASH)
    with pytest.raises(DecodeError, match="policies"):
        columns_of(msgspec.structs.replace(good, policies=("a",)))
    with pytest.raises(DecodeError, match="table"):
        columns_of(msgspec.structs.replace(good, feature_hash="other"))
