"""Weights really arrive in vLLM, by every transport, and what fails on the way changes nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from random import Random

import pytest
import pytest_asyncio
import torch

from rollyard.errors import EngineError, WeightSyncError
from rollyard.model.folder import save
from rollyard.types import WeightVersion
from rollyard.weights.evidence import Evidence
from rollyard.weights.prover import Prover
from tests.engine.embedded.serving import Reference, answers, ask
from tests.engine.vllm.driving import Driven, configured, driving, freshly_started, launched, model_folder
from tests.engine.vllm.receivers import told

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(240)]
PROMPTS = [[Random(number).randrange(2, 40) for _ in range(length)] for number, length in enumerate((3, 17, 40, 70, 70))]
TOKENS = 24


async def written(driven: Driven) -> tuple[list[list[int]], list[list[float]]]:
    """Greedy completions of the prompts, and their logprobs."""
    requests = [ask(number, prompt, TOKENS, ignore_eos=True) for number, prompt in enumerate(PROMPTS)]
    found = await answers(driven.engine, requests)
    return [found[request.id].token_ids for request in requests], [found[request.id].logprobs for request in requests]


async def agrees(driven: Driven, folder: Path, fresh: list[list[int]] | None = None) -> None:
    """With a vLLM that read these weights at its start, and with a forward pass of transformers."""
    tokens, logprobs = await written(driven)
    assert fresh is None or tokens == fresh
    reference = Reference(folder)
    for prompt, ids, found in zip(PROMPTS, tokens, logprobs, strict=True):
        assert reference.logits(prompt, ids).argmax(dim=1).tolist() == ids
        torch.testing.assert_close(torch.tensor(found), reference.logprobs(prompt, ids), atol=1e-3, rtol=0)


def versions(tmp_path: Path, *, tied: bool) -> tuple[Path, Path]:
    """A model, and the same one with all weights moved."""
    from rollyard.model.folder import load

    base = model_folder(tmp_path / "base", tied=tied)
    moved = load(base)
    generator = torch.Generator().manual_seed(1)
    with moved.stamp.writing(), torch.no_grad():
        for parameter in moved.parameters():
            parameter.add_(torch.empty(parameter.shape).normal_(0.0, 0.05, generator=generator))
    save(moved, tmp_path / "moved", base)
    return base, tmp_path / "moved"


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return versions(tmp_path_factory.mktemp("tied"), tied=True)


@pytest.fixture(scope="module")
def fresh(tied: tuple[Path, Path]) -> list[list[list[int]]]:
    """What a freshly started vLLM writes with either."""
    found = [freshly_started(folder, PROMPTS, TOKENS) for folder in tied]
    assert all(before != after for before, after in zip(*found, strict=True)), "the move must show in every prompt"
    return found


# A worker by the other ways: below and in test_workers.py, where it is two.
@pytest.mark.parametrize(("transport", "server"), [("checkpoint", False), ("shared_memory", True), ("broadcast", True)])
async def test_updates(transport: str, server: bool, tied: tuple[Path, Path], fresh: list[list[list[int]]]) -> None:
    async with driving(configured(tied[0], transport, server=server), loaded=False) as driven:
        assert driven.engine.version is None
        with pytest.raises(EngineError, match="acknowledged no weights"):
            driven.engine.generate([ask(0, [5, 6])])
        await driven.sync(WeightVersion(0))
        await agrees(driven, tied[0], fresh[0])

        await driven.move(seed=1)
        manifest = await driven.sync(WeightVersion(1))
        assert driven.engine.version == WeightVersion(1)
        await agrees(driven, tied[1], fresh[1])

        with pytest.raises(WeightSyncError, match=r"model\.norm\.weight"):  # names differ
            await driven.engine.prepare(dataclasses.replace(manifest, tensors=manifest.tensors[:-1]))
        with pytest.raises(WeightSyncError, match="version 9"):  # never prepared
            await driven.engine.load(WeightVersion(9))
        assert driven.engine.version == WeightVersion(1)
        await agrees(driven, tied[1], fresh[1])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def driven(tied: tuple[Path, Path]) -> AsyncIterator[Driven]:
    """By shared memory, without a server."""
    async with driving(configured(tied[0], step_tokens=256)) as driven:
        yield driven


@pytest.mark.asyncio(loop_scope="module")
async def test_the_canary_passes_and_the_weights_are_as_before(
    driven: Driven, tied: tuple[Path, Path], fresh: list[list[list[int]]]
) -> None:
    found = await Prover(Evidence(driven.policy.model, driven.device), driven.ask).prove(
        ["engine-0"], WeightVersion(0), driven.sync
    )
    assert found.gap <= found.limit
    await agrees(driven, tied[0], fresh[0])


@pytest.mark.asyncio(loop_scope="module")
async def test_prompts_of_more_tokens_than_a_step_are_not_cut(driven: Driven) -> None:
    """A seeded request whose prompt takes several steps would end vLLM's core on a CPU: each waits for a step with room."""
    asked = [
        ask(number, [2 + (number + at) % 38 for at in range(100)], 8, temperature=1.0, ignore_eos=True) for number in range(8)
    ]
    found = await answers(driven.engine, asked)
    assert [len(found[request.id].token_ids) for request in asked] == [8] * len(asked)


async def test_the_canary_sees_the_stale_head_of_a_tied_model(tied: tuple[Path, Path]) -> None:
    """Also tells when vLLM no longer needs the repair: this fails then, and the repair can go."""
    extra = '{"additional_config": {"rollyard_no_repack": true}}'
    async with driving(configured(tied[0], extra=extra)) as driven:
        with pytest.raises(WeightSyncError, match="does not decode with all the weights"):
            await Prover(Evidence(driven.policy.model, driven.device), driven.ask).prove(
                ["engine-0"], WeightVersion(0), driven.sync
            )


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("family", "tied"), [("llama", False), ("qwen3", True)])
async def test_each_tensor_that_stays_behind_is_caught_and_named(tmp_path: Path, family: str, tied: bool) -> None:
    """In bfloat16, where a step at a learning rate of 1e-6 would not show: the canary's moves do."""
    folder = model_folder(tmp_path, family=family, tied=tied, layers=1)
    config = configured(folder, **{"model.dtype": "bfloat16"})
    async with driving(config, launch=partial(launched, "serve_freezing")) as driven:
        prover = Prover(Evidence(driven.policy.model, driven.device), driven.ask)
        assert (await prover.prove(["engine-0"], WeightVersion(0), driven.sync)).unseen == ()
        for name, _ in driven.policy.model.named_parameters():
            told(folder).write_text(name)
            with pytest.raises(WeightSyncError, match="engine-0 does not decode with all the weights that it was sent") as caught:
                await prover.prove(["engine-0"], WeightVersion(0), driven.sync)
            assert name in str(caught.value)
            told(folder).unlink()
            await driven.sync(WeightVersion(0))


async def test_an_untied_model(tmp_path: Path) -> None:
    base, moved = versions(tmp_path, tied=False)
    async with driving(configured(base)) as driven:
        await driven.move(seed=1)
        await driven.sync(WeightVersion(1))
        await agrees(driven, moved)
