"""Proves that engines decode with the weights they were given: the canary at the start, a probe at each load.

A shell around `canary` and `probe`: it moves the trainer's parameters, has versions brought to the engines, asks them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from torch import Tensor

from rollyard.errors import WeightSyncError
from rollyard.events import EngineId
from rollyard.model.transformer import CausalLM
from rollyard.protocols import Device
from rollyard.types import Canary, Completion, Request, WeightVersion
from rollyard.weights import canary, probe
from rollyard.weights.flat import named
from rollyard.weights.probe import Answer, Verdict

MOVED = -1  # the incarnation of moved weights
NOISE = {"torch.float32": 1e-5, "torch.bfloat16": 2e-2}  # nats, for engines that were not measured with the canary

Ask = Callable[[EngineId, Sequence[Request]], Awaitable[Sequence[Completion]]]
Roll = Callable[[WeightVersion], Awaitable[None]]


class Prover:
    """Keeps the trainer's logprobs of the probe for two versions.

    Args:
        model: the trainer's.
        device: where it computes.
        ask: gets completions from one engine.
    """

    def __init__(self, model: CausalLM, device: Device, ask: Ask) -> None:
        self._model, self._device, self._ask = model, device, ask
        self._noise: dict[EngineId, float] = {}
        self._new: tuple[WeightVersion, Tensor] | None = None
        self._old: Tensor | None = None
        self._attempts = 0

    async def published(self, version: WeightVersion) -> None:
        """The parameters as they are now were published: keep what they say."""
        table = await self._device.run(probe.table, self._model)
        if self._new is not None and self._new[0] != version:
            self._old = self._new[1]
        self._new = version, table

    async def check(self, engine: EngineId) -> Verdict:
        """Probe an engine that took the last version. The first version has none before it to be told from.

        Raises WeightSyncError when the engine contradicts: it decodes with the version before.
        """
        assert self._new is not None, "nothing was published"
        version, new = self._new
        if self._old is None:
            return Verdict.UNDECIDABLE
        answers = await self._answers(engine)
        noise = self._noise.get(engine, NOISE[str(self._model.head_weight.dtype)])
        verdict = probe.judge(answers, new, self._old, noise)
        if verdict is Verdict.CONTRADICTED:
            there, before = probe.distance(answers, new), probe.distance(answers, self._old)
            problem = f"engine {engine} says that it has {named(version)}, and decodes with the version before"
            raise WeightSyncError(f"{problem}: its logprobs are {there:.2g} nats from the new ones and {before:.2g} from the old")
        return verdict

    async def prove(self, engines: Sequence[EngineId], version: WeightVersion, roll: Roll) -> Canary:
        """The canary. `roll` brings the parameters as they are then to all engines, as the version it is given.

        Raises WeightSyncError, naming the engine and where it can the tensor that did not arrive.
        """
        base = await self._device.run(probe.table, self._model)
        before = {engine: await self._answers(engine) for engine in engines}
        context = canary.moved(self._model)
        moved = await self._device.run(context.__enter__)
        try:
            await roll(WeightVersion(version.step, MOVED))
            found = {engine: await self._judged(engine, before[engine], base, moved) for engine in engines}
        finally:
            await self._device.run(context.__exit__, None, None, None)
        await roll(version)
        for engine in engines:
            self._noise[engine] = found[engine].noise
            again = probe.distance(await self._answers(engine), base)
            if again > found[engine].limit:
                raise WeightSyncError(f"engine {engine} did not come back from the moved weights: {again:.2g} nats off")
        worst = max(found.values(), key=lambda each: each.gap / each.limit)
        unseen = canary.unseen(moved.shows, worst.limit)
        return Canary(len(moved.shows), worst.noise, worst.gap, worst.limit, unseen)

    async def _judged(self, engine: EngineId, before: Sequence[Answer], base: Tensor, moved: canary.Moved) -> canary.Finding:
        after = await self._answers(engine)
        found = canary.compare(before, base, after, moved)
        if not found.passed:
            names = await self._device.run(canary.left_behind, self._model, moved, after, found.limit)
            which = f"as if {' or '.join(names)} had stayed as it was" if names else "and no single tensor explains it"
            problem = f"engine {engine} does not decode with all the weights that it was sent"
            raise WeightSyncError(f"{problem}: {found.gap:.2g} nats off, at most {found.limit:.2g} would be noise, {which}")
        return found

    async def _answers(self, engine: EngineId) -> tuple[Answer, ...]:
        self._attempts += 1  # names of their own
        asked = probe.requests(self._model.architecture.vocab_size, self._attempts)
        completions = await self._ask(engine, asked)
        return tuple(Answer(done.token_ids[0], done.logprobs[0]) for done in completions)
