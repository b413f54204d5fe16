"""What comes through the adapter is what the engine behind the server wrote: tokens, logprobs, reasons, versions."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rollyard.engine.embedded.engine import EmbeddedEngine
from rollyard.errors import EngineError, RequestRejected
from rollyard.types import FinishReason, RequestId
from tests.engine.embedded.serving import Written, answers, ask, collect, serving
from tests.engine.sglang.attached import V0, adapter, attached, first_tokens
from tests.engine.sglang_double import double
from tests.engine.sglang_parts import NEW, OLD
from tests.tiny import tiny_folder

PROMPTS = [(5, 6, 7), (9,), (3, 4, 3, 4, 3, 4, 8), (11, 2)]
STYLES = [(NEW, False), (NEW, True), (OLD, False), (OLD, True)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
async def direct(folder: Path) -> AsyncIterator[EmbeddedEngine]:
    async with serving(folder) as engine:
        yield engine


def same(through: dict[RequestId, Written], direct: dict[RequestId, Written]) -> None:
    assert through.keys() == direct.keys()
    for name, one in through.items():
        assert one.token_ids == direct[name].token_ids
        assert one.logprobs == pytest.approx(direct[name].logprobs, abs=1e-5)
        assert one.finish is direct[name].finish


@pytest.mark.parametrize(("version", "incremental"), STYLES)
async def test_tokens_and_logprobs_are_those_of_the_engine(
    folder: Path, direct: EmbeddedEngine, version: str, incremental: bool
) -> None:
    requests = [ask(name, prompt, 40) for name, prompt in enumerate(PROMPTS)]
    expected = await answers(direct, requests)
    async with double(folder, version=version, incremental=incremental) as server, attached(server) as engine:
        through = await answers(engine, requests)
    same(through, expected)
    for one in through.values():
        assert {segment.version for segment in one.segments} == {segment.oldest_kv for segment in one.segments} == {V0}
        assert all(len(segment.token_ids) <= 18 for segment in one.segments)  # 16, and what came with the last of them


async def test_the_request_says_all_that_sglang_would_choose_itself(folder: Path) -> None:
    async with double(folder) as server, attached(server) as engine:
        await answers(engine, [ask(0, (5, 6, 7), 9, written=(8, 9), temperature=0.7, ignore_eos=True)])
        (body,) = [body for path, body in server.asked if path == "/generate"]
    assert body["input_ids"] == [5, 6, 7, 8, 9] and body["return_logprob"] and body["stream"]
    assert body["extra_key"] == "0.0"
    assert body["sampling_params"] == {
        "max_new_tokens": 9,
        "temperature": 0.7,
        "top_p": 1.0,
        "top_k": -1,
        "ignore_eos": True,
        "stop_token_ids": [1],
    }


async def test_names_of_requests_never_begin_each_other(folder: Path) -> None:
    async with double(folder) as server, attached(server) as engine:
        await answers(engine, [ask(1, (5,), 2, member=member) for member in range(12)])
        names = [body["rid"] for path, body in server.asked if path == "/generate"]
    assert len(set(names)) == 12 and {len(name) for name in names} == {32}


async def test_members_of_a_group_draw_each_for_itself(folder: Path) -> None:
    async with double(folder, deterministic=True) as server, attached(server) as engine:
        group = [ask(1, (5, 6), 20, member=member, temperature=1.0, ignore_eos=True) for member in range(4)]
        written = await answers(engine, group)
    assert len({tuple(one.token_ids) for one in written.values()}) == 4


async def test_reasons_to_end(folder: Path, direct: EmbeddedEngine) -> None:
    whole = (await answers(direct, [ask(0, (5, 6, 7), 200)]))[RequestId(0, 0)]
    long = tuple(range(2, 42)) * 6  # 240 tokens
    requests = [ask(1, (5, 6, 7), 5, ignore_eos=True), ask(2, long, 200, ignore_eos=True), ask(3, (5, 6, 7), 200)]
    async with double(folder) as server, attached(server) as engine:
        written = await answers(engine, requests)
    assert written[RequestId(1, 0)].finish is FinishReason.LENGTH and len(written[RequestId(1, 0)].token_ids) == 5
    assert written[RequestId(2, 0)].finish is FinishReason.CONTEXT and len(written[RequestId(2, 0)].token_ids) == 250 - 240
    assert written[RequestId(3, 0)].finish is whole.finish
    assert written[RequestId(3, 0)].token_ids == whole.token_ids[:200]


async def test_the_servers_smaller_window_is_the_window(folder: Path) -> None:
    """The last tokens of its context SGLang keeps to itself; a request is bounded so that it never meets them."""
    async with double(folder, context=64) as server, attached(server, window=64) as engine:
        written = await answers(engine, [ask(0, (5,) * 50, 60, ignore_eos=True)])
        assert written[RequestId(0, 0)].finish is FinishReason.CONTEXT
        assert len(written[RequestId(0, 0)].token_ids) == 64 - 6 - 50
        with pytest.raises(RequestRejected, match="58 tokens leave no room in the window of 58"):
            engine.generate([ask(1, (5,) * 58, 1)])


async def test_an_end_of_sequence_token_is_kept_and_ends(folder: Path, direct: EmbeddedEngine) -> None:
    """Among many draws some hit token 1, which ends the model's texts; ignoring it goes on to the length."""
    async with double(folder, deterministic=True, incremental=True) as server, attached(server) as engine:
        written = await answers(engine, [ask(n, (5, 6), 60, temperature=1.0) for n in range(12)])
        ended = [one for one in written.values() if one.finish is FinishReason.STOP]
        assert ended, "no draw of these seeds ends a text"
        assert all(one.token_ids[-1] == 1 and 1 not in one.token_ids[:-1] for one in ended)
        again = await answers(engine, [ask(n, (5, 6), 60, temperature=1.0, ignore_eos=True) for n in range(12)])
        assert all(len(one.token_ids) == 60 and one.finish is FinishReason.LENGTH for one in again.values())


def spelled(ids: list[int]) -> str:
    """Of the tiny tokenizer's characters: token 2 is the first of them."""
    from tests.tiny import CHARACTERS

    return "".join(CHARACTERS[token_id - 2] for token_id in ids if token_id >= 2)


async def test_stop_strings_keep_the_tokens_that_the_embedded_engine_keeps(folder: Path, direct: EmbeddedEngine) -> None:
    free = (await answers(direct, [ask(0, (5, 6, 7), 40, ignore_eos=True)]))[RequestId(0, 0)].token_ids
    stop = (spelled(free)[9:12],)  # three characters, so three tokens
    request = ask(1, (5, 6, 7), 40, stop=stop, ignore_eos=True)
    expected = await answers(direct, [request])
    assert expected[RequestId(1, 0)].finish is FinishReason.STOP
    async with double(folder, interval=5, step_s=0.02) as server, attached(server) as engine:
        same(await answers(engine, [request]), expected)
        await server.idle(5.0)  # the server was told, and did not go on to the 40th token


async def test_a_stop_string_lies_across_the_place_where_a_request_was_cut(folder: Path, direct: EmbeddedEngine) -> None:
    free = (await answers(direct, [ask(0, (5, 6, 7), 40, ignore_eos=True)]))[RequestId(0, 0)].token_ids
    first = spelled(free).find(stop := spelled(free)[9:12])
    cut = first + 2  # two of its three characters were written elsewhere
    request = ask(1, (5, 6, 7), 40, written=tuple(free[:cut]), stop=(stop,), ignore_eos=True)
    async with double(folder) as server, attached(server) as engine:
        written = (await answers(engine, [request]))[RequestId(1, 0)]
    assert written.token_ids == free[cut : first + 3] and written.finish is FinishReason.STOP


@pytest.mark.parametrize(("version", "incremental"), STYLES)
async def test_a_cut_request_goes_on_elsewhere_as_if_it_was_whole(
    folder: Path, direct: EmbeddedEngine, version: str, incremental: bool
) -> None:
    whole = (await answers(direct, [ask(0, (5, 6, 7), 60, ignore_eos=True)]))[RequestId(0, 0)]
    async with double(folder, version=version, incremental=incremental, step_s=0.02) as server, attached(server) as engine:
        engine.generate([ask(0, (5, 6, 7), 60, ignore_eos=True)])
        heard = await first_tokens(engine)
        await engine.abort([RequestId(0, 0), RequestId(99, 0)])
        rest = (await collect(engine, 1))[RequestId(0, 0)]
        assert rest.finish is FinishReason.ABORT
    cut = heard.token_ids + rest.token_ids
    assert 0 < len(cut) < 60 and cut == whole.token_ids[: len(cut)]
    going_on = ask(0, (5, 6, 7), 60 - len(cut), written=tuple(cut), ignore_eos=True)
    async with double(folder) as server, attached(server) as engine:
        end = (await answers(engine, [going_on]))[RequestId(0, 0)]
    assert cut + end.token_ids == whole.token_ids
    assert heard.logprobs + rest.logprobs + end.logprobs == pytest.approx(whole.logprobs, abs=1e-5)


async def test_with_deterministic_inference_draws_go_on_elsewhere_too(folder: Path) -> None:
    request = ask(0, (5, 6, 7), 40, temperature=1.0, ignore_eos=True, seed=2**64 - 5)
    async with double(folder, deterministic=True) as server, attached(server) as engine:
        assert engine.capabilities.noise
        whole = (await answers(engine, [request]))[RequestId(0, 0)].token_ids
        rest = ask(1, (5, 6, 7), 27, written=tuple(whole[:13]), temperature=1.0, ignore_eos=True, seed=2**64 - 5)
        assert (await answers(engine, [rest]))[RequestId(1, 0)].token_ids == whole[13:]
    async with double(folder) as server, attached(server) as engine:
        assert not engine.capabilities.noise
        await answers(engine, [request])
        assert "sampling_seed" not in server.asked[-1][1]["sampling_params"]


async def test_a_request_that_is_still_in_the_queue_is_cut_without_tokens(folder: Path) -> None:
    async with double(folder, slots=1, step_s=0.02) as server, attached(server) as engine:
        assert engine.slots == 1
        engine.generate([ask(0, (5, 6), 100, ignore_eos=True), ask(1, (7, 8), 100, ignore_eos=True)])
        await first_tokens(engine)
        await engine.abort([RequestId(1, 0)])
        await engine.abort([RequestId(0, 0)])
        written = await collect(engine, 2)
    assert written[RequestId(1, 0)].token_ids == [] and written[RequestId(1, 0)].finish is FinishReason.ABORT


@pytest.mark.parametrize(
    ("request_", "problem"),
    [
        (ask(0, ()), "has no prompt"),
        (ask(0, (5,), 0), "asks for no token"),
        (ask(0, (5,) * 200, written=(5,) * 50), "leave no room"),
        (ask(0, (5, 10_000)), "outside the vocabulary"),
        (ask(0, (5,), written=(-1,)), "outside the vocabulary"),
    ],
)
async def test_what_can_never_run_is_refused(folder: Path, request_, problem: str) -> None:  # type: ignore[no-untyped-def]
    async with double(folder) as server, attached(server) as engine:
        with pytest.raises(RequestRejected, match=problem):
            engine.generate([ask(7, (5,)), request_])
        assert not [body for path, body in server.asked if path == "/generate"]  # all of them or none


async def test_a_name_is_taken_once(folder: Path) -> None:
    async with double(folder, step_s=0.02) as server, attached(server) as engine:
        engine.generate([ask(0, (5,), 100, ignore_eos=True)])
        with pytest.raises(RequestRejected, match="same id"):
            engine.generate([ask(0, (6,))])


async def test_no_request_before_the_first_load_whatever_the_server_has(folder: Path) -> None:
    async with double(folder) as server:
        engine = adapter(server.url, folder)
        with pytest.raises(EngineError, match="was not started"):
            engine.generate([ask(0, (5,))])
        await engine.start()
        assert engine.version is None
        with pytest.raises(EngineError, match="has acknowledged no weights"):
            engine.generate([ask(0, (5,))])
        await engine.close()


async def test_totals(folder: Path) -> None:
    async with double(folder, version=OLD) as server, attached(server) as engine:
        await answers(engine, [ask(0, (5, 6, 7), 10, ignore_eos=True), ask(1, (5, 6), 4, ignore_eos=True)])
        stats = engine.stats()
    assert (stats.generated_tokens, stats.prefilled_tokens, stats.slots, stats.decoder) == (14, 5, 8, "sglang 0.5.6")
