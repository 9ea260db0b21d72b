"""Class and session of a request, from its headers through vLLM's session id to the scheduler."""

from __future__ import annotations

import pytest

from schemas.classes import ServiceClass
from services.actuator.engines.vllm import labels
from services.actuator.engines.vllm.labels import Headers

CHAT = ServiceClass.CHAT


def through(headers: Headers) -> tuple[ServiceClass, str]:
    """What the scheduler reads of a request with these headers."""
    told = [value for key, value in labels.labelled(headers) if key.lower() == labels.VLLM_HEADER]
    assert len(told) <= 1, "vLLM takes the first it finds"
    return labels.parse(told[0].decode() if told else None, CHAT)


@pytest.mark.parametrize(
    ("headers", "kind", "session"),
    [
        ([(b"x-tidegate-class", b"agent")], ServiceClass.AGENT, ""),
        ([(b"X-Tidegate-Class", b" Batch ")], ServiceClass.BATCH, ""),
        ([(b"x-tidegate-session", b"s1")], CHAT, "s1"),
        ([(b"x-tidegate-class", b"agent"), (b"x-tidegate-session", b"a:b:c")], ServiceClass.AGENT, "a:b:c"),
        ([(b"x-session-id", b"own")], CHAT, "own"),
        ([(b"x-session-id", b"own"), (b"x-tidegate-class", b"agent")], ServiceClass.AGENT, "own"),
        ([(b"x-session-id", b"own"), (b"x-tidegate-session", b"s1")], CHAT, "s1"),
        ([], CHAT, ""),
    ],
)
def test_the_scheduler_reads_what_the_client_said(headers: Headers, kind: ServiceClass, session: str) -> None:
    assert through(headers) == (kind, session)


def test_a_mistyped_class_counts_as_none_and_fails_nobody() -> None:
    assert through([(b"x-tidegate-class", b"agnet")]) == (CHAT, "")
    assert through([(b"x-tidegate-class", b"agnet"), (b"x-tidegate-session", b"s")]) == (CHAT, "s")


def test_headers_without_anything_of_ours_are_left_as_they_are() -> None:
    headers: Headers = [(b"x-session-id", b"own"), (b"accept", b"*/*")]
    assert labels.labelled(headers) is headers


def test_the_first_of_a_header_that_comes_twice_counts() -> None:
    assert through([(b"x-tidegate-class", b"agent"), (b"x-tidegate-class", b"batch")])[0] is ServiceClass.AGENT


@pytest.mark.parametrize("text", ["tidegate", "tidegate:agent", "other:agent:s"])
def test_a_session_id_of_somebody_else_is_a_name(text: str) -> None:
    assert labels.parse(text, CHAT) == (CHAT, text)


def test_the_first_tokens_are_kept_as_int32() -> None:
    kept = labels.token_array([5, 6, 7, 8], 3)
    assert kept.tolist() == [5, 6, 7]
    assert kept.dtype == "int32"
    with pytest.raises(ValueError, match="too short"):
        labels.token_array([5], 3)
