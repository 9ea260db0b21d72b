"""A line of the doctor's."""

from __future__ import annotations

from typing import Literal, NamedTuple


class Check(NamedTuple):
    """``mend``: how; empty where there is nothing to mend."""

    name: str
    state: Literal["OK", "WARN", "FAIL"]
    found: str
    mend: str = ""


def ok(name: str, found: str) -> Check:
    return Check(name, "OK", found)


def warn(name: str, found: str, mend: str) -> Check:
    return Check(name, "WARN", found, mend)


def fail(name: str, found: str, mend: str) -> Check:
    return Check(name, "FAIL", found, mend)
