"""Functions compiled by numba for types that are fixed where they are written: nothing is compiled in a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

_Function = TypeVar("_Function", bound=Callable[..., Any])


def compiled(signature: str) -> Callable[[_Function], _Function]:
    """Compile for ``signature`` (numba's notation) without the interpreter lock; the code is kept on disk where there
    is a place for it."""

    def decorate(function: _Function) -> _Function:
        try:
            made = numba.njit(signature, cache=True, nogil=True, error_model="numpy")(function)
        except RuntimeError:
            # No folder to keep the code in (a read-only image without a home): compiled at every start.
            made = numba.njit(signature, nogil=True, error_model="numpy")(function)
        return cast(_Function, made)

    return decorate
