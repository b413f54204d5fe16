"""The inbox of the driver: news of rollouts is taken together, in order, and nothing else is."""

from __future__ import annotations

import asyncio
import gc

import pytest

from rollyard import events as ev
from rollyard.driver import TOGETHER, Inbox, collecting_seldom
from rollyard.types import Reward


def scored(group: int) -> ev.Scored:
    return ev.Scored(group, 0, Reward(1.0))


async def test_news_is_taken_together_and_anything_else_by_itself():
    inbox = Inbox()
    down = ev.EngineDown("a", "gone")
    for event in (scored(0), scored(1), down, scored(2), down, down, *map(scored, range(3, 3 + TOGETHER))):
        inbox.put_nowait(event)
    taken = [await inbox.take() for _ in range(6)]
    assert taken == [[scored(0), scored(1)], [down], [scored(2)], [down], [down], list(map(scored, range(3, 3 + TOGETHER)))]


async def test_no_more_than_so_many_are_taken_together():
    inbox = Inbox()
    for number in range(TOGETHER + 2):
        inbox.put_nowait(scored(number))
    assert [len(await inbox.take()) for _ in range(2)] == [TOGETHER, 2]


async def test_what_comes_later_is_waited_for():
    inbox = Inbox()
    waiting = asyncio.create_task(inbox.take())
    await asyncio.sleep(0)
    inbox.put_nowait(scored(4))
    assert await waiting == [scored(4)]


async def test_what_broke_is_raised_in_its_turn():
    inbox = Inbox()
    inbox.put_nowait(scored(0))
    inbox.put_nowait(OSError("it broke"))
    assert await inbox.take() == [scored(0)]
    with pytest.raises(OSError, match="it broke"):
        await inbox.take()


def test_the_collector_of_cycles_is_as_before_afterwards():
    before = gc.get_threshold()
    with pytest.raises(OSError, match="x"), collecting_seldom():
        assert gc.get_threshold()[0] > before[0]
        raise OSError("x")
    assert gc.get_threshold() == before
