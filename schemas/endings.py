"""How a turn's answer ended, as an engine knows it the moment it ends.

vLLM and OpenAI call it ``finish_reason``, Anthropic ``stop_reason``. It says much about the next turn: a tool answers
in seconds, a reader in minutes.
"""

from __future__ import annotations

import enum
from typing import Final


class Ending(enum.IntEnum):
    """Order is part of request tables on disk: append only."""

    UNKNOWN = 0
    """Nobody said, or in a word nobody here knows."""
    DONE = 1
    """The model had said all: the reader is next."""
    TOOL = 2
    """A tool call: a program is next."""
    LENGTH = 3
    """The limit of output tokens or of the context."""
    CUT = 4
    """Aborted by the client, or failed."""


_WORDS: Final = {
    "stop": Ending.DONE,
    "end_turn": Ending.DONE,
    "stop_sequence": Ending.DONE,
    "tool_use": Ending.TOOL,
    "tool_calls": Ending.TOOL,
    "function_call": Ending.TOOL,
    "length": Ending.LENGTH,
    "max_tokens": Ending.LENGTH,
    "abort": Ending.CUT,
    "error": Ending.CUT,
}


def ending_of(word: str | None) -> Ending:
    """What a finish or stop reason means; UNKNOWN for none, for an empty one and for a word that is not known.

    vLLM's engine says ``stop`` of a tool call too: ask its API server, which says ``tool_calls``.
    """
    return _WORDS.get((word or "").strip().casefold(), Ending.UNKNOWN)
