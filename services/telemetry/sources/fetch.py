"""One page over HTTP, within a time and a size."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

import aiohttp

from services.errors import ScrapeFailed
from services.telemetry.sources.page import Page, parse_page

MAX_PAGE_BYTES: Final = 8 << 20
"""A page of a real server has 50 to 70 kB; this is one that nobody needs."""
_HEADERS: Final = {"Accept": "text/plain;version=0.0.4;q=1, text/plain;q=0.5"}


def metrics_url(url: str) -> str:
    """The page of a server's address: ``/metrics`` where the address has no path of its own."""
    host = url.split("://", 1)[-1]
    return url.rstrip("/") + "/metrics" if "/" not in host.rstrip("/") else url


def base_url(url: str) -> str:
    """The server itself: scheme and host."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.split('/', 1)[0]}"


async def fetch_page(
    session: aiohttp.ClientSession,
    url: str,
    timeout_s: float,
    wanted: Sequence[str] = (),
    max_bytes: int = MAX_PAGE_BYTES,
) -> Page:
    """The page at ``url``, of it what begins with ``wanted``; ScrapeFailed says why where it is not a whole, readable
    one."""
    return parse_page(url, await fetch_text(session, url, timeout_s, max_bytes), wanted)


async def fetch_text(
    session: aiohttp.ClientSession, url: str, timeout_s: float, max_bytes: int = MAX_PAGE_BYTES
) -> str:
    """A page's text, not yet read; ScrapeFailed as :func:`fetch_page`."""
    body, kind = await _get(session, url, timeout_s, max_bytes)
    if "html" in kind:
        raise ScrapeFailed(url, f"content type {kind}, expected text/plain (another service?)")
    try:
        return body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ScrapeFailed(url, f"a byte that is not UTF-8 at {error.start}") from error


async def fetch_bytes(session: aiohttp.ClientSession, url: str, timeout_s: float, max_bytes: int = 1 << 20) -> bytes:
    """Any answer's body, for ``/v1/models``; ScrapeFailed as :func:`fetch_page`."""
    return (await _get(session, url, timeout_s, max_bytes))[0]


async def _get(session: aiohttp.ClientSession, url: str, timeout_s: float, max_bytes: int) -> tuple[bytes, str]:
    began = False
    try:
        async with (
            asyncio.timeout(timeout_s),
            session.get(url, headers=_HEADERS, allow_redirects=False) as response,
        ):
            if response.status != 200:
                why = " (credentials?)" if response.status in (401, 403) else ""
                raise ScrapeFailed(url, f"status {response.status}, expected 200{why}")
            began = True
            body = bytearray()
            async for piece in response.content.iter_chunked(1 << 16):
                body += piece
                if len(body) > max_bytes:
                    raise ScrapeFailed(url, f"more than {max_bytes} bytes")
            return bytes(body), response.content_type
    except TimeoutError as error:
        raise ScrapeFailed(url, f"no whole answer within {timeout_s:g} s") from error
    except aiohttp.ClientConnectorError as error:
        raise ScrapeFailed(url, f"no connection: {error.os_error.strerror or error.os_error}") from error
    except (aiohttp.ClientPayloadError, aiohttp.ClientConnectionError) as error:
        silent = "the connection was closed without an answer"
        raise ScrapeFailed(url, "the answer ended half-way" if began else silent) from error
    except (aiohttp.ClientResponseError, aiohttp.http_exceptions.HttpProcessingError) as error:
        raise ScrapeFailed(url, "no HTTP answer") from error
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise ScrapeFailed(url, f"{error or type(error).__name__}"[:200]) from error
