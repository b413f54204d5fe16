"""The asyncio shell around episodes: begins them, brings questions to the core and answers back, and ends them.

It decides nothing, as `rollout.controller`, which stands beside it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

from rollyard.episode.stage import Player
from rollyard.events import Drop, Event, Instruction
from rollyard.protocols.rollouts import Hearing
from rollyard.turns import Asked, EpisodeEnded, Play, Stream, Tell
from rollyard.types import Asking, Prompt, Reply
from rollyard.watch.timeline import Phase, Timeline

Key = tuple[int, int]  # group, member


class Episodes:
    """Plays the members' episodes of a run.

    Args:
        player: where they are played.
        post: takes the events.
        broke: takes the exception that broke an episode other than by its environment; the run cannot go on.
        timeline: environments at work are opened and closed on it.
    """

    def __init__(
        self, player: Player, post: Callable[[Event], None], broke: Callable[[BaseException], None], timeline: Timeline
    ) -> None:
        self._player, self._post, self._broke, self._timeline = player, post, broke, timeline
        self._going: dict[Key, asyncio.Task[None]] = {}
        self._answers: dict[Key, asyncio.Future[Reply]] = {}
        self._hearing: dict[Key, Hearing] = {}  # who wants to hear of what is being written

    def carry_out(self, instructions: Iterable[Instruction]) -> None:
        """Begin what the instructions say, in order."""
        for instruction in instructions:
            match instruction:
                case Play(prompt, member):
                    self._begin(prompt, member)
                case Tell(group, member, reply):
                    waiting = self._answers.get((group, member))
                    if waiting is not None and not waiting.done():
                        waiting.set_result(reply)
                case Stream(group, member, after, token_ids):
                    if (hearing := self._hearing.get((group, member))) is not None:
                        hearing(after, token_ids)
                case Drop(group, int(member)):
                    if (episode := self._going.get((group, member))) is not None:
                        episode.cancel()

    async def close(self) -> None:
        """Give up what is under way."""
        episodes = list(self._going.values())
        for episode in episodes:
            episode.cancel()
        await asyncio.gather(*episodes, return_exceptions=True)

    def _begin(self, prompt: Prompt, member: int) -> None:
        key = (prompt.id, member)
        episode = self._going[key] = asyncio.create_task(self._play(prompt, key))
        episode.add_done_callback(lambda done: self._done(key, done))

    async def _play(self, prompt: Prompt, key: Key) -> None:
        async def answer(asking: Asking, hearing: Hearing | None = None) -> Reply:
            self._answers[key] = asyncio.get_running_loop().create_future()
            if hearing is not None:
                self._hearing[key] = hearing
            self._post(Asked(*key, asking))
            try:
                return await self._answers[key]
            finally:
                self._hearing.pop(key, None)

        def working() -> AbstractContextManager[None]:
            return self._timeline.phase(Phase.TOOLS)

        played = await self._player.play(prompt, answer, working)
        self._post(EpisodeEnded(*key, played.verdict, played.text))

    def _done(self, key: Key, episode: asyncio.Task[None]) -> None:
        del self._going[key]
        self._answers.pop(key, None)
        error = None if episode.cancelled() else episode.exception()
        if error is not None:
            self._broke(error)
