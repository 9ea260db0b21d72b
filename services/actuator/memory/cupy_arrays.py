"""CuPy: the one module that imports it. Arenas on a GPU, pinned host arenas, and the device that movers drive.

Import it only where a GPU is used. Written against CuPy 14 (checked with 14.2) and CUDA 12.8 to 13. An arena is
one of three: memory of this process, a DLPack view of the engine's own tensor in the engine's process (the
default), or an opened IPC handle. IPC handles exist for plain allocations only, not for memory that was mapped with
CUDA's virtual-memory calls, and make sense only under MPS, where two processes run on the card at the same time.
"""

from __future__ import annotations

import warnings
from importlib.resources import files
from typing import Any, Final

import cupy
import numpy as np
from cupy.cuda import runtime
from numpy.typing import NDArray

from services.actuator.memory.arrays import NumpyArena, PrivateArena, SharedArena, host_geometry
from services.actuator.memory.batch_copy import Batch, entry_point
from services.actuator.memory.device import THREADS
from services.actuator.memory.errors import BadGeometry, SegmentGone
from services.actuator.memory.geometry import Geometry
from services.actuator.memory.pinned import Pinned, allowance, probe, read_host_memory

U1 = NDArray[np.uint8]
U8 = NDArray[np.uint64]
I8 = NDArray[np.int64]

LOWEST_PRIORITY: Final = 0
"""CUDA's least urgent level, and also its default: an engine that wants to come first runs its decode at -1."""
_PORTABLE_AND_MAPPED: Final = 1 | 2
"""cudaHostAlloc and cudaHostRegister: pinned for every context, and reachable by kernels at the same address."""
FAILURES: Final = (runtime.CUDARuntimeError, cupy.cuda.memory.OutOfMemoryError)


def device_problem() -> str | None:
    """Why no GPU can be used; None when one can."""
    try:
        return None if runtime.getDeviceCount() > 0 else "no GPU"
    except runtime.CUDARuntimeError as error:
        return str(error)


class CupyDevice:
    """One GPU. Each method makes it the current one of its thread: lanes run in threads of their own."""

    def __init__(self, number: int = 0) -> None:
        self.number = number
        self._module: Any = None
        self._functions: dict[str, Any] = {}
        self._batch: Batch | None = entry_point(int(runtime.driverGetVersion()))

    def _here(self) -> Any:
        # A new object each time: what one remembers of the device before it may not be shared between threads.
        return cupy.cuda.Device(self.number)

    @property
    def name(self) -> str:
        return str(runtime.getDeviceProperties(self.number)["name"].decode())

    @property
    def processors(self) -> int:
        return int(self._here().attributes["MultiProcessorCount"])

    @property
    def has_batch(self) -> bool:
        return self._batch is not None

    def load(self) -> None:
        """Compile kernels.cu for this card (NVRTC; CuPy keeps the result on disk) and look up its kernels."""
        source = files("services.actuator.memory").joinpath("kernels.cu").read_text()
        with self._here():
            self._module = cupy.RawModule(code=source, options=("-std=c++17",))
            self._module.compile()
            for kernel in (
                "move_blocks", "copy_blocks", "gather_blocks", "scatter_blocks", "checksum_blocks", "read_blocks",
            ):  # fmt: skip
                self._functions[kernel] = self._module.get_function(kernel)

    def new_stream(self, *, urgent: bool = False) -> Any:
        """Of the lowest priority, or of the next higher one where ``urgent`` (the benchmark's decode step)."""
        with self._here():
            return cupy.cuda.Stream(non_blocking=True, priority=LOWEST_PRIORITY - urgent)

    def reserve(self, size: int) -> _DeviceBuffer:
        with self._here():
            try:
                return _DeviceBuffer(cupy.cuda.Memory(size), size)
            except FAILURES as error:
                raise MemoryError(f"{size} bytes of device memory for staging: {error}") from error

    def upload(self, values: I8, stream: Any) -> _DeviceBuffer:
        packed = np.ascontiguousarray(values, np.int64)
        with self._here(), stream:
            # From the pool and freed on this stream, so it is not used again before the kernel has read it. The
            # source is pageable: the call returns when CUDA has taken a copy of it.
            memory = cupy.cuda.alloc(max(packed.nbytes, 8))
            runtime.memcpyAsync(memory.ptr, packed.ctypes.data, packed.nbytes, runtime.memcpyHostToDevice, stream.ptr)
        return _DeviceBuffer(memory, packed.nbytes)

    def launch(self, kernel: str, thread_blocks: int, arguments: tuple[int, ...], stream: Any) -> None:
        if self._module is None:
            self.load()
        with self._here(), stream:
            packed = tuple(np.uint64(value) for value in arguments)
            self._functions[kernel]((thread_blocks,), (THREADS,), packed)

    def copy(self, target: int, source: int, size: int, stream: Any) -> None:
        with self._here():
            runtime.memcpyAsync(target, source, size, runtime.memcpyDefault, stream.ptr)

    def copy_batch(self, targets: U8, sources: U8, sizes: U8, stream: Any) -> None:
        if self._batch is None:
            raise NotImplementedError("cuMemcpyBatchAsync needs a driver of CUDA 12.8 or newer")
        with self._here():
            self._batch(targets, sources, sizes, int(stream.ptr))

    def synchronize(self, stream: Any) -> None:
        with self._here():
            stream.synchronize()

    def free_bytes(self) -> int:
        """Free memory of the card, as the driver sees it."""
        with self._here():
            return int(runtime.memGetInfo()[0])


class _DeviceBuffer:
    """Device memory that is freed with this object."""

    def __init__(self, memory: Any, size: int) -> None:
        self._memory = memory
        self.size = size

    @property
    def address(self) -> int:
        return int(self._memory.ptr)


class CupyArena:
    """Blocks in device memory; ``view`` is a cupy uint8 [blocks, block_bytes], C-ordered."""

    on_device = True

    def __init__(self, device: CupyDevice, geometry: Geometry, view: Any) -> None:
        if view.dtype != cupy.uint8 or view.shape != (geometry.blocks, geometry.block_bytes):
            raise BadGeometry(
                "bytes of the view", int(view.nbytes), f"uint8 {geometry.blocks} x {geometry.block_bytes}"
            )
        if not view.flags.c_contiguous:
            raise BadGeometry("contiguous bytes of the view", 0, str(geometry.arena_bytes))
        self.geometry = geometry
        self._device = device
        self._view: Any = view

    @classmethod
    def private(cls, device: CupyDevice, geometry: Geometry) -> CupyArena:
        """Zeroed memory of this process, straight from cudaMalloc: CuPy's pool would keep it, round it up, and give
        a piece of something larger that an IPC handle would then mean. MemoryError when the card has no room."""
        with cupy.cuda.Device(device.number):
            try:
                memory = cupy.cuda.Memory(geometry.arena_bytes)
            except FAILURES as error:
                raise MemoryError(f"{geometry.arena_bytes} bytes of device memory: {error}") from error
            pointer = cupy.cuda.MemoryPointer(memory, 0)
            view = cupy.ndarray((geometry.blocks, geometry.block_bytes), cupy.uint8, pointer)
            view.fill(0)
            cupy.cuda.get_current_stream().synchronize()
        return cls(device, geometry, view)

    @classmethod
    def over(cls, device: CupyDevice, geometry: Geometry, tensor: Any) -> CupyArena:
        """A view, without a copy, of the engine's KV tensor (anything with ``__dlpack__``) whose first axis counts
        blocks. Of a bfloat16 or float8 tensor give its uint8 view, because CuPy lacks those types.

        BadGeometry when its bytes are not those blocks in a row or it lies elsewhere."""
        with cupy.cuda.Device(device.number):
            array = cupy.from_dlpack(tensor)
            if array.device.id != device.number:
                raise BadGeometry("device of the tensor", int(array.device.id), str(device.number))
            if (
                array.nbytes != geometry.arena_bytes
                or array.shape[0] != geometry.blocks
                or not array.flags.c_contiguous
            ):
                raise BadGeometry("bytes of the tensor", int(array.nbytes), f"{geometry.blocks} blocks in a row")
            view = array.reshape(-1).view(cupy.uint8).reshape(geometry.blocks, geometry.block_bytes)
        return cls(device, geometry, view)

    @classmethod
    def opened(cls, device: CupyDevice, geometry: Geometry, handle: bytes, offset: int = 0) -> CupyArena:
        """Another process's plain allocation, by its IPC handle. SegmentGone when that process is dead."""
        with cupy.cuda.Device(device.number):
            try:
                base = int(runtime.ipcOpenMemHandle(handle))
            except runtime.CUDARuntimeError as error:
                raise SegmentGone("CUDA IPC handle", 0, geometry.arena_bytes, str(error)) from error
            memory = cupy.cuda.UnownedMemory(base, offset + geometry.arena_bytes, None, device.number)
            pointer = cupy.cuda.MemoryPointer(memory, offset)
            view = cupy.ndarray((geometry.blocks, geometry.block_bytes), cupy.uint8, pointer)
        return _OpenedArena(device, geometry, view, base)

    @property
    def handle(self) -> bytes:
        """For :meth:`opened` in another process; only of memory from a plain allocation."""
        with cupy.cuda.Device(self._device.number):
            return bytes(runtime.ipcGetMemHandle(self.address))

    @property
    def view(self) -> Any:
        if self._view is None:
            raise SegmentGone("arena", 0, self.geometry.arena_bytes, "closed")
        return self._view

    @property
    def address(self) -> int:
        return int(self.view.data.ptr)

    def check(self) -> None:
        """SegmentGone once closed. A dead engine's IPC memory shows only as a CUDA error of the transfer."""
        _ = self.view

    def checksum(self, blocks: I8) -> U8:
        """uint64 [n], the same as :meth:`NumpyArena.checksum` of the same bytes."""
        self.geometry.group_of(blocks)
        if not len(blocks):
            return np.empty(0, np.uint64)
        stream = self._device.new_stream()
        with cupy.cuda.Device(self._device.number), stream:
            sums = cupy.zeros(len(blocks), cupy.uint64)
            lists = self._device.upload(blocks, stream)
            places = (sums.data.ptr, self.address, lists.address, len(blocks), self.geometry.block_bytes)
            self._device.launch("checksum_blocks", min(len(blocks), 4 * self._device.processors), places, stream)
            result: U8 = cupy.asnumpy(sums, stream=stream)
            stream.synchronize()
        return result

    def read(self, blocks: I8) -> U1:
        """Copies of blocks on the host: uint8 [n, block_bytes]."""
        self.geometry.group_of(blocks)
        with cupy.cuda.Device(self._device.number):
            result: U1 = cupy.asnumpy(self.view[cupy.asarray(blocks)])
        return result

    def write(self, blocks: I8, values: U1) -> None:
        """Set blocks from uint8 [n, block_bytes] on the host."""
        self.geometry.group_of(blocks)
        with cupy.cuda.Device(self._device.number):
            self.view[cupy.asarray(blocks)] = cupy.asarray(values)
            cupy.cuda.get_current_stream().synchronize()

    def close(self) -> None:
        """Let go of the memory."""
        self._view = None


class _OpenedArena(CupyArena):
    def __init__(self, device: CupyDevice, geometry: Geometry, view: Any, base: int) -> None:
        super().__init__(device, geometry, view)
        self._base = base

    def close(self) -> None:
        if self._view is not None:
            super().close()
            with cupy.cuda.Device(self._device.number):
                runtime.ipcCloseMemHandle(self._base)


class _HostMemory:
    """Pinned memory straight from CUDA: CuPy's pinned pool would round its size up to a power of two."""

    def __init__(self, device: CupyDevice, size: int) -> None:
        with cupy.cuda.Device(device.number):
            self.address = int(runtime.hostAlloc(size, _PORTABLE_AND_MAPPED))
        self.size = size
        self.__array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (self.address, False), "version": 3}

    def __del__(self) -> None:
        # getattr: the allocation itself may have failed
        if (address := getattr(self, "address", 0)) and runtime is not None:
            runtime.freeHost(address)


class HostArena(NumpyArena):
    """A host arena and whether the card reaches it; ``receipt`` says what the probe got."""

    def __init__(self, geometry: Geometry, view: U1, receipt: Pinned[Any]) -> None:
        super().__init__(geometry, view)
        self.receipt = receipt

    @property
    def pinned(self) -> bool:
        return self.receipt.value is not None

    @classmethod
    def allocate(cls, device: CupyDevice, block_bytes: int, slots: int, *, ranks: int = 1) -> HostArena:
        """Up to ``slots`` pinned slots, fewer where the cgroup, the other ``ranks`` or the driver allow no more (a
        warning tells), and as many pageable ones, with another warning, where nothing can be pinned."""
        room = allowance(read_host_memory(), ranks) // block_bytes
        wanted = min(slots, room)
        if wanted < 1:
            raise BadGeometry("host slots that memory allows", room, f"1 or more of {block_bytes} bytes")
        receipt = probe(
            lambda size: _HostMemory(device, size),
            wanted * block_bytes,
            unit_bytes=block_bytes,
            failures=FAILURES,
            free_device_bytes=device.free_bytes,
        )
        if wanted < slots:
            warnings.warn(f"host arena: room for {wanted} of {slots} slots of {block_bytes} bytes", stacklevel=2)
        if receipt.warning:
            warnings.warn(receipt.warning, stacklevel=2)
        if receipt.value is None:
            geometry = host_geometry(block_bytes, wanted)
            return cls(geometry, PrivateArena(geometry).view, receipt)
        geometry = host_geometry(block_bytes, receipt.bytes // block_bytes)
        view = np.asarray(receipt.value).reshape(geometry.blocks, block_bytes)
        return cls(geometry, view, receipt)


def register(device: CupyDevice, arena: SharedArena | PrivateArena) -> bool:
    """Pin an arena that exists already, such as one shared between processes, where it lies. False, with a warning,
    where the driver refuses: it then serves as pageable memory. Undo with :func:`unregister` before closing it."""
    with cupy.cuda.Device(device.number):
        try:
            runtime.hostRegister(arena.address, arena.geometry.arena_bytes, _PORTABLE_AND_MAPPED)
        except runtime.CUDARuntimeError as error:
            warnings.warn(f"host memory stays pageable, transfers will be slower: {error}", stacklevel=2)
            return False
    return True


def unregister(device: CupyDevice, arena: SharedArena | PrivateArena) -> None:
    """Undo :func:`register`."""
    with cupy.cuda.Device(device.number):
        runtime.hostUnregister(arena.address)
