"""Every message that crosses a process boundary, and the tables that give its columns meaning.

Nothing here does I/O or imports a service: schemas are the lowest layer.
Messages are frozen msgspec Structs in MessagePack array layout. They only ever grow at the end,
with defaults; ``tests/schemas/golden/`` holds bytes of yesterday that today's code must read.
"""
