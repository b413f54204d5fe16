"""The adapter against a real vLLM server, as somebody would start it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import pytest_asyncio

from rollyard.config import EngineConfig
from rollyard.engine.openai.client import OpenAIClient
from rollyard.engine.openai.engine import OpenAIEngine
from rollyard.engine.openai.failure import ServerError
from rollyard.engine.openai.limits import Limits
from rollyard.environment import process_environment
from rollyard.hosts import interpreter
from rollyard.model.tokenizer import Tokenizer
from rollyard.types import FinishReason, RequestId, Sampling, WeightVersion
from tests.engine.contract.model import PROMPTS, WINDOW, Model, model_folder, model_of, text
from tests.engine.embedded.serving import Written, answers, ask, collect

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="module")]

START_S = 240.0
KEY = "sk-of-this-test"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return model_of(model_folder(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def address(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    command = [str(interpreter(EngineConfig(kind="vllm"))), "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(model.folder), "--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--dtype", "float32", "--enforce-eager", "--max-model-len", str(WINDOW), "--max-num-seqs", "8", "--api-key", KEY]
    command += ["--kv-cache-memory-bytes", str(1 << 26), "--generation-config", "vllm", "--logprobs-mode", "processed_logprobs"]
    log = tmp_path_factory.mktemp("log") / "vllm.log"
    surroundings = {**process_environment(), "VLLM_NO_USAGE_STATS": "1"}
    with log.open("wb") as out:
        server = subprocess.Popen(command, stdout=out, stderr=out, env=surroundings, start_new_session=True)
    try:
        found_at = f"http://127.0.0.1:{port}/v1"
        asyncio.run(_until_up(found_at, server, log))
        yield found_at
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGTERM)
            server.wait(20)
            os.killpg(server.pid, signal.SIGKILL)  # its workers, where they are left


async def _until_up(address: str, server: subprocess.Popen[bytes], log: Path) -> None:
    async with asyncio.timeout(START_S), OpenAIClient([address], "tiny", KEY, Limits(tries=1)) as client:
        while True:
            try:
                await client.models()
                return
            except ServerError as error:
                assert server.poll() is None, f"it ended; see {log}"
                assert error.status is None, str(error)
                await asyncio.sleep(1.0)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(address: str, model: Model) -> AsyncIterator[OpenAIEngine]:
    engine = OpenAIEngine("vllm", OpenAIClient([address], "tiny", KEY, Limits(per_server=8)), Tokenizer(model.folder))
    await engine.start()
    yield engine
    await engine.close()


async def test_it_offers_all_that_there_is(engine: OpenAIEngine) -> None:
    able = engine.capabilities
    assert (able.token_ids, able.logprobs, able.truncation, able.train) == (True, True, True, False)


async def test_greedy_tokens_and_logprobs(engine: OpenAIEngine, model: Model) -> None:
    requests = [ask(n, prompt, 24) for n, prompt in enumerate(PROMPTS)]
    written = await answers(engine, requests)
    finishes = set()
    for request in requests:
        one = written[request.id]
        assert one.token_ids == model.greedy(request)
        assert one.logprobs == pytest.approx(model.logprobs(request, one.token_ids), abs=1e-3)
        assert {segment.version for segment in one.segments} == {WeightVersion(0)}
        finishes.add(one.finish)
    assert finishes == {FinishReason.STOP, FinishReason.LENGTH}


@pytest.mark.parametrize(("temperature", "top_p", "top_k"), [(1.0, 1.0, 0), (0.8, 0.95, 0), (1.2, 1.0, 5)])
async def test_samples_have_the_logprobs_they_were_drawn_with(
    engine: OpenAIEngine, model: Model, temperature: float, top_p: float, top_k: int
) -> None:
    group = [ask(9, PROMPTS[3], 20, member=k, temperature=temperature, top_p=top_p, top_k=top_k) for k in range(6)]
    written = await answers(engine, group)
    assert len({tuple(one.token_ids) for one in written.values()}) == len(group)
    for request in group:
        one = written[request.id]
        assert one.logprobs == pytest.approx(model.logprobs(request, one.token_ids), abs=1e-3)


async def test_stop_strings_and_the_window(engine: OpenAIEngine, model: Model) -> None:
    whole = model.greedy(ask(1, PROMPTS[1], 20, ignore_eos=True))
    stop = text(whole)[5:8]
    request = ask(1, PROMPTS[1], 20, stop=(stop,), ignore_eos=True)
    rest = ask(2, PROMPTS[1], 20, stop=(stop,), ignore_eos=True, written=model.greedy(request)[:-1])
    full = ask(3, tuple(2 + at % 37 for at in range(WINDOW - 8)), 50, ignore_eos=True)
    written = await answers(engine, [request, rest, full])
    assert (written[request.id].token_ids, written[request.id].finish) == (model.greedy(request), FinishReason.STOP)
    assert (written[rest.id].token_ids, written[rest.id].finish) == (model.greedy(request)[-1:], FinishReason.STOP)
    assert (written[full.id].token_ids, written[full.id].finish) == (model.greedy(full), FinishReason.CONTEXT)


async def test_what_is_cut_goes_on(engine: OpenAIEngine, model: Model) -> None:
    request = ask(1, PROMPTS[0], 200, ignore_eos=True)
    engine.generate([request])
    cut = Written()
    async for segments in engine.segments():
        cut.token_ids += [token for segment in segments for token in segment.token_ids]
        if len(cut.token_ids) >= 5:
            break
    await engine.abort([request.id])
    written = await collect(engine, 1, {request.id: cut})
    assert written[request.id].finish is FinishReason.ABORT
    assert 5 <= len(cut.token_ids) < 200
    (rest,) = (await answers(engine, [ask(2, PROMPTS[0], 20, written=cut.token_ids, ignore_eos=True)])).values()
    assert cut.token_ids + rest.token_ids == model.greedy(ask(1, PROMPTS[0], len(cut.token_ids) + 20, ignore_eos=True))


async def test_its_words_about_a_prompt_that_is_too_long_are_understood(address: str, model: Model) -> None:
    """By an engine that does not know the window."""
    engine = OpenAIEngine("vllm", OpenAIClient([address], "tiny", KEY), Tokenizer(model.folder), window=10**6)
    await engine.start()
    over, cut = ask(1, (3,) * (WINDOW + 10), 5), ask(2, tuple(2 + at % 37 for at in range(WINDOW - 8)), 50, ignore_eos=True)
    written = await answers(engine, [over, cut])
    await engine.close()
    assert (written[over.id].token_ids, written[over.id].finish) == ([], FinishReason.CONTEXT)
    assert (written[cut.id].token_ids, written[cut.id].finish) == (model.greedy(cut), FinishReason.CONTEXT)


async def test_a_bad_key_and_a_bad_request(address: str) -> None:
    async with OpenAIClient([address], "tiny", "wrong-key") as client:
        with pytest.raises(ServerError, match="answered 401") as caught:
            await client.complete("a", Sampling(2))
        assert "wrong-key" not in str(caught.value)
    async with OpenAIClient([address], "huge", KEY) as client:
        with pytest.raises(ServerError, match=r"answered 404: .*huge"):
            await client.complete("a", Sampling(2))


async def test_many_at_a_time(address: str, model: Model) -> None:
    async with OpenAIClient([address], "tiny", KEY, Limits(per_server=16)) as client:
        pieces = await asyncio.gather(
            *(client.complete(PROMPTS[n % 8], Sampling(2, temperature=0.0), extra={"return_token_ids": True}) for n in range(200))
        )
    for number, piece in enumerate(pieces):
        request = ask(0, PROMPTS[number % 8], 2)
        assert list(piece.token_ids or ()) == model.greedy(request), RequestId(number, 0)
