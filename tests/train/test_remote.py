"""A trainer at the other end of a line: calls, numbers and errors arrive as they are."""

from __future__ import annotations

import asyncio
import math
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollyard.errors import CheckpointError, NonFinite, RanksApart, TrainerLost, TrainError
from rollyard.place.link import Link
from rollyard.train import wire
from rollyard.train.host import serve_member
from rollyard.train.remote import RemoteTrainer
from rollyard.types import Sample, Sampling, TrainBatch, TrainStats, VersionSpan, WeightVersion
from rollyard.watch.spans import SpanLog

V0 = WeightVersion(0)


class Noting:
    """A trainer that notes what it is told."""

    def __init__(self) -> None:
        self.version = WeightVersion(4, 1)
        self.seen: list[Any] = []
        self.error: Exception | None = None

    async def _note(self, *told: Any) -> None:
        self.seen.append(told)
        if self.error is not None:
            raise self.error

    async def train(self, shards: tuple[TrainBatch, ...]) -> TrainStats:
        await self._note("train", shards)
        self.version = self.version._replace(step=shards[0].step + 1)
        return TrainStats(self.version.step, 0.1 + 0.2, math.inf, 1e-6, 7, math.nan, 0.0, 1.0, 5e-324, 0.0, 0.0)

    async def values(self, shards: tuple[TrainBatch, ...]) -> tuple[tuple[tuple[float, ...], ...], ...]:
        await self._note("values", shards)
        return (((0.1 + 0.2, math.nan), ()), ((-5e-324,),))

    async def settle(self) -> WeightVersion:
        return self.version

    async def save(self, folder: Path) -> None:
        await self._note("save", folder)

    async def become(self, version: WeightVersion) -> None:
        await self._note("become", version)

    async def open(self, address: str, limit_s: float) -> str:
        await self._note("open", address, limit_s)
        return "there:1/1"

    async def join(self, place: str, rank: int, size: int, limit_s: float) -> None:
        await self._note("join", place, rank, size, limit_s)

    async def close(self) -> None: ...


@asynccontextmanager
async def line(trainer: Noting, step_s: float = 5.0) -> AsyncIterator[tuple[RemoteTrainer, Link]]:
    ours, theirs = socket.socketpair()
    here, there = [Link(name, *await asyncio.open_connection(sock=s)) for name, s in (("trainer 0", ours), ("us", theirs))]
    serve_member(trainer, there, SpanLog(), "10.0.0.9")
    for each in (here, there):
        each.open()
        each.ready()
    try:
        yield RemoteTrainer("trainer 0", here, V0, start_s=5.0, step_s=step_s), there
    finally:
        await here.close()
        await there.close()


def sample(*logprobs: float) -> Sample:
    tokens = len(logprobs)
    spans = (VersionSpan(WeightVersion(3, 1), V0, tokens),)
    return Sample(2, 1, (9, *range(tokens)), (False,) + (True,) * tokens, (0.0, *logprobs), (0.0,) + (-0.1,) * tokens, spans)


async def test_every_call_arrives() -> None:
    trainer = Noting()
    async with line(trainer) as (remote, _):
        assert remote.version == V0
        await remote.start()
        assert remote.version == WeightVersion(4, 1)
        batch = TrainBatch(
            4, ((sample(-0.1, -1e-45), sample(math.nextafter(-1, 0))), (sample(-2.0),)), Sampling(9, 0.7, stop=("x",))
        )
        stats = await remote.train([batch])
        assert remote.version == WeightVersion(5, 1)
        assert (stats.step, stats.loss, stats.grad_norm, stats.logprob_gap_mean) == (5, 0.1 + 0.2, math.inf, 5e-324)
        assert math.isnan(stats.entropy)
        ((row, none), other) = await remote.values([batch])
        assert row[0] == 0.1 + 0.2 and math.isnan(row[1]) and (none, other) == ((), ((-5e-324,),))
        await remote.save(Path("/there/5"))
        assert await remote.open("10.0.0.1", 7.5) == await remote.open("", 7.5) == "there:1/1"
        await remote.join("there:1/1", 1, 2, 7.5)
        await remote.become(WeightVersion(8, 2))
        assert remote.version == WeightVersion(8, 2)
        assert trainer.seen == [
            ("train", (batch,)),
            ("values", (batch,)),
            ("save", Path("/there/5")),
            ("open", "10.0.0.1", 7.5),
            ("open", "10.0.0.9", 7.5),  # its own, where none is named
            ("join", "there:1/1", 1, 2, 7.5),
            ("become", WeightVersion(8, 2)),
        ]


@given(st.lists(st.floats(), min_size=1))
def test_numbers_arrive_to_the_last_bit(numbers: list[float]) -> None:
    batch = TrainBatch(0, ((sample(*numbers),),), Sampling(9))
    (arrived,) = wire.SHARDS.validate_json(wire.SHARDS.dump_json((batch,)))
    found = arrived.samples[0].logprobs[1:]
    for sent, got in zip(numbers, found, strict=True):
        assert struct.pack("d", sent) == struct.pack("d", got) or (math.isnan(sent) and math.isnan(got))


@pytest.mark.parametrize(
    "error", [NonFinite("step 4: loss nan"), RanksApart("rank 1 of 2 lost the others"), CheckpointError("full")]
)
async def test_errors_arrive_as_what_they_are(error: Exception) -> None:
    trainer = Noting()
    trainer.error = error
    async with line(trainer) as (remote, _):
        with pytest.raises(type(error), match=str(error)):
            await remote.train([TrainBatch(4, (), Sampling(9))])
        assert remote.version == V0


async def test_a_bug_there_is_an_error_of_the_trainer() -> None:
    trainer = Noting()
    trainer.error = RuntimeError("out of memory")
    async with line(trainer) as (remote, _):
        with pytest.raises(TrainError, match="trainer 0 failed: RuntimeError: out of memory"):
            await remote.train([TrainBatch(4, (), Sampling(9))])


async def test_one_that_is_gone_is_lost_and_one_that_is_late_is_told() -> None:
    trainer, never = Noting(), asyncio.Event()
    trainer.train = lambda shards: never.wait()  # type: ignore[assignment,method-assign,return-value]
    async with line(trainer, step_s=0.1) as (remote, there):
        with pytest.raises(TrainError, match=r"trainer 0 did not answer train.step within 0.1 s"):
            await remote.train([TrainBatch(4, (), Sampling(9))])
        await there.close()
        with pytest.raises(TrainerLost, match="trainer 0 is lost: trainer 0 ended"):
            await remote.train([TrainBatch(4, (), Sampling(9))])
        with pytest.raises(TrainerLost):
            await remote.start()
