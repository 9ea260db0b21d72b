"""What a streamed answer says, event by event: tokens, finish reason, usage, errors.

Pure: data of one server-sent event in, a reading out; when it came is the client's business. Fields are those of
/v1/completions and /v1/chat/completions, and vLLM's ``token_ids``.
"""

from __future__ import annotations

from typing import Final

import msgspec

DONE: Final = b"[DONE]"
_DETAIL_CHARS: Final = 200


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class _Cached(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Cached | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: msgspec.Raw = msgspec.Raw()
    """Text in some servers, an object in others."""
    object: str | None = None
    message: str | None = None


_DECODER: Final = msgspec.json.Decoder(_Event)


class MalformedAnswer(ValueError):
    """An event that is no part of the API."""


class Answer:
    """What has come of one answer so far."""

    def __init__(self) -> None:
        self.text = ""
        self.token_ids: list[int] | None = None
        self.finish = ""
        self.error = ""
        self.is_done = False
        self.chunks = 0
        """Events that brought text or tokens."""
        self.prompt_tokens: int | None = None
        self.cached_tokens: int | None = None
        self._usage_tokens: int | None = None

    def take(self, data: bytes) -> int:
        """Read one event; how many tokens it brought (1 where it has text and the server counts none).

        MalformedAnswer for what is not JSON of this API. Events after ``[DONE]`` or an error bring nothing.
        """
        if self.is_done or self.error:
            return 0
        if data.strip() == DONE:
            self.is_done = True
            return 0
        try:
            event = _DECODER.decode(data)
        except msgspec.MsgspecError as problem:
            raise MalformedAnswer(f"{problem}: found {excerpt(data)}") from problem
        except UnicodeDecodeError as problem:
            raise MalformedAnswer(f"no UTF-8: found {excerpt(data)}") from problem
        error = bytes(event.error)
        if event.object == "error" or error not in (b"", b"null"):
            self.error = excerpt(error or (event.message or "an error without a message").encode())
            return 0
        if event.choices is None and event.usage is None:
            raise MalformedAnswer(f"expected choices or usage, found {excerpt(data)}")
        if event.usage is not None:
            self._take_usage(event.usage)
        return sum(self._take_choice(choice) for choice in (event.choices or [])[:1])

    @property
    def output_tokens(self) -> int:
        """By token ids, else as the server's usage says, else one for every event with text."""
        if self.token_ids is not None:
            return len(self.token_ids)
        return self.chunks if self._usage_tokens is None else self._usage_tokens

    @property
    def counted_by(self) -> str:
        """``ids``, ``usage`` or ``chunks``: what ``output_tokens`` rests on."""
        return "ids" if self.token_ids is not None else "chunks" if self._usage_tokens is None else "usage"

    @property
    def is_contradicted(self) -> bool:
        """The usage gives another count than there are token ids."""
        return None not in (self.token_ids, self._usage_tokens) and self.output_tokens != self._usage_tokens

    def _take_choice(self, choice: _Choice) -> int:
        text = choice.text or ""
        if choice.delta is not None:
            told = choice.delta
            text += (told.reasoning_content or told.reasoning or "") + (told.content or "")
        self.text += text
        if choice.token_ids is not None:
            self.token_ids = (self.token_ids or []) + choice.token_ids
        if choice.finish_reason:
            self.finish = choice.finish_reason
        tokens = int(bool(text)) if choice.token_ids is None else len(choice.token_ids)
        self.chunks += tokens > 0
        return tokens

    def _take_usage(self, usage: _Usage) -> None:
        if usage.completion_tokens is not None:
            self._usage_tokens = usage.completion_tokens
        if usage.prompt_tokens is not None:
            self.prompt_tokens = usage.prompt_tokens
        if usage.prompt_tokens_details is not None:
            self.cached_tokens = usage.prompt_tokens_details.cached_tokens


def excerpt(data: bytes) -> str:
    """The beginning of what a server sent, for a message; one line."""
    text = " ".join(data[: 4 * _DETAIL_CHARS].decode(errors="replace").split())
    return text if len(text) <= _DETAIL_CHARS else text[:_DETAIL_CHARS] + "..."
