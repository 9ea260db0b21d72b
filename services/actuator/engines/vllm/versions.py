"""Which vLLM this adapter knows. It reaches into parts that vLLM does not call public, so it refuses the others."""

from __future__ import annotations

import re
from typing import Final

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
