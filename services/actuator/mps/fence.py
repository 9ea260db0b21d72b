"""The launch-time fence: how much device memory each MPS client may pin, and whether the clients fit the card. Pure.

``CUDA_MPS_PINNED_DEVICE_MEM_LIMIT`` is read when a client starts. It can only tighten what the server allows, never
widen it, and nothing changes it in a process that runs (DESIGN section 5, *MPS*). It bounds one client process, not a
worker: an engine with four processes on a card needs a quarter each. (NVIDIA MPS documentation, environment variables.)
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from services.errors import UserError

MIB: Final = 1 << 20
VARIABLE: Final = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
DEFAULT_PIPES: Final = Path("/tmp/nvidia-mps")
_UUID: Final = re.compile(r"GPU-[0-9A-Fa-f-]{4,36}\Z")
_ENTRY: Final = re.compile(r"\s*(?P<device>[^=\s]+)\s*=\s*(?P<amount>\d+)(?P<unit>[GMgm])[Bb]?\s*\Z")


class Card(NamedTuple):
    """What clients may share of one device; bytes."""

    device: str
    """CUDA ordinal as MPS clients see it, or a UUID."""
    total_bytes: int
    reserve_bytes: int
    """Kept out: the MPS server's own context, the clients' contexts, the driver's part."""


class Client(NamedTuple):
    """One process to be started under MPS; bytes by device."""

    name: str
    limits: Mapping[str, int]


def limit_text(limit_bytes: int) -> str:
    """``10752M``: whole MiB, rounded down, so that the fence is never wider than what was granted.

    UserError below 1 MiB: MPS would read 0 as a fence at nothing, or as none.
    """
    if limit_bytes < MIB:
        raise UserError(f"MPS limit: found {limit_bytes} bytes, expected {MIB} (1 MiB) or more")
    return f"{limit_bytes // MIB}M"


def device_text(device: str | int) -> str:
    """A CUDA ordinal or a full ``GPU-`` UUID, as MPS takes it; UserError for anything else.

    Driver 550 takes ordinals only in the control daemon's commands.
    """
    text = str(device)
    if not (text.isascii() and text.isdigit() and str(int(text)) == text) and not _UUID.match(text):
        raise UserError(f"MPS device: found {text!r}, expected an ordinal (0, 1, ...) or a UUID GPU-...")
    return text


def format_limits(limits: Iterable[tuple[str | int, int]]) -> str:
    """``0=10752M,1=...`` in the order given. UserError for none, for a device named twice, for less than 1 MiB."""
    parts: dict[str, str] = {}
    for device, limit_bytes in limits:
        name = device_text(device)
        if name in parts:
            raise UserError(f"MPS limit: device {name} is named twice")
        parts[name] = limit_text(limit_bytes)
    if not parts:
        raise UserError("MPS limit: no device is named")
    return ",".join(f"{name}={text}" for name, text in parts.items())


def parse_limits(text: str) -> dict[str, int]:
    """Bytes by device of such a text, as found in an environment. UserError for what MPS would not read."""
    found: dict[str, int] = {}
    for part in text.split(","):
        match = _ENTRY.match(part)
        if match is None:
            raise UserError(f"{VARIABLE}: found {part!r}, expected DEVICE=NUMBER followed by M or G")
        device = device_text(match["device"])
        if device in found:
            raise UserError(f"{VARIABLE}: device {device} is named twice")
        found[device] = int(match["amount"]) * (MIB if match["unit"] in "Mm" else 1024 * MIB)
    return found


def tightened(own: Mapping[str, int], server: Mapping[str, int]) -> dict[str, int]:
    """What really holds for a client: on each device the lower of its own limit and the server's; one alone holds."""
    devices = [*own, *(device for device in server if device not in own)]
    return {device: min(limits[device] for limits in (own, server) if device in limits) for device in devices}


def check_budget(cards: Sequence[Card], clients: Sequence[Client]) -> dict[str, int]:
    """Bytes left on each card once every client holds what it may. UserError when the clients of a card may hold more
    than it has, when a client names a card that is not there, or has no limit on one: it could take it all."""
    left = {}
    for card in cards:
        device_text(card.device)
        if card.device in left:
            raise UserError(f"card {card.device} is named twice")
        if not 0 <= card.reserve_bytes < card.total_bytes:
            raise UserError(f"card {card.device}: reserve {card.reserve_bytes} of {card.total_bytes} bytes")
        left[card.device] = card.total_bytes - card.reserve_bytes
    names: set[str] = set()
    for client in clients:
        if client.name in names:
            raise UserError(f"MPS client {client.name} is named twice")
        names.add(client.name)
        unknown = sorted(set(client.limits) - set(left))
        missing = sorted(set(left) - set(client.limits))
        if unknown or missing:
            told = f"no card {', '.join(unknown)}" if unknown else f"no limit on card {', '.join(missing)}"
            raise UserError(f"MPS client {client.name}: {told}; expected limits on {', '.join(sorted(left))}")
        for device, limit_bytes in client.limits.items():
            limit_text(limit_bytes)
            left[device] -= limit_bytes // MIB * MIB
    for card in cards:
        if left[card.device] < 0:
            room = card.total_bytes - card.reserve_bytes
            raise UserError(
                f"card {card.device}: its {len(clients)} clients may hold {room - left[card.device]} bytes, "
                f"expected at most {room} ({card.total_bytes} less a reserve of {card.reserve_bytes})"
            )
    return left


def client_environment(
    limits: Iterable[tuple[str | int, int]], *, pipes: Path = DEFAULT_PIPES, visible: Sequence[str] = ()
) -> dict[str, str]:
    """Variables to start a client with. ``pipes``: the daemon's CUDA_MPS_PIPE_DIRECTORY; ``visible``: UUIDs of the
    cards that it may see, since ordinals count what is visible."""
    if not pipes.is_absolute():
        raise UserError(f"CUDA_MPS_PIPE_DIRECTORY: found {pipes}, expected an absolute path")
    environment = {
        VARIABLE: format_limits(limits),
        "CUDA_MPS_PIPE_DIRECTORY": str(pipes),
        # Else ordinals go by speed, and may name another card than NVML's.
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }
    if visible:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(device_text(uuid) for uuid in visible)
    return environment
