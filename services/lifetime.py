"""A process's ties to the operating system: who its parent is, signals, and a last limit on its end."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
from collections.abc import Callable

from services.errors import UserError

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when the thread that started it ends.

    SIGKILL, because nothing that hangs may stay behind. ``parent_pid`` (0: unknown) is the process that
    asked for it: if that is no longer our parent, it died before this call, and so do we. Raises UserError
    where the kernel has no such thing.
    """
    if not sys.platform.startswith("linux"):
        raise UserError(f"die_with_parent: found {sys.platform}, expected Linux")
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise UserError(f"die_with_parent: found {os.strerror(ctypes.get_errno())}, expected prctl to allow it")
    if parent_pid and os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)


def on_stop_signals(loop: asyncio.AbstractEventLoop, stop: Callable[[str], None]) -> None:
    """Call ``stop`` with the signal's name at the first SIGTERM or SIGINT; a second one ends the process."""
    seen: list[signal.Signals] = []

    def handle(number: signal.Signals) -> None:
        if seen:
            os._exit(128 + number)
        seen.append(number)
        stop(number.name)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, handle, number)


def limit_the_end(limit_s: float) -> None:
    """Be killed by SIGALRM in ``limit_s`` unless gone by then: holds even if the event loop or native code
    hangs. 0 takes the limit back."""
    signal.setitimer(signal.ITIMER_REAL, limit_s)
