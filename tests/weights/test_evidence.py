"""Whatever ends a canary, the parameters are as they were, bit for bit."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch

from rollyard.errors import WeightSyncError
from rollyard.model.folder import load
from rollyard.model.transformer import CausalLM
from rollyard.place.inline import DeviceThread
from rollyard.types import Verdict, WeightVersion
from rollyard.weights import canary
from rollyard.weights.evidence import Evidence
from rollyard.weights.many import ManyEvidence
from rollyard.weights.prover import Prover
from tests.tiny import tiny_folder
from tests.weights.moving import step
from tests.weights.proving import Answering

V0, V1 = WeightVersion(0), WeightVersion(1)


@pytest.fixture
async def device() -> AsyncIterator[DeviceThread]:
    made = DeviceThread(lambda: torch.set_num_threads(1))
    yield made
    made.close()


def equal(one: CausalLM, other: CausalLM) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


async def nowhere(version: WeightVersion) -> None:
    """The engines have the trainer's own parameters."""


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("moment", ["move", "roll", "judge"])
async def test_a_canary_that_is_cancelled(
    tmp_path: Path, device: DeviceThread, monkeypatch: pytest.MonkeyPatch, moment: str, times: int
) -> None:
    """Once, or once more while the parameters are being put back."""
    folder = tiny_folder(tmp_path)
    model, before = load(folder), load(folder)
    evidence, reached = Evidence(model, device), asyncio.Event()
    loop = asyncio.get_running_loop()

    def tell(function: object) -> object:
        def told(*args: object, **named: object) -> object:
            found = function(*args, **named)  # type: ignore[operator]
            loop.call_soon_threadsafe(reached.set)
            return found

        return told

    async def roll(version: WeightVersion) -> None:
        if moment == "roll":
            reached.set()
            await asyncio.sleep(600)

    if moment == "move":
        monkeypatch.setattr(canary, "move", tell(canary.move))
    if moment == "judge":
        monkeypatch.setattr(canary, "compare", tell(canary.compare))
    proving = asyncio.ensure_future(Prover(evidence, Answering(device, {"e0": model})).prove(["e0"], V0, roll))
    await reached.wait()
    for _ in range(times):
        proving.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await proving
    await device.run(int)  # whatever it was doing is over
    assert model.stamp.whole and equal(model, before)


async def test_a_move_that_breaks_half_way(tmp_path: Path, device: DeviceThread, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_folder(tmp_path)
    model, before = load(folder), load(folder)

    def breaking(model: CausalLM, *args: object) -> None:
        with model.stamp.writing(), torch.no_grad():
            next(model.parameters()).zero_()
            raise RuntimeError("out of memory")

    monkeypatch.setattr(canary, "move", breaking)
    with pytest.raises(RuntimeError, match="out of memory"):
        await Prover(Evidence(model, device), Answering(device, {"e0": model})).prove(["e0"], V0, nowhere)
    assert model.stamp.whole and equal(model, before)


async def test_one_that_was_left_behind_is_put_back_before_the_next(tmp_path: Path, device: DeviceThread) -> None:
    folder = tiny_folder(tmp_path)
    model, before = load(folder), load(folder)
    evidence, asking = Evidence(model, device), Answering(device, {"e0": model})
    base = await evidence.begin({"e0": await asking.answers("e0")})
    await evidence.move(1, base.tensors)
    assert not equal(model, before)
    again = await evidence.begin({"e0": await Answering(device, {"e0": before}).answers("e0")})
    assert equal(model, before) and again == base
    await evidence.restore()
    await evidence.restore()  # harmless
    assert equal(model, before)


async def test_an_engine_that_computes_something_else_is_told_at_once(tmp_path: Path, device: DeviceThread) -> None:
    folder = tiny_folder(tmp_path)
    model, before, other = load(folder), load(folder), load(tiny_folder(tmp_path, seed=1))
    prover = Prover(Evidence(model, device), Answering(device, {"e0": other}))
    with pytest.raises(WeightSyncError, match=r"engine e0 does not compute the trainer's model: .* at most 0\.3 is noise"):
        await prover.prove(["e0"], V0, nowhere)
    assert equal(model, before)


async def test_an_engine_that_stays_with_the_moved_weights_is_told(tmp_path: Path, device: DeviceThread) -> None:
    folder = tiny_folder(tmp_path)
    model, engine = load(folder), load(folder)

    async def roll(version: WeightVersion) -> None:
        if version.incarnation < 0:
            canary.restore(engine, canary.keep(model))

    with pytest.raises(WeightSyncError, match="engine e0 did not come back from the moved weights"):
        await Prover(Evidence(model, device), Answering(device, {"e0": engine})).prove(["e0"], V0, roll)


async def test_nobody_is_asked_before_there_are_two_versions(tmp_path: Path, device: DeviceThread) -> None:
    model = load(tiny_folder(tmp_path))
    evidence, asking = Evidence(model, device), Answering(device, {"e0": model})
    prover = Prover(evidence, asking)
    for _ in range(2):  # the same version again is none before it
        await prover.published(V0, ["e0"])
        assert await prover.check("e0") is Verdict.UNDECIDABLE and asking.asked == 0
    probed = await evidence.check("e0", await asking.answers("e0"))
    assert probed.verdict is Verdict.UNDECIDABLE and probed.new == 0 and probed.old == math.inf
    await device.run(step, model, 1)
    await prover.published(V1, ["e0"])
    assert await prover.check("e0") is Verdict.VERIFIED and asking.asked == 1


# ------------------------------------------------------------------------------- trainers with parameters of their own


async def test_replicas_move_alike_and_each_says_what_its_own_engine_is_worth(tmp_path: Path, device: DeviceThread) -> None:
    folder = tiny_folder(tmp_path)
    models = {name: load(folder) for name in ("a", "b")}
    evidence = ManyEvidence({name: Evidence(model, device) for name, model in models.items()})
    rolls: list[WeightVersion] = []

    async def roll(version: WeightVersion) -> None:
        rolls.append(version)
        assert equal(models["a"], models["b"]) and equal(models["a"], load(folder)) == (version == V0)

    found = await Prover(evidence, Answering(device, models)).prove(["a", "b"], V0, roll)
    assert found.gap == 0 and found.unseen == () and found.tensors == len(list(models["a"].parameters()))
    assert rolls[-1] == V0 and len(rolls) >= 2 and equal(models["b"], load(folder))
    stays = Answering(device, {"a": models["a"], "b": load(folder)})
    with pytest.raises(WeightSyncError, match="engine b does not decode with all the weights"):
        await Prover(evidence, stays).prove(["a", "b"], V0, nowhere)
    assert equal(models["a"], load(folder)) and equal(models["b"], load(folder))


async def test_halves_that_take_turns_compare_with_what_their_own_engine_had(tmp_path: Path, device: DeviceThread) -> None:
    """As in a swap: each publishes every other version, to its own engine."""
    folder = tiny_folder(tmp_path)
    models = {name: load(folder) for name in ("a", "b")}
    prover = Prover(
        ManyEvidence({name: Evidence(model, device) for name, model in models.items()}),
        Answering(device, {"a": models["a"], "b": load(folder)}),  # that of b never takes anything
    )
    await prover.published(V0, ["a", "b"])
    await device.run(step, models["a"], 1)
    await prover.published(V1, ["a"])
    assert await prover.check("a") is Verdict.VERIFIED
    await device.run(step, models["b"], 2)
    await prover.published(WeightVersion(2), ["b"])
    with pytest.raises(WeightSyncError, match=r"engine b says that it has version 2, and decodes .*, those of version 0"):
        await prover.check("b")
