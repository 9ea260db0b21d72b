"""The CPU's inner loops on blocks: many copies in one call, two ways, and a checksum that a GPU computes alike.

Compiled by numba, without the interpreter lock, so that transfers in two directions and the engine's own work run
side by side. Types are fixed here: nothing is compiled in the middle of a run.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]  # numba's own, without stubs
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from services.compiled import compiled

U1 = NDArray[np.uint8]
U8 = NDArray[np.uint64]
I8 = NDArray[np.int64]

STREAM_BYTES: Final = 64
"""What the streaming copy moves at a time: addresses and block size must be multiples."""
_HALF: Final = np.uint64(STREAM_BYTES // 2)
_WHOLE: Final = np.uint64(STREAM_BYTES)
# kernels.cu has the same three constants (odd, from the finaliser of MurmurHash3 and the golden ratio).
_PLACE: Final = np.uint64(0x9E3779B97F4A7C15)
_MIX: Final = np.uint64(0xFF51AFD7ED558CCD)
_SHIFT: Final = np.uint64(32)
_ONE: Final = np.uint64(1)

# The C library's own copy is several times faster on 4 KiB than a loop that numba compiles for a slice. The name
# is looked up by the linker, so the compiled code can be kept on disk.
_memcpy: Any = types.ExternalFunction("memcpy", types.uintp(types.uintp, types.uintp, types.uintp))


@compiled("void(u8, u8, i8[::1], i8[::1], i8[::1], i8)")
def copy_runs(target: int, source: int, into: I8, from_: I8, lengths: I8, block_bytes: int) -> None:
    """Copy runs of neighbouring blocks between two arenas that start at the addresses ``target`` and ``source``.

    ``into``, ``from_``: int64 [runs], the first block of each run; ``lengths``: its blocks. The runs must lie
    inside the arenas and must not overlap: the caller has checked.
    """
    for k in range(len(into)):
        _memcpy(
            np.uint64(target + np.uint64(into[k] * block_bytes)),
            np.uint64(source + np.uint64(from_[k] * block_bytes)),
            np.uint64(lengths[k] * block_bytes),
        )


def _stream_32(typing: Any, target: Any, source: Any) -> Any:
    """32 bytes from one address to another by a store that goes past the caches."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.VectorType(ir.IntType(64), 4)
        value = builder.load(builder.inttoptr(arguments[1], kind.as_pointer()), align=32)
        store = builder.store(value, builder.inttoptr(arguments[0], kind.as_pointer()), align=32)
        store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))
        return context.get_dummy_value()

    return types.void(types.uint64, types.uint64), emit


def _full_fence(typing: Any) -> Any:
    """Everything written so far is seen by others before anything that follows."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), emit


_stream: Any = intrinsic(_stream_32)
_fence: Any = intrinsic(_full_fence)


@compiled("void(u8, u8, i8[::1], i8[::1], i8[::1], i8)")
def stream_runs(target: int, source: int, into: I8, from_: I8, lengths: I8, block_bytes: int) -> None:
    """:func:`copy_runs` with stores past the caches: what is written is not read first, which spares a third of the
    memory traffic, and the engine's working set stays in the caches. The C library does so only for copies that are
    larger than a cache. Both addresses and ``block_bytes`` must be multiples of STREAM_BYTES.
    """
    for k in range(len(into)):
        to = np.uint64(target + np.uint64(into[k] * block_bytes))
        of = np.uint64(source + np.uint64(from_[k] * block_bytes))
        end = np.uint64(of + np.uint64(lengths[k] * block_bytes))
        while of < end:
            _stream(to, of)
            _stream(to + _HALF, of + _HALF)
            to += _WHOLE
            of += _WHOLE
    _fence()  # such stores are not ordered by themselves: the commit that follows must not overtake them


@compiled("u8[::1](u1[:,::1], i8[::1])")
def checksums(view: U1, blocks: I8) -> U8:
    """Checksum of each of ``blocks`` (int64 [n]) of ``view`` (uint8 [blocks, block_bytes]): uint64 [n].

    The sum over the block's little-endian 8-byte words (the last one filled up with zeros) of a mix of word and
    place. A sum, so that threads may add their shares in any order; mixed, so that words that change places or
    change together do not cancel out. It finds accidents, not forgeries.
    """
    sums = np.zeros(len(blocks), np.uint64)
    size = view.shape[1]
    whole = size // 8
    for k in range(len(blocks)):
        row = view[blocks[k]]
        words = row[: whole * 8].view(np.uint64)
        total = np.uint64(0)
        place = np.uint64(0)
        for i in range(whole):
            place += _PLACE
            mixed = (words[i] ^ place) * _MIX
            total += (mixed ^ (mixed >> _SHIFT)) * _MIX
        if whole * 8 < size:
            rest = np.uint64(0)
            for i in range(size - whole * 8):
                rest |= np.uint64(row[whole * 8 + i]) << np.uint64(8 * i)
            mixed = (rest ^ (place + _PLACE)) * _MIX
            total += (mixed ^ (mixed >> _SHIFT)) * _MIX
        sums[k] = total
    return sums


def runs(into: I8, from_: I8) -> tuple[I8, I8, I8]:
    """Pairs of blocks as runs in which both sides go up by one: int64 [runs] each of into, from and length.

    Ordered by the place written to, which the memory system likes better than random order.
    """
    order = np.argsort(into, kind="stable")
    into = np.ascontiguousarray(into[order], np.int64)
    from_ = np.ascontiguousarray(from_[order], np.int64)
    if not len(into):
        return into, from_, np.empty(0, np.int64)
    starts = np.flatnonzero(np.r_[True, (np.diff(into) != 1) | (np.diff(from_) != 1)])
    lengths = np.diff(np.r_[starts, len(into)])
    return into[starts], from_[starts], lengths.astype(np.int64)
