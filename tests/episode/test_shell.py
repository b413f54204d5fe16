"""The shell around episodes: events one way, instructions the other."""

from __future__ import annotations

import asyncio

from rollyard.episode.load import FromFunction
from rollyard.episode.shell import Episodes
from rollyard.events import Drop
from rollyard.turns import Asked, EpisodeEnded, Play, Stream, Tell
from rollyard.types import Asking, DropReason, FinishReason, Reply, Reward
from rollyard.watch.timeline import Timeline
from tests.episode.toys import PROMPT, stage


class Table:
    """Episodes whose core is the test."""

    def __init__(self, function, **changes) -> None:
        self.posted: asyncio.Queue = asyncio.Queue()
        self.broken: list[BaseException] = []
        self.timeline = Timeline()
        self.episodes = Episodes(
            stage(FromFunction(function), **changes), self.posted.put_nowait, self.broken.append, self.timeline
        )

    async def next(self):
        async with asyncio.timeout(3):
            return await self.posted.get()


async def echo(ask, prompt):
    first = await ask(prompt.token_ids)
    second = await ask((*prompt.token_ids, *first.token_ids, 5))
    return second.token_ids[0] / 10


async def test_questions_go_to_the_core_and_answers_come_back():
    table = Table(echo)
    table.episodes.carry_out([Play(PROMPT, 0), Play(PROMPT, 1)])
    asked = [await table.next(), await table.next()]
    assert asked == [Asked(0, 0, Asking((4,), 9)), Asked(0, 1, Asking((4,), 9))]
    table.episodes.carry_out([Tell(0, 1, Reply((1, 2), "hello", FinishReason.STOP))])
    assert await table.next() == Asked(0, 1, Asking((4, 1, 2, 5), 9))
    table.episodes.carry_out([Tell(0, 1, Reply((3,), "hello", FinishReason.STOP))])
    assert await table.next() == EpisodeEnded(0, 1, Reward(0.3, {"environment": 0.3}), "hello=hello")
    assert table.timeline.current is None, "member 0 waits for its answer"
    await table.episodes.close()
    assert not table.broken and table.posted.empty()


async def test_who_wants_to_hear_of_a_turn_hears_of_it_until_it_is_over():
    said = []

    async def listener(ask, prompt):
        first = await ask(prompt.token_ids, hearing=lambda after, ids: said.append((after, ids)))
        await ask((*prompt.token_ids, *first.token_ids))

    table = Table(listener)
    table.episodes.carry_out([Play(PROMPT, 0)])
    assert await table.next() == Asked(0, 0, Asking((4,), 9, streams=True))
    table.episodes.carry_out([Stream(0, 0, 0, (1, 2)), Stream(0, 1, 0, (3,)), Stream(0, 0, 1, (3,))])
    table.episodes.carry_out([Tell(0, 0, Reply((1, 3), "hehello", FinishReason.STOP))])
    assert await table.next() == Asked(0, 0, Asking((4, 1, 3), 9))
    table.episodes.carry_out([Stream(0, 0, 0, (6,))])
    assert said == [(0, (1, 2)), (1, (3,))]
    await table.episodes.close()


async def test_a_dropped_member_takes_its_episode_with_it():
    """Wherever it is: asking, or at work. What comes for it later is nobody's."""
    ended = []

    async def episode(ask, prompt):
        try:
            await ask(prompt.token_ids)
            await asyncio.sleep(60)
        finally:
            ended.append(prompt.id)

    table = Table(episode)
    table.episodes.carry_out([Play(PROMPT, member) for member in range(3)])
    for _ in range(3):
        await table.next()
    table.episodes.carry_out([Tell(0, 1, Reply((1,), "he", FinishReason.STOP))])
    await asyncio.sleep(0.01)
    table.episodes.carry_out([Drop(0, member, DropReason.STALE) for member in range(2)])
    await asyncio.sleep(0.01)
    table.episodes.carry_out([Tell(0, 0, Reply((1,), "he", FinishReason.STOP))])
    assert len(ended) == 2 and table.posted.empty()
    await table.episodes.close()
    await asyncio.sleep(0.01)
    assert len(ended) == 3 and table.posted.empty() and not table.broken


async def test_an_environment_that_fails_is_an_episode_without_a_verdict():
    async def episode(ask, prompt):
        raise KeyError("tool")

    table = Table(episode)
    table.episodes.carry_out([Play(PROMPT, 0)])
    assert await table.next() == EpisodeEnded(0, 0, Reward(None, problem="KeyError: 'tool'"), "")
    await table.episodes.close()
