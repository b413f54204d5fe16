"""The adapter against real servers on this machine, with the embedded engine behind them."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import pytest

from rollyard.engine.capabilities import CAPABILITIES
from rollyard.engine.openai.client import OpenAIClient
from rollyard.engine.openai.engine import OpenAIEngine
from rollyard.engine.openai.failure import ServerError
from rollyard.engine.openai.limits import Limits
from rollyard.errors import EngineError, RequestRejected
from rollyard.types import FinishReason, Request, WeightVersion
from tests.engine.embedded.serving import Written, answers, ask, serving
from tests.engine.openai.benches import PROMPTS, QUICK, Bench, Benches, first_change, one
from tests.engine.openai_double import Fault

# ----------------------------------------------------------------------------------------------------- the tokens


async def test_greedy_tokens_and_logprobs_are_those_of_the_embedded_engine(folder: Path, benches: Benches) -> None:
    requests = [ask(n, prompt, 20) for n, prompt in enumerate(PROMPTS)]
    async with serving(folder, kernels="plain") as embedded:
        expected = await answers(embedded, requests)
    async with benches.open() as bench:
        written = await answers(bench.engine, requests)
        assert bench.engine.version == WeightVersion(0)
        assert bench.engine.stats().generated_tokens == sum(len(e.token_ids) for e in expected.values())
    for name, one_expected in expected.items():
        assert written[name].token_ids == one_expected.token_ids
        assert written[name].logprobs == pytest.approx(one_expected.logprobs, abs=1e-4)
        assert written[name].finish == one_expected.finish
        assert all(s.version == s.oldest_kv == WeightVersion(0) for s in written[name].segments)


async def test_members_of_a_group_are_requests_of_their_own_with_seeds_of_their_own(folder: Path, benches: Benches) -> None:
    group = [ask(3, PROMPTS[1], 24, member=k, temperature=1.0, top_k=9, top_p=0.9, seed=100 + k) for k in range(6)]
    async with benches.open() as bench:
        first, again = await answers(bench.engine, group), await answers(bench.engine, group)
        assert len(bench.double.bodies) == 12
        assert {(body["top_k"], body["top_p"], body["temperature"]) for body in bench.double.bodies} == {(9, 0.9, 1.0)}
    assert [first[r.id].token_ids for r in group] == [again[r.id].token_ids for r in group]
    assert len({tuple(first[r.id].token_ids) for r in group}) > 1
    for request in group:
        kept = kept_logprobs(bench, request, first[request.id])
        assert first[request.id].logprobs == pytest.approx(kept, abs=1e-3)


def kept_logprobs(bench: Bench, request: Request, written: Written) -> list[float]:
    """Logprobs among the kept tokens, from transformers' forward pass and the definition of top_k, then top_p."""
    found = []
    for row, token_id in zip(bench.reference.logits(request.prompt_ids, written.token_ids), written.token_ids, strict=True):
        values, ids = row.sort(descending=True)
        values, ids = values[: request.sampling.top_k], ids[: request.sampling.top_k]
        shares = values.softmax(0)
        kept = int((shares.cumsum(0) - shares < request.sampling.top_p).sum())
        found.append(float(values[:kept].log_softmax(0)[ids[:kept].tolist().index(token_id)]))
    return found


async def test_a_continuation_draws_other_noise_than_its_beginning(benches: Benches) -> None:
    async with benches.open() as bench:
        whole = await one(bench, ask(1, PROMPTS[0], 20, temperature=1.0, seed=5, ignore_eos=True))
        rest = await one(bench, ask(2, PROMPTS[0], 12, written=whole.token_ids[:8], temperature=1.0, seed=5, ignore_eos=True))
        assert len(rest.token_ids) == 12
        assert bench.double.bodies[0]["seed"] != bench.double.bodies[1]["seed"]
        assert bench.double.bodies[1]["prompt"] == [*PROMPTS[0], *whole.token_ids[:8]]
        assert bench.double.bodies[1]["ignore_eos"] is True


async def test_a_greedy_completion_goes_on_in_the_same_words(benches: Benches) -> None:
    async with benches.open() as bench:
        whole = await one(bench, ask(1, PROMPTS[0], 20, ignore_eos=True))
        rest = await one(bench, ask(2, PROMPTS[0], 12, written=whole.token_ids[:8], ignore_eos=True))
    assert rest.token_ids == whole.token_ids[8:]


# ----------------------------------------------------------------------------------------------- what servers offer


async def test_what_a_server_offers_becomes_its_capabilities(benches: Benches) -> None:
    async with benches.open() as processed:
        assert processed.engine.capabilities.logprobs
        assert processed.engine.capabilities.truncation
        assert processed.engine.capabilities.token_ids
        assert not processed.engine.capabilities.train
        assert processed.engine.slots == 64
    async with benches.open(raw=True) as raw:
        assert not raw.engine.capabilities.logprobs
        assert raw.engine.capabilities.token_ids
    async with benches.open(strict=True) as plain:
        assert not plain.engine.capabilities.token_ids
    assert not CAPABILITIES["openai"].train


async def test_logprobs_of_another_distribution_are_not_passed_on(benches: Benches) -> None:
    """A server that gives those before temperature, as vLLM does unless told otherwise."""
    async with benches.open(raw=True) as bench:
        for sampling, exact in (
            ({"temperature": 0.7}, False),
            ({"temperature": 1.0}, True),
            ({"top_k": 3, "temperature": 1.0}, False),
            ({}, True),
        ):
            written = await one(bench, ask(1, PROMPTS[1], 6, ignore_eos=True, **sampling))  # type: ignore[arg-type]
            assert len(written.logprobs) == 6
            if exact:
                assert written.logprobs == pytest.approx(
                    bench.reference.logprobs(PROMPTS[1], written.token_ids).tolist(), abs=1e-4
                )
            else:
                assert all(map(math.isnan, written.logprobs))


@pytest.mark.parametrize("logprobs", [True, False])
async def test_a_server_of_texts_only_serves_with_a_tokenizer(benches: Benches, logprobs: bool) -> None:
    async with benches.open(token_ids=False) as full, benches.open(strict=True, logprobs=logprobs) as bench:
        expected = await one(full, ask(1, PROMPTS[1], 12))
        written = await one(bench, ask(1, PROMPTS[1], 12))
        assert bench.tokenizer.decode(written.token_ids) == bench.tokenizer.decode(expected.token_ids) != ""
        assert written.finish is FinishReason.LENGTH
        assert all(map(math.isnan, written.logprobs))
        with pytest.raises(RequestRejected, match="top_k"):
            bench.engine.generate([ask(2, PROMPTS[1], 12, top_k=5, temperature=1.0)])
        with pytest.raises(RequestRejected, match="ignore_eos"):
            bench.engine.generate([ask(2, PROMPTS[1], 12, ignore_eos=True)])
        assert "return_token_ids" not in bench.double.bodies[-1]
        assert ("logprobs" in bench.double.bodies[-1]) == logprobs


async def test_a_server_of_texts_only_does_not_serve_without_one(benches: Benches) -> None:
    with pytest.raises(EngineError, match="no token ids"):
        async with benches.open(token_ids=False, reads=False):
            pass


async def test_a_bad_key_gives_one_clear_error_at_the_start(benches: Benches) -> None:
    async with benches.double(key="right") as server:
        engine = OpenAIEngine("judge", OpenAIClient([server.address], "tiny", "wrong-key", Limits(**QUICK)))
        with pytest.raises(ServerError) as caught:
            await engine.start()
        await engine.close()
    assert str(caught.value) == f"server {server.address} answered 401: Incorrect API key provided: ***."


async def test_a_model_that_is_not_there_gives_one_clear_error_at_the_start(benches: Benches) -> None:
    async with benches.double() as server:
        engine = OpenAIEngine("judge", OpenAIClient([server.address], "huge", "", Limits(**QUICK)))
        with pytest.raises(ServerError, match="answered 404: The model 'huge' does not exist"):
            await engine.start()
        await engine.close()


# ------------------------------------------------------------------------------------------------------ how they end


async def test_stop_strings_end_a_completion_over_token_borders(folder: Path, benches: Benches) -> None:
    async with benches.open() as bench, serving(folder, kernels="plain") as embedded:
        plain = await one(bench, ask(1, PROMPTS[1], 30, ignore_eos=True))
        characters = bench.tokenizer.decode(plain.token_ids)
        assert len(characters) == len(plain.token_ids)
        at = first_change(characters)
        stop = characters[at - 1 : at + 1]
        request = ask(2, PROMPTS[1], 30, stop=(stop,), ignore_eos=True)
        written, expected = await one(bench, request), (await answers(embedded, [request]))[request.id]
        assert written.token_ids == expected.token_ids == plain.token_ids[: at + 1]
        assert written.finish is FinishReason.STOP
        # The server sees the second half only, and would go on.
        rest = await one(bench, ask(3, PROMPTS[1], 30, written=plain.token_ids[:at], stop=(stop,), ignore_eos=True))
        assert rest.token_ids == plain.token_ids[at : at + 1]
        assert rest.finish is FinishReason.STOP


async def test_a_window_that_is_known_cuts_what_may_be_written(benches: Benches) -> None:
    prompt = tuple(range(2, 22))
    async with benches.open(window=32) as bench:
        written = await one(bench, ask(1, prompt, 50, ignore_eos=True))
        assert (len(written.token_ids), written.finish) == (12, FinishReason.CONTEXT)
        exact = await one(bench, ask(2, prompt, 12, ignore_eos=True))
        assert (len(exact.token_ids), exact.finish) == (12, FinishReason.LENGTH)
        with pytest.raises(RequestRejected, match="no room"):
            bench.engine.generate([ask(3, (3,) * 32, 1)])
        assert [body["max_tokens"] for body in bench.double.bodies] == [12, 12]


async def test_a_window_that_is_not_known_is_learnt_from_the_first_refusal(benches: Benches) -> None:
    prompt = tuple(range(2, 22))
    async with benches.open(window=32, says_window=False) as bench:
        over = await one(bench, ask(1, (3,) * 40, 5))
        assert (over.token_ids, over.finish) == ([], FinishReason.CONTEXT)
        written = await one(bench, ask(2, prompt, 50, ignore_eos=True))
        assert (len(written.token_ids), written.finish) == (12, FinishReason.CONTEXT)
        assert [body["max_tokens"] for body in bench.double.bodies] == [5, 12]
    async with benches.open(window=32, says_window=False) as bench:
        written = await one(bench, ask(1, prompt, 50, ignore_eos=True))
        assert (len(written.token_ids), written.finish) == (12, FinishReason.CONTEXT)
        await one(bench, ask(2, prompt, 50, ignore_eos=True))
        assert [body["max_tokens"] for body in bench.double.bodies] == [50, 12, 12]


async def test_a_completion_that_the_server_cut_to_its_window_says_so(benches: Benches) -> None:
    """As vLLM does instead of refusing it."""
    event = 'data: {"choices": [{"token_ids": [4], "logprobs": {"token_logprobs": [-1]}, "finish_reason": "length"}]}'
    async with benches.open() as bench:
        bench.double.faults.append(Fault(200, f"{event}\n\ndata: [DONE]\n\n", "text/event-stream"))
        assert (await one(bench, ask(1, PROMPTS[0], 2))).finish is FinishReason.CONTEXT


@pytest.mark.parametrize("fault", [Fault(cut_after=2), Fault(cut_after=1)])
async def test_a_connection_that_breaks_keeps_the_tokens_that_came(benches: Benches, fault: Fault) -> None:
    async with benches.open() as bench:
        whole = await one(bench, ask(1, PROMPTS[0], 100, ignore_eos=True))
        bench.double.faults.append(fault)
        cut = await one(bench, ask(2, PROMPTS[0], 100, ignore_eos=True))
        assert cut.finish is FinishReason.ERROR
        assert cut.segments[-1].problem.startswith(f"server {bench.double.address} broke off")
        assert 0 < len(cut.token_ids) < 100
        assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]


@pytest.mark.parametrize(
    "fault",
    [
        Fault(429, headers={"Retry-After": "0.1"}),
        Fault(500),
        Fault(503, "<h1>sorry</h1>", "text/html"),
        Fault(200, "<h1>hello</h1>", "text/html"),
        Fault(200, "data: nonsense\n\n", "text/event-stream"),
        Fault(200, 'data: {"error": {"message": "died", "code": 500}}\n\n', "text/event-stream"),
        Fault(cut_after=0),
        Fault(delay_s=0.3),
    ],
)
async def test_what_goes_wrong_before_the_first_token_is_tried_again(benches: Benches, fault: Fault) -> None:
    async with benches.open() as bench:
        bench.double.faults.append(fault)
        expected = bench.reference.greedy(PROMPTS[0], 8)
        assert (await one(bench, ask(1, PROMPTS[0], 8))).token_ids == expected
        assert len(bench.double.bodies) == (1 if fault.delay_s else 2)


async def test_a_server_that_fails_for_good_ends_a_request_with_its_words(benches: Benches) -> None:
    async with benches.open(limits={"tries": 3}) as bench:
        bench.double.faults.extend([Fault(500)] * 3)
        written = await one(bench, ask(1, PROMPTS[0], 8))
        assert written.finish is FinishReason.ERROR
        assert written.segments[0].problem == f"server {bench.double.address} answered 500: told to fail (tried 3 times)"


async def test_a_silent_server_ends_a_request_within_its_time(benches: Benches) -> None:
    async with benches.open(limits={"silence_s": 0.2, "tries": 2}) as bench:
        bench.double.faults.extend([Fault(delay_s=30)] * 2)
        async with asyncio.timeout(10):
            written = await one(bench, ask(1, PROMPTS[0], 8))
        assert "was silent for too long" in written.segments[0].problem
        assert bench.double.stopped.empty(), "what was not begun is not stopped"


async def test_an_end_that_is_none_of_ours_is_an_error(benches: Benches) -> None:
    event = 'data: {"choices": [{"text": "", "token_ids": [], "finish_reason": "content_filter"}]}\n\ndata: [DONE]\n\n'
    async with benches.open() as bench:
        bench.double.faults.append(Fault(200, event, "text/event-stream"))
        written = await one(bench, ask(1, PROMPTS[0], 8))
        assert (written.finish, written.segments[0].problem) == (FinishReason.ERROR, "the server ended it with 'content_filter'")
        bench.double.faults.append(Fault(200, "data: [DONE]\n\n", "text/event-stream"))
        assert (await one(bench, ask(2, PROMPTS[0], 8))).finish is FinishReason.ABORT


@pytest.mark.parametrize(
    ("choice", "problem"),
    [
        ('{"text": "ab"}', "a server gave text without token ids"),
        ('{"text": "ab", "token_ids": [4, 5]}', "a server gave token ids without logprobs"),
        (
            '{"text": "", "token_ids": [4, 5, 6], "logprobs": {"token_logprobs": [-1, -1, -1]}}',
            "a server wrote more than the 2 tokens it was asked for",
        ),
    ],
)
async def test_a_server_that_is_unlike_the_first_is_found_out(benches: Benches, choice: str, problem: str) -> None:
    async with benches.open() as bench:
        bench.double.faults.append(Fault(200, f'data: {{"choices": [{choice}]}}\n\ndata: [DONE]\n\n', "text/event-stream"))
        written = await one(bench, ask(1, PROMPTS[0], 2))
        assert (written.finish, written.segments[-1].problem) == (FinishReason.ERROR, problem)
