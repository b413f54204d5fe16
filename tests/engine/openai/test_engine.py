"""The adapter against real servers on this machine, with the embedded engine behind them."""

from __future__ import annotations

import asyncio
import math
import socket
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rollyard.engine.capabilities import CAPABILITIES
from rollyard.engine.openai.chat import Chat
from rollyard.engine.openai.client import OpenAIClient
from rollyard.engine.openai.engine import OpenAIEngine
from rollyard.engine.openai.failure import ServerError
from rollyard.engine.openai.limits import Limits
from rollyard.errors import ConfigError, EngineError, RequestRejected, WeightSyncError
from rollyard.events import Rollover, WakePart
from rollyard.layers import resolve
from rollyard.model.tokenizer import Tokenizer
from rollyard.types import FinishReason, Manifest, Request, RequestId, Sampling, WeightVersion
from tests.engine.embedded.serving import Reference, Written, answers, ask, collect, serving
from tests.engine.openai_double import Double, Fault, double
from tests.tiny import tiny_folder

PROMPTS = ((5, 6, 7), (30, 4, 9, 12, 40), (11,))
QUICK: dict[str, Any] = {"backoff_s": 0.01, "aside_s": 0.05, "total_s": 20.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("tiny"), chat=True)


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder)


@dataclass
class Bench:
    """An engine under test, and the double it speaks to."""

    engine: OpenAIEngine
    double: Double
    tokenizer: Tokenizer
    reference: Reference


class Benches:
    def __init__(self, folder: Path, reference: Reference) -> None:
        self._folder, self.reference = folder, reference
        self.tokenizer = Tokenizer(folder)

    def double(self, **offers: Any) -> AbstractAsyncContextManager[Double]:
        return double(self._folder, **offers)

    @asynccontextmanager
    async def open(
        self, *, window: int = 256, key: str = "", reads: bool = True, limits: dict[str, Any] | None = None, **offers: Any
    ) -> AsyncIterator[Bench]:
        async with self.double(window=window, key=key, **offers) as server:
            client = OpenAIClient([server.address], "tiny", key, Limits(**(QUICK | (limits or {}))))
            engine = OpenAIEngine("judge", client, self.tokenizer if reads else None)
            try:
                await engine.start()
                server.bodies.clear()
                yield Bench(engine, server, self.tokenizer, self.reference)
            finally:
                await engine.close()


@pytest.fixture
def benches(folder: Path, reference: Reference) -> Benches:
    return Benches(folder, reference)


async def one(bench: Bench, request: Request) -> Written:
    return (await answers(bench.engine, [request]))[request.id]


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


def first_change(text: str) -> int:
    """Where a text has another character for the first time: it ends the first such pair."""
    return next(at for at in range(1, len(text)) if text[at] != text[0])


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


# -------------------------------------------------------------------------------------------------------- the life


async def _until_begun(bench: Bench, written: dict[RequestId, Written], count: int) -> None:
    """Read until so many requests have tokens."""
    async for segments in bench.engine.segments():
        for segment in segments:
            into = written.setdefault(segment.request, Written())
            into.token_ids += segment.token_ids
        if len(written) == count:
            return


async def test_abort_keeps_the_tokens_and_stops_the_server(benches: Benches) -> None:
    async with benches.open() as bench:
        requests = [ask(n, PROMPTS[0], 240, ignore_eos=True) for n in range(3)]
        bench.engine.generate(requests)
        written: dict[RequestId, Written] = {}
        await _until_begun(bench, written, 3)
        await bench.engine.abort([requests[0].id, requests[2].id, RequestId(99, 0)])
        await collect(bench.engine, 3, written)
        assert [written[r.id].finish for r in requests] == [FinishReason.ABORT, FinishReason.LENGTH, FinishReason.ABORT]
        whole = written[requests[1].id].token_ids
        assert len(whole) == 240
        for cut in (written[requests[0].id], written[requests[2].id]):
            assert 0 < len(cut.token_ids) < 240
            assert cut.token_ids == whole[: len(cut.token_ids)]
        async with asyncio.timeout(5):
            assert await bench.double.stopped.get() != await bench.double.stopped.get()


async def test_pause_aborts_or_drains_and_takes_nothing_meanwhile(benches: Benches) -> None:
    async with benches.open() as bench:
        engine = bench.engine
        with pytest.raises(EngineError, match="cannot keep"):
            await engine.pause(Rollover.KEEP)
        engine.generate([ask(1, PROMPTS[0], 240, ignore_eos=True)])
        await asyncio.sleep(0.1)
        await engine.pause(Rollover.ABORT)
        assert (await collect(engine, 1))[RequestId(1, 0)].finish is FinishReason.ABORT
        with pytest.raises(EngineError, match="is paused"):
            engine.generate([ask(2, PROMPTS[0])])
        await engine.resume()
        engine.generate([ask(2, PROMPTS[0], 40, ignore_eos=True)])
        draining = asyncio.create_task(engine.pause(Rollover.DRAIN))
        await asyncio.sleep(0)
        with pytest.raises(EngineError, match="finishing"):
            engine.generate([ask(3, PROMPTS[0])])
        await draining
        assert len((await collect(engine, 1))[RequestId(2, 0)].token_ids) == 40
        await engine.resume()
        assert (await one(bench, ask(4, PROMPTS[0], 3))).finish is not None


async def test_it_takes_no_weights_and_says_so(benches: Benches) -> None:
    async with benches.open() as bench:
        with pytest.raises(WeightSyncError, match="takes no weights"):
            await bench.engine.prepare(Manifest(WeightVersion(1), (), 0))
        with pytest.raises(WeightSyncError, match="takes no weights"):
            await bench.engine.load(WeightVersion(1))
        with pytest.raises(EngineError, match="cannot sleep"):
            await bench.engine.sleep()
        await bench.engine.wake(WakePart.CACHE)
        assert bench.engine.version == WeightVersion(0)


async def test_requests_that_cannot_run_are_refused_all_or_none(benches: Benches) -> None:
    async with benches.open() as bench:
        for wrong in ([ask(1, ()), ask(2, PROMPTS[0])], [ask(2, PROMPTS[0]), ask(2, PROMPTS[0])], [ask(1, PROMPTS[0], 0)]):
            with pytest.raises(RequestRejected):
                bench.engine.generate(wrong)
        assert bench.double.bodies == []
    with pytest.raises(EngineError, match="closed"):
        bench.engine.generate([ask(1, PROMPTS[0])])


async def test_closing_cuts_what_runs_and_ends_the_segments(benches: Benches) -> None:
    async with benches.open() as bench:
        bench.engine.generate([ask(1, PROMPTS[0], 240, ignore_eos=True)])
        await bench.engine.close()
        await bench.engine.close()
        finishes = [s.finish async for segments in bench.engine.segments() for s in segments]
        assert finishes[-1] is FinishReason.ABORT


async def test_it_serves_only_once_it_was_started(folder: Path) -> None:
    engine = OpenAIEngine("judge", OpenAIClient(["http://127.0.0.1:9/v1"], "tiny", "", Limits(tries=1)))
    assert engine.capabilities == CAPABILITIES["openai"]
    with pytest.raises(EngineError, match="not started"):
        engine.generate([ask(1, PROMPTS[0])])
    with pytest.raises(ServerError, match="cannot be reached"):
        await engine.start()
    await engine.close()


def test_a_run_cannot_train_on_it() -> None:
    for placement in ("colocated", "separate"):
        with pytest.raises(ConfigError, match=r"engine\.kind: .*judges, teachers and evaluation") as caught:
            resolve(preset="sort", environment={}, overrides={"engine.kind": "openai", "place.placement": placement})
        assert "vllm or sglang" in str(caught.value)


# ---------------------------------------------------------------------------------------------------- many of them


async def test_two_thousand_at_a_time_over_few_connections(benches: Benches) -> None:
    async with benches.double(slots=64) as server:
        async with OpenAIClient([server.address], "tiny", "", Limits(per_server=48, total_s=50.0)) as client:
            prompts = [(2 + n % 37, 3 + n // 37 % 37) for n in range(2000)]
            pieces = await asyncio.gather(
                *(client.complete(p, Sampling(3, temperature=0.0), extra={"return_token_ids": True}) for p in prompts)
            )
        assert len(server.bodies) == 2000
        assert server.most_open <= 48
        assert len(server.connections) <= 48
    again = {prompt: piece.token_ids for prompt, piece in zip(prompts, pieces, strict=True)}
    assert all(piece.token_ids == again[prompt] for prompt, piece in zip(prompts, pieces, strict=True))
    expected = benches.reference
    for prompt in prompts[:1369:100]:
        assert list(again[prompt] or ()) == expected.greedy(prompt, 3)


async def test_calls_that_are_cancelled_at_any_moment_leave_nothing_behind(benches: Benches) -> None:
    async with benches.double() as server, OpenAIClient([server.address], "tiny", "", Limits(**QUICK, per_server=8)) as client:
        for moment in range(40):
            calls = [asyncio.create_task(client.complete(PROMPTS[0], Sampling(30))) for _ in range(6)]
            await asyncio.sleep(moment * 0.001)
            for call in calls:
                call.cancel()
            await asyncio.wait(calls)
        pieces = await asyncio.gather(*(client.complete(PROMPTS[0], Sampling(3)) for _ in range(64)))
        assert len(pieces) == 64
        assert server.open <= 8


async def test_a_dead_server_is_routed_around(benches: Benches) -> None:
    with socket.socket() as held:  # a port that nobody listens on
        held.bind(("127.0.0.1", 0))
        dead = f"http://127.0.0.1:{held.getsockname()[1]}/v1"
        async with benches.double() as server, benches.double() as other:
            client = OpenAIClient([dead, server.address, other.address], "tiny", "", Limits(**QUICK))
            engine = OpenAIEngine("judge", client)
            await engine.start()
            requests = [ask(n, PROMPTS[n % 3], 6) for n in range(60)]
            written = await answers(engine, requests)
            await engine.close()
            assert Counter(w.finish for w in written.values()).keys() <= {FinishReason.LENGTH, FinishReason.STOP}
            assert min(len(server.bodies), len(other.bodies)) > 15


async def test_a_server_that_dies_meanwhile_costs_only_what_it_was_writing(benches: Benches) -> None:
    async with AsyncExitStack() as stack:
        alive = await stack.enter_async_context(benches.double())
        dying = AsyncExitStack()
        other = await dying.enter_async_context(benches.double())
        engine = OpenAIEngine("judge", OpenAIClient([alive.address, other.address], "tiny", "", Limits(**QUICK)))
        stack.push_async_callback(engine.close)
        await engine.start()
        engine.generate([ask(n, PROMPTS[n % 3], 200, ignore_eos=True) for n in range(8)])
        await asyncio.sleep(0.2)
        await dying.aclose()
        written = await collect(engine, 8)
        assert {w.finish for w in written.values()} <= {FinishReason.LENGTH, FinishReason.ERROR}
        later = await answers(engine, [ask(100 + n, PROMPTS[n % 3], 5) for n in range(20)])
        assert FinishReason.ERROR not in {w.finish for w in later.values()}


def asked_and_answered(benches: Benches) -> tuple[list[dict[str, str]], str]:
    """A question, and a greedy answer of 60 tokens that has more than one character."""
    for content in ("2+2=?", "hello", "abc", "why?", "7-1", "is it so?", "name one"):
        question = [{"role": "user", "content": content}]
        whole = benches.tokenizer.decode(benches.reference.greedy(benches.tokenizer.chat(question), 60))
        if len(set(whole)) > 1:
            return question, whole
    raise AssertionError("all answers are one character")


async def test_a_chat_gives_text(benches: Benches) -> None:
    question, whole = asked_and_answered(benches)
    text = whole[: first_change(whole)]
    async with benches.double(key="k") as server, OpenAIClient([server.address], "tiny", "k", Limits(**QUICK)) as client:
        piece = await client.chat(question, Sampling(5, temperature=0.0), logprobs=True)
        assert (piece.text, piece.finish) == (whole[:5], "length")
        assert piece.logprobs is not None and len(piece.logprobs) == 5
        with pytest.raises(EngineError, match="no whole answer: 5 characters, finish_reason length"):
            await Chat(client, Sampling(5, temperature=0.0)).ask(question)
        judge = Chat(client, Sampling(60, temperature=0.0, stop=(whole[len(text)],)))
        assert await judge.ask(question) == text
        server.faults.extend([Fault(500), Fault(cut_after=0)])
        assert await judge.ask(question) == text
        assert (server.bodies[-1]["temperature"], server.bodies[-1]["max_completion_tokens"]) == (0.0, 60)
