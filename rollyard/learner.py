"""What becomes of a batch of finished groups: they are compared, packed, and trained on.

This is the usual `protocols.Learner`. Another one may have all of that done by somebody else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

from rollyard import worker
from rollyard.advantage.compare import compare
from rollyard.advantage.token import spread
from rollyard.batch.sample import shards
from rollyard.config import Config
from rollyard.protocols.training import Trainer, ValueTrainer
from rollyard.types import Group, TrainBatch, TrainStats, WeightVersion


class TrainerLearner:
    """Implements `protocols.Learner` with a trainer.

    Args:
        config: how groups are compared and packed.
        trainer: of the policy; one with a value head, where advantages are made with one.
        ranks: parts of every batch.
        trains: told what is trained on, just before.
        meanwhile: done while the trainer is busy.
    """

    def __init__(
        self,
        config: Config,
        trainer: Trainer,
        ranks: int,
        trains: Callable[[Sequence[TrainBatch]], None] = lambda parts: None,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        self._config, self._trainer, self._ranks = config, trainer, ranks
        self._trains, self._meanwhile = trains, meanwhile

    @property
    def version(self) -> WeightVersion:
        return self._trainer.version

    async def learn(self, step: int, groups: Sequence[Group]) -> TrainStats:
        config = self._config
        judged = compare(groups, config.advantage)
        parts = shards(step, groups, judged, config.batch.token_budget, worker.sampling_of(config), self._ranks)
        if config.advantage.kind == "gae":
            values = await cast(ValueTrainer, self._trainer).values(parts)
            parts = await asyncio.to_thread(spread, parts, values, config.advantage)  # 3 us a token, while others generate
        self._trains(parts)
        training = asyncio.ensure_future(self._trainer.train(parts))
        try:
            self._meanwhile()
        finally:
            stats = await training
        return stats

    async def settle(self) -> WeightVersion:
        return await self._trainer.settle()

    async def save(self, folder: Path) -> Path:
        await self._trainer.save(folder)
        return folder
