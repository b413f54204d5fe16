"""Scores a policy on held-out prompts: pinned to one version, outside admission, never trained on."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from rollyard.events import EngineId
from rollyard.protocols import Scorer
from rollyard.rollout.controller import Controller
from rollyard.rollout.seeds import completion_seed
from rollyard.types import Completion, Prompt, Request, RequestId, Reward, Sampling


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Mean reward over the completions that have a verdict; `unscored` of `samples` have none."""

    mean_reward: float | None
    samples: int
    unscored: int


@dataclass(frozen=True, slots=True)
class Evaluator:
    """Asks every held-out prompt `samples` times, with the same noise at every evaluation.

    Args:
        prompts: held-out prompts.
        sampling: as in training.
        window: tokens of prompt and completion at most.
        samples: completions of each prompt.
        seed: of the run.
    """

    prompts: tuple[Prompt, ...]
    sampling: Sampling
    window: int
    samples: int
    seed: int

    async def run(self, controller: Controller, scorer: Scorer, engines: Sequence[EngineId] = ()) -> Evaluation:
        """Ask the engines that are named, or all. Raises EngineError when none of them is left."""
        asked = {request.id: prompt for prompt, request in self._requests()}
        completions = await controller.complete([request for _, request in self._requests()], engines)
        rewards = await self._judge(scorer, [(asked[_id(done)], done) for done in completions])
        values = [r.value for r in rewards if r.value is not None and math.isfinite(r.value)]
        samples = len(self.prompts) * self.samples
        return Evaluation(math.fsum(values) / len(values) if values else None, samples, samples - len(values))

    def _requests(self) -> Iterable[tuple[Prompt, Request]]:
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

    @staticmethod
    async def _judge(scorer: Scorer, finished: Sequence[tuple[Prompt, Completion]]) -> list[Reward]:
        return await asyncio.gather(*(scorer.score(prompt, done) for prompt, done in finished))


def _id(completion: Completion) -> RequestId:
    return RequestId(completion.group, completion.member)
