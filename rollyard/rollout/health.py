"""Which engines are fit to write (PURE): what each of them did wrong lately, and which has to go.

    wrong answer   counts one; ten answers that are right take one back     at `faults`: it has to go, and is not believed
    failure        of a request that others may do; counts once a prompt,
                   and one answer that is right takes all of them back      at `failures`: it has to go

A wrong answer is never taken, whoever gives it; that an engine gives several says that what it gave before may be wrong too.
Failures are counted by prompt: one that every engine fails at speaks against the prompt, and against none of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rollyard.events import EngineId
from rollyard.rollout.policy import RolloutPolicy
from rollyard.types import WeightVersion

RIGHT = 10  # right answers that make up for a wrong one


@dataclass(slots=True)
class Record:
    """Of one engine, since it came up."""

    epoch: int  # what was written in an earlier one is beyond doubt
    versions: dict[WeightVersion, None] = field(default_factory=dict)  # acknowledged; last words of an old one may come late
    wrong: int = 0  # in tenths
    failed: set[int] = field(default_factory=set)  # prompts, since the last right answer


class Health:
    """Keeps the records.

    Args:
        policy: says how much an engine may do wrong; 0: as much as it likes.
    """

    def __init__(self, policy: RolloutPolicy) -> None:
        self._policy = policy
        self._records: dict[EngineId, Record] = {}
        self._epochs = 0

    def up(self, engine: EngineId, version: WeightVersion | None) -> None:
        """It is here, with a clean record."""
        self._epochs += 1
        self._records[engine] = Record(self._epochs, {} if version is None else {version: None})

    def gone(self, engine: EngineId) -> None:
        self._records.pop(engine, None)

    def took(self, engine: EngineId, version: WeightVersion) -> None:
        """It acknowledged these weights."""
        if engine in self._records:
            self._records[engine].versions[version] = None

    def proved(self, engine: EngineId) -> None:
        """Its logprobs were those of the weights that it says it has: what it wrote so far is beyond doubt."""
        if engine in self._records:
            self._epochs += 1
            self._records[engine].epoch = self._epochs

    def epoch(self, engine: EngineId) -> int:
        """Anew with every start and every proof; no two engines share one."""
        return self._records[engine].epoch

    def took_none(self, engine: EngineId, version: WeightVersion) -> str:
        """What is wrong with tokens of this version from this engine; empty when nothing is."""
        record = self._records.get(engine)
        if record is None or version in record.versions:
            return ""
        last = next(reversed(record.versions), None)
        has = "it acknowledged none" if last is None else f"the last it acknowledged is {tuple(last)}"
        return f"tokens of version {tuple(version)}, and {has}"

    def right(self, engine: EngineId) -> None:
        """It finished a request as it should."""
        record = self._records.get(engine)
        if record is not None and (record.wrong or record.failed):
            record.wrong = max(record.wrong - 1, 0)
            record.failed.clear()

    def wrong(self, engine: EngineId, problem: str) -> str:
        """It gave an answer that cannot be. Why it has to go, if it has to."""
        record = self._records.get(engine)
        if record is None:
            return ""
        record.wrong += RIGHT
        if not 0 < self._policy.faults * RIGHT <= record.wrong:
            return ""
        return f"it gave wrong answers ({self._policy.faults} that right ones did not make up for), the last one: {problem}"

    def failed(self, engine: EngineId, prompt: int, cause: str) -> str:
        """A request failed that another engine may do. Why it has to go, if it has to."""
        record = self._records.get(engine)
        if record is None:
            return ""
        record.failed.add(prompt)
        if not 0 < self._policy.failures <= len(record.failed):
            return ""
        return f"it failed at {len(record.failed)} prompts in a row, the last time: {cause}"
