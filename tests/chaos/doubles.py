"""What runs in the processes of a chaos run: it takes virtual time, and has a real state that shows what was trained on what.

The trainer's weights are a hash over everything it trained on, in order. Where engines have weights that decide what they
write (`bound`), they got them from the trainer: one wrong version anywhere, and all later weights are others.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from rollyard.engine.fake import BASE_GAP, END, FakeEngine, Script, logprob_of
from rollyard.journal.recover import Past
from rollyard.protocols.processes import Channel
from rollyard.types import (
    Answer,
    Handed,
    Manifest,
    Probed,
    Prompt,
    TensorInfo,
    TrainBatch,
    TrainStats,
    Verdict,
    WeightVersion,
)
from tests.chaos.processes import Clockwork

VOCABULARY = 97
LONGEST = 24  # tokens of a completion
TENSORS = (TensorInfo("weight", (1,), "torch.float32"),)
STATE = "state.json"
BASE = "base"


@dataclass(frozen=True)
class Times:
    """Seconds."""

    token: float = 0.05
    load: float = 0.1
    prepare: float = 0.05
    train: float = 0.6
    save: float = 0.2
    judge: float = 0.1
    start: float = 1.0


def now() -> float:
    return asyncio.get_running_loop().time()


def written(seed: int, weights: str) -> Script:
    """A completion, which follows from the request's seed, and from the engine's weights where these are told."""
    random = Random(f"{seed} {weights}")
    return Script((*(random.randrange(1, VOCABULARY) for _ in range(random.randint(1, LONGEST - 1))), END))


class Engine(FakeEngine):
    """An engine with weights."""

    def __init__(self, id: str, slots: int, times: Times, clock: Clockwork, *, bound: bool) -> None:
        super().__init__(
            id,
            slots=slots,
            token_s=times.token,
            load_s=times.load,
            script=lambda request: written(request.seed, self.weights if bound else ""),
            sleep=clock.sleep,
            clock=now,
        )
        self.weights, self._near, self._times, self._own = "", "", times, clock

    async def prepare(self, manifest: Manifest) -> None:
        await self._own.sleep(self._times.prepare)
        await super().prepare(manifest)
        self._near = manifest.source

    async def load(self, version: WeightVersion) -> None:
        await super().load(version)
        self.weights = self._near


class Known:
    """What engines say with the weights that they were given (protocols.Evidence, of a probe alone)."""

    async def prompts(self) -> tuple[tuple[int, ...], ...]:
        return ((5, 6), (5, 7))

    async def published(self, version: WeightVersion, engines: Sequence[str]) -> None:
        """The same logprobs whatever the version."""

    async def check(self, engine: str, answers: Sequence[Answer]) -> Probed:
        gap = max(abs(answer.logprob - logprob_of(answer.token)) for answer in answers)
        return Probed(Verdict.CONTRADICTED if gap > BASE_GAP / 2 else Verdict.VERIFIED, gap, BASE_GAP - gap, WeightVersion(0))


def write(folder: Path, state: Mapping[str, object]) -> None:
    folder.mkdir(parents=True)
    (folder / STATE).write_text(json.dumps(state))


def digest(before: str, shards: Sequence[TrainBatch]) -> str:
    """Weights after one more batch: of its tokens, what they were worth, and their order. Not of who wrote them when."""
    rows = [
        (sample.group, sample.member, sample.token_ids, sample.mask, sample.logprobs, sample.advantages)
        for shard in shards
        for sample in sorted(shard.samples, key=lambda each: (each.group, each.member))
    ]
    return hashlib.blake2b(repr((before, rows)).encode(), digest_size=8).hexdigest()


class Trainer:
    """Implements `train.host`'s side of a trainer, a publisher and a handoff."""

    def __init__(self, times: Times, clock: Clockwork, past: Past, folder: Path) -> None:
        self._times, self._clock, self._version, self._life = times, clock, past.version, past.lives
        self.weights = BASE
        if past.checkpoint:
            self.weights = json.loads((folder / past.checkpoint / STATE).read_text())["weights"]
        self._offered = Manifest(self._version, TENSORS, 0, self.weights)
        self._turn = asyncio.Lock()

    @property
    def version(self) -> WeightVersion:
        return self._version

    async def train(self, shards: Sequence[TrainBatch]) -> TrainStats:
        async with self._turn:
            await self._clock.sleep(self._times.train)
            assert all(shard.step == self._version.step for shard in shards)
            self.weights = digest(self.weights, shards)
            step, tokens = self._version.step + 1, sum(sum(sample.mask) for shard in shards for sample in shard.samples)
            self._version = WeightVersion(step, self._life)
        return TrainStats(step, 0.0, 0.0, 0.0, tokens, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0)

    async def settle(self) -> WeightVersion:
        async with self._turn:
            return self._version

    async def save(self, folder: Path) -> None:
        await self._clock.sleep(self._times.save)
        write(folder, {"weights": self.weights, "step": self._version.step})

    async def become(self, version: WeightVersion) -> None:
        self._version = version

    async def close(self) -> None:
        """Nothing is open."""

    # ---------------------------------------------------------------------------------------- as a publisher

    async def publish(self, version: WeightVersion, engines: Sequence[str]) -> Manifest:
        self._offered = Manifest(version, TENSORS, 4, self.weights)
        return self._offered

    async def again(self, engines: Sequence[str]) -> Manifest:
        return self._offered

    async def deliver(self) -> None:
        await self._clock.sleep(self._times.prepare)

    def taken(self, engine: str, version: WeightVersion) -> None:
        """Nothing is mapped."""

    def lost(self, engine: str) -> None:
        """Nothing is mapped."""

    # ------------------------------------------------------------------------------------------ as a handoff

    async def give(self, version: WeightVersion, to: str) -> Manifest:
        return Manifest(version, TENSORS, 16, self.weights)

    async def given(self) -> None:
        await self._clock.sleep(self._times.load)

    async def take(self, manifest: Manifest) -> Handed:
        await self._clock.sleep(self._times.load)
        self.weights = manifest.source
        return Handed(manifest.bytes_copied, self._times.load)


class Prompts:
    """So many of them (protocols.PromptSource)."""

    def __init__(self, count: int, done: frozenset[int] = frozenset(), cursor: int = 0) -> None:
        self._count, self._done, self._cursor = count, done, cursor

    @property
    def cursor(self) -> int:
        return self._cursor

    def take(self, count: int) -> tuple[tuple[Prompt, ...], bool]:
        found: list[Prompt] = []
        while len(found) < count and self._cursor < self._count:
            if self._cursor not in self._done:
                found.append(Prompt(self._cursor, self._cursor, (5, 6, self._cursor + 1), f"p{self._cursor}"))
            self._cursor += 1
        return tuple(found), self._cursor == self._count


def judged(prompt: str, completion: str) -> float:
    """A verdict that belongs to the completion."""
    return float(int(hashlib.blake2b(f"{prompt} {completion}".encode(), digest_size=2).hexdigest(), 16) % 11)


async def judge(times: Times, clock: Clockwork, channel: Channel) -> None:
    """What a reward worker runs: the other end of `reward.workers`."""

    async def start(content: bytes) -> bytes:
        await clock.sleep(times.start)
        return b""

    async def judge(content: bytes) -> bytes:
        _, _, texts, _ = json.loads(content)
        await clock.sleep(times.judge)
        return json.dumps([(judged(*each), "") for each in texts]).encode()

    channel.handle("start", start)
    channel.handle("judge", judge)
    channel.ready()
    await channel.ended()
