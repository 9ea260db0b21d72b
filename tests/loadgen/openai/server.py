"""A server that plays the OpenAI API, well or badly, as a test tells it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from aiohttp import web

Behaviour = Callable[[web.StreamResponse, dict[str, Any]], Awaitable[None]]


class Server:
    """Answers are a function of the prompt, like those of a model at temperature 0."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.at_once = 0
        self.most_at_once = 0
        self.max_model_len: int | None = 4096
        self.gap_s = 0.0
        self.first_s = 0.0
        self.knows_ids = True
        self.behave: Callable[[int], Behaviour | web.Response | None] = lambda number: None
        """By request number from 0: None for a good answer, a response, or what to write into the stream."""
        self.models: web.Response | None = None
        self.url = ""

    async def list_models(self, request: web.Request) -> web.Response:
        if self.models is not None:
            return self.models
        return web.json_response({"object": "list", "data": [{"id": "played", "max_model_len": self.max_model_len}]})

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        number = len(self.bodies)
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            how = self.behave(number)
            if isinstance(how, web.Response):
                return how
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
            await response.prepare(request)
            await (how or self.answer)(response, body)
            return response
        finally:
            self.at_once -= 1

    async def answer(self, response: web.StreamResponse, body: dict[str, Any]) -> None:
        """A good one: ``max_tokens`` tokens that depend on the prompt alone."""
        prompt = body.get("prompt") or body["messages"]
        seed = sum(map(ord, json.dumps(prompt)))
        await asyncio.sleep(self.first_s)
        for at in range(body["max_tokens"]):
            if at:
                await asyncio.sleep(self.gap_s)
            await response.write(event(self.choice(body, seed + at, last=at + 1 == body["max_tokens"])))
        size = len(prompt)
        usage = {"prompt_tokens": size, "completion_tokens": body["max_tokens"], "total_tokens": 0}
        await response.write(event({"choices": [], "usage": usage}))
        await response.write(b"data: [DONE]\n\n")

    def choice(self, body: dict[str, Any], token: int, last: bool = False) -> dict[str, Any]:
        told: dict[str, Any] = {"index": 0, "finish_reason": "length" if last else None}
        if "messages" in body:
            told["delta"] = {"content": f"w{token % 100} "}
        else:
            told["text"] = f"w{token % 100} "
        if self.knows_ids and body.get("return_token_ids"):
            told["token_ids"] = [token % 100]
        return {"choices": [told]}


def event(value: object) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[Server]:
    """A started server on a free port; what still hangs in it at the end is cancelled."""
    server = Server()
    app = web.Application()
    app.router.add_get("/v1/models", server.list_models)
    app.router.add_post("/v1/completions", server.complete)
    app.router.add_post("/v1/chat/completions", server.complete)
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield server
    finally:
        await runner.cleanup()
