"""What was offered is offered again as it was then: the trainer goes on meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch

from rollyard import events as ev
from rollyard.errors import WeightSyncError
from rollyard.model.folder import load
from rollyard.model.transformer import CausalLM
from rollyard.place.inline import DeviceThread
from rollyard.types import Manifest, WeightVersion
from rollyard.weights import broadcast, flat, shared_memory
from rollyard.weights.in_place import InPlace
from tests.tiny import tiny_folder
from tests.weights.moving import MOVING, Sides, sides, step
from tests.weights.syncing import Driven, driven

Tensors = Mapping[str, torch.Tensor]


def snapshot(model: CausalLM) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def same(found: Tensors | None, wanted: Tensors) -> bool:
    return found is not None and found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


async def prepared(both: Sides, manifest: Manifest, *engines: str) -> None:
    await asyncio.gather(*(asyncio.to_thread(both.receivers[name].prepare, manifest) for name in engines))
    await both.publisher.deliver()


@pytest.mark.parametrize("kind", MOVING)
async def test_bytes_are_those_of_the_offer_whatever_became_of_the_parameters(tmp_path: Path, kind: str) -> None:
    folder = tiny_folder(tmp_path)
    model = load(folder)
    async with sides(kind, model, folder, engines=2) as both:
        with pytest.raises(WeightSyncError, match="nothing that was offered is there"):
            await both.publisher.again(("e0",))
        wanted = step(model, 1)
        first = await both.send(1)
        assert first.bytes_copied > 0
        both.publisher.taken("e0", WeightVersion(1))
        for number in (2, 3):  # twice: a sender that has sent something again can do so once more
            step(model, number)
            again = await both.publisher.again(("e1",))
            assert replace(again, source="") == replace(first, bytes_copied=0, source="")
            await prepared(both, again, "e1")
            assert same(both.receivers["e1"].take(WeightVersion(1)), wanted)


@pytest.mark.parametrize("kind", MOVING)
async def test_publishing_a_version_anew_copies_the_parameters_as_they_are_then(tmp_path: Path, kind: str) -> None:
    folder = tiny_folder(tmp_path)
    model = load(folder)
    async with sides(kind, model, folder) as both:
        for number in range(4):  # as often as slots are used more than once
            wanted = step(model, number)
            manifest = await both.send(7)
            assert manifest.bytes_copied > 0
            assert same(both.receivers["e0"].take(WeightVersion(7)), wanted)
            both.taken(7)


@pytest.mark.parametrize("kind", MOVING)
async def test_an_offer_that_could_not_be_made_leaves_the_one_before(tmp_path: Path, kind: str) -> None:
    folder = tiny_folder(tmp_path)
    model = load(folder)
    async with sides(kind, model, folder) as both:
        wanted = step(model, 1)
        await both.send(1)
        with pytest.raises(RuntimeError), model.stamp.writing():
            raise RuntimeError
        with pytest.raises(WeightSyncError, match="half way"):
            await both.publisher.publish(WeightVersion(2), ("e0",))
        await prepared(both, await both.publisher.again(("e0",)), "e0")
        assert same(both.receivers["e0"].take(WeightVersion(1)), wanted)


async def test_in_place_only_while_nothing_changed(tmp_path: Path) -> None:
    model = load(tiny_folder(tmp_path))
    transport = InPlace(model)
    with pytest.raises(WeightSyncError, match="nothing that was offered"):
        await transport.again()
    first = await transport.publish(WeightVersion(1))
    assert await transport.again() == first
    step(model, 1)
    with pytest.raises(WeightSyncError, match="the weights changed since version 1 was published"):
        await transport.again()


async def test_a_broadcast_whose_copy_failed_is_not_offered_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_folder(tmp_path)
    model = load(folder)

    def broken(targets: Tensors, sources: object) -> None:
        raise WeightSyncError("out of memory")

    async with sides("broadcast", model, folder, limit_s=2.0) as both:
        await both.send(0)
        monkeypatch.setattr(broadcast, "fill", broken)
        with pytest.raises(WeightSyncError, match="out of memory"):
            await both.publisher.publish(WeightVersion(1), ("e0",))
            await both.publisher.deliver()
        with pytest.raises(WeightSyncError, match="nothing that was offered is there"):
            await both.publisher.again(("e0",))


async def test_a_slot_is_that_of_the_offer_that_was_taken(tmp_path: Path) -> None:
    """The same version lies in both slots; the older one is free once the engine has that of the newer offer."""
    folder = tiny_folder(tmp_path)
    model = load(folder)
    async with sides("shared_memory", model, folder) as both:
        sources = []
        for number in range(3):
            step(model, number)
            sources.append((await both.send(5)).source)
            both.taken(5)
        assert sources[0] != sources[1] and sources[2] == sources[0]


# ------------------------------------------------------------------------------------- through the whole sync


def slowly(targets: Tensors, sources: Iterable[tuple[str, torch.Tensor]]) -> None:
    """What is copied while the trainer wants to go on."""
    for name, source in sources:
        time.sleep(0.001)
        flat.fill(targets, ((name, source),))


class Training:
    """A trainer that takes its next step the moment it hears that a version was published."""

    def __init__(self, run: Driven, device: DeviceThread) -> None:
        self._run, self._device = run, device
        self.steps: list[asyncio.Future[object]] = []
        self._post = run.sync._post
        run.sync._post = self._hear

    def _hear(self, event: ev.Event) -> None:
        if isinstance(event, ev.Published):
            self.steps.append(asyncio.ensure_future(self._device.run(step, self._run.model, 1000 + len(self.steps))))
        self._post(event)


@pytest.mark.parametrize("kind", MOVING)
async def test_a_trainer_that_goes_on_at_once_changes_nothing_that_was_published(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while a version is offered once more to an engine that missed it."""
    monkeypatch.setattr(broadcast, "fill", slowly)
    monkeypatch.setattr(shared_memory, "fill", slowly)
    dice = Random(0)
    async with driven(kind, tiny_folder(tmp_path, layers=1), retries=3, limit_s=10.0) as run:
        training, misses = Training(run, run.device), 0

        def misses_it(part: str) -> None:
            nonlocal misses
            if part == "load" and dice.random() < 0.5:
                misses += 1
                raise WeightSyncError("not this time")

        for number in range(10):
            run.engines["e1"].happens = misses_it
            wanted = snapshot(run.model)
            told = await run.roll(number)
            await asyncio.gather(*training.steps)
            if told:
                assert "not this time" in told
                run.engines["e1"].happens = lambda part: None
                continue
            assert not same(snapshot(run.model), wanted)
            for engine in run.engines.values():
                assert same(engine.weights, wanted) and engine.version == WeightVersion(number)
        assert misses > 2 and len(training.steps) >= 10 + misses - 2


async def test_who_is_named_gets_the_same_bytes_and_a_version_that_is_new_is_published(tmp_path: Path) -> None:
    async with driven("shared_memory", tiny_folder(tmp_path)) as run:
        offers: list[tuple[str, object]] = []
        publish, again = run.publisher.publish, run.publisher.again

        async def publishing(version: WeightVersion, engines: tuple[str, ...]) -> Manifest:
            offers.append(("publish", tuple(engines)))
            return await publish(version, engines)

        async def repeating(engines: tuple[str, ...]) -> Manifest:
            offers.append(("again", tuple(engines)))
            return await again(engines)

        run.publisher.publish, run.publisher.again = publishing, repeating  # type: ignore[assignment]
        for instruction in (
            ev.Publish(WeightVersion(1)),
            ev.Publish(WeightVersion(1), ("e1",)),
            ev.Publish(WeightVersion(1)),
            ev.Publish(WeightVersion(2), ("e0",)),
            ev.Publish(WeightVersion(2), ("e0",)),
        ):
            await run.sync.actions[ev.Publish](instruction)
        assert offers == [
            ("publish", ("e0", "e1")),
            ("again", ("e1",)),
            ("publish", ("e0", "e1")),
            ("publish", ("e0",)),
            ("again", ("e0",)),
        ]
