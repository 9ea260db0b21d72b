"""The class for ``--scheduler-cls``: vLLM's own scheduler with Tidegate's quota, order and account around it.

Importing this module also gives EngineCore the method that the middleware calls. Nothing on disk is patched.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

import msgspec
import vllm
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore

from schemas.engine import Failure, ReplyBody, RequestBody
from services.actuator.engines.vllm import commands, settings, versions
from services.actuator.engines.vllm.steward import Steward

log = logging.getLogger("vllm.tidegate")
BODY: msgspec.msgpack.Decoder[RequestBody] = msgspec.msgpack.Decoder(RequestBody)
AGAIN = b""
"""Answer of a call that has more to do after the next step."""


class _Steered:
    """Before vLLM's scheduler in the order of its bases. Without ``TIDEGATE_SOCKET`` it does nothing. What cannot be
    steered is refused when the engine starts; from then on an error of Tidegate's ends Tidegate, not the engine."""

    tidegate: Steward | None = None
    tidegate_ended = ""
    """The error after which this engine goes on without Tidegate."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        told = settings.from_environ(os.environ)
        if told is not None:
            versions.check(vllm.__version__)
            versions.check_parallel(self.parallel_config)  # type: ignore[attr-defined]
            self.tidegate = Steward(self, told)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        self._tell(Steward.before_step)
        output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        self._tell(Steward.after_schedule, output)
        return output

    def add_request(self, request: Any) -> None:
        if request.request_id not in self.requests:  # type: ignore[attr-defined]
            self._tell(Steward.arrived, request)
        super().add_request(request)  # type: ignore[misc]

    def _handle_blocked_waiting_request(self, request: Any) -> bool:
        if self._tell(Steward.holds_out, request):
            return False
        # vLLM's part first: it lets in at once whom it made ready (a grammar that is compiled, KV that is loaded).
        if not super()._handle_blocked_waiting_request(request):  # type: ignore[misc]
            return False
        return self._tell(Steward.may_admit, request) is not False

    def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        if self.tidegate is not None:
            self.tidegate.preemptions += 1
        super()._preempt_request(request, *args, **kwargs)  # type: ignore[misc]

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        self._tell(Steward.ended, request)
        return super()._free_request(request, *args, **kwargs)  # type: ignore[misc]

    def _tell(self, what: Callable[..., Any], *args: Any) -> Any:
        """What the steward answers; None without one."""
        steward = self.tidegate
        if steward is None:
            return None
        try:
            return what(steward, *args)
        except Exception as error:
            log.exception("Tidegate ends in this engine; vLLM goes on without it")
            self.tidegate, self.tidegate_ended = None, f"{type(error).__name__}: {error}"[:200]
            try:
                steward.release()
            except Exception:
                log.exception("Tidegate could not undo what it had set")
            return None


class _StepByStep(_Steered, Scheduler):  # type: ignore[misc]
    """For engines that wait for a step before they schedule the next (CPUs)."""


class _Ahead(_Steered, AsyncScheduler):  # type: ignore[misc]
    """For engines that schedule ahead of the device."""


class TidegateScheduler:
    """Given to vLLM, which makes one: of the kind that its configuration asks for. With the other kind an engine that
    schedules ahead would lose that."""

    def __new__(cls, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        kind = _Ahead if vllm_config.scheduler_config.async_scheduling else _StepByStep
        return kind(vllm_config, *args, **kwargs)


def answer(core: Any, frame: bytes) -> bytes:
    """EngineCore's method ``tidegate``: a request body of the engine protocol, MessagePack, to its reply's; empty
    while it has more to do after the next step. vLLM tells the caller of an error, which does not reach its loop."""
    steward: Steward | None = getattr(core.scheduler, "tidegate", None)
    if steward is None:
        ended = getattr(core.scheduler, "tidegate_ended", "")
        if ended:
            return msgspec.msgpack.encode(Failure("failed", f"Tidegate ended in this engine: {ended}"))
        return msgspec.msgpack.encode(Failure("unsupported", "TIDEGATE_SOCKET is not set in the engine's process"))
    steward.core = core
    try:
        reply: ReplyBody | None = commands.answer(steward, BODY.decode(frame))
    except msgspec.DecodeError as error:
        reply = Failure("malformed", str(error))
    return AGAIN if reply is None else msgspec.msgpack.encode(reply)


EngineCore.tidegate = answer
