"""What the shell around the core makes of engines that fail it."""

from __future__ import annotations

import asyncio

import pytest

from rollyard.errors import EngineLost
from rollyard.events import Abort
from rollyard.rollout.controller import Controller
from rollyard.types import Request, RequestId, Sampling
from rollyard.watch.timeline import Timeline


class Gone:
    """An engine that dies when it is told to cut a request."""

    async def abort(self, requests):
        raise EngineLost("it died")


async def test_an_engine_that_dies_while_it_cuts_a_request_does_not_break_the_run():
    """That it is gone is told by whoever listens to it."""
    broken: list[BaseException] = []
    controller = Controller(
        {"a": Gone()}, None, None, lambda ids, stop, finish: "", lambda event: None, broken.append, Timeline()
    )
    controller.carry_out([Abort("a", (RequestId(0, 0),))])
    await asyncio.sleep(0.01)
    await controller.close()
    assert not broken


async def test_an_engine_that_is_gone_is_a_lost_one_to_whoever_asks_it():
    """What is proved of one engine may still be under way when that is closed."""
    engines = {"a": Gone()}
    controller = Controller(engines, None, None, lambda ids, stop, finish: "", lambda event: None, lambda error: None, Timeline())
    controller.listen()
    controller.leave("a")
    del engines["a"]
    with pytest.raises(EngineLost, match="no engine is left"):
        await controller.complete([Request(RequestId(-1, 0), (1,), Sampling(1), seed=0)], ("a",))
