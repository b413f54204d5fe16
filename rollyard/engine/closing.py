"""Closing an engine: each part gets its time, and nothing that it meets keeps the rest from happening."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextlib import suppress

PART_S = 10.0  # seconds


async def attempt(work: Awaitable[object], parts: int = 1) -> None:
    """Await so many parts of closing for a while; nobody is left who could do something about what goes wrong in them."""
    with suppress(Exception):
        async with asyncio.timeout(parts * PART_S):
            await work
