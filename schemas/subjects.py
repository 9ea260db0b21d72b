"""Subjects, streams and buckets: built and parsed here and nowhere else.

A subject carries the node as one token of ``[A-Za-z0-9_-]``. Host names have dots, and may have any
other byte: such characters travel as ``_xx`` (two lower-case hex digits a byte), and ``_`` itself as ``_5f``,
so that two hosts never share a subject and a token can be read back.
"""

from __future__ import annotations

import re
from typing import Final, Literal

from schemas.identity import NodeId

Family = Literal["telemetry", "state", "action", "outcome", "audit", "transition", "scaleout"]
FAMILIES: Final[tuple[Family, ...]] = (
    "telemetry", "state", "action", "outcome", "audit", "transition", "scaleout",
)  # fmt: skip

PREFIX: Final = "tg.v1"

STREAM_TRANSITIONS: Final = "TG_TRANSITIONS"
STREAM_AUDIT: Final = "TG_AUDIT"
BUCKET_CONFIG: Final = "tg_config"
BUCKET_POLICY: Final = "tg_policy"
BUCKET_WEIGHTS: Final = "tg_weights"

STREAM_SUBJECTS: Final[dict[str, tuple[str, ...]]] = {
    STREAM_TRANSITIONS: (f"{PREFIX}.transition.*",),
    STREAM_AUDIT: (f"{PREFIX}.audit.*", f"{PREFIX}.scaleout.*"),
}

_PLAIN = re.compile(rb"[A-Za-z0-9-]")
_TOKEN = re.compile(r"(?:[A-Za-z0-9-]|_[0-9a-f]{2})+")
_ESCAPE = re.compile(r"_([0-9a-f]{2})")


def token(name: str) -> str:
    """One subject token for a node or deployment name; ValueError when the name is empty."""
    if not name:
        raise ValueError("a node or deployment name is empty: expected at least one character")
    raw = name.encode()
    return "".join(chr(byte) if _PLAIN.match(raw, i) else f"_{byte:02x}" for i, byte in enumerate(raw))


def name_of(tok: str) -> str:
    """The name that :func:`token` escaped; ValueError for a token it cannot have made."""
    if not _TOKEN.fullmatch(tok):
        raise ValueError(f"subject token {tok!r}: expected [A-Za-z0-9-] and _xx escapes")
    raw = bytearray()
    i = 0
    while i < len(tok):
        match = _ESCAPE.match(tok, i)
        if match:
            raw.append(int(match[1], 16))
            i += 3
        else:
            raw.append(ord(tok[i]))
            i += 1
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"subject token {tok!r}: its escapes are not UTF-8") from error


def subject(family: Family, name: str) -> str:
    """``tg.v1.<family>.<token>`` for a node (or, for ``scaleout``, a deployment)."""
    return f"{PREFIX}.{family}.{token(name)}"


def wildcard(family: Family) -> str:
    """The subject that matches a family's messages of every node."""
    return f"{PREFIX}.{family}.*"


def parse(text: str) -> tuple[Family, NodeId]:
    """Family and node of a subject; ValueError says what was expected."""
    head, _, rest = text.partition(f"{PREFIX}.")
    family, _, tok = rest.partition(".")
    if head or family not in FAMILIES or not tok or "." in tok:
        raise ValueError(f"subject {text!r}: expected {PREFIX}.<{'|'.join(FAMILIES)}>.<node>")
    return family, NodeId(name_of(tok))
