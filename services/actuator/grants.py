"""Free page groups dealt out to engines that map on grants only; the account says how many."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from schemas.engine import GrantPages
from services.actuator.account import Account
from services.actuator.members import Member
from services.errors import EngineRefused, EngineUnreachable

CAN_GRANT: Final = "grants"
"""Capability of an engine that maps on grants only."""


async def grant(account: Account, members: Mapping[str, Member]) -> None:
    """What the account has to change, lowered grants first."""
    for card in account.cards.values():
        if not any(one is not None and CAN_GRANT in one.capabilities for one in card.members.values()):
            continue
        for worker, granted in sorted(card.grants().items(), key=lambda item: item[1]):
            member = members[worker]
            if member.known is None or CAN_GRANT not in member.known.capabilities:
                continue
            try:
                await member.engine.grant_pages(GrantPages(granted, member.known.generation))
                member.known.granted_bytes = granted
            except (EngineRefused, EngineUnreachable) as error:
                member.problem = str(error)
