"""What a session says: its prompts as token ids or as words, each holding the history that prefix caches live on.

Pure and seeded: the text of a session is a function of (seed, session), so prompts are equal from run to run as long
as the server's answers are.
"""

from __future__ import annotations

import hashlib
from typing import Final, Protocol

import msgspec
import numpy as np

from loadgen.openai.plan import Turn

_COMMON: Final = """
the of and to in is that it was for on are as with his they at be this from have or by one had not but what all were
when we there can an your which their said if do will each about how up out them then she many some so these would
other into has more her two like him see time could no make than first been its who now people my made over did down
only way find use may water long little very after words called just where most know"""
WORDS: Final = tuple(_COMMON.split())
"""Short and common: about one token each in any vocabulary."""
_TEXT, _SHARED, _ANSWERS = 3, 4, 5


class Prompt(msgspec.Struct, frozen=True):
    """What is sent, and how it was made."""

    field: str
    """``prompt`` or ``messages``."""
    value: list[int] | list[dict[str, str]]
    tokens: int
    """Its length: exact for token ids, an estimate for words."""
    kept_tokens: int
    """Leading tokens that an earlier turn of the session had already sent or been answered."""

    @property
    def digest(self) -> str:
        """16 hex digits: equal prompts have equal ones."""
        return hashlib.sha256(msgspec.json.encode(self.value)).hexdigest()[:16]


class Conversation(Protocol):
    """One session's history."""

    def ask(self, turn: Turn) -> Prompt: ...

    def answered(self, turn: Turn, token_ids: list[int] | None, text: str, output_tokens: int) -> None: ...


class TokenConversation:
    """History as token ids: every prompt has exactly the length that its turn asks for."""

    def __init__(
        self, seed: int, session: int, token_ids: tuple[int, int], shared_tokens: int, is_synthetic: bool
    ) -> None:
        self._low, self._high = token_ids
        self._rng = np.random.default_rng([seed, _TEXT, session])
        self._answers = np.random.default_rng([seed, _ANSWERS, session])
        self._is_synthetic = is_synthetic
        shared = np.random.default_rng([seed, _SHARED])
        self.context = self._new(shared, shared_tokens)
        self._is_first = True

    def ask(self, turn: Turn) -> Prompt:
        """The prompt: what is kept of the history, then new tokens, at least one, up to the turn's length."""
        kept = self.context[: turn.kept_tokens]
        if turn.prompt_tokens:
            kept = kept[: turn.prompt_tokens - 1]
        fresh = max(turn.fresh_tokens, turn.prompt_tokens - len(kept))
        self.context = kept + self._new(self._rng, fresh)
        told = 0 if self._is_first else len(kept)
        self._is_first = False
        return Prompt("prompt", list(self.context), len(self.context), told)

    def answered(self, turn: Turn, token_ids: list[int] | None, text: str, output_tokens: int) -> None:
        """The answer becomes history: as it came, or as many synthetic tokens where nobody knows its ids.

        Synthetic history is as long as the answer's limit, so that it does not depend on the server.
        """
        if self._is_synthetic:
            self.context += self._new(self._answers, turn.max_tokens)
        else:
            self.context += self._new(self._answers, output_tokens) if token_ids is None else token_ids

    def _new(self, rng: np.random.Generator, count: int) -> list[int]:
        made: list[int] = rng.integers(self._low, self._high, count).tolist()
        return made


class WordConversation:
    """History as chat messages; lengths count a word as a token, which templates and vocabularies make approximate."""

    def __init__(self, seed: int, session: int, shared_tokens: int, is_synthetic: bool) -> None:
        self._rng = np.random.default_rng([seed, _TEXT, session])
        self._answers = np.random.default_rng([seed, _ANSWERS, session])
        self._is_synthetic = is_synthetic
        self.messages: list[dict[str, str]] = []
        self._sizes: list[int] = []
        if shared_tokens:
            self._say("system", _words(np.random.default_rng([seed, _SHARED]), shared_tokens), shared_tokens)
        self._is_first = True

    def ask(self, turn: Turn) -> Prompt:
        """Whole exchanges are kept as far as the turn keeps history (templates want the roles to alternate)."""
        while self.messages and sum(self._sizes) > turn.kept_tokens:
            self._drop()
            while self.messages and self.messages[-1]["role"] == "user":
                self._drop()
        kept = sum(self._sizes)
        fresh = max(turn.fresh_tokens, turn.prompt_tokens - kept)
        self._say("user", _words(self._rng, fresh), fresh)
        told = 0 if self._is_first else kept
        self._is_first = False
        return Prompt("messages", list(self.messages), kept + fresh, told)

    def answered(self, turn: Turn, token_ids: list[int] | None, text: str, output_tokens: int) -> None:
        """The answer becomes a message of the assistant."""
        if self._is_synthetic:
            self._say("assistant", _words(self._answers, turn.max_tokens), turn.max_tokens)
        else:
            self._say("assistant", text, output_tokens)

    def _say(self, role: str, content: str, size: int) -> None:
        self.messages.append({"role": role, "content": content})
        self._sizes.append(size)

    def _drop(self) -> None:
        self.messages.pop()
        self._sizes.pop()


def _words(rng: np.random.Generator, count: int) -> str:
    return " ".join(WORDS[index] for index in rng.integers(0, len(WORDS), count).tolist())
