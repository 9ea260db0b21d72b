"""A run: sessions ask, records come out, a report at the end.

A request is due when its session's start or think time says; if the client cannot send it then (the bound on
concurrency, a busy machine), the wait is part of its latency, so that a slow server cannot hide behind a client that
waits for it (coordinated omission).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import Counter
from collections.abc import Callable
from typing import Final

import aiohttp

from loadgen.openai.asking import body_of, headers_of, path_of
from loadgen.openai.client import Outcome, ask, http_session
from loadgen.openai.models import served
from loadgen.openai.options import Options
from loadgen.openai.plan import TOO_LONG, Plan, Session, Turn, open_plan, slot_sessions, trace_plan
from loadgen.openai.prompts import Conversation, Prompt, TokenConversation, WordConversation
from loadgen.openai.records import Failure, RequestRecord
from loadgen.openai.report import Report, Tally, ttft_limit_s
from loadgen.traces import read
from loadgen.workload.table import Workload
from schemas.classes import DEFAULT_LIMITS

FAILURE_PAUSE_S: Final = 1.0
"""Closed loop: after a failure a slot waits so long before its next session, or a server that is away would be asked
thousands of times a second."""
AFTER_FAILURE: Final = "turns of sessions that had failed"
AFTER_END: Final = "turns due after the end"
STOPPED: Final = "turns left when the run was stopped"


class Progress:
    """What a run is doing, for a screen."""

    def __init__(self, tally: Tally) -> None:
        self.tally = tally
        self.in_flight = 0
        self.waiting = 0
        self.elapsed_s = 0.0


async def drive(
    options: Options,
    *,
    sink: Callable[[RequestRecord], None] | None = None,
    watch: Callable[[Progress], None] | None = None,
    stop: asyncio.Event | None = None,
) -> Report:
    """Load the server as ``options`` say until they are fulfilled, or ``stop`` is set.

    ``sink`` gets every record as its request ends; ``watch`` is called four times a second. Setting ``stop`` cancels
    what is under way (recorded as ``interrupted``). UserError for options that cannot be meant, EngineUnreachable
    when the server does not answer at the start; what fails later is counted, never raised.
    """
    options.check()
    workload = read(options.trace, options.trace_format, seed=options.seed) if options.trace is not None else None
    async with http_session() as http:
        model = await served(http, options.base, options.model, options.api_key)
        limit = options.context_limit or model.max_model_len or 0
        run = _Run(options, http, model.id, limit, sink or (lambda record: None))
        return await run.all(workload, watch, stop or asyncio.Event())


class _Run:
    def __init__(
        self,
        options: Options,
        http: aiohttp.ClientSession,
        model: str,
        limit: int,
        sink: Callable[[RequestRecord], None],
    ) -> None:
        self.options = options
        self.http = http
        self.model = model
        self.context_limit = limit
        self.sink = sink
        self.tally = Tally()
        self.progress = Progress(self.tally)
        self.url = options.base + path_of(options)
        self.held_back = 0
        self.not_sent: Counter[str] = Counter()
        self.left_out: Counter[str] = Counter()
        self.is_stopped = False
        self._clock = asyncio.get_running_loop().time
        self._places = asyncio.Semaphore(options.max_concurrency)
        self._start = 0.0
        self._end = math.inf

    async def all(
        self, workload: Workload | None, watch: Callable[[Progress], None] | None, stop: asyncio.Event
    ) -> Report:
        plan = self._plan(workload)
        self._start = self._clock()
        if self.options.duration_s:
            self._end = self._start + self.options.duration_s
        started_unix_s = time.time()
        work = asyncio.ensure_future(self._closed() if plan is None else self._open(plan))
        stopping = asyncio.ensure_future(self._stop(stop, work))
        watching = asyncio.ensure_future(self._watch(watch)) if watch is not None else None
        try:
            await asyncio.wait([work])
        finally:
            tasks = [task for task in (work, stopping, watching) if task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        if not work.cancelled():
            _raise_first(work)
        if watching is not None and not watching.cancelled():
            watching.result()
        return self.tally.report(
            url=self.options.base, model=self.model, loop=self.options.loop, started_unix_s=started_unix_s,
            held_back=self.held_back, not_sent=self.not_sent, left_out=self.left_out, notes=self._notes(plan),
        )  # fmt: skip

    def _plan(self, workload: Workload | None) -> Plan | None:
        if self.options.sessions:
            return None
        limit = self.context_limit
        plan = open_plan(self.options, limit) if workload is None else trace_plan(self.options, workload, limit)
        self.left_out.update(plan.left_out)
        return plan

    async def _stop(self, stop: asyncio.Event, work: asyncio.Future[None]) -> None:
        latest = self._end + self.options.drain_s
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(latest if math.isfinite(latest) else None):
                await stop.wait()
        self.is_stopped = True
        work.cancel()

    async def _watch(self, watch: Callable[[Progress], None]) -> None:
        while True:
            self.progress.elapsed_s = self._clock() - self._start
            watch(self.progress)
            await asyncio.sleep(0.25)

    async def _closed(self) -> None:
        async with asyncio.TaskGroup() as slots:
            for slot in range(self.options.sessions):
                slots.create_task(self._slot(slot))

    async def _slot(self, slot: int) -> None:
        due = self._start
        for session in slot_sessions(self.options, slot, self.context_limit):
            if session.left_out:
                self.left_out[TOO_LONG] += session.left_out
            due = await self._session(session, due)
            if due >= self._end:
                return

    async def _open(self, plan: Plan) -> None:
        async with asyncio.TaskGroup() as sessions:
            for at, session in enumerate(plan.sessions):
                due = self._start + session.start_s
                try:
                    await self._until(due)
                except asyncio.CancelledError:
                    self.not_sent[STOPPED] += sum(len(one.turns) for one in plan.sessions[at:])
                    raise
                sessions.create_task(self._session(session, due))

    async def _session(self, session: Session, due: float) -> float:
        """Ask its turns one after the other; when its place is free for another (inf: thinking until after the end)."""
        conversation = self._conversation(session)
        for index, turn in enumerate(session.turns):
            left = len(session.turns) - index
            if due >= self._end:
                self.not_sent[AFTER_END] += left
                return math.inf
            try:
                await self._until(due)
                record = await self._turn(session, index, turn, conversation, due)
            except asyncio.CancelledError:
                self.not_sent[STOPPED] += left - 1
                raise
            if record.failure is not Failure.NONE:
                self.not_sent[AFTER_FAILURE] += left - 1
                return self._clock() + FAILURE_PAUSE_S
            due = self._start + record.end_s + turn.think_s
        return self._clock()

    async def _turn(
        self, session: Session, index: int, turn: Turn, conversation: Conversation, due: float
    ) -> RequestRecord:
        prompt = conversation.ask(turn)
        self.progress.waiting += 1
        try:
            self.held_back += self._places.locked()
            await self._places.acquire()
        finally:
            self.progress.waiting -= 1
        options, records = self.options, []
        patience_s = math.inf
        if options.is_giving_up:
            limits = DEFAULT_LIMITS[session.service_class]
            limit_s = ttft_limit_s(limits, prompt.tokens, prompt.kept_tokens)
            patience_s = max(due + limits.timeout_factor * limit_s - self._clock(), 0.0)

        def ended(outcome: Outcome) -> None:
            records.append(self._record(session, index, turn, prompt, due, outcome))
            self.tally.add(records[0])
            self.sink(records[0])

        self.progress.in_flight += 1
        try:
            await ask(
                self.http, self.url, headers_of(options, session),
                body_of(options, self.model, session, turn, index, prompt),
                timeout_s=options.timeout_s, patience_s=patience_s, ended=ended,
            )  # fmt: skip
        finally:
            self.progress.in_flight -= 1
            self._places.release()
        record: RequestRecord = records[0]
        conversation.answered(turn, record.token_ids, record.text, record.output_tokens)
        return record

    def _record(
        self, session: Session, index: int, turn: Turn, prompt: Prompt, due: float, outcome: Outcome
    ) -> RequestRecord:
        answer = outcome.answer
        told = prompt.tokens if answer.prompt_tokens is None else answer.prompt_tokens
        return RequestRecord(
            session=session.number, turn=index, service_class=session.service_class.name.lower(),
            intended_s=due - self._start, sent_s=outcome.sent - self._start, end_s=outcome.end - self._start,
            ttft_s=outcome.first - due, tpot_s=outcome.tpot_s, gaps_s=outcome.gaps_s,
            prompt_tokens=told, kept_tokens=min(prompt.kept_tokens, told), cached_tokens=answer.cached_tokens,
            prompt_digest=prompt.digest, max_tokens=turn.max_tokens, output_tokens=answer.output_tokens,
            counted_by=answer.counted_by, is_contradicted=answer.is_contradicted, finish=answer.finish,
            status=outcome.status, failure=outcome.failure, detail=outcome.detail,
            token_ids=answer.token_ids, text=answer.text,
        )  # fmt: skip

    def _conversation(self, session: Session) -> Conversation:
        options = self.options
        shared, is_synthetic = options.shared_prefix_tokens, options.history == "synthetic"
        if options.is_chat:
            return WordConversation(options.seed, session.number, shared, is_synthetic)
        return TokenConversation(options.seed, session.number, options.token_ids, shared, is_synthetic)

    async def _until(self, due: float) -> None:
        delay_s = due - self._clock()
        if delay_s > 0:
            await asyncio.sleep(delay_s)

    def _notes(self, plan: Plan | None) -> tuple[str, ...]:
        notes = list(plan.notes) if plan is not None else []
        if self.options.loop == "trace" and not self.options.is_ignoring_eos:
            notes.append("answers may be shorter than the trace's (--ignore-eos makes them as long)")
        if not self.context_limit:
            notes.append("the server names no context length: --context-limit leaves out what is too long for it")
        if self.is_stopped:
            notes.append("stopped with requests under way")
        return tuple(notes)


def _raise_first(work: asyncio.Future[None]) -> None:
    """What a session raised, if one did: a full disk, options that nothing fits; out of its group, to be told."""
    problem: BaseException | None = work.exception()
    while isinstance(problem, BaseExceptionGroup):
        problem = problem.exceptions[0]
    if problem is not None:
        raise problem
