"""Proves that engines decode with the weights they were given: the canary at the start, a probe at each load.

A shell around `canary` and `probe`: it moves the trainer's parameters, has versions brought to the engines, asks them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence

from torch import Tensor

from rollyard.errors import EngineLost, WeightSyncError
from rollyard.events import EngineId
from rollyard.model.transformer import CausalLM
from rollyard.protocols import Device
from rollyard.types import Canary, Completion, Request, WeightVersion
from rollyard.weights import canary, probe
from rollyard.weights.flat import named
from rollyard.weights.probe import Answer, Verdict

ROUNDS = 6  # canaries at most: those after the first are for tensors that did not show
SHOWN = 2.0  # times the limit: what the absence of a tensor must come to, to be certain of it
MUCH_COARSER = 20.0
MOST_NOISE = 0.3  # nats; bfloat16 comes to a tenth of it
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
        self._coarse: float | None = None

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
        run, model = self._device.run, self._model
        base = await run(probe.table, model)
        before = await self._each(engines)
        self._noise = {engine: probe.distance(answer, base) for engine, answer in before.items()}
        for engine, noise in self._noise.items():
            if noise > MOST_NOISE:
                problem = f"{noise:.2g} nats from the trainer's logprobs with the same weights, at most {MOST_NOISE:g} is noise"
                raise WeightSyncError(f"engine {engine} does not compute the trainer's model: {problem}")
        kept = await run(canary.keep, model)
        limit = canary.least_limit(max(self._noise.values()))
        left, worst = tuple(kept), canary.Finding(0.0, canary.LEAST_LIMIT)
        try:
            for attempt in range(1, ROUNDS + 1):
                moved = await run(canary.move, model, kept, left, attempt, limit)
                coarser = await self._coarser(kept)  # before they are published: it writes parameters
                await roll(WeightVersion(version.step, -attempt))
                answers = await self._each(before)
                before = {engine: before[engine] for engine in answers}
                for engine, after in answers.items():
                    found = await self._judged(engine, before[engine], base, after, moved, coarser, kept)
                    worst = max(worst, found, key=lambda each: each.gap / each.limit)
                left = await run(canary.hidden, model, kept, moved, after, SHOWN * worst.limit)
                if not left:
                    break
        finally:
            await run(canary.restore, model, kept)
        await roll(version)
        for engine, answers_again in (await self._each(before)).items():
            again = probe.distance(answers_again, base)
            if again > canary.least_limit(self._noise[engine]):
                raise WeightSyncError(f"engine {engine} did not come back from the moved weights: {again:.2g} nats off")
        return Canary(len(kept), max(self._noise.values()), worst.gap, worst.limit, left)

    async def _coarser(self, kept: canary.Kept) -> float:
        """How many times coarser the logprobs of the moved parameters are than those of the parameters as they were.

        Looked up only where the noise is large enough to matter.
        """
        if max(self._noise.values()) * canary.LIMIT * MUCH_COARSER < canary.LEAST_LIMIT:
            return 1.0
        if self._coarse is None:
            away = await self._device.run(canary.keep, self._model)
            await self._device.run(canary.restore, self._model, kept)
            self._coarse = await self._device.run(canary.answer_to_rounding, self._model)
            await self._device.run(canary.restore, self._model, away)
        return max(1.0, await self._device.run(canary.answer_to_rounding, self._model) / self._coarse)

    async def _judged(
        self,
        engine: EngineId,
        before: Sequence[Answer],
        base: Tensor,
        after: Sequence[Answer],
        moved: canary.Moved,
        coarser: float,
        kept: canary.Kept,
    ) -> canary.Finding:
        found = canary.compare(before, base, after, moved, coarser)
        if not found.passed:
            names = await self._device.run(canary.left_behind, self._model, kept, after, found.limit)
            which = f"as if {' or '.join(names)} had stayed as it was" if names else "and no single tensor explains it"
            problem = f"engine {engine} does not decode with all the weights that it was sent"
            raise WeightSyncError(f"{problem}: {found.gap:.2g} nats off, at most {found.limit:.2g} would be noise, {which}")
        return found

    async def _each(self, engines: Iterable[EngineId]) -> dict[EngineId, Sequence[Answer]]:
        """What those say that are not lost. Raises EngineLost when none is left."""
        answers: dict[EngineId, Sequence[Answer]] = {}
        lost = EngineLost("no engine is left")
        for engine in engines:
            try:
                answers[engine] = await self._answers(engine)
            except EngineLost as error:
                lost = error
        if not answers:
            raise lost
        return answers

    async def _answers(self, engine: EngineId) -> tuple[Answer, ...]:
        self._attempts += 1  # names of their own
        asked = probe.requests(self._model.architecture.vocab_size, self._attempts)
        completions = await self._ask(engine, asked)
        return tuple(Answer(done.token_ids[0], done.logprobs[0]) for done in completions)
