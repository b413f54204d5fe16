"""Proves that engines decode with the weights they were given: the canary at the start, a probe at each load.

The driver's side: it asks engines, has versions brought to them, and says what is wrong. What their answers are worth is
found where the trainer's model is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from rollyard.errors import EngineError, EngineLost, TimeLimitExceeded, WeightSyncError
from rollyard.events import EngineId
from rollyard.protocols.weights import Evidence
from rollyard.types import (
    PROOFS,
    Answer,
    Canary,
    Completion,
    Finding,
    Judged,
    Request,
    RequestId,
    Sampling,
    Verdict,
    WeightVersion,
)
from rollyard.weights.words import named

ROUNDS = 6  # canaries at most: those after the first are for tensors that did not show
MOST_NOISE = 0.3  # nats; bfloat16 comes to a tenth of it
LIMIT_S = 300.0  # seconds that an engine may take for an answer

MIXED = WeightVersion(-1)  # nobody's

Ask = Callable[[EngineId, Sequence[Request]], Awaitable[Sequence[Completion]]]
Roll = Callable[[WeightVersion], Awaitable[None]]


class Prover:
    """Asks engines for one token after each of some prompts.

    Args:
        evidence: the trainer's side.
        ask: gets completions from one engine.
    """

    def __init__(self, evidence: Evidence, ask: Ask, limit_s: float = LIMIT_S) -> None:
        self._evidence, self._ask, self._limit_s = evidence, ask, limit_s
        self._version: WeightVersion | None = None
        self._compares = False  # there was a version before
        self._prompts: tuple[tuple[int, ...], ...] = ()
        self._attempts = 0

    async def published(self, version: WeightVersion, engines: Sequence[EngineId] = ()) -> None:
        """The parameters as they are now were published to these engines. Raises WeightSyncError, TrainError."""
        await self._evidence.published(version, engines)
        self._compares = self._compares or self._version not in (None, version)
        self._version = version

    async def check(self, engine: EngineId) -> Verdict:
        """Probe an engine that took the last version. The first version has none before it to be told from.

        Raises WeightSyncError when the engine contradicts: it decodes with other weights. EngineError when it answers wrongly.
        """
        assert self._version is not None, "nothing was published"
        version = self._version
        if not self._compares:
            return Verdict.UNDECIDABLE
        return await self._judged(engine, [replace(answer, version=version) for answer in await self._answers(engine)])

    async def look(self, engine: EngineId) -> Verdict:
        """The same between two loads: does it decode with the version that it says? Raises as `check` does."""
        return await self._judged(engine, await self._answers(engine)) if self._compares else Verdict.UNDECIDABLE

    async def _judged(self, engine: EngineId, answers: Sequence[Answer]) -> Verdict:
        probed = await self._evidence.check(engine, answers)
        if probed.verdict is Verdict.CONTRADICTED:
            has = "none that is known" if probed.other is None else f"those of {named(probed.other)}"
            gaps = f"its logprobs are {probed.new:.2g} nats from its own version's and {probed.old:.2g} from the nearest other's"
            version = answers[0].version
            problem = f"says that it has {named(version) if version else 'no version'}, and decodes with other weights, {has}"
            raise WeightSyncError(f"engine {engine} {problem}: {gaps}")
        return probed.verdict

    async def prove(self, engines: Sequence[EngineId], version: WeightVersion, roll: Roll) -> Canary:
        """The canary. `roll` brings the parameters as they are then to all engines, as the version it is given.

        Raises WeightSyncError, naming the engine and where it can the tensor that did not arrive.
        """
        before, evidence, findings = await self._each(engines), self._evidence, list[Finding]()
        try:
            base = await evidence.begin(before)
            _check_noise(base.noise)
            left = base.tensors
            for attempt in range(1, ROUNDS + 1):
                await evidence.move(attempt, left)
                await roll(WeightVersion(version.step, -attempt))
                before = await self._each(before)
                judged = await evidence.judge(before)
                _check_all_arrived(judged)
                findings += judged.findings.values()
                left = judged.unseen
                if not left:
                    break
        finally:
            await asyncio.shield(evidence.restore())  # goes on whatever becomes of whoever waits
        await roll(version)
        for engine, found in (await evidence.returned(await self._each(before))).items():
            if not found.passed:
                raise WeightSyncError(f"engine {engine} did not come back from the moved weights: {found.gap:.2g} nats off")
        worst = max(findings, key=lambda each: each.gap / each.limit)
        return Canary(len(base.tensors), max(base.noise.values()), worst.gap, worst.limit, left)

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
        self._prompts = self._prompts or await self._evidence.prompts()
        self._attempts += 1  # names of their own
        try:
            async with asyncio.timeout(self._limit_s):
                completions = await self._ask(engine, requests(self._prompts, self._attempts))
        except TimeoutError:
            raise TimeLimitExceeded(f"engine {engine} did not answer a proof within {self._limit_s:g} s") from None
        return tuple(_answer(engine, done) for done in completions)


def requests(prompts: Sequence[tuple[int, ...]], attempt: int) -> tuple[Request, ...]:
    """One token after each of these prompts, drawn from the model's own distribution."""
    sampling = Sampling(1, ignore_eos=True)
    return tuple(
        Request(RequestId(PROOFS - number, 0, attempt), ids, sampling, seed=number) for number, ids in enumerate(prompts)
    )


def _answer(engine: EngineId, done: Completion) -> Answer:
    """Raises EngineError for one that is not a token and its logprob. What crossed a change of weights is of no version."""
    if len(done.token_ids) != 1 or len(done.logprobs) != 1:
        raise EngineError(
            f"engine {engine} was asked for one token, and gave {len(done.token_ids)} and {len(done.logprobs)} logprobs"
        )
    span = done.spans[-1] if done.spans else None
    version = None if span is None else span.version if span.version == span.oldest_kv else MIXED
    return Answer(done.token_ids[0], done.logprobs[0], version)


def _check_noise(noise: Mapping[EngineId, float]) -> None:
    for engine, nats in noise.items():
        if not nats <= MOST_NOISE:
            problem = f"{nats:.2g} nats from the trainer's logprobs with the same weights, at most {MOST_NOISE:g} is noise"
            raise WeightSyncError(f"engine {engine} does not compute the trainer's model: {problem}")


def _check_all_arrived(judged: Judged) -> None:
    for engine, found in judged.findings.items():
        if not found.passed:
            which = (
                f"as if {' or '.join(found.behind)} had stayed as it was" if found.behind else "and no single tensor explains it"
            )
            problem = f"engine {engine} does not decode with all the weights that it was sent"
            raise WeightSyncError(f"{problem}: {found.gap:.2g} nats off, at most {found.limit:.2g} would be noise, {which}")
