"""The plain decoder on a CUDA device, against transformers on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rollyard.model.folder import load
from tests.engine.embedded.serving import Reference, answers, ask, serving
from tests.tiny import tiny_folder

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")]


async def test_greedy_tokens_and_logprobs(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path)
    model, reference = load(folder, torch.float32, "cuda"), Reference(folder)
    requests = [ask(name, tuple(range(2, 3 + name)), 16, member=k) for name in range(8) for k in range(2)]
    async with serving(folder, model=model, step_tokens=20, pages=60) as engine:
        written = await answers(engine, requests)
        assert engine.stats().decoder.startswith("plain")
    for request in requests:
        one = written[request.id]
        assert one.token_ids == reference.greedy(request.prompt_ids, 16)
        logprobs = reference.logprobs(request.prompt_ids, one.token_ids)
        torch.testing.assert_close(torch.tensor(one.logprobs), logprobs, atol=1e-3, rtol=0)


async def test_a_bfloat16_copy_follows_the_parameters(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path)
    model, reference = load(folder, torch.float32, "cuda"), Reference(folder)
    request = ask(0, (5, 6, 7), 12, temperature=1.0, ignore_eos=True)
    async with serving(folder, model=model, dtype="bfloat16") as engine:
        one = (await answers(engine, [request]))[request.id]
    gap = torch.tensor(one.logprobs) - reference.logprobs(request.prompt_ids, one.token_ids)
    assert float(gap.abs().max()) < 0.2
