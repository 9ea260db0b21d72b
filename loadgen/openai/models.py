"""What the server serves: /v1/models."""

from __future__ import annotations

import asyncio
from typing import Final

import aiohttp
import msgspec

from loadgen.openai.answers import excerpt
from services.errors import EngineUnreachable, UserError

_TIMEOUT_S: Final = 10.0


class Model(msgspec.Struct, frozen=True):
    """One of its models."""

    id: str
    max_model_len: int | None = None
    """Longest prompt + answer, tokens; vLLM and SGLang say it."""


class _Models(msgspec.Struct, frozen=True):
    data: list[Model]


async def served(http: aiohttp.ClientSession, base: str, wanted: str, api_key: str) -> Model:
    """The model called ``wanted``, or the first there is.

    EngineUnreachable when the server does not answer, or not with a list of models; UserError when it serves no
    such model.
    """
    url = f"{base}/v1/models"
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        async with asyncio.timeout(_TIMEOUT_S), http.get(url, headers=headers) as response:
            text = await response.read()
            if response.status != 200:
                raise EngineUnreachable(url, f"{response.status}: {excerpt(text) or response.reason}")
    except TimeoutError as problem:
        raise EngineUnreachable(url, f"no answer within {_TIMEOUT_S:g} s") from problem
    except (aiohttp.ClientError, OSError) as problem:
        raise EngineUnreachable(url, f"{problem} (is the server running?)") from problem
    try:
        models = msgspec.json.decode(text, type=_Models).data
    except (msgspec.MsgspecError, UnicodeDecodeError) as problem:
        raise EngineUnreachable(url, f"expected a list of models, found {excerpt(text)}") from problem
    if not models:
        raise EngineUnreachable(url, "serves no model")
    for model in models:
        if model.id == wanted or not wanted:
            return model
    raise UserError(
        f"--model: found {wanted!r}, expected one that {base} serves: {', '.join(one.id for one in models)}"
    )
