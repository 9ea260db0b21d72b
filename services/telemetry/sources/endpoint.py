"""One configured engine endpoint: its page and its socket asked side by side, its workers' rows out."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

import aiohttp
import numpy as np
from numpy.typing import NDArray

from schemas.classes import DEFAULT_LIMITS, ServiceClass
from schemas.codec import DecodeError, fit_columns, unpack
from schemas.engine import Sample
from schemas.identity import worker_id
from schemas.metrics import COLUMN, METRICS
from services.clock import Clock
from services.errors import EngineRefused, EngineUnreachable, ScrapeFailed
from services.kvsegment import FOLDER
from services.telemetry.settings import Engine
from services.telemetry.sources import sglang, triton, vllm
from services.telemetry.sources.card import CardMemory
from services.telemetry.sources.fetch import base_url, fetch_bytes, fetch_page, metrics_url
from services.telemetry.sources.kvcached import KvcachedFacts, read_facts
from services.telemetry.sources.model_facts import ModelFacts, model_folder, read_model_facts
from services.telemetry.sources.node_client import NodeClient
from services.telemetry.sources.page import Page, Part
from services.telemetry.sources.said import Adapter, Key
from services.telemetry.sources.track import Row, Track, empty_row, sane

ADAPTERS: Final[dict[str, Adapter]] = {a.kind: a for a in (vllm.ADAPTER, sglang.ADAPTER, triton.ADAPTER)}
NEWEST: Final = -1
MODEL_TRIES: Final = 3
"""How often in a row a server that names no model is asked; one that wants a key would be asked for ever."""
MOST_OF_CARD: Final = 0.8
"""A pool whose size is assumed is taken to be no more than this share of its card."""


class Scrape(NamedTuple):
    """What one worker's engine said in a step."""

    worker: str
    card: int
    row: Row
    alive: bool
    age_s: float
    """Of the oldest number in the row; NaN when there is none."""


class Probe(NamedTuple):
    """What an endpoint really gives, for ``attach`` and ``doctor``."""

    engines: tuple[Key, ...]
    gives: frozenset[str]
    """METRICS names that the page's engines have now, the card's own left out."""
    lacks: frozenset[str]
    """Names that this kind of engine can give and this page does not."""
    flags: tuple[tuple[str, str], ...]


def parts_of(adapter: Adapter, page: Page, model: str = "") -> dict[Key, Part]:
    """The engines on a page, of one ``model`` where one is named; ScrapeFailed when it shows none."""
    if not page.starts(adapter.prefixes):
        raise ScrapeFailed(page.url, f"no metric of {adapter.kind} ({', '.join(adapter.prefixes)}...) on the page")
    parts = {key: part for key, part in adapter.engines(page).items() if model in ("", key.model)}
    if not parts:
        raise ScrapeFailed(page.url, f"no engine of model {model!r} on the page")
    return parts


def engines_of(adapter: Adapter, page: Page) -> dict[Key, Row]:
    """First rows of all engines on a page; ScrapeFailed when it shows none."""
    limits = DEFAULT_LIMITS[ServiceClass.CHAT]
    return {key: Track(limits).row(adapter.read(page, part), 0) for key, part in parts_of(adapter, page).items()}


def probe(adapter: Adapter, page: Page) -> Probe:
    """What this page's engines give. ScrapeFailed when it shows none."""
    rows = engines_of(adapter, page)
    has = {metric.name for k, metric in enumerate(METRICS) if all(not math.isnan(r.values[k]) for r in rows.values())}
    can = {name for name, presence in adapter.provides.items() if presence.value != "absent"}
    card = {"hbm_bytes", "card_kv_capacity_bytes", "q0_bytes", "card_free_bytes"}
    flags = tuple(flag for row in rows.values() for flag in row.flags)
    return Probe(tuple(rows), frozenset(has), frozenset(can - has - card), flags + page.refused)


class Endpoint:
    """The engines behind one url, for as long as telemetry lives. ``ask`` never raises for what they do."""

    def __init__(self, node: str, engine: Engine, socket: Path, clock: Clock, wall_s: Callable[[], float]) -> None:
        """``socket``: of the engine itself; it need not be there. ``wall_s``: Unix time, for pages whose samples
        carry time stamps."""
        self.engine = engine
        self._node = node
        self._adapter = ADAPTERS[engine.kind]
        self._url = metrics_url(engine.url)
        self._clock = clock
        self._wall_s = wall_s
        self._socket = socket
        self._client = NodeClient(f"{node}/{engine.gpu}/{engine.name}", socket)
        self._tracks: dict[Key, Track] = {}
        self._models: dict[str, ModelFacts] = {}
        self._restarts = self._asked = 0
        self._workers: dict[Key, tuple[str, int]] = {}
        self.device = CardMemory()
        """The card's memory, where the page tells it."""
        self.error: Exception | None = None
        """Why the last step's page could not be had."""

    def close(self) -> None:
        self._client.close()

    async def ask(
        self, session: aiohttp.ClientSession, boot_id: int, timeout_s: float, max_age_s: float, most_bytes: float
    ) -> list[Scrape]:
        """A scrape of each engine that was ever seen behind the url, within ``timeout_s``."""
        asked_ns = self._clock.now_ns()
        try:
            page, (own, own_age_s), elastic = await asyncio.gather(
                fetch_page(session, self._url, timeout_s, self._adapter.reads),
                self._own(boot_id, timeout_s),
                asyncio.to_thread(self._segment, most_bytes),
            )
            age_s = max(0.0, (self._clock.now_ns() - asked_ns) / 1e9)
            if page.oldest_s == page.oldest_s:
                age_s = max(age_s, self._wall_s() - page.oldest_s)
            if age_s > max_age_s:
                raise ScrapeFailed(self._url, f"numbers of {age_s:.1f} s ago, expected at most {max_age_s:g} s")
            rows = await self._rows(session, page, asked_ns, own, timeout_s, most_bytes)
        except ScrapeFailed as error:
            self.error = error
            return self._away(error.reason)
        self.error = None
        oldest = age_s if own is None else max(age_s, own_age_s)
        if elastic is not None and len(rows) == 1:
            rows = {key: _with(row, elastic, own) for key, row in rows.items()}
        out = [Scrape(*self._name(key), row, True, oldest) for key, row in rows.items()]
        missing = [
            scrape for scrape in self._away("no longer on the page") if scrape.worker not in {s.worker for s in out}
        ]
        return out + missing

    async def _rows(
        self,
        session: aiohttp.ClientSession,
        page: Page,
        asked_ns: int,
        own: NDArray[np.float64] | None,
        timeout_s: float,
        most_bytes: float,
    ) -> dict[Key, Row]:
        if self.engine.kind == "triton":
            self.device = triton.device(page)
        parts = parts_of(self._adapter, page, self.engine.model)
        rows: dict[Key, Row] = {}
        for key, part in parts.items():
            track = self._tracks.setdefault(key, Track(DEFAULT_LIMITS[self.engine.class_number]))
            facts = await self._facts(session, key.model, timeout_s)
            # The socket is of one engine: it says nothing of others behind the same page.
            mine = own if len(parts) == 1 else None
            said = self._adapter.read(page, part)
            row = track.row(said, asked_ns, facts, mine, most_bytes * MOST_OF_CARD)
            rows[key] = row._replace(flags=row.flags + list(page.refused))
        restarts = sum(track.restarts for track in self._tracks.values())
        if restarts != self._restarts:
            self._restarts = restarts
            self._models.clear()  # it may serve another model now
            self._asked = 0
        return rows

    async def _facts(self, session: aiohttp.ClientSession, model: str, timeout_s: float) -> ModelFacts:
        """Of the model's folder, asked once for each life of the engine; one that does not tell is soon left alone."""
        if model not in self._models and self._asked < MODEL_TRIES:
            facts = ModelFacts()
            self._asked += 1
            with contextlib.suppress(ScrapeFailed):
                body = await fetch_bytes(session, f"{base_url(self._url)}/v1/models", timeout_s)
                self._asked = 0
                folder = model_folder(body, model)
                if folder is not None:
                    facts = await asyncio.to_thread(read_model_facts, folder)
            if not self._asked:
                self._models[model] = facts
        facts = self._models.get(model, ModelFacts())
        if self.engine.weights_bytes > 0:
            facts = facts._replace(weights_bytes=self.engine.weights_bytes)
        return facts

    async def _own(self, boot_id: int, timeout_s: float) -> tuple[NDArray[np.float64] | None, float]:
        """The engine's own row over its socket and its age; None where nobody serves one.

        ScrapeFailed when somebody does and gives no sane answer in time: the page alone would show a stock server,
        with a quota that is not in force.
        """
        if not self._client.connected and not self._socket.exists():
            return None, 0.0
        try:
            async with asyncio.timeout(timeout_s):
                t_ns, reply = await self._client.sample(Sample(NEWEST, boot_id, timeout_s))
            table = fit_columns(unpack(reply.metrics, "<f8", len(reply.workers), "SampleReply"), len(METRICS))
        except (EngineUnreachable, EngineRefused, DecodeError, TimeoutError, ValueError) as error:
            if isinstance(error.__cause__, (ConnectionRefusedError, FileNotFoundError)):
                return None, 0.0  # left behind by an engine that was killed
            reason = str(error) or f"no answer within {timeout_s:g} s"
            raise ScrapeFailed(str(self._socket), reason) from error
        if len(table) != 1:
            raise ScrapeFailed(str(self._socket), f"{len(table)} rows, expected the engine's own")
        values, _ = sane(table[0])
        return values, max(0.0, (self._clock.now_ns() - t_ns) / 1e9)

    def _segment(self, card_bytes: float) -> KvcachedFacts | None:
        """What kvcached's segment says; None where none is configured."""
        named = self.engine.kvcached
        return read_facts(FOLDER / named, card_bytes=card_bytes) if named else None

    def _away(self, reason: str) -> list[Scrape]:
        """Empty rows of all engines known, at least of the configured one."""
        known = list(self._workers.values()) or [self._named(Key(self.engine.model, ""))]
        flags = [("", reason)]
        return [
            Scrape(worker, card, Row(empty_row(), list(flags), math.nan, math.nan), False, math.nan)
            for worker, card in known
        ]

    def _name(self, key: Key) -> tuple[str, int]:
        if key not in self._workers:
            self._workers[key] = self._named(key)
        return self._workers[key]

    def _named(self, key: Key) -> tuple[str, int]:
        """Worker id and card of an engine: rank 0 of the first model has the plain name, for as long as we live."""
        engine = self.engine
        digits = "".join(c for c in key.rank if c.isdigit())
        rank = int(digits) if digits else 0
        name = engine.name if key.rank in ("", "0") else f"{engine.name}-{key.rank}"
        worker = worker_id(self._node, engine.gpu + rank, name)
        if worker in {taken for taken, _ in self._workers.values()}:
            model = key.model.replace("/", "-") or "model"
            worker = worker_id(self._node, engine.gpu + rank, f"{name}-{model}")
        return worker, engine.gpu + rank


def _with(row: Row, elastic: KvcachedFacts, own: NDArray[np.float64] | None) -> Row:
    """The row with what kvcached's segment says; the engine's own word comes first, its page's last."""
    values, flags = row.values.copy(), [*row.flags, *elastic.flags]
    for name, value in elastic.columns.items():
        if not math.isnan(value) and (own is None or math.isnan(own[COLUMN[name]])):
            values[COLUMN[name]] = value
    if elastic.trouble:
        flags.append(("kv_mapped_bytes", elastic.trouble))
    return row._replace(values=values, flags=flags)
