"""One typed MessagePack decoder per message, and matrices as the bytes inside them.

Per-worker numbers travel as one little-endian matrix per message instead of as lists: a step of 10,000
workers is then read with ``numpy.frombuffer``, which costs microseconds where lists cost seconds.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from schemas.identity import SCHEMA_VERSION

T = TypeVar("T")

MAX_MESSAGE_BYTES = 8 * 1024 * 1024


class DecodeError(ValueError):
    """Bytes that are not the message they should be; ``reason`` is a short label for a counter."""

    def __init__(self, message_type: str, reason: str, detail: str) -> None:
        super().__init__(f"{message_type}: {detail}")
        self.message_type = message_type
        self.reason = reason
        self.detail = detail


class Codec(Generic[T]):
    """Encoder and decoder of one message type.

    ``decode`` raises :class:`DecodeError` with reason ``too_large``, ``malformed`` or ``unknown_version``,
    and nothing else, whatever the bytes are.
    """

    __slots__ = ("_decoder", "_encoder", "_name", "_versioned")

    def __init__(self, message_type: type[T]) -> None:
        self._name = message_type.__name__
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(message_type)
        self._versioned = "schema_version" in getattr(message_type, "__struct_fields__", ())

    def encode(self, message: T) -> bytes:
        return self._encoder.encode(message)

    def decode(self, data: bytes | bytearray | memoryview) -> T:
        if len(data) > MAX_MESSAGE_BYTES:
            raise DecodeError(self._name, "too_large", f"{len(data)} bytes, at most {MAX_MESSAGE_BYTES} expected")
        try:
            message = self._decoder.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise DecodeError(self._name, "malformed", str(error)) from error
        if self._versioned:
            version: int = message.schema_version  # type: ignore[attr-defined]  # tested above
            if version != SCHEMA_VERSION:
                raise DecodeError(
                    self._name,
                    "unknown_version",
                    f"schema version {version}, this program reads {SCHEMA_VERSION}",
                )
        return message


def pack(matrix: NDArray[Any], dtype: str) -> bytes:
    """Bytes of a C-ordered array in the little-endian ``dtype`` (``<f8``, ``<f4``, ``u1`` ...)."""
    return np.ascontiguousarray(matrix, dtype=dtype).tobytes()


def unpack(data: bytes, dtype: str, rows: int, message_type: str) -> NDArray[Any]:
    """A read-only [rows, columns] view of packed bytes, the columns being whatever the sender had.

    DecodeError (``bad_shape``) when the bytes do not divide into ``rows`` equal rows.
    """
    item = np.dtype(dtype).itemsize
    if rows == 0:
        if data:
            raise DecodeError(message_type, "bad_shape", f"{len(data)} bytes for no workers")
        return np.empty((0, 0), dtype)
    if len(data) % (rows * item):
        raise DecodeError(
            message_type,
            "bad_shape",
            f"{len(data)} bytes do not divide into {rows} rows of {item}-byte numbers",
        )
    return np.frombuffer(data, dtype).reshape(rows, -1)


_INT64_LOW, _INT64_HIGH = -(2**63), 2**63 - 1
_ITEM_BYTES = {"d": 8, "q": 8, "f": 4}


@functools.lru_cache(maxsize=1024)
def _row_of(count: int, code: str) -> struct.Struct:
    return struct.Struct(f"<{count}{code}")


def pack_row(values: Sequence[float], code: str) -> bytes:
    """A few numbers as :func:`pack` writes them (``code``: ``d`` <f8, ``f`` <f4, ``q`` <i8), without an array:
    below some 50 numbers that is faster. An integer beyond 64 bits becomes the nearest that fits."""
    try:
        return _row_of(len(values), code).pack(*values)
    except struct.error:
        fitting = [min(max(int(value), _INT64_LOW), _INT64_HIGH) for value in values]
        return _row_of(len(values), code).pack(*fitting)


def unpack_row(data: bytes, code: str) -> tuple[Any, ...]:
    """What :func:`pack_row` packed; the caller has checked the length."""
    return _row_of(len(data) // _ITEM_BYTES[code], code).unpack(data)


def matrix_rows(data: bytes, dtype: str, rows: int, message_type: str) -> list[tuple[Any, ...]]:
    """The rows of packed bytes as tuples of Python numbers; DecodeError as :func:`unpack`."""
    return [tuple(row) for row in unpack(data, dtype, rows, message_type).tolist()]


def fit_columns(matrix: NDArray[Any], columns: int, fill: float = float("nan")) -> NDArray[Any]:
    """The first ``columns`` columns, missing ones filled: how a newer or older sender's table is read."""
    have = matrix.shape[1]
    if have == columns:
        return matrix
    if have > columns:
        return matrix[:, :columns]
    out = np.full((matrix.shape[0], columns), fill, matrix.dtype)
    out[:, :have] = matrix
    return out
