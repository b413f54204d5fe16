"""What `VllmEngine` makes of what vLLM does: a core that is told what to write stands for vLLM."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from rollyard.engine.vllm.core import Asked, Output
from rollyard.engine.vllm.engine import VllmEngine
from rollyard.errors import EngineError, EngineLost, TimeLimitExceeded, WeightSyncError
from rollyard.events import Rollover
from rollyard.model.architecture import Architecture
from rollyard.model.tokenizer import Tokenizer
from rollyard.types import FinishReason, Manifest, RequestId, Segment, WeightVersion
from tests.engine.embedded.serving import ask, collect
from tests.tiny import tiny_folder

Script = Callable[[Asked, str], list[Output]]
PROMPT = [7, 3, 12, 5, 9]


class Core:
    """Implements `core.Core`: every request writes what the script says, an output in each turn."""

    name, ours, warmed = "told", True, False

    def __init__(self, script: Script) -> None:
        self._script, self.label = script, ""
        self._aborted: set[str] = set()
        self._going = asyncio.Event()
        self._going.set()
        self._gone: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.deaf = 0  # orders to abort that it misses
        self.fails: Exception | None = None  # in the next update
        self.update_s = 0.0  # seconds that it takes
        self.dies: Exception | None = None  # in whatever it is told
        self.asked: list[Asked] = []
        self.labels: Counter[str] | None = None  # what it says of a request that was cut

    async def start(self, receiver: str, order: str) -> int:
        return 2

    async def generate(self, asked: Asked) -> AsyncGenerator[Output]:
        if asked.salt == "warm up":
            self.warmed = True
            return
        self.asked.append(asked)
        for output in self._script(asked, self.label):
            await self._going.wait()
            if asked.name in self._aborted:
                break
            yield output
            await asyncio.sleep(0.001)
        else:
            return
        yield Output((), (), "abort", labels=self.labels)

    async def abort(self, names: Sequence[str]) -> None:
        if self.dies is not None:
            raise self.dies
        if self.deaf:
            self.deaf -= 1
            return
        self._aborted.update(names)

    async def stand_still(self) -> None:
        self._going.clear()

    async def go_on(self) -> None:
        self._going.set()

    async def ask(self, method: str, *args: object) -> Sequence[Mapping[str, object]]:
        answers: dict[str, dict[str, object]] = {"rollyard_prepared": {"done": True}, "rollyard_take": {"bytes": 8}}
        return [answers.get(method, {})]

    async def update(self, version: WeightVersion, label: str) -> None:
        if self.fails is not None:
            error, self.fails = self.fails, None
            raise error
        await asyncio.sleep(self.update_s)
        self.label = label

    async def forget(self) -> None:
        pass

    async def ended(self) -> str:
        return await self._gone

    def end(self, cause: str) -> None:
        self._gone.set_result(cause)

    async def close(self) -> None:
        self._going.set()
        if self.dies is not None:
            raise self.dies


def tokens(count: int) -> list[Output]:
    return [Output((9,), (-0.5,)) for _ in range(count)]


def ending(count: int, label: str) -> list[Output]:
    """`count` tokens; with the last, what wrote them."""
    return [*tokens(count - 1), Output((9,), (-0.5,), "length", labels=Counter({label: count}))]


@asynccontextmanager
async def engine(tmp_path: Path, script: Script) -> AsyncIterator[tuple[VllmEngine, Core]]:
    folder = tiny_folder(tmp_path, window=64)
    core = Core(script)
    shape = Architecture.from_folder(folder)
    made = VllmEngine("engine-0", core, folder, shape, slots=4, window=64, receiver="", order="")
    try:
        await made.start()
        await made.prepare(Manifest(WeightVersion(0), (), 0))
        await made.load(WeightVersion(0))
        yield made, core
    finally:
        await made.close()


async def test_a_request_that_ends_as_was_said(tmp_path: Path) -> None:
    async with engine(tmp_path, lambda asked, label: ending(5, label)) as (made, core):
        assert made.slots == 2, "as many as vLLM has"
        made.generate([ask(0, PROMPT, 5, ignore_eos=True)])
        found = (await collect(made, 1))[RequestId(0, 0)]
        assert found.token_ids == [9] * 5 and found.finish is FinishReason.LENGTH
        assert core.asked[0].token_ids == tuple(PROMPT)


async def test_tokens_of_weights_that_were_never_loaded(tmp_path: Path) -> None:
    """vLLM was started anew behind its address: nothing that it wrote counts."""
    async with engine(tmp_path, lambda asked, label: ending(5, "default")) as (made, _):
        made.generate([ask(0, PROMPT, 5, ignore_eos=True)])
        with pytest.raises(EngineLost, match="'default', which were not loaded"):
            await collect(made, 1)
        with pytest.raises(EngineLost):
            made.generate([ask(1, PROMPT, 5)])


FIRST, SECOND, THIRD = "0.0.0", "1.1.0", "2.2.0"  # what the loads of these tests are called


async def change_weights(made: VllmEngine, step: int, after: int) -> None:
    """Once so many tokens came."""
    while made.stats().generated_tokens < after:  # noqa: ASYNC110
        await asyncio.sleep(0.002)
    await made.pause(Rollover.KEEP)
    await made.load(WeightVersion(step))
    await made.resume()


async def spans(tmp_path: Path, last: Output, *, after: int, loads: int = 1) -> Sequence[Segment]:
    """A request of 29 tokens and `last`, with weights changing every time so many tokens came."""
    async with engine(tmp_path, lambda asked, label: [*tokens(29), last]) as (made, _):
        made.generate([ask(0, PROMPT, 30, ignore_eos=True)])
        for number in range(1, loads + 1):
            await change_weights(made, number, after * number)
        return (await collect(made, 1))[RequestId(0, 0)].segments


def by_version(segments: Sequence[Segment]) -> Counter[int]:
    written: Counter[int] = Counter()
    for segment in segments:
        written[segment.version.step] += len(segment.token_ids)
    return +written


async def test_tokens_that_came_later_than_the_pause_said(tmp_path: Path) -> None:
    """Written by the old weights, and here only once the new ones were at work: each is of those that wrote it."""
    last = Output((9,), (-0.5,), "length", labels=Counter({FIRST: 15, SECOND: 15}))
    segments = await spans(tmp_path, last, after=3)
    assert by_version(segments) == {0: 15, 1: 15} and segments[-1].finish is FinishReason.LENGTH
    assert [segment.version.step for segment in segments] == sorted(segment.version.step for segment in segments)
    assert {segment.oldest_kv.step for segment in segments} == {0}


async def test_two_loads_under_a_request(tmp_path: Path) -> None:
    last = Output((9,), (-0.5,), "length", labels=Counter({THIRD: 4, FIRST: 15, SECOND: 11}))
    segments = await spans(tmp_path, last, after=3, loads=2)
    assert by_version(segments) == {0: 15, 1: 11, 2: 4} and segments[-1].finish is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("last", "finish"),
    [
        (Output((9,), (-0.5,), "length"), FinishReason.ERROR),
        (Output((), (), "abort"), FinishReason.ABORT),
        (Output((), ()), FinishReason.ERROR),
    ],
)
async def test_what_nobody_knows_the_weights_of_is_not_kept(tmp_path: Path, last: Output, finish: FinishReason) -> None:
    segments = await spans(tmp_path, last, after=3)
    assert segments[-1].finish is finish and not segments[-1].token_ids
    assert set(by_version(segments)) == {0} and by_version(segments)[0] < 29


async def test_words_that_cannot_be(tmp_path: Path) -> None:
    """Fewer tokens of the first weights than came before others were loaded: nothing that it says is to be relied on."""
    last = Output((9,), (-0.5,), "length", labels=Counter({FIRST: 2, SECOND: 28}))
    with pytest.raises(EngineLost, match=r"came, .* before a load"):
        await spans(tmp_path, last, after=5)


async def test_a_stop_string_after_a_load(tmp_path: Path) -> None:
    """It is found here; vLLM is told to end the request, and says what wrote it."""
    word = Tokenizer(tiny_folder(tmp_path, window=64)).decode([7])
    script = [*tokens(5), *[Output((7,), (-0.5,))] * 25]
    async with engine(tmp_path, lambda asked, label: script) as (made, core):
        core.labels = Counter({FIRST: 6, SECOND: 4})
        made.generate([ask(0, PROMPT, 30, ignore_eos=True, stop=(word,))])
        await change_weights(made, 1, after=2)
        found = (await collect(made, 1))[RequestId(0, 0)]
    assert found.finish is FinishReason.STOP and found.token_ids == [9] * 5 + [7]
    assert by_version(found.segments) == {0: 6}


async def test_an_order_to_cut_that_was_missed_is_repeated(tmp_path: Path) -> None:
    async with engine(tmp_path, lambda asked, label: tokens(10_000)) as (made, core):
        core.deaf = 1
        made.generate([ask(0, PROMPT, 50, ignore_eos=True)])
        await asyncio.sleep(0.01)
        await core.stand_still()
        cutting = asyncio.create_task(made.abort([RequestId(0, 0)]))
        await asyncio.sleep(0.01)
        await core.go_on()
        await cutting
        found = (await collect(made, 1))[RequestId(0, 0)]
        assert found.finish in (FinishReason.ABORT, FinishReason.LENGTH)


@pytest.mark.parametrize("error", [EngineError("it broke"), TimeLimitExceeded("no answer within 1 s")])
async def test_an_update_that_fails(tmp_path: Path, error: Exception) -> None:
    async with engine(tmp_path, lambda asked, label: ending(5, label)) as (made, core):
        core.fails = error
        with pytest.raises(WeightSyncError, match="engine-0: "):
            await made.load(WeightVersion(1))
        assert made.version == WeightVersion(0)
        await made.load(WeightVersion(1))
        assert made.version == WeightVersion(1)
        made.generate([ask(0, PROMPT, 5, ignore_eos=True)])
        assert (await collect(made, 1))[RequestId(0, 0)].finish is FinishReason.LENGTH


async def test_a_load_that_nobody_waits_for_any_more(tmp_path: Path) -> None:
    """It goes on to its end, and nothing runs before that."""
    async with engine(tmp_path, lambda asked, label: ending(5, label)) as (made, core):
        core.update_s = 0.2
        await made.pause(Rollover.KEEP)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await made.load(WeightVersion(1))
        assert made.version == WeightVersion(0)
        await made.resume()
        assert made.version == WeightVersion(1) and core.label == SECOND
        made.generate([ask(0, PROMPT, 5, ignore_eos=True)])
        assert by_version((await collect(made, 1))[RequestId(0, 0)].segments) == {1: 5}


@pytest.mark.parametrize("error", [EngineLost("it died"), TimeLimitExceeded("no answer"), OSError("no such socket")])
async def test_closing_meets_no_error(tmp_path: Path, error: Exception) -> None:
    async with engine(tmp_path, lambda asked, label: tokens(10_000)) as (made, core):
        made.generate([ask(0, PROMPT, 50, ignore_eos=True)])
        core.dies = error
        await made.close()
        assert all([segments async for segments in made.segments()]), "and whoever listens hears the end"


async def test_closing_takes_no_longer_than_it_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollyard.engine.closing.PART_S", 0.1)
    async with engine(tmp_path, lambda asked, label: tokens(10_000)) as (made, core):
        made.generate([ask(0, PROMPT, 50, ignore_eos=True)])
        core.deaf = 10_000
        await core.stand_still()
        await made.close()


async def test_no_step_before_the_first_load_of_a_server_that_runs_already(tmp_path: Path) -> None:
    """It may be half way between two versions of an earlier run."""
    core = Core(lambda asked, label: ending(5, label))
    core.ours = False
    folder = tiny_folder(tmp_path, window=64)
    made = VllmEngine("engine-0", core, folder, Architecture.from_folder(folder), slots=4, window=64, receiver="", order="")
    await made.start()
    assert not core.warmed
    await made.close()


async def test_its_end_is_told(tmp_path: Path) -> None:
    async with engine(tmp_path, lambda asked, label: tokens(10_000)) as (made, core):
        core.end("the machine burns")
        with pytest.raises(EngineLost, match="the machine burns"):
            async with asyncio.timeout(5):
                async for _ in made.segments():
                    pass


async def test_silence_at_the_end_is_an_error(tmp_path: Path) -> None:
    async with engine(tmp_path, lambda asked, label: tokens(3)) as (made, _):
        made.generate([ask(0, PROMPT, 5, ignore_eos=True)])
        found = (await collect(made, 1))[RequestId(0, 0)]
        assert found.finish is FinishReason.ERROR and found.token_ids == [9] * 3
