"""The adapter's life: cuts, pauses, the end, and many at a time."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path

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
from rollyard.types import FinishReason, Manifest, RequestId, Sampling, WeightVersion
from tests.engine.embedded.serving import Written, answers, ask, collect
from tests.engine.openai.benches import PROMPTS, QUICK, Bench, Benches, first_change, one
from tests.engine.openai_double import Fault

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
