"""What happens when something breaks: an update half way, vLLM's core, the process around it, the run."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest
import pytest_asyncio

from rollyard import hosts
from rollyard.errors import EngineError, EngineLost, WeightSyncError
from rollyard.types import RequestId, WeightVersion
from tests.engine.embedded.serving import answers, ask
from tests.engine.vllm.driving import Driven, configured, driving, gone, group_of, launched, model_folder, root
from tests.engine.vllm.receivers import BAD

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def driven(folder: Path) -> AsyncIterator[Driven]:
    async with driving(configured(folder), launch=partial(launched, "serve_breaking")) as driven:
        yield driven


@pytest.mark.asyncio(loop_scope="module")
async def test_an_update_that_breaks_half_way(driven: Driven) -> None:
    """The engine goes on with the weights it had, bit for bit, and takes the next version."""
    asked = [ask(0, [5, 6, 7], 30, ignore_eos=True)]
    before = (await answers(driven.engine, asked))[RequestId(0, 0)]
    await driven.move(seed=5)
    with pytest.raises(WeightSyncError):
        await driven.sync(WeightVersion(BAD))
    assert driven.engine.version == WeightVersion(0)
    await driven.engine.resume()
    same = (await answers(driven.engine, asked))[RequestId(0, 0)]
    assert (same.token_ids, same.logprobs) == (before.token_ids, before.logprobs)
    assert {segment.version for segment in same.segments} == {WeightVersion(0)}
    await driven.sync(WeightVersion(1))
    after = (await answers(driven.engine, asked))[RequestId(0, 0)]
    assert after.logprobs != before.logprobs and {segment.version for segment in after.segments} == {WeightVersion(1)}


@pytest.mark.asyncio(loop_scope="module")
async def test_the_end_of_the_core_is_noticed_while_nothing_runs(driven: Driven) -> None:
    """The last test of this engine."""
    leader = driven.engine._channel.pid  # type: ignore[attr-defined]
    (core,) = (process for process, name in group_of(leader).items() if name.startswith("VLLM"))
    os.kill(core, signal.SIGKILL)
    with pytest.raises(EngineLost):
        async with asyncio.timeout(20):
            async for _ in driven.engine.segments():
                pass
    assert await gone([leader, core], within_s=10)


async def test_an_engine_that_does_not_start_says_why(folder: Path) -> None:
    engine = await hosts.launch_engine(
        configured(folder, extra='{"block_size": 32, "quantization": "nonsense"}'), "engine-0", folder
    )
    try:
        with pytest.raises((EngineError, EngineLost), match=r"(?s)did not start.*nonsense"):
            await engine.start()
    finally:
        await engine.close()


RUN = """
import asyncio, sys
from pathlib import Path
from rollyard import hosts
from tests.engine.vllm.driving import configured

async def main():
    folder = Path(sys.argv[1])
    engine = await hosts.launch_engine(configured(folder), "engine-0", folder)
    await engine.start()
    print(engine._channel.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def test_nothing_outlives_the_run_or_the_engines_process(folder: Path) -> None:
    """The run is killed; or it hangs while the process of its engine is killed, which vLLM's core would not notice."""
    for hung in (False, True):
        command = [sys.executable, "-c", RUN, str(folder)]
        run = subprocess.Popen(command, cwd=root(), stdout=subprocess.PIPE, text=True)
        try:
            assert run.stdout is not None
            leader = int(run.stdout.readline())
            processes = group_of(leader)
            assert any(name.startswith("VLLM") for name in processes.values())
            if hung:
                os.kill(run.pid, signal.SIGSTOP)
                os.kill(leader, signal.SIGKILL)
            else:
                run.kill()
            assert asyncio.run(gone(list(processes), within_s=10))
        finally:
            run.kill()
            run.wait()
            assert run.stdout is not None
            run.stdout.close()
