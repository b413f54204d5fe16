"""Pausing, new weights, memory: what the server is told, and what it means for requests."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rollyard.engine.sglang.engine import SGLangEngine
from rollyard.errors import EngineError, TimeLimitExceeded, WeightSyncError
from rollyard.events import Rollover, WakePart
from rollyard.types import FinishReason, Manifest, RequestId, WeightVersion
from tests.engine.embedded.serving import Written, answers, ask, collect, serving
from tests.engine.sglang.attached import V0, V1, attached, bring, first_tokens
from tests.engine.sglang_double import Double, double
from tests.engine.sglang_parts import NEW, OLD, Fault
from tests.tiny import tiny_folder

LONG = ask(0, (5, 6, 7), 60, ignore_eos=True)
NAME = LONG.id
VERSIONS = [NEW, OLD]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same shape with other weights."""
    return tiny_folder(tmp_path_factory.mktemp("other"), seed=7)


async def greedy(folder: Path) -> Written:
    async with serving(folder) as engine:
        return (await answers(engine, [LONG]))[NAME]


def calls(server: Double, path: str) -> list[dict[str, object]]:
    return [body for called, body in server.asked if called == path]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("rollover", [Rollover.DRAIN, Rollover.ABORT])
async def test_new_weights_are_what_it_decodes_with(folder: Path, other: Path, version: str, rollover: Rollover) -> None:
    before, after = await greedy(folder), await greedy(other)
    assert before.token_ids != after.token_ids
    async with double(folder, version=version) as server, attached(server) as engine:
        assert (await answers(engine, [LONG]))[NAME].token_ids == before.token_ids
        await engine.pause(rollover)
        await bring(engine, other, V1)
        await engine.resume()
        assert engine.version == V1 and server.label == "1.0"
        written = (await answers(engine, [LONG]))[NAME]
    assert written.token_ids == after.token_ids
    assert written.logprobs == pytest.approx(after.logprobs, abs=1e-5)
    assert {segment.version for segment in written.segments} == {V1}


async def test_what_an_update_says(folder: Path, other: Path) -> None:
    async with double(folder) as server, attached(server) as engine:
        await bring(engine, other, WeightVersion(3, 2))
        assert calls(server, "/update_weights_from_disk")[-1] == {
            "model_path": str(other),
            "load_format": "auto",
            "weight_version": "3.2",
            "flush_cache": True,
        }
        assert not calls(server, "/update_weight_version")


async def test_an_older_server_that_is_paused_is_told_the_label_apart(folder: Path, other: Path) -> None:
    async with double(folder, version=OLD) as server, attached(server) as engine:
        await engine.pause(Rollover.ABORT)
        await bring(engine, other, V1)
        assert calls(server, "/update_weight_version") == [{"new_version": "1.0", "abort_all_requests": False}]


async def test_draining_finishes_what_runs_and_takes_no_more(folder: Path) -> None:
    async with double(folder, step_s=0.005) as server, attached(server) as engine:
        engine.generate([LONG])
        pausing = asyncio.create_task(engine.pause(Rollover.DRAIN))
        await asyncio.sleep(0)
        with pytest.raises(EngineError, match="finishing what it has"):
            engine.generate([ask(1, (5,))])
        await pausing
        assert (await collect(engine, 1))[NAME].finish is FinishReason.LENGTH
        with pytest.raises(EngineError, match="is paused"):
            engine.generate([ask(1, (5,))])
        await engine.resume()
        await answers(engine, [ask(1, (5,), 3)])
        assert not calls(server, "/pause_generation")


async def test_a_drain_that_takes_too_long_is_an_error(folder: Path) -> None:
    async with double(folder, step_s=0.05) as server, attached(server, drain_s=0.3) as engine:
        engine.generate([ask(0, (5,), 200, ignore_eos=True)])
        with pytest.raises(TimeLimitExceeded, match=r"engine-0 did not finish what it has within 0\.3 s"):
            await engine.pause(Rollover.DRAIN)


@pytest.mark.parametrize("version", VERSIONS)
async def test_cutting_keeps_what_was_written_and_goes_on_with_new_weights(folder: Path, other: Path, version: str) -> None:
    whole = await greedy(folder)
    async with double(folder, version=version, step_s=0.02) as server, attached(server) as engine:
        engine.generate([LONG])
        heard = await first_tokens(engine)
        await engine.pause(Rollover.ABORT)
        assert server.paused == "abort" and not server.live
        rest = (await collect(engine, 1))[NAME]
        assert rest.finish is FinishReason.ABORT
        cut = tuple(heard.token_ids + rest.token_ids)
        assert list(cut) == whole.token_ids[: len(cut)]
        await bring(engine, other, V1)
        await engine.resume()
        going_on = ask(0, (5, 6, 7), 10, written=cut, ignore_eos=True)
        after = (await answers(engine, [going_on]))[NAME]
        assert {(segment.version, segment.oldest_kv) for segment in after.segments} == {(V1, V1)}
    async with serving(other) as fresh:
        assert after.token_ids == (await answers(fresh, [going_on]))[NAME].token_ids


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("incremental", [False, True])
async def test_keeping_swaps_the_weights_under_requests(folder: Path, other: Path, version: str, incremental: bool) -> None:
    async with double(folder, version=version, incremental=incremental, step_s=0.02) as server, attached(server) as engine:
        engine.generate([LONG])
        heard = await first_tokens(engine)
        await engine.pause(Rollover.KEEP)
        assert server.paused == "in_place" and server.live
        await bring(engine, other, V1)
        assert calls(server, "/update_weights_from_disk")[-1]["flush_cache"] is False
        await engine.resume()
        engine.generate([ask(1, (5, 6, 7), 8, ignore_eos=True)])
        written = await collect(engine, 2)
        bodies = calls(server, "/generate")
    segments = [*heard.segments, *written[NAME].segments]
    assert [segment.version for segment in segments] == sorted(segment.version for segment in segments)
    assert {segment.version for segment in segments} == {V0, V1}
    assert {segment.oldest_kv for segment in segments} == {V0}
    assert sum(len(segment.token_ids) for segment in segments) == 60
    old = [token_id for segment in segments if segment.version == V0 for token_id in segment.token_ids]
    assert old == (await greedy(folder)).token_ids[: len(old)]
    assert [body["extra_key"] for body in bodies] == ["0.0", "1.0"]  # the second one shares no prompt with the first
    async with serving(other) as fresh:
        expected = await answers(fresh, [ask(1, (5, 6, 7), 8, ignore_eos=True)])
    assert written[RequestId(1, 0)].token_ids == expected[RequestId(1, 0)].token_ids


async def test_the_server_counts_the_same_tokens_of_each_version(folder: Path, other: Path) -> None:
    """0.5.23 says at the end which tokens each version wrote; they are those of the segments."""
    async with double(folder, interval=1, step_s=0.02) as server, attached(server) as engine:
        engine.generate([LONG])
        heard = await first_tokens(engine)
        (live,) = server.live.values()
        await engine.pause(Rollover.KEEP)
        await bring(engine, other, V1)
        await engine.resume()
        segments = [*heard.segments, *(await collect(engine, 1))[NAME].segments]
        old = sum(len(segment.token_ids) for segment in segments if segment.version == V0)
        assert server.spans(live) == [
            {"version": "0.0", "start": 0, "end": old},
            {"version": "1.0", "start": old, "end": 60},
        ]


async def test_what_stands_still_can_be_cut(folder: Path) -> None:
    async with double(folder, step_s=0.02) as server, attached(server) as engine:
        engine.generate([LONG])
        heard = await first_tokens(engine)
        await engine.pause(Rollover.KEEP)
        with pytest.raises(EngineError, match="resume it first"):
            await engine.pause(Rollover.DRAIN)
        await asyncio.wait_for(engine.abort([NAME]), 2.0)
        rest = (await collect(engine, 1))[NAME]
        assert rest.finish is FinishReason.ABORT and 0 < len(heard.token_ids + rest.token_ids) < 60
        await engine.resume()
        await server.idle(5.0)  # there too


async def test_a_standstill_can_become_a_cut(folder: Path) -> None:
    async with double(folder, step_s=0.02) as server, attached(server) as engine:
        engine.generate([LONG])
        await first_tokens(engine)
        await engine.pause(Rollover.KEEP)
        await asyncio.wait_for(engine.pause(Rollover.ABORT), 5.0)
        assert (await collect(engine, 1))[NAME].finish is FinishReason.ABORT
        assert server.paused == "abort" and not server.live


async def test_no_load_while_it_generates(folder: Path, other: Path) -> None:
    async with double(folder, step_s=0.02) as server, attached(server) as engine:
        engine.generate([LONG])
        with pytest.raises(EngineError, match="pause it first"):
            await bring(engine, other, V1)


# ------------------------------------------------------------------------------------------- what goes wrong


async def unchanged(engine: SGLangEngine, folder: Path, other: Path) -> None:
    """It still has version 0 and its weights, and takes the next ones."""
    assert engine.version == V0
    assert (await answers(engine, [LONG]))[NAME].token_ids == (await greedy(folder)).token_ids
    await bring(engine, other, WeightVersion(2))
    assert (await answers(engine, [LONG]))[NAME].token_ids == (await greedy(other)).token_ids


async def test_a_version_whose_folder_is_not_there(folder: Path, other: Path, tmp_path: Path) -> None:
    async with double(folder) as server, attached(server) as engine:
        with pytest.raises(WeightSyncError, match="is no folder of a model"):
            await engine.prepare(Manifest(V1, (), 0, str(tmp_path / "gone")))
        with pytest.raises(WeightSyncError, match="is no folder of a model"):
            await engine.prepare(Manifest(V1, (), 0, ""))
        with pytest.raises(WeightSyncError, match="was not prepared"):
            await engine.load(V1)
        await unchanged(engine, folder, other)


async def test_a_load_that_the_server_refuses(folder: Path, other: Path, tmp_path: Path) -> None:
    """The folder is gone by the time it reads it."""
    (tmp_path / "config.json").write_text("{}")
    async with double(folder) as server, attached(server) as engine:
        with pytest.raises(WeightSyncError, match=r"did not take weights 1\.0.*400.*has no weights"):
            await bring(engine, tmp_path, V1)
        await unchanged(engine, folder, other)


@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        (Fault(status=500), "500: told to fail"),
        (Fault(status=503), "503: told to fail"),
        (Fault(body="<html>"), "no JSON object"),
        (Fault(body='{"success": false, "message": "no"}'), "it answered.*'no'"),
        (Fault(label="0.9"), r"was given weights 1\.0 and says that it has '0\.9'"),
        (Fault(hang=True), r"did not answer within 0\.5 s"),
    ],
)
async def test_an_update_that_fails(folder: Path, other: Path, fault: Fault, problem: str) -> None:
    async with double(folder) as server, attached(server, sync_s=5.0) as engine:
        server.faults["/update_weights_from_disk"] = fault
        engine._control._sync_s = 0.5
        with pytest.raises(WeightSyncError, match=problem):
            await bring(engine, other, V1)
        assert engine.version == V0
        server.faults.clear()
        engine._control._sync_s = 5.0
        await bring(engine, other, WeightVersion(2))
        assert (await answers(engine, [LONG]))[NAME].token_ids == (await greedy(other)).token_ids


async def test_a_server_that_says_another_version_than_it_was_given(folder: Path, other: Path) -> None:
    async with double(folder) as server, attached(server) as engine:
        server.faults["/model_info"] = Fault(label="0.0")
        with pytest.raises(WeightSyncError, match=r"given weights 1\.0 and says that it has '0\.0'"):
            await bring(engine, other, V1)
        assert engine.version == V0


# ---------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("backup", [False, True])
async def test_sleep_gives_memory_back_and_waking_takes_it(folder: Path, backup: bool) -> None:
    async with double(folder, memory_saver=True, weights_backup=backup) as server, attached(server) as engine:
        assert engine.capabilities.sleep
        before = (await answers(engine, [LONG]))[NAME].token_ids
        await engine.sleep()
        assert server.released == ({"weights", "kv_cache"} if backup else {"kv_cache"})
        with pytest.raises(EngineError, match="is asleep"):
            engine.generate([LONG])
        await engine.wake(WakePart.WEIGHTS)
        with pytest.raises(EngineError, match="is asleep"):
            engine.generate([LONG])
        await engine.wake(WakePart.CACHE)
        assert not server.released and not server.died
        assert (await answers(engine, [LONG]))[NAME].token_ids == before


async def test_no_sleep_while_requests_run_nor_where_the_server_cannot(folder: Path) -> None:
    async with double(folder, memory_saver=True, step_s=0.02) as server, attached(server) as engine:
        engine.generate([LONG])
        with pytest.raises(EngineError, match="requests run"):
            await engine.sleep()
    async with double(folder) as server, attached(server) as engine:
        assert not engine.capabilities.sleep
        with pytest.raises(EngineError, match="--enable-memory-saver"):
            await engine.sleep()
        assert not server.died


async def test_a_server_that_still_works_on_what_was_cut_is_waited_for(folder: Path) -> None:
    """Told to give memory back then, it would end."""
    async with double(folder, memory_saver=True, step_s=0.02) as server, attached(server) as engine:
        await answers(engine, [ask(0, (5, 6, 7), 60, stop=("?", *"abcdefghijklmnopqrstuvwxyz"), ignore_eos=True)])
        await engine.sleep()
        assert server.released and not server.died


async def test_closing_leaves_the_server_going_on(folder: Path) -> None:
    async with double(folder, step_s=0.02) as server:
        async with attached(server) as engine:
            engine.generate([LONG])
            await first_tokens(engine)
            await engine.pause(Rollover.KEEP)
            await engine.close()
            await engine.close()
            assert [segment.finish async for segments in engine.segments() for segment in segments][-1] is FinishReason.ABORT
            with pytest.raises(EngineError, match="is closed"):
                engine.generate([LONG])
        assert server.paused == ""
        await server.idle(5.0)


async def test_what_an_earlier_run_left_paused_goes_on(folder: Path) -> None:
    async with double(folder) as server:
        async with attached(server) as engine:
            await engine.pause(Rollover.ABORT)
            engine._control._held = False  # as if it had ended without a word
        assert server.paused == "abort"
        async with attached(server) as engine:
            assert len((await answers(engine, [LONG]))[NAME].token_ids) == 60
