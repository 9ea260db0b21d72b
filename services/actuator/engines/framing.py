"""Length-prefixed frames out of a byte stream, without I/O: for both ends of an engine's socket."""

from __future__ import annotations

from schemas.engine import HEADER_BYTES, MAX_FRAME_BYTES, frame_length
from services.errors import ProtocolError


class Frames:
    """Collects bytes as they come and gives whole frame bodies; half a frame waits for its rest."""

    def __init__(self, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self._held = bytearray()
        self._max_frame_bytes = max_frame_bytes

    @property
    def pending_bytes(self) -> int:
        """Bytes of a frame that is not complete yet."""
        return len(self._held)

    def feed(self, data: bytes) -> list[bytes]:
        """Bodies that ``data`` completes, in order; ProtocolError for a frame beyond the limit, after which
        the stream cannot be read any further."""
        held = self._held
        held += data
        bodies = []
        start = 0
        while len(held) - start >= HEADER_BYTES:
            try:
                length = frame_length(bytes(held[start : start + HEADER_BYTES]))
            except ValueError as error:
                raise ProtocolError(str(error)) from error
            if length > self._max_frame_bytes:
                raise ProtocolError(f"frame of {length} bytes: at most {self._max_frame_bytes} expected")
            end = start + HEADER_BYTES + length
            if len(held) < end:
                break
            bodies.append(bytes(held[start + HEADER_BYTES : end]))
            start = end
        if start:
            del held[:start]
        return bodies
