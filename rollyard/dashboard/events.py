"""What goes on, sent to a page as it happens (server-sent events).

live    what the run is at, about each second (`watch.live.Live`)
step    a step is done: its line of the metrics
again   a new life has begun: steps that were told may be others now
end     the run does not go on: how it stands (`told.Ended`). Nothing comes after it
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any, Final

from fastapi.concurrency import run_in_threadpool
from fastapi.sse import ServerSentEvent
from pydantic import TypeAdapter

from rollyard.dashboard.shown import Shown
from rollyard.dashboard.state import going
from rollyard.dashboard.told import CHECK, RUNNING, Ended, Problem
from rollyard.errors import JournalError
from rollyard.watch.live import Live

EVERY_S: Final = 1.0
AGAIN_S: Final = 5.0  # after something that could not be read
PROBLEM: Final = TypeAdapter(Problem)
LIVE: Final = TypeAdapter(Live)
ENDED: Final = TypeAdapter(Ended)
ROW: Final = TypeAdapter(dict[str, Any])


async def events(shown: Shown, after: int | None, closing: asyncio.Event) -> AsyncIterator[ServerSentEvent]:
    """All that happens from now on.

    Args:
        after: the last step that is known; None: the newest.
        closing: set when the server is to end: it waits for nobody who would listen for ever.
    """
    file: int | None = None
    last = False
    while not last:
        last = closing.is_set()
        if last and await run_in_threadpool(going, shown.folder):
            return  # else there is one more to tell: that it is over, which is why the server ends
        try:
            pulse = await run_in_threadpool(shown.pulse, after or 0)
        except (JournalError, OSError) as error:
            yield _event("problem", PROBLEM.dump_json(Problem(str(error), str(shown.folder.path), CHECK)))
            await _pause(closing, AGAIN_S)
            continue
        if file not in (None, pulse.file):
            yield _event("again", b"{}")
        elif after is not None:
            for row in pulse.rows:
                yield _event("step", ROW.dump_json(dict(row)))
        file, after = pulse.file, pulse.last
        if pulse.live is not None:
            yield _event("live", LIVE.dump_json(pulse.live))
        if pulse.state != RUNNING:
            yield _event("end", ENDED.dump_json(Ended(pulse.state, pulse.cause)))
            return
        await _pause(closing, EVERY_S)


async def _pause(closing: asyncio.Event, seconds: float) -> None:
    with suppress(TimeoutError):
        await asyncio.wait_for(closing.wait(), seconds)


def _event(name: str, content: bytes) -> ServerSentEvent:
    return ServerSentEvent(event=name, raw_data=content.decode())
