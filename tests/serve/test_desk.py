"""The lease of a trainer."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rollyard.serve.desk import Desk
from rollyard.serve.refusals import Refused
from tests.serve.double import Double

LEASE_S = 0.3


async def lasting(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return "done"


async def test_who_waits_for_us_keeps_the_lease(tmp_path: Path) -> None:
    """Such as for weights that come by a group for longer than the lease."""
    run: Any = Double(tmp_path)
    desk = Desk(run, LEASE_S)
    lease = desk.take("one", over=False).id
    assert await desk.hold(lease, lasting(2 * LEASE_S)) == "done"
    assert desk.trainer == "one"


async def test_who_waits_for_us_hears_that_another_one_took_over(tmp_path: Path) -> None:
    run: Any = Double(tmp_path)
    desk = Desk(run, LEASE_S)
    holding = asyncio.create_task(desk.hold(desk.take("one", over=False).id, lasting(60.0)))
    await asyncio.sleep(0)
    desk.take("other", over=True)
    with pytest.raises(Refused, match="not the lease"):
        await asyncio.wait_for(holding, 10)
