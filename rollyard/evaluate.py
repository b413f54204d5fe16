"""Scores a policy on held-out prompts: pinned to one version, outside admission, never trained on."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rollyard.episode.stage import Player
from rollyard.events import EngineId
from rollyard.protocols.rollouts import Hearing, Scorer
from rollyard.rollout.controller import Controller
from rollyard.rollout.playing import room_for
from rollyard.rollout.seeds import completion_seed
from rollyard.types import (
    Asking,
    Completion,
    FinishReason,
    Prompt,
    Reply,
    Request,
    RequestId,
    Reward,
    Sampling,
    Turn,
    WeightVersion,
)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Mean reward over the completions that have a verdict; `unscored` of `samples` have none.

    `parts` are the means of the rewards by name, each over the completions that have one of it. `tokens` were sampled for it.
    """

    mean_reward: float | None
    samples: int
    unscored: int
    parts: Mapping[str, float] = field(default_factory=dict)
    tokens: int = 0

    @classmethod
    def of(cls, rewards: Sequence[Reward], samples: int, tokens: int) -> Evaluation:
        values = [reward.value for reward in rewards if reward.value is not None and math.isfinite(reward.value)]
        names = dict.fromkeys(name for reward in rewards for name in reward.parts)
        parts = {name: _mean([reward.parts[name] for reward in rewards if name in reward.parts]) for name in names}
        return cls(_mean(values) if values else None, samples, samples - len(values), parts, tokens)


@dataclass(frozen=True, slots=True)
class Evaluator:
    """Asks every held-out prompt `samples` times, with the same noise at every evaluation.

    Args:
        prompts: held-out prompts.
        sampling: as in training.
        window: tokens of prompt and completion at most.
        samples: completions of each prompt.
        seed: of the run.
        player: where prompts are played as episodes; None: they are answered once.
    """

    prompts: tuple[Prompt, ...]
    sampling: Sampling
    window: int
    samples: int
    seed: int
    player: Player | None = None

    async def run(
        self, controller: Controller, scorer: Scorer, version: WeightVersion, engines: Sequence[EngineId] = ()
    ) -> Evaluation:
        """Ask those that have the version, of the engines that are named or of all. Raises EngineLost when none is left.

        EngineError when an engine fails at a request.
        """
        if self.player is not None:
            rewards, tokens = await self._play(self.player, controller, scorer, version, engines or controller.engines)
        else:
            asked = {request.id: prompt for prompt, request in self.requests()}
            completions = await controller.complete([request for _, request in self.requests()], engines, version)
            rewards = await self._judge(scorer, [(asked[_id(done)], done) for done in completions])
            tokens = sum(len(done.token_ids) for done in completions)
        return Evaluation.of(rewards, len(self.prompts) * self.samples, tokens)

    def requests(self) -> Iterable[tuple[Prompt, Request]]:
        """Negative groups keep these apart from rollouts. A prompt that fills the window is not asked: it stays unscored."""
        for position, prompt in enumerate(self.prompts):
            max_tokens = min(self.sampling.max_tokens, self.window - len(prompt.token_ids))
            if max_tokens < 1:
                continue
            sampling = replace(self.sampling, max_tokens=max_tokens)
            for member in range(self.samples):
                group = -1 - position
                seed = completion_seed(self.seed, group, member)
                yield prompt, Request(RequestId(group, member), prompt.token_ids, sampling, seed)

    async def _play(
        self, player: Player, controller: Controller, scorer: Scorer, version: WeightVersion, names: Sequence[EngineId]
    ) -> tuple[list[Reward], int]:
        """Every prompt as `samples` episodes, all at once. Returns the verdicts, and the tokens that were sampled."""
        episodes: list[asyncio.Future[Reward]] = []
        all_heard: list[_Heard] = []
        for position, prompt in enumerate(self.prompts):
            for member in range(self.samples if len(prompt.token_ids) < self.window else 0):
                first = len(episodes) % max(len(names), 1)  # each begins with another engine
                order = (*names[first:], *names[:first])
                heard = _Heard(self, player, controller, RequestId(-1 - position, member), version, order)
                all_heard.append(heard)
                episodes.append(asyncio.ensure_future(heard.judged(prompt, scorer)))
        try:
            rewards = await asyncio.gather(*episodes)
            return rewards, sum(len(part.token_ids) for heard in all_heard for part in heard.parts)
        finally:
            for episode in episodes:
                episode.cancel()

    @staticmethod
    async def _judge(scorer: Scorer, finished: Sequence[tuple[Prompt, Completion]]) -> list[Reward]:
        return await asyncio.gather(*(scorer.score(prompt, done) for prompt, done in finished))


@dataclass(slots=True)
class _Heard:
    """One episode outside the core: what the policy wrote in it."""

    asks: Evaluator
    player: Player
    controller: Controller
    id: RequestId
    version: WeightVersion
    engines: Sequence[EngineId]
    taken: list[Turn] = field(default_factory=list)
    parts: list[Completion] = field(default_factory=list)

    async def judged(self, prompt: Prompt, scorer: Scorer) -> Reward:
        played = await self.player.play(prompt, self.answer)
        return played.verdict or await scorer.score(prompt, self.completion(played.text))

    async def answer(self, asking: Asking, hearing: Hearing | None = None) -> Reply:
        """As the core has it answered, in one piece."""
        asks, turn, (group, member, _) = self.asks, len(self.taken), self.id
        room = room_for(asking, turn, asks.window, self.player.turns)
        if isinstance(room, FinishReason):
            self.taken.append(Turn(asking.prompt_ids, 0, room))
            return Reply((), "", room)
        most, stop = min(room, asking.max_tokens), asks.sampling.stop + asking.stop
        sampling = replace(asks.sampling, max_tokens=most, stop=stop)
        seed = completion_seed(asks.seed, group, member, turn)
        request = Request(RequestId(group, member, turn), asking.prompt_ids, sampling, seed)
        (done,) = await self.controller.complete([request], self.engines, self.version)
        cut = done.finish is FinishReason.LENGTH and room < asking.max_tokens
        finish = FinishReason.CONTEXT if cut else done.finish
        self.taken.append(Turn(asking.prompt_ids, len(done.token_ids), finish))
        self.parts.append(done)
        return Reply(done.token_ids, done.text, finish, done.logprobs, done.spans)

    def completion(self, text: str) -> Completion:
        ids = tuple(token for part in self.parts for token in part.token_ids)
        logprobs = tuple(logprob for part in self.parts for logprob in part.logprobs)
        spans = tuple(span for part in self.parts for span in part.spans)
        finish = self.taken[-1].finish if self.taken else FinishReason.ERROR
        return Completion(self.id.group, self.id.member, ids, logprobs, spans, finish, text, tuple(self.taken))


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _id(completion: Completion) -> RequestId:
    return RequestId(completion.group, completion.member)
