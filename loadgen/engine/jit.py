"""The decorators of the engine's kernels, and where their machine code is kept.

Numba's file cache looks only at the file of the function it caches, not at the functions that one calls: after
an edit in one module the others would run old code. So the cache lies in a folder named after a fingerprint of
all of the engine's sources.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import numba

_Function = TypeVar("_Function", bound=Callable[..., Any])
_FOLDER: Final = Path(__file__).parent
_njit: Any = numba.njit  # its stubs lack the options below


def fingerprint() -> str:
    """Sixteen hex digits that change with any source of the engine and with numba's version."""
    digest = hashlib.sha256(numba.__version__.encode())
    for source in sorted(_FOLDER.glob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def _cache_folder() -> Path:
    """Beside the sources where they can be written to, else in the user's cache folder."""
    beside = _FOLDER / "__pycache__"
    if os.access(beside if beside.is_dir() else _FOLDER, os.W_OK):
        return beside / f"kernels-{fingerprint()}"
    base = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return base / "tidegate" / f"kernels-{fingerprint()}"


if not os.environ.get("NUMBA_CACHE_DIR"):
    _config: Any = numba.config
    _config.CACHE_DIR = str(_cache_folder())


# No reference counts: kernels allocate nothing, and counting costs both compile and run time.
_COMMON: Final[dict[str, Any]] = {
    "nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True, "_nrt": False,
}  # fmt: skip


def kernel(function: _Function) -> _Function:
    """A function for other kernels: compiled with the entry that calls it, not callable from Python."""
    return cast(_Function, _njit(no_cpython_wrapper=True, **_COMMON)(function))


def entry(function: _Function) -> _Function:
    """What Python calls: compiled on first call, its code kept on disk, without the interpreter lock."""
    return cast(_Function, _njit(cache=True, **_COMMON)(function))
