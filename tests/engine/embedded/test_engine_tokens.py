"""What the engine writes, against transformers: `generate` and a plain forward pass over the whole sequence."""

from __future__ import annotations

import random
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Protocol

import pytest
import torch

from rollyard.engine.embedded.engine import EmbeddedEngine
from rollyard.types import FinishReason, Request, RequestId
from tests.engine.embedded import serving as engines
from tests.engine.embedded.serving import DECODERS, Reference, Written, answers, ask
from tests.tiny import CHARACTERS, tiny_folder


class Serving(Protocol):
    def __call__(self, folder: Path, **config: object) -> AbstractAsyncContextManager[EmbeddedEngine]: ...


SHAPES = {
    "llama-tied-grouped": dict(family="llama", tied=True, heads=4, kv_heads=2),
    "llama-untied": dict(family="llama", tied=False, heads=4, kv_heads=4),
    "qwen2-tied-grouped": dict(family="qwen2", tied=True, heads=4, kv_heads=1),
    "qwen3-untied-grouped": dict(family="qwen3", tied=False, heads=6, kv_heads=2, width=96),
}


@pytest.fixture(params=DECODERS, autouse=True)
def decoder(request: pytest.FixtureRequest) -> str:
    """Every test here runs with our own kernels and with plain torch."""
    return str(request.param)


@pytest.fixture
def serving(decoder: str) -> Serving:
    return partial(engines.serving, kernels=decoder)


@pytest.fixture(scope="module", params=SHAPES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("model"), **SHAPES[request.param])  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("llama"))


def prompts(count: int, longest: int = 30, seed: int = 0) -> list[tuple[int, ...]]:
    source = random.Random(seed)
    return [tuple(source.randrange(2, 40) for _ in range(source.randint(1, longest))) for _ in range(count)]


def check_against(reference: Reference, requests: list[Request], written: dict[RequestId, Written]) -> None:
    """Greedy: the tokens of `generate`, and the logprobs of a plain pass."""
    for request in requests:
        one = written[request.id]
        expected = reference.greedy(request.prompt_ids, len(request.written_ids) + request.sampling.max_tokens)
        assert [*request.written_ids, *one.token_ids] == expected
        assert one.finish is (FinishReason.STOP if expected[-1] == 1 else FinishReason.LENGTH)
        logprobs = reference.logprobs(request.prompt_ids, expected)[len(request.written_ids) :]
        torch.testing.assert_close(torch.tensor(one.logprobs), logprobs, atol=1e-4, rtol=0)


async def test_greedy_tokens_of_ragged_prompts(folder: Path, reference: Reference, serving: Serving) -> None:
    requests = [ask(name, prompt, 5 + name) for name, prompt in enumerate(prompts(12))]
    async with serving(folder) as engine:
        check_against(reference, requests, await answers(engine, requests))


async def test_greedy_tokens_when_pages_run_out(folder: Path, reference: Reference, serving: Serving) -> None:
    requests = [ask(name, prompt, 24) for name, prompt in enumerate(prompts(8, longest=12))]
    async with serving(folder, pages=14) as engine:
        check_against(reference, requests, await answers(engine, requests))
        assert engine.stats().preemptions > 0 and engine.stats().recomputed_tokens > 0


async def test_greedy_tokens_of_shared_prompts(folder: Path, reference: Reference, serving: Serving) -> None:
    # Different lengths, so that members leave the shared pages at different times.
    requests = [ask(name, prompt, 4 + 3 * k, member=k) for name, prompt in enumerate(prompts(5)) for k in range(4)]
    async with serving(folder, pages=60) as engine:
        check_against(reference, requests, await answers(engine, requests))
        stats = engine.stats()
        lengths = [len(prompt) for prompt in prompts(5)]
        assert stats.prefilled_tokens + stats.recomputed_tokens >= sum(lengths)
        assert stats.shared_tokens > 0


async def test_each_prompt_is_prefilled_once(llama: Path, serving: Serving) -> None:
    requests = [ask(name, prompt, 6, member=k) for name, prompt in enumerate(prompts(5)) for k in range(4)]
    async with serving(llama, slots=3) as engine:
        await answers(engine, requests)
        total = sum(len(prompt) for prompt in prompts(5))
        assert engine.stats().prefilled_tokens == total
        assert engine.stats().shared_tokens == 3 * total


async def test_greedy_tokens_when_prompts_are_computed_in_chunks(folder: Path, reference: Reference, serving: Serving) -> None:
    requests = [ask(name, prompt, 8) for name, prompt in enumerate(prompts(10))]
    async with serving(folder, step_tokens=7) as engine:
        check_against(reference, requests, await answers(engine, requests))


async def test_greedy_tokens_when_prompts_spare_who_decodes(folder: Path, reference: Reference, serving: Serving) -> None:
    requests = [ask(name, prompt, 4 + 2 * name) for name, prompt in enumerate(prompts(10))]
    async with serving(folder, slots=4, prefill_tokens=3) as engine:
        check_against(reference, requests, await answers(engine, requests))
        spared = engine.stats().steps
    async with serving(folder, slots=4) as engine:
        check_against(reference, requests, await answers(engine, requests))
        assert engine.stats().steps < spared  # so prompts did come beside decoding


async def test_a_continued_request_goes_on_as_if_never_cut(folder: Path, reference: Reference, serving: Serving) -> None:
    whole = {name: reference.greedy(prompt, 15) for name, prompt in enumerate(prompts(6))}
    requests = [
        ask(name, prompt, 15 - name, written=whole[name][:name])
        for name, prompt in enumerate(prompts(6))
        if len(whole[name]) > name
    ]
    assert len(requests) > 3
    async with serving(folder, step_tokens=16) as engine:
        check_against(reference, requests, await answers(engine, requests))


async def test_logprobs_at_a_temperature(folder: Path, reference: Reference, serving: Serving) -> None:
    requests = [ask(name, prompt, 12, temperature=0.8, ignore_eos=True) for name, prompt in enumerate(prompts(6))]
    async with serving(folder) as engine:
        written = await answers(engine, requests)
    for request in requests:
        one = written[request.id]
        logprobs = reference.logprobs(request.prompt_ids, one.token_ids, temperature=0.8)
        torch.testing.assert_close(torch.tensor(one.logprobs), logprobs, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("top_p", "top_k"), [(0.7, 0), (1.0, 5), (0.8, 6)])
async def test_logprobs_are_those_of_the_kept_set(llama: Path, top_p: float, top_k: int, serving: Serving) -> None:
    reference = Reference(llama)
    requests = [
        ask(name, prompt, 12, temperature=0.8, top_p=top_p, top_k=top_k, ignore_eos=True)
        for name, prompt in enumerate(prompts(6))
    ]
    async with serving(llama) as engine:
        written = await answers(engine, requests)
    for request in requests:
        one = written[request.id]
        for token, logprob, logits in zip(
            one.token_ids, one.logprobs, reference.logits(request.prompt_ids, one.token_ids), strict=True
        ):
            assert logprob == pytest.approx(expected_logprob(logits, token, 0.8, top_p, top_k), abs=1e-4)


def expected_logprob(logits: torch.Tensor, token: int, temperature: float, top_p: float, top_k: int) -> float:
    """By hand: sort, keep, renormalise."""
    probabilities = torch.softmax(logits.double() / temperature, dim=-1).tolist()
    ranked = sorted(range(len(probabilities)), key=lambda index: -probabilities[index])
    ranked = ranked[:top_k] if top_k else ranked
    mass, kept, held = sum(probabilities[index] for index in ranked), [], 0.0
    for index in ranked:
        if held >= top_p * mass:
            break
        kept.append(index)
        held += probabilities[index]
    assert token in kept
    return float(torch.tensor(probabilities[token] / held).log())


async def sampled(serving: Serving, folder: Path, requests: list[Request], **config: int) -> dict[RequestId, list[int]]:
    async with serving(folder, **config) as engine:
        return {name: one.token_ids for name, one in (await answers(engine, requests)).items()}


async def test_sampled_tokens_do_not_depend_on_the_batch(llama: Path, serving: Serving) -> None:
    requests = [
        ask(name, prompt, 16, member=k, temperature=(0.7, 1.0, 1.3)[k], top_p=(1.0, 0.9, 1.0)[k])
        for name, prompt in enumerate(prompts(5))
        for k in range(3)
    ]
    plain = await sampled(serving, llama, requests, slots=16)
    assert len({tuple(tokens) for tokens in plain.values()}) == 15  # every member has noise of its own
    assert await sampled(serving, llama, requests[::-1], slots=1) == plain
    assert await sampled(serving, llama, requests, slots=4, pages=20, step_tokens=9) == plain
    others = [ask(50 + name, prompt, 9, temperature=2.0) for name, prompt in enumerate(prompts(7, seed=5))]
    mixed = await sampled(serving, llama, [*others[:4], *requests, *others[4:]])
    assert {name: tokens for name, tokens in mixed.items() if name.group < 50} == plain
    # Cut after any number of tokens and continued elsewhere.
    continued = [
        ask(request.id.group, request.prompt_ids, 16 - cut, member=request.id.member, written=plain[request.id][:cut],
            temperature=request.sampling.temperature, top_p=request.sampling.top_p)
        for cut, request in enumerate(requests)
        if len(plain[request.id]) > cut
    ]  # fmt: skip
    tails = await sampled(serving, llama, continued)
    assert len(continued) > 8
    assert all([*request.written_ids, *tails[request.id]] == plain[request.id] for request in continued)


async def test_another_seed_writes_another_text(llama: Path, serving: Serving) -> None:
    requests = [ask(seed, (5, 6, 7), 12, seed=seed, temperature=1.0, ignore_eos=True) for seed in range(20)]
    written = await sampled(serving, llama, requests)
    assert len({tuple(tokens) for tokens in written.values()}) == 20


async def test_the_first_token_is_distributed_as_the_model_says(llama: Path, serving: Serving) -> None:
    prompt = (9, 8, 7)
    requests = [ask(0, prompt, 1, member=k, temperature=1.0) for k in range(4000)]
    async with serving(llama, slots=512) as engine:
        written = await answers(engine, requests)
    probabilities = torch.softmax(Reference(llama).logits(prompt, [2])[0].double(), dim=-1)
    drawn = torch.bincount(torch.tensor([one.token_ids[0] for one in written.values()]), minlength=len(probabilities))
    expected = probabilities * len(requests)
    often = expected >= 5
    chi2 = float(((drawn - expected) ** 2 / expected)[often].sum())
    degrees = int(often.sum()) - 1
    assert chi2 < degrees + 5 * (2 * degrees) ** 0.5  # five standard deviations above the mean


async def test_end_of_sequence_is_a_set(llama: Path, tmp_path: Path, serving: Serving) -> None:
    first = Reference(llama).greedy((5, 6), 6)
    ends = tiny_folder(tmp_path, eos_token_id=[1, first[2]], pad_token_id=0)
    stop_at = first.index(first[2])
    async with serving(ends) as engine:
        written = await answers(engine, [ask(0, (5, 6), 6), ask(1, (5, 6), 6, ignore_eos=True)])
    cut, whole = written[RequestId(0, 0)], written[RequestId(1, 0)]
    assert (cut.token_ids, cut.finish) == (first[: stop_at + 1], FinishReason.STOP)
    assert (whole.token_ids, whole.finish) == (first, FinishReason.LENGTH)


async def test_stop_strings_end_a_completion_over_token_borders(llama: Path, serving: Serving) -> None:
    text = [CHARACTERS[token - 2] if token > 1 else "" for token in Reference(llama).greedy((5, 6, 9), 20)]
    stop = "".join(text[6:9])
    assert len(stop) == 3
    end = "".join(text).index(stop) + 3
    requests = [ask(0, (5, 6, 9), 20, stop=("never", stop)), ask(1, (5, 6, 9), 20)]
    async with serving(llama) as engine:
        written = await answers(engine, requests)
        one, whole = written[RequestId(0, 0)], written[RequestId(1, 0)]
        assert one.finish is FinishReason.STOP and one.token_ids == whole.token_ids[:end]
        # Cut inside the stop string and continued: the part written before counts.
        rest = ask(2, (5, 6, 9), 20, written=whole.token_ids[: end - 1], stop=(stop,))
        written = await answers(engine, [rest])
        assert written[rest.id].token_ids == [whole.token_ids[end - 1]] and written[rest.id].finish is FinishReason.STOP


async def test_the_window_ends_a_completion(llama: Path, serving: Serving) -> None:
    requests = [
        ask(0, (5,) * 20, 50, ignore_eos=True),
        ask(1, (5,) * 20, 12, ignore_eos=True),
        ask(2, (5,) * 31, 9, ignore_eos=True),
    ]
    async with serving(llama, window=32) as engine:
        written = await answers(engine, requests)
    ends = [(len(written[request.id].token_ids), written[request.id].finish) for request in requests]
    assert ends == [(12, FinishReason.CONTEXT), (12, FinishReason.LENGTH), (1, FinishReason.CONTEXT)]


async def test_bfloat16_runs(llama: Path, serving: Serving, decoder: str) -> None:
    from rollyard.model.folder import load

    model = load(llama, torch.bfloat16, torch.device("cpu"))
    requests = [ask(name, prompt, 8, temperature=1.0, ignore_eos=True) for name, prompt in enumerate(prompts(6))]
    async with serving(llama, model=model, step_tokens=16) as engine:
        written = await answers(engine, requests)
        assert engine.stats().decoder == decoder
    exact = Reference(llama)
    for request in requests:
        one = written[request.id]
        logprobs = exact.logprobs(request.prompt_ids, one.token_ids)
        assert len(one.token_ids) == 8 and float((torch.tensor(one.logprobs) - logprobs).abs().max()) < 0.2
