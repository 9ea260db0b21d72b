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
from schemas.codec import DecodeError, fit_columns, pack_row, unpack, unpack_row
from schemas.features import FEATURE_HASH
from schemas.identity import parse_action_id
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


@pytest.mark.parametrize(
    "change",
    [
        {"workers": ("a",)},
        {"actions": b"\x01"},
        {"target_rho": bytes(15)},
        {"probabilities": bytes(4)},
        {"policy_index": bytes([0, 2])},
        {"policies": ()},
        {"mask_reasons": bytes(5)},
        {"mask_reasons": b"\x00" * 9},
    ],
)
def test_action_columns_that_do_not_agree_are_a_decode_error(change: dict[str, object]) -> None:
    with pytest.raises(DecodeError) as caught:
        schemas.actions.columns_of(msgspec.structs.replace(samples.ACTION, **change))
    assert caught.value.reason == "bad_shape"


@pytest.mark.parametrize(
    "change",
    [
        {"workers": ("a",)},
        {"statuses": b"\x01"},
        {"effective_rho": bytes(17)},
        {"policy_index": bytes([0, 2])},
        {"effects": (schemas.outcomes.Effect(2),)},
        {"completions": (schemas.outcomes.Completion(-1, 1, 1),)},
    ],
)
def test_outcome_columns_that_do_not_agree_are_a_decode_error(change: dict[str, object]) -> None:
    with pytest.raises(DecodeError) as caught:
        schemas.outcomes.check_columns(msgspec.structs.replace(samples.OUTCOME, **change))
    assert caught.value.reason == "bad_shape"


def test_a_batch_by_rows_says_what_its_columns_say() -> None:
    acting, held = schemas.actions.actions_of(samples.ACTION)
    assert (acting.worker, acting.action, acting.target_rho, acting.policy) == (
        "gpu-01.example/0/w0",
        1,
        1.2,
        "heuristic",
    )
    assert acting.action_id == "gpu-01.example/0/w0@1700000000000000000.7"
    assert (acting.mask_reasons, acting.q_values) == ((0, 0, 0, 9, 0), (0.5, 1.5, 2.5, 3.5, 4.5))
    assert [(one.policy, one.action) for one in acting.shadows] == [("dqn:v2", 4)]
    assert (held.policy, held.probability, held.hold) == ("dqn:v1", 0.5, 1)
    assert (held.q_values, held.shadows) == ((), ()), "nothing is made of a state that is not to be trusted"
    receipt, completion = schemas.outcomes.outcomes_of(samples.OUTCOME)
    assert (receipt.kind, receipt.detail, receipt.evicted_bytes) == (0, "clipped to 1.6", 0)
    assert (completion.kind, completion.action_id) == (1, "gpu-01.example/0/w1@1700000000000000000.5")
    assert (completion.evicted_bytes, completion.pages_freed, completion.pause_us) == (2, 4, 5.5)


def test_rows_packed_again_give_the_same_outcomes() -> None:
    rows = schemas.outcomes.outcomes_of(samples.OUTCOME)
    head = samples.OUTCOME
    assert schemas.outcomes.outcome_batch(head.node, head.boot_id, head.step, head.t_ns, rows) == head


def test_rows_packed_again_give_the_same_actions_but_for_what_networks_think() -> None:
    head = samples.ACTION
    rows = schemas.actions.actions_of(head)
    again = schemas.actions.action_batch(head.node, head.boot_id, head.step, head.t_ns, rows, head.policy_version)
    assert again == msgspec.structs.replace(head, q_values=b"", shadows=())
    with pytest.raises(ValueError, match="one pair for the whole batch"):
        schemas.actions.action_batch("n", 1, 1, 0, [rows[0], rows[1]._replace(lease_ns=1)])


def test_a_number_beyond_64_bits_is_packed_as_the_nearest_that_fits() -> None:
    assert unpack_row(pack_row([2**64 - 1, -(2**70), 5], "q"), "q") == (2**63 - 1, -(2**63), 5)


@pytest.mark.parametrize("text", ["", "n0/0/w0", "@1.2", "n0/0/w0@1", "n0/0/w0@x.2"])
def test_a_text_that_is_no_action_id_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match="action id"):
        parse_action_id(text)
