"""A server's HTTP side as attach and doctor meet it: /metrics and /version, asked once, and one line for what is wrong.

Whatever answers oddly is named here before anything is started: nobody is home, nothing comes, an answer that breaks
off, an error page, an empty page, a page of somebody else.
"""

from __future__ import annotations

import json
import time
import urllib.parse
from typing import Final, Literal, NamedTuple

import aiohttp

from services.actuator.engines.vllm import versions
from services.errors import ScrapeFailed, TidegateError, UserError
from services.telemetry.sources.endpoint import ADAPTERS, Probe, probe
from services.telemetry.sources.fetch import base_url, fetch_bytes, fetch_page, metrics_url
from services.telemetry.sources.page import Page

Kind = Literal["vllm", "sglang", "triton"]
ANSWER_LIMIT_S: Final = 5.0
"""For one answer; telemetry waits half a step, but who looks for the first time may find a server that warms up."""
SLOW_S: Final = 1.0
"""An answer that takes longer is one that telemetry will not wait for."""
_VERSION_PATHS: Final[dict[Kind, str]] = {"vllm": "/version", "sglang": "/get_server_info", "triton": "/v2"}


class EndpointProblem(TidegateError):
    """A server that cannot be read as it is; the message is one line."""

    def __init__(self, url: str, why: str) -> None:
        super().__init__(f"{url}: {why}")
        self.url = url
        self.why = why


class Endpoint(NamedTuple):
    """A server that answered as one of its kind does."""

    url: str
    """As telemetry is told it."""
    kind: Kind
    version: str
    """As it says itself; empty where it does not."""
    page: Page
    """Its /metrics."""
    probe: Probe
    took_s: float
    """Until the page was there."""

    @property
    def steerable(self) -> bool:
        """Whether the adapter knows this version's insides."""
        return self.kind == "vllm" and versions.known(self.version)


def checked(url: str) -> str:
    """The address with its scheme; UserError for what is no HTTP address."""
    url = url.strip()
    full = (url if "://" in url else f"http://{url}").rstrip("/")
    parts = urllib.parse.urlsplit(full)
    try:
        parts.port  # noqa: B018 - it raises for what is no port
    except ValueError:
        parts = parts._replace(netloc="")
    if parts.scheme not in ("http", "https") or not parts.hostname or not parts.netloc:
        raise UserError(f"--url {url!r}: expected the server's HTTP address, such as http://127.0.0.1:8000")
    return full


async def look(url: str, kind: Kind, limit_s: float = ANSWER_LIMIT_S) -> Endpoint:
    """Ask a server; EndpointProblem when it is not one that can be read, UserError when ``url`` is no address."""
    address = checked(url)
    page_url = metrics_url(address)
    async with aiohttp.ClientSession() as session:
        began_s = time.monotonic()
        try:
            page = await fetch_page(session, page_url, limit_s)
            took_s = time.monotonic() - began_s
        except ScrapeFailed as error:
            raise EndpointProblem(page_url, _told(error.reason)) from None
        version = await _version(session, base_url(address), kind, limit_s)
    try:
        found = probe(ADAPTERS[kind], page)
    except ScrapeFailed as error:
        others = [other for other, adapter in ADAPTERS.items() if other != kind and page.starts(adapter.prefixes)]
        theirs = f"; it is {others[0]}'s page (tidegate attach {others[0]})" if others else ""
        its = f", version {version}" if version else ""
        raise EndpointProblem(page_url, f"{error.reason}{its}{theirs}") from None
    return Endpoint(address, kind, version, page, found, took_s)


def _told(reason: str) -> str:
    """A failure with what to do about it, where that is plain."""
    for sign, advice in _ADVICE:
        if sign in reason:
            return f"{reason}: {advice}"
    return reason


_ADVICE: Final = (
    ("no connection", "is the server up, and is this its address?"),
    ("no whole answer", "the server hangs, or something else listens there"),
    ("no HTTP answer", "something else listens there"),
    ("status 404", "its metrics are off, or this is not the server"),
    ("status 5", "the server is in trouble: look at its log"),
    ("an empty answer", "its metrics are off, or it has only just started"),
)


async def _version(session: aiohttp.ClientSession, base: str, kind: Kind, limit_s: float) -> str:
    """What the server says that it is; empty where it says nothing that can be read."""
    try:
        found = json.loads(await fetch_bytes(session, f"{base}{_VERSION_PATHS[kind]}", limit_s))
    except (ScrapeFailed, ValueError):
        return ""
    version = found.get("version", "") if isinstance(found, dict) else ""
    return version[:40] if isinstance(version, str) else ""
