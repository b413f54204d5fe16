"""The socket in a run's folder, in its start; see tests/security/test_lines.py for what comes over it."""

from __future__ import annotations

import asyncio
import gc
from contextlib import suppress
from pathlib import Path

import pytest

from rollyard.control import NAME, Answer, serving


@pytest.mark.parametrize("turns", range(4))
async def test_a_run_that_is_cut_in_its_start_leaves_no_socket(tmp_path: Path, turns: int) -> None:
    """At whichever of the places where it gives way: what is left open would be warned of here."""

    async def serve() -> None:
        async with serving(tmp_path, lambda order: Answer("yes")):
            await asyncio.Event().wait()

    task = asyncio.create_task(serve())
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    assert not (tmp_path / NAME).exists() and gc.collect() >= 0
