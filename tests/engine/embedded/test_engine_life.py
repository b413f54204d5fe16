"""The engine around its steps: pausing, new weights, sleep, aborts, failures, closing."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
import torch

from rollyard.config import EngineConfig
from rollyard.engine.embedded.engine import EmbeddedEngine
from rollyard.errors import ConfigError, EngineError, EngineLost, RequestRejected, StaleWeights, WeightSyncError
from rollyard.events import Rollover, WakePart
from rollyard.model.folder import load
from rollyard.model.tokenizer import Tokenizer
from rollyard.model.transformer import CausalLM
from rollyard.place.inline import DeviceThread
from rollyard.protocols.rollouts import Engine
from rollyard.types import FinishReason, RequestId, WeightVersion
from tests.compiler import needs_compiler
from tests.engine.embedded.serving import InPlace, Reference, Written, answers, ask, change, collect, serving
from tests.tiny import tiny_folder

V0, V1, V2 = WeightVersion(0), WeightVersion(1), WeightVersion(2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same shape with other weights."""
    return tiny_folder(tmp_path_factory.mktemp("other"), seed=7)


@pytest.fixture
def model(folder: Path) -> CausalLM:
    return load(folder, torch.float32, torch.device("cpu"))


@torch.no_grad()
def retrain(model: CausalLM, source: Path) -> None:
    """What a trainer does: new values in the same tensors."""
    new = load(source, torch.float32, torch.device("cpu")).state_dict()
    with model.stamp.writing():
        for name, tensor in model.state_dict().items():
            tensor.copy_(new[name])


async def some_tokens(engine: Engine, into: dict[RequestId, Written], least: int = 1) -> None:
    async for segments in engine.segments():
        for segment in segments:
            one = into.setdefault(segment.request, Written())
            one.token_ids += segment.token_ids
            one.segments.append(segment)
        if sum(len(one.token_ids) for one in into.values()) >= least:
            return


def test_it_is_an_engine(folder: Path, model: CausalLM) -> None:
    engine: Engine = EmbeddedEngine("e", model, Tokenizer(folder), DeviceThread(), InPlace(), EngineConfig(slots=3), 64)
    assert (engine.id, engine.slots, engine.version) == ("e", 3, None)


def test_a_window_beyond_the_models_is_refused(folder: Path, model: CausalLM) -> None:
    with pytest.raises(ConfigError, match=r"engine\.window.*512.*256"):
        EmbeddedEngine("e", model, Tokenizer(folder), DeviceThread(), InPlace(), EngineConfig(), 512)


async def test_no_request_before_the_first_load(folder: Path) -> None:
    receiver = InPlace()
    async with serving(folder, loaded=False, receiver=receiver) as engine:
        assert engine.version is None
        with pytest.raises(EngineError, match="no weights"):
            engine.generate([ask(0, (5,))])
        await change(engine, V1)
        assert receiver.received == [V1] and engine.version == V1
        assert (await answers(engine, [ask(0, (5,), 3)]))[RequestId(0, 0)].segments[-1].version == V1


async def test_rejected_requests_leave_nothing_behind(folder: Path) -> None:
    async with serving(folder, pages=4, window=64) as engine:
        for bad, problem in (
            (ask(1, (5,) * 10, 30), "pages"),
            (ask(1, (5,) * 64, 1), "window"),
            (ask(1, (5, 999), 1), "vocabulary"),
            (ask(0, (5,), 1), "same id"),
        ):
            with pytest.raises(RequestRejected, match=problem):
                engine.generate([ask(0, (5,), 1), bad])
        assert (await answers(engine, [ask(0, (5,), 1)]))[RequestId(0, 0)].finish is not None


async def test_segments_are_at_most_16_tokens_and_come_while_writing(folder: Path) -> None:
    async with serving(folder) as engine:
        written = await answers(engine, [ask(0, (5, 6), 40, ignore_eos=True)])
    sizes = [len(segment.token_ids) for segment in written[RequestId(0, 0)].segments]
    assert sum(sizes) == 40 and len(sizes) >= 3 and max(sizes) <= 16
    assert [segment.finish for segment in written[RequestId(0, 0)].segments][:-1] == [None] * (len(sizes) - 1)


async def test_abort_returns_what_was_written(folder: Path) -> None:
    expected = Reference(folder).greedy((5, 6, 7), 200)
    async with serving(folder, slots=2) as engine:
        requests = [ask(name, (5, 6, 7), 200, ignore_eos=True) for name in range(4)]
        engine.generate(requests)
        written: dict[RequestId, Written] = {}
        await some_tokens(engine, written)
        await engine.abort([RequestId(0, 0), RequestId(2, 0), RequestId(77, 0)])  # one runs, one waits, one is unknown
        await engine.abort([RequestId(1, 0), RequestId(3, 0)])
        async for segments in engine.segments():
            for segment in segments:
                one = written.setdefault(segment.request, Written())
                one.token_ids += segment.token_ids
                one.finish = segment.finish
            if len(written) == 4 and all(one.finish for one in written.values()):
                break
        assert all(one.finish is FinishReason.ABORT for one in written.values())
        assert 0 < len(written[RequestId(0, 0)].token_ids) < 200
        # Greedy, so it goes on as expected unless the end-of-sequence token was ignored on the way.
        tokens = written[RequestId(0, 0)].token_ids
        until = min(len(tokens), len(expected))
        assert tokens[:until] == expected[:until]
        engine.generate([requests[0]])  # the name is free again
        await engine.abort([RequestId(0, 0)])


async def test_drain_finishes_everything_first(folder: Path) -> None:
    async with serving(folder, slots=2) as engine:
        engine.generate([ask(name, (5, name + 2), 9, ignore_eos=True) for name in range(5)])
        pausing = asyncio.create_task(engine.pause(Rollover.DRAIN))
        await asyncio.sleep(0)
        with pytest.raises(EngineError, match="finishing"):
            engine.generate([ask(9, (5,))])
        await pausing
        with pytest.raises(EngineError, match="paused"):
            engine.generate([ask(9, (5,))])
        written = await collect(engine, 5)
        assert all(len(one.token_ids) == 9 for one in written.values())
        await engine.resume()
        assert len(await answers(engine, [ask(9, (5,), 2)])) == 1


async def test_pause_abort_cuts_everything(folder: Path) -> None:
    async with serving(folder, slots=2) as engine:
        engine.generate([ask(name, (5, name + 2), 200, ignore_eos=True) for name in range(5)])
        await engine.pause(Rollover.ABORT)
        written = await collect(engine, 5)
        assert all(one.finish is FinishReason.ABORT for one in written.values())
        await engine.sleep()  # nothing runs


async def test_new_weights_are_followed_and_no_old_page_is_used(folder: Path, other: Path, model: CausalLM) -> None:
    prompt = (5, 6, 7, 8, 9)
    async with serving(folder, model=model) as engine:
        first = await answers(engine, [ask(0, prompt, 10, ignore_eos=True)])
        retrain(model, other)
        await change(engine, V1)
        second = await answers(engine, [ask(1, prompt, 10)])
        assert engine.stats().shared_tokens == 0  # the prompt was computed anew
    one = second[RequestId(1, 0)]
    reference = Reference(other)
    assert one.token_ids == reference.greedy(prompt, 10) and one.token_ids != first[RequestId(0, 0)].token_ids
    torch.testing.assert_close(torch.tensor(one.logprobs), reference.logprobs(prompt, one.token_ids), atol=1e-4, rtol=0)
    assert all((segment.version, segment.oldest_kv) == (V1, V1) for segment in one.segments)


async def test_keep_swaps_under_running_requests(folder: Path, other: Path, model: CausalLM) -> None:
    prompt = (5, 6, 7, 8, 9)
    async with serving(folder, model=model) as engine:
        engine.generate([ask(0, prompt, 200, ignore_eos=True)])
        written: dict[RequestId, Written] = {}
        await some_tokens(engine, written)
        await engine.pause(Rollover.KEEP)
        with pytest.raises(EngineError, match="resume it first"):
            await engine.pause(Rollover.DRAIN)
        retrain(model, other)
        await change(engine, V1)
        await engine.resume()
        engine.generate([ask(1, prompt, 10)])
        await collect(engine, 2, written)
    old, new = written[RequestId(0, 0)], written[RequestId(1, 0)]
    spans = [(segment.version, segment.oldest_kv) for segment in old.segments if segment.token_ids]
    assert spans[0] == (V0, V0) and spans[-1] == (V1, V0) and len(set(spans)) == 2
    assert len(old.token_ids) == 200
    assert new.token_ids == Reference(other).greedy(prompt, 10)  # nothing of the old pages in it
    assert {(segment.version, segment.oldest_kv) for segment in new.segments} == {(V1, V1)}


async def test_a_forward_pass_on_changed_weights_loses_the_engine(folder: Path, other: Path, model: CausalLM) -> None:
    async with serving(folder, model=model) as engine:
        retrain(model, other)  # and no load
        engine.generate([ask(0, (5,), 3)])
        with pytest.raises(EngineLost, match="generation") as lost:
            await collect(engine, 1)
        assert isinstance(lost.value.__cause__, StaleWeights)
        for call in (engine.pause(Rollover.DRAIN), engine.load(V1), engine.resume(), engine.sleep()):
            with pytest.raises(EngineLost):
                await call
        with pytest.raises(EngineLost):
            engine.generate([ask(1, (5,))])


async def test_who_drains_hears_of_the_loss(folder: Path, other: Path, model: CausalLM) -> None:
    async with serving(folder, model=model) as engine:
        engine.generate([ask(0, (5,), 200, ignore_eos=True)])
        pausing = asyncio.create_task(engine.pause(Rollover.DRAIN))
        await asyncio.sleep(0.01)
        retrain(model, other)
        with pytest.raises(EngineLost):
            await asyncio.wait_for(pausing, 5)


class Refuses(InPlace):
    """Refuses the first time it is asked for V1."""

    def take(self, version: WeightVersion) -> None:
        if version == V1 and V1 not in self.received:
            self.received.append(version)
            raise WeightSyncError(f"no {version}")


async def test_a_failed_load_leaves_the_version(folder: Path) -> None:
    async with serving(folder, receiver=Refuses()) as engine:
        with pytest.raises(WeightSyncError):
            await change(engine, V1)
        assert engine.version == V0
        one = (await answers(engine, [ask(0, (5,), 3)]))[RequestId(0, 0)]
        assert one.segments[-1].version == V0
        await change(engine, V1)
        assert engine.version == V1


async def test_weights_do_not_change_under_running_requests(folder: Path) -> None:
    async with serving(folder) as engine:
        engine.generate([ask(0, (5,), 200, ignore_eos=True)])
        with pytest.raises(EngineError, match="pause it first"):
            await change(engine, V1)


async def test_sleep_gives_the_cache_back(folder: Path) -> None:
    async with serving(folder) as engine:
        engine.generate([ask(0, (5, 6, 7), 200, ignore_eos=True)])
        with pytest.raises(EngineError, match="requests run"):
            await engine.sleep()
        await engine.pause(Rollover.ABORT)
        await collect(engine, 1)
        assert engine.cache_bytes > 0
        await engine.sleep()
        assert engine.cache_bytes == 0
        with pytest.raises(EngineError, match="asleep"):
            engine.generate([ask(0, (5,))])
        await engine.wake(WakePart.WEIGHTS)
        with pytest.raises(EngineError, match="asleep"):
            engine.generate([ask(0, (5,))])
        await change(engine, V1)
        await engine.wake(WakePart.CACHE)
        await engine.resume()
        written = await answers(engine, [ask(0, (5, 6, 7), 6)])
        assert written[RequestId(0, 0)].token_ids == Reference(folder).greedy((5, 6, 7), 6)


async def test_close_ends_running_requests_and_the_stream(folder: Path) -> None:
    async with serving(folder, slots=2) as engine:
        engine.generate([ask(name, (5, 6), 200, ignore_eos=True) for name in range(4)])
        written: dict[RequestId, Written] = {}
        await some_tokens(engine, written)
        draining = asyncio.create_task(engine.pause(Rollover.DRAIN))
        await asyncio.sleep(0)
        await asyncio.wait_for(engine.close(), 5)
        with pytest.raises(EngineError, match="closed"):
            await asyncio.wait_for(draining, 5)
        ended = [segment async for segments in engine.segments() for segment in segments if segment.finish]
        assert sorted(segment.request.group for segment in ended) == [0, 1, 2, 3]
        assert all(segment.finish is FinishReason.ABORT for segment in ended)
        with pytest.raises(EngineError, match="closed"):
            engine.generate([ask(9, (5,))])
        await engine.close()


async def test_stats_add_up(folder: Path) -> None:
    async with serving(folder, slots=4) as engine:
        written = await answers(engine, [ask(name, (5, 6, name + 7), 4, ignore_eos=True) for name in range(8)])
        stats = engine.stats()
    assert stats.generated_tokens == sum(len(one.token_ids) for one in written.values()) == 32
    assert stats.prefilled_tokens == 24 and stats.steps == 8
    assert stats.step_s > 0 and stats.slots_busy == pytest.approx(1.0)


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["plain", pytest.param("native", marks=needs_compiler)])
async def test_sleeping_gives_the_memory_of_the_cache_back(tmp_path: Path, kernels: str) -> None:
    """To the system: what the process has in memory, not what it counts itself."""
    folder, layers, width = tiny_folder(tmp_path, kv_heads=4, width=256, window=1024), 2, 256
    token = layers * 2 * width * 4  # bytes of its keys and values in float32
    prompts = [[2 + (7 * number + at) % 40 for at in range(500)] for number in range(32)]
    asked = [ask(number, prompt, 2, ignore_eos=True) for number, prompt in enumerate(prompts)]
    async with serving(folder, window=1024, slots=32, kernels=kernels) as engine:
        first = await answers(engine, asked)
        full = resident()
        await engine.sleep()
        given_back = full - resident()
        assert given_back > 0.9 * token * sum(map(len, prompts))
        await engine.wake(WakePart.WEIGHTS)
        await engine.wake(WakePart.CACHE)
        assert {name: each.token_ids for name, each in (await answers(engine, asked)).items()} == {
            name: each.token_ids for name, each in first.items()
        }


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
