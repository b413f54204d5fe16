"""Several publishers, each for its own engines: who is asked for what, and who gets which manifest."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from rollyard.errors import WeightSyncError
from rollyard.types import Manifest, WeightVersion
from rollyard.weights.many import Offers

V1, V2 = WeightVersion(1), WeightVersion(2)


class Noting:
    """Offers numbers, and notes what it is asked for."""

    def __init__(self, name: str) -> None:
        self.name, self.calls = name, list[tuple[object, ...]]()
        self.fails, self.waits = "", 0.0
        self.offered: Manifest | None = None

    async def publish(self, version: WeightVersion, engines: Sequence[str]) -> Manifest:
        self.calls.append(("publish", version.step, *engines))
        await asyncio.sleep(self.waits)
        if self.fails:
            raise WeightSyncError(self.fails)
        self.offered = Manifest(version, (), 100, f"{self.name}/{len(self.calls)}")
        return self.offered

    async def again(self, engines: Sequence[str]) -> Manifest:
        assert self.offered is not None
        self.calls.append(("again", *engines))
        return Manifest(self.offered.version, (), 0, self.offered.source)

    async def deliver(self) -> None:
        self.calls.append(("deliver",))

    def taken(self, engine: str, version: WeightVersion) -> None:
        self.calls.append(("taken", engine, version.step))

    def lost(self, engine: str) -> None:
        self.calls.append(("lost", engine))

    def close(self) -> None: ...


def two() -> tuple[Noting, Noting, Offers]:
    """One that serves e0 and e1, one that serves e2."""
    left, right = Noting("left"), Noting("right")
    return left, right, Offers({"e0": left, "e1": left, "e2": right})


async def test_one_publisher_gets_one_call_for_all_its_engines() -> None:
    left, right, offers = two()
    found = await offers.offer(V1, ["e0", "e1", "e2"])
    assert found.bytes_copied == 200 and found.afresh == ("e0", "e1", "e2")
    assert offers.manifest("e0") == offers.manifest("e1") == left.offered and offers.manifest("e2") == right.offered
    await offers.deliver()
    offers.taken("e2", V1)
    offers.lost("e1")
    assert left.calls == [("publish", 1, "e0", "e1"), ("deliver",), ("lost", "e1")]
    assert right.calls == [("publish", 1, "e2"), ("deliver",), ("taken", "e2", 1)]


async def test_who_has_no_engine_among_them_is_not_asked() -> None:
    left, right, offers = two()
    await offers.offer(V1, ["e2"])
    await offers.deliver()
    assert left.calls == [] and right.calls == [("publish", 1, "e2"), ("deliver",)]


async def test_again_is_for_publishers_that_offered_that_version_last() -> None:
    left, right, offers = two()
    await offers.offer(V1, ["e0", "e2"])
    await offers.offer(V2, ["e2"])
    found = await offers.offer(V1, ["e0", "e2"], again=True)  # right has gone on
    assert found.bytes_copied == 100 and found.afresh == ("e2",)
    assert left.calls == [("publish", 1, "e0"), ("again", "e0")]
    assert right.calls == [("publish", 1, "e2"), ("publish", 2, "e2"), ("publish", 1, "e2")]
    await offers.offer(V1, ["e0"])
    assert left.calls[-1] == ("publish", 1, "e0")


async def test_what_one_of_them_raises_is_raised_once_the_other_is_done() -> None:
    left, right, offers = two()
    await offers.offer(V1, ["e0", "e2"])
    left.fails, right.waits = "no room", 0.01
    with pytest.raises(WeightSyncError, match="no room"):
        await offers.offer(V2, ["e0", "e2"])
    assert right.offered is not None and right.offered.version == V2
    left.fails = ""
    await offers.offer(V1, ["e0"], again=True)  # nobody knows what is there since
    assert left.calls[-1] == ("publish", 1, "e0")
