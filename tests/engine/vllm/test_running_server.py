"""A vLLM server that somebody started, by the command that the documentation gives."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollyard import hosts
from rollyard.config import Config, EngineConfig
from rollyard.engine.vllm.server import FLAGS
from rollyard.environment import process_environment
from rollyard.errors import ConfigError, EngineLost
from rollyard.events import Rollover
from rollyard.hosts import interpreter
from rollyard.protocols.rollouts import Engine
from rollyard.types import RequestId, WeightVersion
from tests.engine.embedded.serving import answers, ask
from tests.engine.vllm.driving import WINDOW, configured, driving, gone, group_of, model_folder, root

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(240)]
PROMPT = [7, 3, 12, 5, 9]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, int]]:
    """Its address and process group."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    own = f"--model {folder} --host 127.0.0.1 --port {port} --dtype float32 --enforce-eager --max-model-len {WINDOW}"
    small = "--max-num-seqs 8 --kv-cache-memory-bytes 33554432 --block-size 32 --skip-tokenizer-init"
    python = interpreter(EngineConfig(kind="vllm"))
    command = [
        str(python),
        "-m",
        "vllm.entrypoints.openai.api_server",
        *shlex.split(f"{own} {small} {FLAGS} --no-enable-chunked-prefill"),
    ]
    variables = {"VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": root(), "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    log = tmp_path_factory.mktemp("log") / "server"
    with log.open("wb") as out:
        process = subprocess.Popen(command, env=process_environment() | variables, stdout=out, stderr=out, start_new_session=True)
    try:
        yield f"http://127.0.0.1:{port}", process.pid
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def attached(url: str, folder: Path, **options: object) -> Config:
    return configured(folder, url=url, extra="", start_s=200.0, **options)


async def attach(config: Config, name: str, folder: Path) -> Engine:
    return hosts.attach_engine(config, name, config.engine.url[0], folder)


async def test_runs_one_after_the_other(server: tuple[str, int], folder: Path) -> None:
    """The first is gone without a word, in the middle of an update; the second finds the server, and leaves it going on."""
    url, group = server
    before = None
    first = await attach(attached(url, folder), "engine-0", folder)
    async with driving(attached(url, folder), launch=attach) as driven:
        before = (await answers(driven.engine, [ask(0, PROMPT, 30, ignore_eos=True)]))[RequestId(0, 0)]
        await driven.engine.pause(Rollover.KEEP)
        await driven.engine._core._post("/start_weight_update")  # type: ignore[attr-defined]
        driven.engine._core._touched = False  # type: ignore[attr-defined]  # it says no farewell
    await first.close()  # one that was never started does nothing
    async with driving(attached(url, folder), launch=attach) as driven:
        again = (await answers(driven.engine, [ask(0, PROMPT, 30, ignore_eos=True)]))[RequestId(0, 0)]
        assert again.token_ids == before.token_ids
        await driven.move(seed=3)
        await driven.sync(WeightVersion(1))
        moved = (await answers(driven.engine, [ask(1, PROMPT, 30, ignore_eos=True)]))[RequestId(1, 0)]
        assert moved.logprobs != before.logprobs and {one.version for one in moved.segments} == {WeightVersion(1)}
    assert group_of(group), "the server is not ours to end"


async def test_a_server_that_does_not_suit(server: tuple[str, int], folder: Path, tmp_path: Path) -> None:
    url, _ = server
    wide = model_folder(tmp_path, window=2 * WINDOW)
    with pytest.raises(ConfigError, match=f"room for {WINDOW} tokens"):
        async with driving(attached(url, wide), launch=attach):
            pass


async def test_its_end_is_noticed_while_nothing_runs(server: tuple[str, int], folder: Path) -> None:
    """The last test of this server."""
    url, group = server
    async with driving(attached(url, folder), launch=attach) as driven:
        processes = list(group_of(group))
        os.killpg(group, signal.SIGKILL)
        assert await gone(processes, within_s=10)
        with pytest.raises(EngineLost, match="lost"):
            async with asyncio.timeout(20):
                async for _ in driven.engine.segments():
                    pass
