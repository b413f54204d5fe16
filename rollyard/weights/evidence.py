"""What the trainer's own model says about engines' answers: tables of logprobs, and moved parameters.

A canary keeps the parameters of `begin` on the CPU until `restore`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from rollyard.events import EngineId
from rollyard.model.transformer import CausalLM
from rollyard.protocols.devices import Device
from rollyard.protocols.weights import Answers
from rollyard.types import Activity, Baseline, Finding, Judged, Probed, Verdict, WeightVersion
from rollyard.weights import canary, probe
from rollyard.weights.record import record

T = TypeVar("T")

SHOWN = 2.0  # times the limit: what the absence of a tensor must come to, to be certain of it
MUCH_COARSER = 20.0
NOISE = {"torch.float32": 1e-5, "torch.bfloat16": 2e-2}  # nats, for engines that were not measured with the canary


@dataclass(slots=True)
class Case:
    """A canary under way, or the last one."""

    base: Tensor  # [prompts, vocab] logprobs of the parameters as they were
    before: Mapping[EngineId, Answers]  # what engines said then
    noise: Mapping[EngineId, float]  # nats
    kept: canary.Kept
    worst: Finding
    moved: canary.Moved | None = None
    coarser: float = 1.0  # how many times coarser the logprobs of the moved parameters are

    @property
    def most_noise(self) -> float:
        return max(self.noise.values())


class Tables:
    """What a trainer says with the last two versions that were published, and with the first: an engine that was started anew
    without anybody's knowledge decodes with that one.

    Args:
        dtype: number format of the weights, as torch's `str` has it.
    """

    def __init__(self, dtype: str) -> None:
        self._usual = NOISE[dtype]
        self._known: dict[WeightVersion, Tensor] = {}  # the newest last
        self.noise: dict[EngineId, float] = {}  # nats, as measured

    def published(self, version: WeightVersion, table: Tensor) -> None:
        self._known.pop(version, None)
        self._known[version] = table
        for gone in list(self._known)[1:-2]:
            del self._known[gone]

    def check(self, engine: EngineId, answers: Answers) -> Probed:
        """Undecidable where no other version is known, to be told from, and where the answers are of several or of one that is
        not known any more."""
        assert self._known, "nothing was published"
        newest = next(reversed(self._known))
        versions = {newest if answer.version is None else answer.version for answer in answers}
        version = versions.pop()
        if versions or version not in self._known:
            return Probed(Verdict.UNDECIDABLE, math.inf, math.inf)
        others = {other: table for other, table in self._known.items() if other != version}
        return probe.judge(answers, self._known[version], others, self.noise.get(engine, self._usual))


class Evidence:
    """Implements `protocols.TrainerEvidence` beside the model.

    Args:
        model: the trainer's.
        device: where it computes. Every method but `check` is one call there, so that a restore that is asked for while
            another is under way comes after all of it.
        together: the same device, where ranks that share the model do the same at the same time. Only a restore needs no
            other rank.
        shares: of the workers that engines are made of, if they are several.
    """

    def __init__(
        self, model: CausalLM, device: Device, together: Device | None = None, shares: canary.Shares | None = None
    ) -> None:
        self._model, self._device, self._together, self._shares = model, device, together or device, shares or {}
        self._tables = Tables(str(model.head_weight.dtype))
        self._case: Case | None = None
        self._coarse: float | None = None

    async def prompts(self) -> tuple[tuple[int, ...], ...]:
        return probe.prompts(self._model.architecture.vocab_size)

    async def published(self, version: WeightVersion, engines: Sequence[EngineId] = ()) -> None:
        self._tables.published(version, await self._run("evidence", self._table))

    async def check(self, engine: EngineId, answers: Answers) -> Probed:
        return self._tables.check(engine, answers)

    async def record(self, version: WeightVersion, folder: Path) -> None:
        await self._run("evidence", record, self._model, version, folder)

    async def begin(self, answers: Mapping[EngineId, Answers]) -> Baseline:
        return await self._run("canary", self._begin, answers)

    async def move(self, attempt: int, names: Sequence[str]) -> None:
        await self._run("canary", self._move, attempt, names)

    async def judge(self, answers: Mapping[EngineId, Answers]) -> Judged:
        return await self._run("canary", self._judge, answers)

    async def restore(self) -> None:
        await self._device.run(self._device.spans.timed(Activity.SYNC, self._restore, "canary"))

    async def returned(self, answers: Mapping[EngineId, Answers]) -> Mapping[EngineId, Finding]:
        case = self._under_way()
        return {
            engine: Finding(probe.distance(each, case.base), canary.least_limit(case.noise[engine]))
            for engine, each in answers.items()
        }

    async def _run(self, what: str, call: Callable[..., T], *args: object) -> T:
        return await self._together.run(self._device.spans.timed(Activity.SYNC, call, what), *args)

    # ------------------------------------------------------------------------------------------- on the device

    def _table(self) -> Tensor:
        """What the policy says of the probe's prompts, see `probe.table`."""
        return probe.table(self._model)

    def _subject(self) -> CausalLM:
        """The model whose parameters are moved."""
        return self._model

    def _begin(self, answers: Mapping[EngineId, Answers]) -> Baseline:
        self._restore()  # of one that was left behind
        self._model = self._subject()
        base = self._table()
        noise = {engine: probe.distance(each, base) for engine, each in answers.items()}
        kept = canary.keep(self._model)
        self._tables.noise |= noise
        self._case = Case(base, dict(answers), noise, kept, Finding(0.0, canary.LEAST_LIMIT))
        return Baseline(tuple(kept), noise)

    def _move(self, attempt: int, names: Sequence[str]) -> None:
        case = self._under_way()
        case.moved = canary.move(self._model, case.kept, names, attempt, canary.least_limit(case.most_noise), self._shares)
        case.coarser = self._coarser(case)

    def _coarser(self, case: Case) -> float:
        """Looked up only where the noise is large enough to matter."""
        if case.most_noise * canary.LIMIT * MUCH_COARSER < canary.LEAST_LIMIT:
            return 1.0
        if self._coarse is None:
            away = canary.keep(self._model)
            canary.restore(self._model, case.kept)
            self._coarse = canary.answer_to_rounding(self._model)
            canary.restore(self._model, away)
        return max(1.0, canary.answer_to_rounding(self._model) / self._coarse)

    def _judge(self, answers: Mapping[EngineId, Answers]) -> Judged:
        case, findings = self._under_way(), dict[EngineId, Finding]()
        assert case.moved is not None and answers, "nothing to judge"
        for engine, after in answers.items():
            found = canary.compare(case.before[engine], case.base, after, case.moved, case.coarser)
            findings[engine] = found
            if not found.passed:
                behind = canary.left_behind(self._model, case.kept, after, found.limit, self._shares)
                return Judged(findings | {engine: replace(found, behind=behind)}, ())
            case.worst = max(case.worst, found, key=lambda each: each.gap / each.limit)
        return Judged(findings, canary.hidden(self._model, case.kept, case.moved, after, SHOWN * case.worst.limit, self._shares))

    def _restore(self) -> None:
        if self._case is not None and self._case.kept:
            canary.restore(self._model, self._case.kept)
            self._case.kept = {}

    def _under_way(self) -> Case:
        assert self._case is not None, "no canary was begun"
        return self._case
