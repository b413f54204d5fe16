"""One of two engines is lost: the other one gets every version, and answers for both."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from rollyard.errors import EngineLost
from rollyard.events import Abort, EngineId
from rollyard.model.folder import load
from rollyard.place.inline import DeviceThread
from rollyard.types import Completion, FinishReason, Request, WeightVersion
from rollyard.weights import probe
from rollyard.weights.evidence import Evidence
from rollyard.weights.prover import Prover
from tests.tiny import tiny_folder
from tests.weights.syncing import Receiving, driven


def dies_in(engine: Receiving, wanted: str) -> None:
    def happens(part: str) -> None:
        if part == wanted:
            engine.kill()

    engine.happens = happens


@pytest.mark.parametrize("kind", ["shared_memory", "broadcast", "relay", "broadcast delta", "relay delta"])
@pytest.mark.parametrize("moment", ["idle", "generating", "prepare", "load"])
async def test_the_other_engine_goes_on(tmp_path: Path, kind: str, moment: str) -> None:
    async with driven(kind, tiny_folder(tmp_path), retries=0, limit_s=10.0) as run:
        assert await run.bring(0) == ""
        lost = run.engines["e1"]
        began = time.monotonic()
        match moment:
            case "idle":
                lost.kill()
            case "generating":
                asking = asyncio.create_task(run.ask(8))
                await asyncio.sleep(0.005)
                lost.kill()
                assert await asking == 8
            case part:
                dies_in(lost, part)
        for number in (1, 2, 3):
            assert await run.bring(number) == ""
            assert run.engines["e0"].version == WeightVersion(number) and run.has("e0")
            assert await run.ask(6) == 6
        assert time.monotonic() - began < 9  # nobody waited for the dead one until the limit of 10 s
        run.controller.carry_out([Abort("e1", ())])  # a cut that comes too late harms nobody
        await asyncio.sleep(0)
        assert not [event for event in run.heard() if isinstance(event, BaseException)]


async def test_when_the_last_one_is_lost_nobody_answers(tmp_path: Path) -> None:
    async with driven("shared_memory", tiny_folder(tmp_path)) as run:
        assert await run.bring(0) == ""
        for engine in run.engines.values():
            engine.kill()
        with pytest.raises(EngineLost):
            await run.ask(3)


@pytest.mark.parametrize("kind", ["shared_memory", "broadcast"])
@pytest.mark.parametrize("part", ["prepare", "load"])
async def test_versions_that_are_brought_outside_the_circle_reach_the_one_that_is_left(
    tmp_path: Path, kind: str, part: str
) -> None:
    """As the canary brings them."""
    async with driven(kind, tiny_folder(tmp_path)) as run:
        assert await run.bring(0) == ""
        dies_in(run.engines["e1"], part)
        for number in (-1, -2, -3):
            await run.sync._roll(WeightVersion(0, number))
            assert run.engines["e0"].version == WeightVersion(0, number) and run.has("e0")


async def test_the_canary_goes_on_with_the_engine_that_is_left(tmp_path: Path) -> None:
    """An engine that is lost at any of the canary's questions costs nothing but itself."""
    model = load(tiny_folder(tmp_path))
    device = DeviceThread(lambda: torch.set_num_threads(1))
    for last in range(3):
        asked = {"a": 0, "b": 0}

        async def ask(engine: EngineId, requests: Sequence[Request], last: int = last, asked: dict[str, int] = asked) -> Any:
            asked[engine] += 1
            if engine == "b" and asked[engine] > last:
                raise EngineLost("engine b is lost")
            table = await device.run(probe.table, model)
            tokens = table.argmax(dim=1).tolist()
            return [
                Completion(request.id.group, 0, (token,), (float(row[token]),), (), FinishReason.LENGTH, "")
                for request, token, row in zip(requests, tokens, table, strict=True)
            ]

        async def roll(version: WeightVersion) -> None: ...

        found = await Prover(Evidence(model, device), cast(Any, ask)).prove(["a", "b"], WeightVersion(0), roll)
        assert found.gap <= found.limit and asked["b"] == last + 1
    device.close()
