"""Which vLLM this adapter knows. It reaches into parts that vLLM does not call public, so it refuses the others."""

from __future__ import annotations

import re
from typing import Any, Final

from services.errors import UserError

KNOWN: Final = ("0.32",)
"""Minor releases whose scheduler, block pool and offloading connector were read and tried."""


def known(version: str) -> bool:
    """Whether ``version`` (``0.32.0``, ``0.32.1.dev3+cpu``) belongs to a known minor release."""
    found = re.match(r"(\d+)\.(\d+)(?!\d)", version)
    return found is not None and f"{found[1]}.{found[2]}" in KNOWN


def check(version: str) -> None:
    """UserError, naming what is known, for any other."""
    if not known(version):
        raise UserError(f"vLLM {version or 'of unknown version'}: expected {', '.join(f'{one}.x' for one in KNOWN)}")


def check_parallel(config: Any) -> None:
    """UserError for data parallelism, ``config`` being vLLM's ParallelConfig: all ranks would serve one socket, each
    command would reach every rank and be answered by one, and a load that one rank begins alone hangs the others."""
    size, index = int(config.data_parallel_size), int(getattr(config, "data_parallel_index", 0))
    if size > 1 or index > 0:  # ranks of a dense model are told a size of 1, but not an index of 0
        raise UserError(f"data parallelism over {max(size, index + 1)} ranks: expected one engine, one server a rank")
