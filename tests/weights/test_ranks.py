"""Several ranks as one side: who is asked what, also when one fails."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from rollyard.errors import TrainerLost, WeightSyncError
from rollyard.model.folder import load, tensors
from rollyard.model.shards import Whole
from rollyard.place.inline import DeviceThread
from rollyard.protocols.weights import Evidence
from rollyard.train.group import TrainerGroup
from rollyard.types import Baseline, Manifest, WeightVersion
from rollyard.weights.broadcast import BroadcastPublisher
from rollyard.weights.ranks import RanksEvidence, RanksPublisher
from rollyard.weights.source import OwnSource
from tests.tiny import tiny_folder
from tests.train.test_group import APART, STATS, Scripted
from tests.weights.moving import CPU, LOCAL, receiver
from tests.weights.test_many import Noting

V0 = WeightVersion(0)


def meeting() -> TrainerGroup:
    return TrainerGroup(cast(Any, [Scripted(STATS), Scripted(STATS)]), "127.0.0.1", 5.0, shards=True)


async def test_all_ranks_publish_and_the_first_does_the_rest() -> None:
    ranks, group = [Noting("a"), Noting("b")], meeting()
    publisher = RanksPublisher(ranks, group.together)
    assert await publisher.publish(V0, ("e0",)) == Manifest(V0, (), 100, "a/1")
    assert (await publisher.again(("e0",))).source == "a/1"
    await publisher.deliver()
    publisher.taken("e0", V0)
    publisher.lost("e0")
    assert [call[0] for call in ranks[0].calls] == ["publish", "again", "deliver", "taken", "lost"]
    assert [call[0] for call in ranks[1].calls] == ["publish"]
    assert [cast(Scripted, member).calls for member in group._members] == [["open", "join somewhere 0 2"], ["join somewhere 1 2"]]


async def test_they_meet_anew_after_an_offer_that_failed() -> None:
    ranks, group = [Noting("a"), Noting("b")], meeting()
    publisher = RanksPublisher(ranks, group.together)
    ranks[0].fails = "no slot"
    with pytest.raises(WeightSyncError, match="no slot"):
        await publisher.publish(V0, ())
    ranks[0].fails = ""
    await publisher.publish(V0, ())
    assert len(cast(Scripted, group._members[1]).calls) == 2


async def test_ranks_that_lose_each_other_at_the_last_tensor_offer_it_again(tmp_path: Path) -> None:
    """The other ranks were done already, and rank 0 had named the version: its copy is waited for all the same."""

    class Losing(Whole):
        sharded = True
        left = 0

        def collected(self, tensor: torch.Tensor) -> torch.Tensor | None:
            self.left -= 1
            if not self.left:
                raise APART
            return tensor.detach()

    model, device, parts, group = load(tiny_folder(tmp_path)), DeviceThread(), Losing(), meeting()
    first = BroadcastPublisher(OwnSource(lambda: tensors(model), model.stamp, CPU, parts), device, LOCAL, 10.0)
    publisher, engine = RanksPublisher([first, Noting("b")], group.together), receiver("broadcast", model, "e0")
    parts.left = len(tensors(model))
    with pytest.raises(WeightSyncError, match="version 0 was not collected: rank 0: lost the others"):
        await publisher.publish(V0, ("e0",))
    manifest = await publisher.publish(V0, ("e0",))
    await asyncio.gather(publisher.deliver(), asyncio.to_thread(engine.prepare, manifest))
    assert engine.take(V0) is not None
    assert len(cast(Scripted, group._members[1]).calls) == 2
    engine.close()
    first.close()
    device.close()


async def test_one_thing_at_a_time() -> None:
    """What all ranks do next must be the same for all."""
    group, under_way = meeting(), list[str]()

    async def doing(what: str) -> None:
        under_way.append(what)
        await asyncio.sleep(0.01)
        under_way.append(what)

    async def both(what: str) -> None:
        await group.together([lambda: doing(what), lambda: doing(what)])

    await asyncio.gather(both("one"), both("two"))
    assert under_way == ["one"] * 4 + ["two"] * 4


class Rank:
    """Evidence that notes what it is asked."""

    def __init__(self, fails: Exception | None = None) -> None:
        self.calls, self._fails = list[str](), fails

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        async def call(*args: object) -> object:
            self.calls.append(name)
            if self._fails is not None:
                raise self._fails
            return Baseline(("w",), {}) if name == "begin" else name

        return call


def evidence(ranks: Sequence[Rank]) -> RanksEvidence:
    return RanksEvidence([cast(Evidence, rank) for rank in ranks], meeting().together)


async def test_all_ranks_look_at_the_model_and_the_first_says_what_it_saw() -> None:
    ranks = [Rank(), Rank()]
    proving = evidence(ranks)
    assert await proving.begin({}) == Baseline(("w",), {})
    await proving.published(V0, ("e0",))
    await proving.move(1, ("w",))
    assert await proving.judge({}) == "judge"
    await proving.restore()
    assert ranks[1].calls == ["begin", "published", "move", "judge", "restore"]
    assert [await proving.prompts(), await proving.check("e0", ()), await proving.returned({})] == [
        "prompts",
        "check",
        "returned",
    ]
    assert ranks[0].calls == [*ranks[1].calls, "prompts", "check", "returned"]


async def test_the_parameters_are_put_back_on_every_rank_that_is_left() -> None:
    ranks = [Rank(TrainerLost("gone")), Rank()]
    with pytest.raises(TrainerLost):
        await evidence(ranks).restore()
    assert ranks[1].calls == ["restore"]


async def test_a_rank_is_named_by_what_it_met_itself() -> None:
    with pytest.raises(TrainerLost, match=r"^rank 1: gone"):
        await evidence([Rank(APART), Rank(TrainerLost("gone"))]).move(1, ())
