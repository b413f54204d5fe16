"""Engines that answer the prover from a model's own logprobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rollyard.events import EngineId
from rollyard.model.transformer import CausalLM
from rollyard.place.inline import DeviceThread
from rollyard.types import Answer, Completion, FinishReason, Request
from rollyard.weights import probe


class Answering:
    """What the prover asks with.

    Args:
        models: what each engine decodes with; a model that follows the trainer's is the trainer's.
    """

    def __init__(self, device: DeviceThread, models: Mapping[EngineId, CausalLM]) -> None:
        self._device, self._models = device, models
        self.asked = 0

    async def __call__(self, engine: EngineId, requests: Sequence[Request]) -> list[Completion]:
        self.asked += 1
        said = await self.answers(engine)
        return [
            Completion(request.id.group, 0, (each.token,), (each.logprob,), (), FinishReason.LENGTH, "")
            for request, each in zip(requests, said, strict=True)
        ]

    async def answers(self, engine: EngineId) -> tuple[Answer, ...]:
        table = await self._device.run(probe.table, self._models[engine])
        return tuple(Answer(int(row.argmax()), float(row.max())) for row in table)
