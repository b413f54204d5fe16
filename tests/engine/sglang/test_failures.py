"""A server that misbehaves: one clear error each time, soon, with what was written before it kept."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from pathlib import Path
from time import monotonic

import pytest

from rollyard.engine.sglang import totals
from rollyard.engine.sglang.engine import SGLangEngine
from rollyard.errors import ConfigError, EngineError, EngineLost, TimeLimitExceeded
from rollyard.events import Rollover
from rollyard.types import FinishReason
from tests.engine.embedded.serving import Written, answers, ask, collect, serving
from tests.engine.sglang.attached import V0, V1, adapter, attached, bring, first_tokens
from tests.engine.sglang_double import double
from tests.engine.sglang_parts import NEW, OLD, Fault
from tests.tiny import tiny_folder

LONG = ask(0, (5, 6, 7), 60, ignore_eos=True)
NAME = LONG.id


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same shape with other weights."""
    return tiny_folder(tmp_path_factory.mktemp("other"), seed=7)


async def until_lost(engine: SGLangEngine) -> tuple[Written, str]:
    """What came before the engine was lost, and why it was."""
    heard = Written()
    with pytest.raises(EngineLost) as caught:
        async with asyncio.timeout(10):
            async for segments in engine.segments():
                for segment in segments:
                    heard.token_ids += segment.token_ids
                    heard.finish = segment.finish
    return heard, str(caught.value)


async def greedy(folder: Path) -> list[int]:
    async with serving(folder) as engine:
        return (await answers(engine, [LONG]))[NAME].token_ids


# ------------------------------------------------------------------------------------ one request that fails


@pytest.mark.parametrize("version", [NEW, OLD])
@pytest.mark.parametrize("incremental", [False, True])
@pytest.mark.parametrize(
    ("fault", "kept", "problem"),
    [
        (Fault(status=500), 0, "/generate answered 500: told to fail"),
        (Fault(status=503), 0, "/generate answered 503: told to fail"),
        (Fault(error_after=10), 10, "told to fail"),
        (Fault(garbage_after=10), 10, "not in the schema of /generate"),
        (Fault(abort_after=10), 10, r"the server gave up: told to fail \(500\)"),
        (Fault(body="data: [DONE]\n\n"), 0, "said that it is done and not why"),
    ],
)
async def test_a_request_that_fails_says_why_and_the_engine_goes_on(
    folder: Path, version: str, incremental: bool, fault: Fault, kept: int, problem: str
) -> None:
    whole = await greedy(folder)
    async with double(folder, version=version, incremental=incremental) as server, attached(server) as engine:
        server.faults["/generate"] = replace(fault, times=1)
        written = (await answers(engine, [LONG]))[NAME]
        assert written.finish is FinishReason.ERROR
        assert re.search(problem, written.segments[-1].problem)
        assert written.token_ids == whole[:kept]
        assert (await answers(engine, [LONG]))[NAME].token_ids == whole


async def test_a_late_server_is_waited_for(folder: Path) -> None:
    async with double(folder) as server, attached(server) as engine:
        server.faults["/generate"] = Fault(late_s=0.5)
        assert (await answers(engine, [LONG]))[NAME].token_ids == await greedy(folder)


async def test_an_abort_that_nobody_here_asked_for_goes_on_elsewhere(folder: Path) -> None:
    """Somebody else told the server to end it."""
    async with double(folder, step_s=0.02) as server, attached(server) as engine:
        engine.generate([LONG])
        heard = await first_tokens(engine)
        await server.engine.pause(Rollover.ABORT)
        rest = (await collect(engine, 1))[NAME]
        await server.engine.resume()
        assert rest.finish is FinishReason.ABORT
        cut = heard.token_ids + rest.token_ids
        assert cut and cut == (await greedy(folder))[: len(cut)]


# ---------------------------------------------------------------------------------------- an engine that is lost


@pytest.mark.parametrize("incremental", [False, True])
async def test_a_cut_connection_is_a_lost_engine_and_its_tokens_count(folder: Path, incremental: bool) -> None:
    async with double(folder, incremental=incremental) as server, attached(server) as engine:
        server.faults["/generate"] = Fault(cut_after=20)
        engine.generate([LONG])
        heard, cause = await until_lost(engine)
        assert "engine-0 is lost: the line to http://127.0.0.1:" in cause
        assert heard.token_ids == (await greedy(folder))[:20] and heard.finish is None
        for call in (engine.abort([NAME]), engine.pause(Rollover.DRAIN), engine.load(V1), engine.resume()):
            with pytest.raises(EngineLost):
                await call
        with pytest.raises(EngineLost):
            engine.generate([LONG])


@pytest.mark.parametrize(("fault", "written"), [(Fault(silent_after=20), 20), (Fault(hang=True), 0)])
async def test_how_long_a_server_may_be_silent_is_for_whoever_listens_to_say(
    folder: Path, fault: Fault, written: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is heard of it for hours, and it is not lost before it is condemned. Its tokens count."""
    monkeypatch.setattr(totals, "monotonic", lambda: monotonic() - 7200)
    async with double(folder) as server, attached(server) as engine:
        server.faults["/generate"] = fault
        engine.generate([LONG])
        asyncio.get_running_loop().call_later(0.5, engine.condemn, "it wrote nothing for 2 h")
        heard, cause = await until_lost(engine)
        assert cause.endswith("it wrote nothing for 2 h")
        assert heard.token_ids == (await greedy(folder))[:written]


async def test_a_server_that_ends_is_lost_for_whoever_waits(folder: Path) -> None:
    async with double(folder, step_s=0.02) as server, attached(server) as engine:
        engine.generate([LONG])
        await first_tokens(engine)
        draining = asyncio.create_task(engine.pause(Rollover.DRAIN))
        await asyncio.sleep(0.05)
        await server.die()
        with pytest.raises(EngineLost):
            await asyncio.wait_for(draining, 5)
        await until_lost(engine)


async def test_a_server_that_is_gone_is_lost_at_the_next_call(folder: Path, other: Path) -> None:
    async with double(folder) as server, attached(server) as engine:
        await server.die()
        with pytest.raises(EngineLost, match=r"line to .* broke: ConnectError"):
            await bring(engine, other, V1)
        await until_lost(engine)


async def test_nothing_that_a_server_with_base_weights_writes_counts(folder: Path, other: Path) -> None:
    """It ended and was started anew between two requests, unseen."""
    async with double(folder) as server, attached(server, other) as engine:
        assert len((await answers(engine, [LONG]))[NAME].token_ids) == 60
        await server.restart()
        engine.generate([LONG])
        heard, cause = await until_lost(engine)
        assert not heard.token_ids
        assert "decodes with weights 'default', and 0.0 was loaded: it was started anew" in cause


async def test_weights_of_an_earlier_load_write_nothing_for_later_requests(folder: Path, other: Path) -> None:
    async with double(folder) as server, attached(server) as engine:
        await bring(engine, other, V1)
        server.faults["/generate"] = Fault(label="0.0")
        engine.generate([LONG])
        heard, cause = await until_lost(engine)
        assert not heard.token_ids and "decodes with weights '0.0', and 1.0 was loaded" in cause


async def test_an_engine_of_a_restarted_server_gets_no_request_before_its_sync(folder: Path) -> None:
    async with double(folder) as server:
        async with attached(server) as engine:
            await answers(engine, [LONG])
        await server.restart()
        server.asked.clear()
        engine = adapter(server.url, folder)
        await engine.start()
        assert engine.version is None
        with pytest.raises(EngineError, match="acknowledged no weights"):
            engine.generate([LONG])
        await bring(engine, folder, V0)
        await answers(engine, [LONG])
        paths = [path for path, _ in server.asked]
        assert paths == ["/continue_generation", "/update_weights_from_disk", "/generate"]
        await engine.close()


# ------------------------------------------------------------------------------------------- control that fails


async def test_a_server_that_does_not_end_what_it_is_told_to_is_cut_off(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollyard.engine.sglang.engine.CUT_S", 0.5)
    async with double(folder, step_s=0.02) as server, attached(server) as engine:
        server.faults["/abort_request"] = Fault(pretend=True, body="{}")
        engine.generate([LONG])
        heard = await first_tokens(engine)
        await asyncio.wait_for(engine.abort([NAME]), 3)
        rest = (await collect(engine, 1))[NAME]
        assert rest.finish is FinishReason.ABORT and 0 < len(heard.token_ids + rest.token_ids) < 60
        await server.idle(5.0)  # the closed line told it


async def test_a_request_that_the_server_did_not_know_yet_is_cut_all_the_same(folder: Path) -> None:
    async with double(folder, step_s=0.02) as server, attached(server) as engine:
        server.faults["/generate"] = Fault(late_s=0.3)
        engine.generate([LONG])
        await asyncio.sleep(0.05)  # it is on its way
        await asyncio.wait_for(engine.abort([NAME]), 5)
        assert (await collect(engine, 1))[NAME].finish is FinishReason.ABORT
        await server.idle(5.0)


@pytest.mark.parametrize("rollover", [Rollover.ABORT, Rollover.KEEP])
async def test_a_pause_that_fails(folder: Path, rollover: Rollover, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollyard.engine.sglang.control.QUICK_S", 0.5)
    async with double(folder) as server, attached(server) as engine:
        server.faults["/pause_generation"] = Fault(status=500)
        with pytest.raises(EngineError, match="/pause_generation answered 500"):
            await engine.pause(rollover)
        server.faults["/pause_generation"] = Fault(hang=True)
        with pytest.raises(TimeLimitExceeded, match=r"/pause_generation did not answer within 0\.5 s"):
            await engine.pause(rollover)


# ------------------------------------------------------------------------------------------------ the start


async def test_a_server_that_never_comes(folder: Path) -> None:
    async with double(folder) as server:
        url = server.url
    engine = adapter(url, folder, start_s=1.0)
    with pytest.raises(TimeLimitExceeded, match=r"engine-0 was not ready within 1 s: .*ConnectError"):
        await engine.start()
    await engine.close()


@pytest.mark.parametrize("fault", [Fault(status=503, times=2), Fault(late_s=0.3)])
async def test_a_server_that_is_still_starting_is_waited_for(folder: Path, fault: Fault) -> None:
    async with double(folder) as server:
        server.faults["/model_info"] = fault
        async with attached(server) as engine:
            assert engine.version == V0


@pytest.mark.parametrize(
    ("fault", "error", "problem"),
    [
        (Fault(status=404), EngineError, "/server_info answered 404"),
        (Fault(body="[]"), EngineError, "no JSON object"),
        (Fault(body='{"max_running_requests": "many"}'), EngineError, "does not describe itself as SGLang does"),
        (Fault(hang=True), TimeLimitExceeded, r"was not ready within 1 s: .*did not answer"),
    ],
)
async def test_something_else_answers(folder: Path, fault: Fault, error: type[Exception], problem: str) -> None:
    async with double(folder) as server:
        server.faults["/server_info"] = fault
        engine = adapter(server.url, folder, start_s=1.0)
        with pytest.raises(error, match=problem):
            await engine.start()
        await engine.close()


async def test_keys(folder: Path) -> None:
    async with double(folder, key="general", admin_key="control") as server:
        for keys in (("", ""), ("wrong", "control")):
            engine = adapter(server.url, folder, keys)
            with pytest.raises(ConfigError, match=r"engine\.url.*401: Unauthorized.*ROLLYARD_ENGINE_KEY"):
                await engine.start()
            await engine.close()
        engine = adapter(server.url, folder, ("general", "general"))
        with pytest.raises(EngineError, match="/continue_generation answered 401"):
            await engine.start()
        await engine.close()
        async with attached(server, keys=("general", "control")) as engine:
            assert len((await answers(engine, [LONG]))[NAME].token_ids) == 60


async def test_a_server_that_does_not_suit_the_run(folder: Path) -> None:
    for options, problem in (
        ({"preferred": '{"top_p": 0.9}'}, r"engine\.url.*top_p.*--preferred-sampling-params"),
        ({"context": 128}, r"engine\.window.*room for 122 tokens.*wants 250.*--context-length 250"),
    ):
        async with double(folder, **options) as server:
            engine = adapter(server.url, folder)
            with pytest.raises(ConfigError, match=problem):
                await engine.start()
            await engine.close()


async def test_many_requests_and_one_bad_line(folder: Path) -> None:
    """The loss of the engine is told once, after all that came."""
    async with double(folder, slots=8) as server, attached(server) as engine:
        server.faults["/generate"] = Fault(cut_after=30, times=1)
        engine.generate([ask(name, (5, 6), 100, ignore_eos=True) for name in range(20)])
        heard, _ = await until_lost(engine)
        assert heard.token_ids
