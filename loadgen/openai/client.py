"""One request over HTTP: everything that can happen to it becomes one record."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Final

import aiohttp
import msgspec

from loadgen.openai.answers import Answer, MalformedAnswer, excerpt
from loadgen.openai.records import NAN, Failure
from loadgen.openai.sse import EventParser, EventTooLarge

KEEP_ALIVE_S: Final = 2.0
"""Shorter than any server's (uvicorn: 5 s): a connection that the server is just closing would count as its failure."""
_BAD_FINISH: Final = frozenset({"abort", "error"})


class Outcome(msgspec.Struct, kw_only=True):
    """How it went; instants are of the loop's clock, NaN where a thing never happened."""

    answer: Answer
    sent: float
    first: float = NAN
    last: float = NAN
    """Of the last event with tokens."""
    first_tokens: int = 0
    """In the first event with any."""
    tokens: int = 0
    """In all events, as they were told there."""
    gaps_s: list[float] = []
    end: float = NAN
    status: int = 0
    failure: Failure = Failure.NONE
    detail: str = ""

    @property
    def tpot_s(self) -> float:
        """Mean seconds a token after the first event; NaN when no other event had any."""
        later = self.answer.output_tokens - self.first_tokens
        return (self.last - self.first) / later if later > 0 and self.gaps_s else NAN


def http_session() -> aiohttp.ClientSession:
    """One for the whole run; inside a running loop only."""
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
    return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))


async def ask(
    http: aiohttp.ClientSession,
    url: str,
    headers: Mapping[str, str],
    body: Mapping[str, Any],
    *,
    timeout_s: float,
    patience_s: float,
    ended: Callable[[Outcome], None],
) -> None:
    """Send one request and read its stream to the end; ``ended`` is called once, whatever happens.

    ``timeout_s``: for all of it. ``patience_s``: to the first token; inf = as long as the rest. Cancelled, the outcome
    says so and the cancellation goes on.
    """
    clock = asyncio.get_running_loop().time
    data = msgspec.json.encode(body)
    outcome = Outcome(answer=Answer(), sent=clock(), gaps_s=[])
    limit = outcome.sent + timeout_s
    try:
        async with asyncio.timeout_at(min(limit, outcome.sent + patience_s)) as patience:
            async with http.post(url, data=data, headers=headers) as response:
                outcome.status = response.status
                if response.status != 200:
                    outcome.failure = _status_failure(response.status)
                    told = excerpt(await response.content.read(4096))
                    outcome.detail = f"{response.status}: {told}" if told else f"{response.status} {response.reason}"
                else:
                    await _read(response, outcome, clock, lambda: patience.reschedule(limit))
    except TimeoutError:
        has_first = outcome.first == outcome.first
        gave_up = not has_first and patience_s < timeout_s
        outcome.failure = Failure.GAVE_UP if gave_up else Failure.TIMEOUT
        outcome.detail = (
            f"{'no first token' if not has_first else 'not finished'} within {clock() - outcome.sent:.1f} s"
        )
    except asyncio.CancelledError:
        outcome.failure, outcome.detail = Failure.INTERRUPTED, "the run was stopped"
        raise
    except (MalformedAnswer, EventTooLarge) as problem:
        outcome.failure, outcome.detail = Failure.MALFORMED, str(problem)
    except aiohttp.ClientConnectorError as problem:
        outcome.failure, outcome.detail = Failure.REFUSED, str(problem)
    except (aiohttp.ClientPayloadError, aiohttp.ServerDisconnectedError, aiohttp.ClientOSError, OSError) as problem:
        outcome.failure, outcome.detail = Failure.CUT, f"{type(problem).__name__}: {problem}"
    except aiohttp.ClientError as problem:
        outcome.failure, outcome.detail = Failure.MALFORMED, f"{type(problem).__name__}: {problem}"
    finally:
        outcome.end = clock()
        ended(outcome)


async def _read(
    response: aiohttp.ClientResponse, outcome: Outcome, clock: Callable[[], float], has_begun: Callable[[], None]
) -> None:
    parser, answer, head, has_events = EventParser(), outcome.answer, b"", False
    async for chunk in response.content.iter_any():
        now = clock()
        if not has_events:
            head = (head + chunk)[:1024]
        for event in parser.feed(chunk):
            has_events = True
            tokens = answer.take(event)
            if not tokens:
                continue
            if outcome.first_tokens:
                outcome.gaps_s.append(round(now - outcome.last, 6))
            else:
                outcome.first, outcome.first_tokens = now, tokens
                has_begun()
            outcome.last = now
            outcome.tokens += tokens
        if answer.is_done or answer.error:
            break
    if answer.error:
        outcome.failure, outcome.detail = Failure.STREAM_ERROR, answer.error
    elif not has_events and head.strip():
        found = f"{response.content_type}: {excerpt(head)}"
        outcome.failure, outcome.detail = Failure.MALFORMED, f"expected server-sent events, found {found}"
    elif not answer.finish:
        outcome.failure = Failure.CUT
        outcome.detail = f"the stream ended after {outcome.tokens} tokens without a finish reason"
    elif answer.finish in _BAD_FINISH:
        outcome.failure, outcome.detail = Failure.ABORTED, f"finish reason {answer.finish}"


def _status_failure(status: int) -> Failure:
    return {4: Failure.HTTP_4XX, 5: Failure.HTTP_5XX}.get(status // 100, Failure.HTTP_OTHER)
