"""vLLM with tensor parallelism: two workers, each with its part of every tensor."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import pytest

from rollyard.errors import WeightSyncError
from rollyard.events import Rollover
from rollyard.types import Slice, WeightVersion
from rollyard.weights.evidence import Evidence
from rollyard.weights.prover import Prover
from tests.engine.embedded.serving import ask, collect
from tests.engine.vllm.driving import Driven, configured, driving, launched, model_folder, segments
from tests.engine.vllm.receivers import told
from tests.engine.vllm.test_weights import agrees

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]
LONG = 1500  # tokens, so that they are not all written before new weights are near
UP = "model.layers.0.mlp.up_proj.weight"


@pytest.mark.parametrize("transport", ["checkpoint", "shared_memory", "broadcast"])
async def test_two_workers(transport: str, tmp_path: Path) -> None:
    """One start of vLLM for all of it: it takes longer than the rest together."""
    folder = model_folder(tmp_path, heads=4, kv_heads=2, width=128, layers=1, window=2048)
    config = configured(folder, transport, tensor_parallel_size=2)
    async with driving(config, launch=partial(launched, "serve_freezing")) as driven:
        await agrees(driven, folder)
        before = driven.engine.stats().copied_bytes
        manifest = await driven.sync(WeightVersion(0))
        place = [info.name for info in manifest.tensors].index(UP)
        assert [each[place] for each in manifest.shares] == [Slice(0, 0, 128), Slice(0, 128, 256)]
        whole = sum(parameter.nbytes for parameter in driven.policy.model.parameters())
        norms = sum(parameter.nbytes for parameter in driven.policy.model.parameters() if parameter.dim() == 1)
        assert driven.engine.stats().copied_bytes - before == whole + norms  # no part twice, but for what both have whole
        await proves(driven, folder)
        if transport == "shared_memory":
            await goes_on(driven)


async def proves(driven: Driven, folder: Path) -> None:
    """All is well; then a tensor stays behind in the second worker alone, which is said."""
    evidence = Evidence(driven.policy.model, driven.device, shares=shares_of(driven))
    prover = Prover(evidence, driven.ask)
    found = await prover.prove(["engine-0"], WeightVersion(0), driven.sync)
    assert found.gap <= found.limit and found.unseen == ()
    told(folder, 1).write_text(UP)
    with pytest.raises(WeightSyncError, match=rf"as if .*{UP} in worker 1.* had stayed as it was"):
        await prover.prove(["engine-0"], WeightVersion(0), driven.sync)
    told(folder, 1).unlink()
    await driven.sync(WeightVersion(0))
    await agrees(driven, folder)


def shares_of(driven: Driven) -> dict[str, list[Slice]]:
    from rollyard import worker
    from rollyard.weights.flat import model_infos

    model = driven.policy.model
    config = configured(driven.policy.folder, tensor_parallel_size=2)
    return dict(worker.shares_of(config, model.architecture, model_infos(model)))


async def goes_on(driven: Driven) -> None:
    """Weights change under a request, in both workers at the same token."""
    await driven.move(seed=3)
    driven.engine.generate([ask(1, [5, 6, 7], LONG, ignore_eos=True)])
    written = await segments(driven.engine, 8)
    rolling = asyncio.create_task(driven.sync(WeightVersion(1), Rollover.KEEP))
    done = await collect(driven.engine, 1)
    await rolling
    (one,) = done.values()
    versions = [segment.version.step for segment in (*written, *one.segments) for _ in segment.token_ids]
    assert len(versions) == LONG and versions == sorted(versions) and set(versions) == {0, 1}
