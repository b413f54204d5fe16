"""What the shell around the core makes of engines that fail it."""

from __future__ import annotations

import asyncio

from rollyard.errors import EngineLost
from rollyard.events import Abort
from rollyard.rollout.controller import Controller
from rollyard.types import RequestId
from rollyard.watch.timeline import Timeline


class Gone:
    """An engine that dies when it is told to cut a request."""

    async def abort(self, requests):
        raise EngineLost("it died")


async def test_an_engine_that_dies_while_it_cuts_a_request_does_not_break_the_run():
    """That it is gone is told by whoever listens to it."""
    broken: list[BaseException] = []
    controller = Controller({"a": Gone()}, None, None, lambda ids, finish: "", lambda event: None, broken.append, Timeline())
    controller.carry_out([Abort("a", (RequestId(0, 0),))])
    await asyncio.sleep(0.01)
    await controller.close()
    assert not broken
