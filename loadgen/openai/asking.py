"""The body and headers of one request.

Pure. Header names are the project's: the vLLM adapter reads them, every other server passes over them.
"""

from __future__ import annotations

from typing import Any, Final

from loadgen.openai.options import Options
from loadgen.openai.plan import Session, Turn
from loadgen.openai.prompts import Prompt

CLASS_HEADER: Final = "x-tidegate-class"
SESSION_HEADER: Final = "x-tidegate-session"


def path_of(options: Options) -> str:
    """Of the API, after the base URL."""
    return "/v1/chat/completions" if options.is_chat else "/v1/completions"


def headers_of(options: Options, session: Session) -> dict[str, str]:
    """Class and session, and the key where there is one."""
    told = {
        "Content-Type": "application/json",
        CLASS_HEADER: session.service_class.name.lower(),
        SESSION_HEADER: f"s{options.seed}-{session.number}",
    }
    if options.api_key:
        told["Authorization"] = f"Bearer {options.api_key}"
    return told


def body_of(options: Options, model: str, session: Session, turn: Turn, index: int, prompt: Prompt) -> dict[str, Any]:
    """The JSON body, as a mapping; ``index`` is the turn's number in its session."""
    body: dict[str, Any] = {
        "model": model,
        prompt.field: prompt.value,
        "max_tokens": turn.max_tokens,
        "temperature": options.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if options.temperature > 0:  # sampling: the same run asked again may at least draw the same
        body["seed"] = (options.seed * 1_000_003 + session.number * 1009 + index) % 2**31
    if not options.is_plain:
        body["return_token_ids"] = True
    if options.is_ignoring_eos:
        body["ignore_eos"] = True
    priority = options.priority
    if isinstance(priority, dict):
        priority = priority.get(session.service_class)
    if priority is not None:
        body["priority"] = priority
    return body
