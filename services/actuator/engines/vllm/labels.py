"""What a request carries of Tidegate: class and session, through vLLM's session id. Pure.

The middleware reads the headers and writes the label, the scheduler reads it: vLLM hands a session id from its API
server to its engine unchanged, and nothing else that a client may set.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Final

import numpy as np
from numpy.typing import NDArray

from schemas.classes import ServiceClass

CLASS_HEADER: Final = b"x-tidegate-class"
SESSION_HEADER: Final = b"x-tidegate-session"
VLLM_HEADER: Final = b"x-session-id"
_PREFIX: Final = "tidegate"
PREFETCH: Final = "tidegate-prefetch-"
"""Request ids of loads that nobody asked for."""

Headers = list[tuple[bytes, bytes]]


def labelled(headers: Headers) -> Headers:
    """The headers with vLLM's session id telling class and session, where the client gave either of Tidegate's. A
    class that is not known counts as none: a typing mistake must not fail a request."""
    own: dict[bytes, bytes] = {}
    for key, value in headers:
        own.setdefault(key.lower(), value)
    class_name = own.get(CLASS_HEADER, b"").decode("latin-1").strip().upper()
    if class_name not in ServiceClass.__members__:
        class_name = ""
    session = own.get(SESSION_HEADER, b"").decode("latin-1").strip()
    if not class_name and not session:
        return headers
    session = session or own.get(VLLM_HEADER, b"").decode("latin-1")
    label = f"{_PREFIX}:{class_name.lower()}:{session}".encode("latin-1")
    return [*[(key, value) for key, value in headers if key.lower() != VLLM_HEADER], (VLLM_HEADER, label)]


def parse(session_id: str | None, default: ServiceClass) -> tuple[ServiceClass, str]:
    """(class, session name) of a request; the name is empty where the client gave none."""
    if not session_id:
        return default, ""
    parts = session_id.split(":", 2)
    if len(parts) != 3 or parts[0] != _PREFIX:
        return default, session_id
    name = parts[1].upper()
    return (ServiceClass[name] if name in ServiceClass.__members__ else default), parts[2]


def token_array(tokens: Sequence[int], count: int) -> NDArray[np.int32]:
    """The first ``count`` tokens, int32 [count]: a list would hold eight bytes each and an object. ValueError when
    there are fewer."""
    return np.fromiter(islice(tokens, count), np.int32, count)
