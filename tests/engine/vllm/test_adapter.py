"""Only an adapter travels to vLLM: it arrives, takes the place of the one before, and a tensor that stays behind is caught."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

import rollyard
from rollyard import worker
from rollyard.config import Config
from rollyard.errors import WeightSyncError
from rollyard.events import Rollover
from rollyard.layers import resolve
from rollyard.model import adapter
from rollyard.model.architecture import Architecture
from rollyard.model.folder import load, save, tensors
from rollyard.types import WeightVersion
from rollyard.weights.evidence import Evidence
from rollyard.weights.prover import Prover
from tests.engine.embedded.serving import ask
from tests.engine.vllm.driving import Driven, configured, driving, launched, model_folder, segments
from tests.engine.vllm.receivers import BAD, told
from tests.engine.vllm.test_weights import agrees
from tests.rewards import share_of_a

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]
LORA = {"weights.what": "lora", "lora.rank": 5, "lora.alpha": 10}


def merged(driven: Driven, folder: Path) -> Path:
    """The whole model as the trainer has it now, in a folder that transformers reads."""
    model, whole = driven.policy.model, load(Path(driven.policy.folder))
    with whole.stamp.writing(), torch.no_grad():
        for name, tensor in adapter.merge(adapter.base(model), tensors(model), 2.0, {}).items():
            tensors(whole)[name].copy_(tensor)
    save(whole, folder, driven.policy.folder)
    return folder


def lora(folder: Path, transport: str = "shared_memory", **options: object) -> Config:
    return configured(folder, transport, **LORA, **options)


@pytest.mark.parametrize(
    ("transport", "server"), [("shared_memory", False), ("checkpoint", False), ("broadcast", False), ("shared_memory", True)]
)
async def test_versions_arrive_and_old_ones_are_gone(tmp_path: Path, transport: str, server: bool) -> None:
    folder = model_folder(tmp_path)
    async with driving(lora(folder, transport, server=server)) as driven:
        await agrees(driven, folder)  # it begins without an effect
        for step in (1, 2):
            await driven.move(seed=step)
            manifest = await driven.sync(WeightVersion(step))
            assert {info.name for info in manifest.tensors} == driven.policy.model.trained().keys()
            await agrees(
                driven, merged(driven, tmp_path / f"merged-{step}")
            )  # of the same prompts, whose cache was of older ones
        await driven.device.run(lambda: None)
        kept = {name: tensor.clone() for name, tensor in tensors(driven.policy.model).items()}
        await driven.sync(WeightVersion(3))
        assert all(torch.equal(kept[name], tensor) for name, tensor in tensors(driven.policy.model).items())


async def test_a_request_goes_on_under_a_new_adapter_and_one_that_breaks_half_way_changes_nothing(tmp_path: Path) -> None:
    """Under keep: its tokens say which version wrote them."""
    folder = model_folder(tmp_path)
    async with driving(lora(folder), launch=partial(launched, "serve_breaking")) as driven:
        driven.engine.generate([ask(0, [5, 6, 7], 200, ignore_eos=True)])
        begun = await segments(driven.engine, until=16)
        await driven.move(seed=1)
        await driven.sync(WeightVersion(1), Rollover.KEEP)
        rest = await segments(driven.engine, until=200 - sum(len(segment.token_ids) for segment in begun))
        assert [segment.version for segment in rest if segment.token_ids][-1] == WeightVersion(1)

        await driven.move(seed=1)
        await driven.sync(WeightVersion(2))
        whole = merged(driven, tmp_path / "merged")
        await driven.move(seed=2)
        await driven.offer(WeightVersion(BAD))
        await driven.engine.pause(Rollover.DRAIN)
        with pytest.raises(WeightSyncError, match="engine-0"):
            await driven.engine.load(WeightVersion(BAD))
        await driven.engine.resume()
        assert driven.engine.version == WeightVersion(2)
        await agrees(driven, whole)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_each_tensor_that_stays_behind_is_caught_and_named(tmp_path: Path, dtype: str) -> None:
    folder = model_folder(tmp_path, layers=1)
    config = lora(folder, **{"model.dtype": dtype})
    async with driving(config, launch=partial(launched, "serve_freezing")) as driven:
        prover = Prover(Evidence(driven.policy.model, driven.device), driven.ask)
        found = await prover.prove(["engine-0"], WeightVersion(0), driven.sync)
        assert found.unseen == () and found.gap <= found.limit and found.tensors == len(driven.policy.model.trained())
        for name in driven.policy.model.trained():
            told(folder).write_text(name)
            with pytest.raises(WeightSyncError, match="engine-0 does not decode with all the weights that it was sent") as caught:
                await prover.prove(["engine-0"], WeightVersion(0), driven.sync)
            assert name in str(caught.value)
            told(folder).unlink()
            await driven.sync(WeightVersion(0))


def test_a_run(tmp_path: Path) -> None:
    """Whole and asynchronous: the adapter alone travels, and every token says which version of it wrote it."""
    folder = model_folder(tmp_path)
    options = {
        "run.out": str(tmp_path / "run"),
        "run.steps": 3,
        "prompts.task": "sort",
        "model.path": str(folder),
        "rollout.group_size": 2,
        "rollout.groups_per_step": 4,
        "rollout.max_tokens": 48,
        "rollout.max_staleness": 1,
        "train.lr": 1e-2,
        "weights.rollover": "keep",
        "place.placement": "async",
        "place.device": "cpu",
        "place.threads": 1,
        "engine.kind": "vllm",
        "engine.slots": 8,
        "engine.extra": '{"block_size": 32}',
    }
    config = resolve(environment={}, overrides=options | LORA).config
    run = rollyard.Run(config, reward=share_of_a)
    lags = set()
    for step in run:
        spans = [span for group in step.groups for rollout in group.rollouts for span in rollout.completion.spans]
        lags |= {step.step - 1 - span.version.step for span in spans}
        assert step.train.logprob_gap_mean < 1e-3 or step.step > 1
    report = run.report
    assert report is not None and not report.finished.failed and report.steps == 3
    counts = report.prompts
    assert counts.admitted == counts.trained + sum(counts.dropped.values()) and lags <= {0, 1}
    found = report.weights
    assert found.canary is not None and found.canary.unseen == () and found.canary.tensors == 2 * 7 * 2
    assert found.probes.keys() == {"undecidable", "verified"}
    version = worker.size_of(config, Architecture.from_folder(folder))
    assert found.bytes_sent == 4 * version  # of the run's own versions, 0 to 3
