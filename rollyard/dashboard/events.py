"""What goes on, sent to a page as it happens (server-sent events).

live    what the run is at, about each second (`watch.live.Live`)
step    a step is done: its line of the metrics
again   a new life has begun: steps that were told may be others now
end     the run does not go on: how it stands (`told.Ended`). Nothing comes after it
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Final

from fastapi.concurrency import run_in_threadpool
from fastapi.sse import ServerSentEvent
from pydantic import TypeAdapter

from rollyard.dashboard.shown import Shown
from rollyard.dashboard.told import RUNNING, Ended
from rollyard.watch.live import Live

EVERY_S: Final = 1.0
LIVE: Final = TypeAdapter(Live)
ENDED: Final = TypeAdapter(Ended)
ROW: Final = TypeAdapter(dict[str, Any])


async def events(shown: Shown, after: int | None) -> AsyncIterator[ServerSentEvent]:
    """All that happens from now on.

    Args:
        after: the last step that is known; None: the newest.
    """
    if after is None:
        rows = (await run_in_threadpool(shown.pulse, 0)).rows
        after = rows[-1]["step"] if rows else 0
    file: int | None = None
    while True:
        pulse = await run_in_threadpool(shown.pulse, after)
        if file not in (None, pulse.file):
            yield ServerSentEvent(event="again", raw_data="{}")
        file = pulse.file
        for row in pulse.rows:
            after = row["step"]
            yield ServerSentEvent(event="step", raw_data=ROW.dump_json(dict(row)).decode())
        if pulse.live is not None:
            yield ServerSentEvent(event="live", raw_data=LIVE.dump_json(pulse.live).decode())
        if pulse.state != RUNNING:
            yield ServerSentEvent(event="end", raw_data=ENDED.dump_json(Ended(pulse.state, pulse.cause)).decode())
            return
        await asyncio.sleep(EVERY_S)
