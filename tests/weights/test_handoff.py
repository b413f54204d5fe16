"""A trainer's state arrives whole in another place, or what is there stays as it was."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from rollyard.errors import TrainerLost, WeightSyncError
from rollyard.place.child import Child, launch
from rollyard.types import Handed, WeightVersion
from rollyard.weights import handoff
from rollyard.weights.remote import RemoteHandoff, hand_over
from tests.weights.halves import Half, State
from tests.weights.moving import spoilt

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
V1, V2 = WeightVersion(1), WeightVersion(2)
BYTES = (17 * 33 + 18 * 33 + 19 * 33) * 4 * 3 - 18 * 33 * 2 + 3 * 4 + 3  # and the random state
Pair = tuple[Half, Half]


@pytest.fixture(params=["shared_memory", "broadcast"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def pair(transport: str) -> Iterator[Pair]:
    """Halves a and b, in this process."""
    made = Half("a", transport, State(1), limit_s=4.0), Half("b", transport, State(2), limit_s=4.0)
    yield made
    for each in made:
        each.close()


async def test_they_take_turns(pair: Pair) -> None:
    for number in range(6):
        giving, taking = pair[number % 2], pair[(number + 1) % 2]
        await giving.device.run(giving.state.train, 3 + number)
        handed = await hand_over(giving.handoff, taking.handoff, WeightVersion(3 + number), "ba"[number % 2])
        taking.state.become(giving.state.version)
        assert giving.state.digest() == taking.state.digest()
        assert handed.bytes == BYTES + len(giving.state.random.get_state()) and handed.seconds > 0


async def test_what_is_given_is_what_it_was_then(pair: Pair) -> None:
    """The giving side may train on at once; the taking side need not have come."""
    giving, taking = pair
    before = giving.state.digest()
    manifest = await giving.handoff.give(V1, "b")
    await giving.device.run(giving.state.train, 7)
    await asyncio.gather(taking.handoff.take(manifest), giving.handoff.given())
    taking.state.become(V1)
    assert taking.state.digest() == before != giving.state.digest()


async def test_another_state_is_refused(transport: str) -> None:
    giving, taking = Half("a", transport, State(1), 2.0), Half("b", transport, State(2, names=("a", "b")), 2.0)
    before = taking.state.digest()
    manifest = await giving.handoff.give(V1, "b")
    with pytest.raises(WeightSyncError, match="only on one side: exp_avg/c, exp_avg_sq/c, step/c, weight/c"):
        await taking.handoff.take(manifest)
    assert taking.state.digest() == before and taking.state.stamp.whole
    giving.close()
    taking.close()


async def test_what_arrives_changed_is_refused(pair: Pair) -> None:
    giving, taking = pair
    before = taking.state.digest()
    manifest = await giving.handoff.give(V1, "b")
    wrong = spoilt(manifest, taking.receiver)
    taken, _ = await asyncio.gather(taking.handoff.take(wrong), giving.handoff.given(), return_exceptions=True)
    assert isinstance(taken, WeightSyncError) and "odd of version 1 arrived changed" in str(taken)
    assert taking.state.digest() == before and taking.state.stamp.whole
    await hand_over(giving.handoff, taking.handoff, V2, "b")
    assert taking.state.digest() != before


async def test_a_torn_state_is_not_given(pair: Pair) -> None:
    giving, taking = pair
    before = taking.state.digest()
    with pytest.raises(RuntimeError), giving.state.stamp.writing():
        raise RuntimeError
    with pytest.raises(WeightSyncError, match="half way"):
        await hand_over(giving.handoff, taking.handoff, V1, "b")
    assert taking.state.digest() == before


async def test_a_state_that_was_torn_is_whole_once_another_was_taken(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    giving, taking = pair

    def breaking(*args: object) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(handoff, "fill", breaking)
        with pytest.raises(RuntimeError, match="out of memory"):
            await hand_over(giving.handoff, taking.handoff, V1, "b")
    assert not taking.state.stamp.whole
    await hand_over(giving.handoff, taking.handoff, V1, "b")
    taking.state.become(V1)
    assert taking.state.stamp.whole and taking.state.digest() == giving.state.digest()


# -------------------------------------------------------------------------------------- between two processes


@asynccontextmanager
async def children(transport: str) -> AsyncIterator[tuple[Child, Child]]:
    orders = [json.dumps({"name": name, "transport": transport, "seed": seed}) for seed, name in enumerate("ab", start=1)]
    starting = (
        launch("tests.weights.halves:half", order.encode(), name=f"half {name}", environment=ENVIRONMENT)
        for name, order in zip("ab", orders, strict=True)
    )
    one, other = await asyncio.gather(*starting)
    try:
        yield one, other
    finally:
        await asyncio.gather(one.close(), other.close())


@pytest.mark.slow
async def test_between_two_processes(transport: str) -> None:
    async with children(transport) as both:
        await asyncio.gather(*(child.call("digest", limit_s=50.0) for child in both))  # they are up
        sides = [RemoteHandoff(child, 20.0) for child in both]
        for number in range(4):
            giving, taking = number % 2, (number + 1) % 2
            version = WeightVersion(3 + number)
            await both[giving].call("train", str(version.step).encode(), limit_s=10.0)
            handed = await hand_over(sides[giving], sides[taking], version, "ab"[taking])
            assert isinstance(handed, Handed) and handed.bytes > BYTES
            await both[taking].call("become", str(version.step).encode(), limit_s=10.0)
            digests = [await child.call("digest", limit_s=10.0) for child in both]
            assert digests[0] == digests[1]
        both[0].kill()
        with pytest.raises(TrainerLost, match="the trainer is lost: half a was ended by signal 9"):
            await hand_over(sides[1], sides[0], V1, "a")
