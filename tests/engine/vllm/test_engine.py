"""What a run relies on in vLLM: the same completions as the embedded engine, cuts, pauses, versions, distributions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import torch

from rollyard.errors import EngineError
from rollyard.events import Rollover
from rollyard.model.tokenizer import Tokenizer
from rollyard.types import FinishReason, RequestId, WeightVersion
from tests.engine.embedded.serving import Reference, Written, answers, ask, collect, serving
from tests.engine.vllm.driving import WINDOW, Driven, configured, driving, model_folder, segments

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(240), pytest.mark.asyncio(loop_scope="module")]
PROMPT = [7, 3, 12, 5, 9]
ENDS = tuple(range(1, 48, 4))  # end-of-sequence ids: so many that some are written soon


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model"), eos_token_id=list(ENDS))


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["worker", "server"])
async def driven(folder: Path, request: pytest.FixtureRequest) -> AsyncIterator[Driven]:
    """With as many slots as the classic configuration has."""
    async with driving(configured(folder, slots=256, server=request.param == "server")) as driven:
        yield driven


def text(found: Written) -> tuple[tuple[int, ...], FinishReason | None]:
    return tuple(found.token_ids), found.finish


async def test_completions_are_those_of_the_embedded_engine(driven: Driven, folder: Path) -> None:
    """End-of-sequence ids, stop strings over token borders, lengths, the window's end, going on after a cut."""
    whole = (await answers(driven.engine, [ask(0, PROMPT, 40, ignore_eos=True)]))[RequestId(0, 0)].token_ids
    words = Tokenizer(folder).decode(whole)
    long = [2 + number % 38 for number in range(WINDOW - 6)]
    requests = [
        *(ask(number, [number, 5, 8, number + 1], 60) for number in range(2, 14)),
        ask(20, PROMPT, 40, ignore_eos=True, stop=(words[5:8],)),
        ask(21, PROMPT, 40, ignore_eos=True, stop=("never?", words[9:11])),
        ask(22, PROMPT, 40, ignore_eos=True, stop=(words[7:10],), written=whole[:8]),  # completed by what was written
        ask(23, PROMPT, 7, ignore_eos=True),
        ask(24, long, 40, ignore_eos=True),
        ask(25, long, 6, ignore_eos=True),
        ask(26, PROMPT, 20, ignore_eos=True, written=whole[:15]),
    ]
    found = await answers(driven.engine, requests)
    async with serving(folder, window=WINDOW) as embedded:
        wanted = await answers(embedded, requests)
    for request in requests:
        assert text(found[request.id]) == text(wanted[request.id]), request
        torch.testing.assert_close(found[request.id].logprobs, wanted[request.id].logprobs, atol=1e-3, rtol=0)
    finishes = [found[request.id].finish for request in requests]
    assert set(finishes) == {FinishReason.STOP, FinishReason.LENGTH, FinishReason.CONTEXT}
    ends = [found[request.id].token_ids[-1] for request in requests[:12] if found[request.id].finish is FinishReason.STOP]
    assert len(set(ends)) > 1, "more than one of the end-of-sequence ids was met"


async def test_logprobs_are_those_of_the_distribution_tokens_are_drawn_from(driven: Driven, folder: Path) -> None:
    """The classic configuration: temperature 0.8, top_p 0.95; and top_k. Processed by hand from transformers' logits."""
    options = [(0.8, 0.95, 0), (1.0, 1.0, 0), (0.7, 1.0, 5)]
    requests = [
        ask(number, PROMPT, 40, member=member, temperature=temperature, top_p=top_p, top_k=top_k, ignore_eos=True)
        for number, (temperature, top_p, top_k) in enumerate(options)
        for member in range(8)
    ]
    found = await answers(driven.engine, requests)
    reference = Reference(folder)
    for request in requests:
        done, sampling = found[request.id], request.sampling
        scaled = reference.logits(PROMPT, done.token_ids).double() / sampling.temperature
        probabilities = scaled.softmax(dim=-1)
        ordered, order = probabilities.sort(dim=-1, descending=True)
        kept = ordered.cumsum(dim=-1) - ordered < sampling.top_p
        if sampling.top_k:
            kept[:, sampling.top_k :] = False
        narrowed = torch.zeros_like(probabilities).scatter(1, order, ordered * kept)
        narrowed /= narrowed.sum(dim=-1, keepdim=True)
        wanted = narrowed.log().gather(1, torch.tensor(done.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(done.logprobs).double(), wanted, atol=1e-3, rtol=0)
    assert len({tuple(found[request.id].token_ids) for request in requests}) == len(requests)


async def test_seeds(driven: Driven) -> None:
    def drawn(name: int, seed: int, written: tuple[int, ...] = ()):  # type: ignore[no-untyped-def]
        return ask(name, PROMPT, 30, seed=seed, temperature=1.0, ignore_eos=True, written=written)

    most = 2**64 - 1  # seeds have 64 bits
    found = await answers(driven.engine, [drawn(0, most), drawn(1, most), drawn(2, most - 2**63)])
    first, same, other = (found[RequestId(number, 0)].token_ids for number in range(3))
    assert first == same != other
    again = (await answers(driven.engine, [drawn(3, most, tuple(first[:1]))]))[RequestId(3, 0)].token_ids
    assert again[:29] != first[1:], "what goes on elsewhere draws with noise of its own"


async def test_members_share_the_prompt(driven: Driven) -> None:
    prompt = [2 + number % 31 for number in range(96)]
    await asyncio.sleep(0.5)  # totals follow the tokens
    before = driven.engine.stats()
    await answers(driven.engine, [ask(0, prompt, 4, ignore_eos=True)])
    found = await answers(
        driven.engine, [ask(1, prompt, 20, member=member, temperature=1.0, ignore_eos=True) for member in range(8)]
    )
    await asyncio.sleep(0.5)
    after = driven.engine.stats()
    assert after.shared_tokens - before.shared_tokens >= 8 * 64  # full pages of 32, the last token always computed
    assert len({tuple(one.token_ids) for one in found.values()}) == 8
    tokens = sum(len(one.token_ids) for one in found.values()) + 4
    assert after.generated_tokens - before.generated_tokens == tokens
    assert 0 < after.slots_busy <= 1 and after.decoder.startswith("vLLM 0.32")


async def test_what_is_cut_goes_on_as_if_nothing_had_happened(driven: Driven) -> None:
    engine = driven.engine
    whole = (await answers(engine, [ask(0, PROMPT, 200, ignore_eos=True)]))[RequestId(0, 0)]
    assert all(len(segment.token_ids) <= 32 for segment in whole.segments)
    engine.generate([ask(1, PROMPT, 200, ignore_eos=True)])
    found = await segments(engine, 16)
    await engine.abort([RequestId(1, 0), RequestId(99, 0)])  # the second is unknown
    found += [segment for one in (await collect(engine, 1)).values() for segment in one.segments]
    assert found[-1].finish is FinishReason.ABORT
    cut = [token for segment in found for token in segment.token_ids]
    assert 16 <= len(cut) < 200 and cut == whole.token_ids[: len(cut)]
    rest = ask(2, PROMPT, 200 - len(cut), ignore_eos=True, written=cut)
    assert cut + (await answers(engine, [rest]))[RequestId(2, 0)].token_ids == whole.token_ids


async def test_weights_change_under_what_runs(driven: Driven) -> None:
    """KEEP: nothing comes while it stands still; each token is of the version that wrote it, over keys of the first."""
    engine, before, after = driven.engine, WeightVersion(10), WeightVersion(11)
    await driven.sync(before)
    names = [RequestId(0, member) for member in range(4)]
    engine.generate([ask(0, PROMPT, 200, member=member, temperature=1.0, ignore_eos=True) for member in range(4)])
    first = await segments(engine, 80)
    await driven.move(seed=3)
    await driven.offer(after)
    await engine.pause(Rollover.KEEP)
    with pytest.raises(EngineError, match="paused"):
        engine.generate([ask(1, PROMPT)])
    still = driven.engine.stats().generated_tokens
    first += await waiting(driven)
    await asyncio.sleep(0.5)
    assert await waiting(driven) == [] and driven.engine.stats().generated_tokens == still
    await engine.load(after)
    driven.publisher.taken("engine-0", after)
    await engine.resume()
    second = await collect(engine, 4)
    assert {segment.version for segment in first} == {before}
    for name in names:
        early = [segment for segment in first if segment.request == name]
        late = second[name].segments
        assert {(segment.version, segment.oldest_kv) for segment in late} == {(after, before)}
        assert sum(len(segment.token_ids) for segment in (*early, *late)) == 200
    new = await answers(engine, [ask(2, PROMPT, 20)])
    assert {(segment.version, segment.oldest_kv) for segment in new[RequestId(2, 0)].segments} == {(after, after)}


async def waiting(driven: Driven) -> list[object]:
    """What has come and was not taken yet."""
    found: list[object] = []
    queue = driven.engine._ready
    while not queue.empty():
        found += queue.get_nowait() or ()
    return found


async def test_pausing_by_cutting_and_by_finishing(driven: Driven) -> None:
    engine = driven.engine
    engine.generate([ask(0, PROMPT, 200, member=member, temperature=1.0, ignore_eos=True) for member in range(4)])
    await segments(engine, 16)
    await engine.pause(Rollover.ABORT)
    found = await collect(engine, 4)
    assert {one.finish for one in found.values()} == {FinishReason.ABORT}
    await engine.resume()
    engine.generate([ask(1, PROMPT, 100, member=member, temperature=1.0, ignore_eos=True) for member in range(4)])
    await engine.pause(Rollover.DRAIN)
    done = await collect(engine, 4)
    assert [len(one.token_ids) for one in done.values()] == [100] * 4
    await engine.resume()


async def test_pages_of_old_weights_are_never_shared(driven: Driven, folder: Path) -> None:
    """Also while a request of the old version still holds them."""
    engine, prompt = driven.engine, [2 + number % 29 for number in range(96)]
    engine.generate([ask(0, prompt, 150, temperature=1.0, ignore_eos=True)])
    await segments(engine, 16)
    await driven.move(seed=4)
    await driven.sync(WeightVersion(20), Rollover.KEEP)
    engine.generate([ask(1, prompt, 20, ignore_eos=True)])
    found = (await collect(engine, 2))[RequestId(1, 0)]
    async with serving(folder, model=driven.policy.model) as embedded:
        wanted = (await answers(embedded, [ask(1, prompt, 20, ignore_eos=True)]))[RequestId(1, 0)]
    assert found.token_ids == wanted.token_ids
    torch.testing.assert_close(found.logprobs, wanted.logprobs, atol=1e-3, rtol=0)


async def test_a_request_that_can_never_run(driven: Driven) -> None:
    cold = ask(1, PROMPT, 4, temperature=0.005)  # vLLM would draw with 0.01, and say nothing
    found = await answers(driven.engine, [ask(0, [2] * WINDOW, 4), cold, ask(2, [60], 4), ask(3, PROMPT, 4, ignore_eos=True)])
    finishes = {name.group: one.finish for name, one in found.items()}
    assert finishes == {0: FinishReason.ERROR, 1: FinishReason.ERROR, 2: FinishReason.ERROR, 3: FinishReason.LENGTH}
    assert "temperature" in found[RequestId(1, 0)].segments[-1].problem
