"""Long computations beside the event loop, given up at once when nobody waits for them any more."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


async def in_background(work: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """The result of ``work``, or what it raised, from a thread of its own.

    Unlike ``asyncio.to_thread`` the thread is a daemon: whoever is cancelled here (Ctrl-C) can end the process
    without waiting for a computation of many seconds, whose result nobody wants.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[R] = loop.create_future()

    def finish(result: R | None, error: BaseException | None) -> None:
        if done.cancelled():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]  # without an error it is an R

    def run() -> None:
        result: R | None = None
        failed: BaseException | None = None
        try:
            result = work(*args, **kwargs)
        except BaseException as error:  # noqa: BLE001  # raised again where it is awaited
            failed = error
        with contextlib.suppress(RuntimeError):  # the loop is gone, and so is who waited
            loop.call_soon_threadsafe(finish, result, failed)

    threading.Thread(target=run, name=f"background {getattr(work, '__name__', '')}", daemon=True).start()
    return await done
