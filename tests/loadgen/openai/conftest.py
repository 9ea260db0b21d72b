"""A played server for each test."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from tests.loadgen.openai.server import Server, serving


@pytest_asyncio.fixture
async def server() -> AsyncIterator[Server]:
    async with serving() as one:
        yield one
