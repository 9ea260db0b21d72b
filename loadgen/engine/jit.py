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

import schemas
from services.actuator import fast

_Function = TypeVar("_Function", bound=Callable[..., Any])
_FOLDER: Final = Path(__file__).parent
_njit: Any = numba.njit  # its stubs lack the options below
_NO_KERNELS: Final = ("build.py", "calibration.py", "fleet.py", "report.py", "specs.py", "views.py", "warm.py")
"""Sources that no kernel is compiled from."""


def fingerprint() -> str:
    """Sixteen hex digits that change with numba's version, the engine's sources and the tables they compile in."""
    digest = hashlib.sha256(numba.__version__.encode())
    tables, rules = Path(schemas.__file__).parent, Path(fast.__file__).parent
    kernels = [source for source in sorted(_FOLDER.glob("*.py")) if source.name not in _NO_KERNELS]
    for source in (*kernels, *sorted(rules.glob("*.py")), tables / "metrics.py", tables / "actions.py"):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def _cache_folder() -> Path:
    """Under NUMBA_CACHE_DIR if that is set, else beside the sources where they can be written to, else in the
    user's cache folder."""
    named = os.environ.get("NUMBA_CACHE_DIR")
    beside = _FOLDER / "__pycache__"
    if named:
        base = Path(named)
    elif os.access(beside if beside.is_dir() else _FOLDER, os.W_OK):
        base = beside
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "tidegate"
    return base / f"kernels-{fingerprint()}"


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
