"""What the shell around the core makes of engines that fail it."""

from __future__ import annotations

import asyncio
import dataclasses
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollyard.engine.fake import FakeEngine, Lie, Script
from rollyard.errors import ConfigError, EngineError, EngineLost
from rollyard.events import Abort, EngineDown, Event, FetchPrompts, Generate, Pause, Resume, Rollover, RunBroken, SegmentArrived
from rollyard.fitness import Condemn, EngineUnfit, WrongAnswer
from rollyard.model.tokenizer import Tokenizer
from rollyard.rollout.controller import Controller, Text
from rollyard.types import EngineStats, FinishReason, Manifest, Prompt, Request, RequestId, Sampling, Segment, WeightVersion
from rollyard.watch.timeline import Timeline
from tests.tiny import save_tokenizer


class Gone:
    """An engine that dies when it is told to cut a request."""

    async def abort(self, requests):
        raise EngineLost("it died")


async def test_an_engine_that_dies_while_it_cuts_a_request_does_not_break_the_run():
    """That it is gone is told by whoever listens to it."""
    broken: list[BaseException] = []
    controller = Controller(
        {"a": Gone()}, None, None, lambda ids, stop, finish: "", lambda event: None, broken.append, Timeline()
    )
    controller.carry_out([Abort("a", (RequestId(0, 0),))])
    await asyncio.sleep(0.01)
    await controller.close()
    assert not broken


async def test_an_engine_that_is_gone_is_a_lost_one_to_whoever_asks_it():
    """What is proved of one engine may still be under way when that is closed."""
    engines = {"a": Gone()}
    controller = Controller(engines, None, None, lambda ids, stop, finish: "", lambda event: None, lambda error: None, Timeline())
    controller.listen()
    controller.leave("a")
    del engines["a"]
    with pytest.raises(EngineLost, match="engine a has left"):
        await controller.complete([Request(RequestId(-1, 0), (1,), Sampling(1), seed=0)], ("a",))


class Inseparable:
    """An engine in the run's own process."""

    def condemn(self, cause: str) -> None:
        raise EngineError(f"it cannot be taken out: {cause}")


async def test_an_engine_that_cannot_be_taken_out_takes_the_run_with_it():
    heard: list[Event] = []
    controller = Controller({"a": Inseparable()}, None, None, lambda *_: "", heard.append, heard.append, Timeline())
    controller.carry_out([Condemn("a", "it lies")])
    assert heard == [RunBroken("it cannot be taken out: it lies", failed=True)]
    await controller.close()


async def watched(silent_s: float, **options) -> tuple[Controller, FakeEngine, list[Event], asyncio.Task]:
    """A controller, and an engine that was asked for something outside the core."""
    heard: list[Event] = []
    engine = FakeEngine("a", token_s=0.01, script=lambda _: Script((5,) * 400))
    await engine.start()
    await engine.prepare(Manifest(WeightVersion(0), (), 0))
    await engine.load(WeightVersion(0))
    controller = Controller({"a": engine}, None, None, lambda *_: "", heard.append, heard.append, Timeline(), silent_s, **options)
    controller.listen()
    asking = asyncio.create_task(controller.complete([Request(RequestId(-1, 0), (1,), Sampling(400), seed=0)]))
    await asyncio.sleep(0.02)
    return controller, engine, heard, asking


async def test_an_engine_that_stands_still_is_reported_and_not_one_that_was_told_to():
    controller, engine, heard, asking = await watched(0.2)
    engine.stall()
    controller.carry_out([Pause("a", Rollover.KEEP)])
    await asyncio.sleep(0.5)
    assert not heard
    controller.carry_out([Resume("a")])
    async with asyncio.timeout(10):
        while not heard:  # noqa: ASYNC110 (it is told nowhere else)
            await asyncio.sleep(0.01)
    assert isinstance(heard[0], EngineUnfit) and heard[0].engine == "a" and "it wrote nothing for 0." in heard[0].cause
    controller.carry_out([Condemn("a", heard[0].cause)])
    with pytest.raises(EngineLost, match="wrote nothing"):
        await asking
    await asyncio.sleep(0.01)
    assert any(isinstance(event, EngineDown) for event in heard)
    await controller.close()
    await engine.close()


async def test_nobody_is_silent_while_this_process_stands_still_itself():
    controller, engine, heard, asking = await watched(0.8)
    engine.stall()
    time.sleep(1.5)  # noqa: ASYNC251 (that is the point)
    await asyncio.sleep(0.3)
    assert not heard
    asking.cancel()
    await controller.close()
    await engine.close()


V0, V1 = WeightVersion(0), WeightVersion(1)


async def two(*, loaded: int = 2) -> tuple[Controller, list[FakeEngine], list[Event]]:
    """A controller of two engines, so many of which have weights."""
    heard: list[Event] = []
    engines = [FakeEngine(name, script=lambda _: Script((5,) * 40)) for name in "ab"]
    for number, engine in enumerate(engines):
        await engine.start()
        if number < loaded:
            await engine.prepare(Manifest(V0, (), 0))
            await engine.load(V0)
    named = {engine.id: engine for engine in engines}
    controller = Controller(named, None, None, lambda *_: "", heard.append, heard.append, Timeline(), vocabulary=97)
    controller.listen()
    return controller, engines, heard


def asked(count: int) -> list[Request]:
    return [Request(RequestId(-1, member), (1,), Sampling(40), seed=member) for member in range(count)]


async def closed(controller: Controller, engines: list[FakeEngine]) -> None:
    await controller.close()
    for engine in engines:
        await engine.close()


LIES = [lie for lie in Lie if lie not in (Lie.NONE, Lie.STRANGER)]


@pytest.mark.parametrize("lie", LIES)
async def test_a_wrong_answer_outside_the_core_is_told_of_and_another_engine_asked(lie: Lie):
    """Each is told of once, whatever else comes of that request."""
    controller, engines, heard = await two()
    engines[0].lie = lie
    async with asyncio.timeout(10):
        answers = await controller.complete(asked(4), version=V0)
    assert [done.token_ids for done in answers] == [(5,) * 40] * 4 and all(len(done.logprobs) == 40 for done in answers)
    assert [(type(event), event.engine) for event in heard] == [(WrongAnswer, "a")] * 2
    await closed(controller, engines)


async def test_a_request_outside_the_core_that_is_never_answered_rightly_is_given_up():
    controller, engines, heard = await two()
    engines[0].lie = engines[1].lie = Lie.NAN
    async with asyncio.timeout(10):
        with pytest.raises(EngineError, match=r"10 answers to one request were wrong, .*: a logprob is not finite"):
            await controller.complete(asked(1))
    assert len(heard) == 10
    await closed(controller, engines)


async def test_who_has_no_weights_or_others_is_not_asked_outside_the_core():
    controller, engines, heard = await two(loaded=1)
    async with asyncio.timeout(10):
        await controller.complete(asked(4))
        await controller.complete(asked(4), version=V0)
    assert engines[1].stats().generated_tokens == 0
    for names, version in ((("b",), None), ((), V1)):
        with pytest.raises(EngineLost, match="no engine is left that has weights"):
            await controller.complete(asked(1), names, version)
    assert not heard
    await closed(controller, engines)


class Teller:
    """An engine that answers every request with the same segments."""

    id, version = "a", V0

    def __init__(self, segments: list[Segment]) -> None:
        self._segments = segments
        self._asked: asyncio.Queue[RequestId] = asyncio.Queue()

    def generate(self, requests) -> None:
        for request in requests:
            self._asked.put_nowait(request.id)

    async def segments(self):
        while True:
            request = await self._asked.get()
            yield [dataclasses.replace(segment, request=request) for segment in self._segments]

    async def abort(self, requests) -> None:
        """It has said all it has to say."""

    def stats(self) -> EngineStats:
        return EngineStats()


SMALL = 30  # tokens of a vocabulary
ids = st.lists(st.integers(0, SMALL - 1) | st.integers(-(2**70), 2**70) | st.sampled_from((SMALL, 2**31, 2**32 - 1, 2**32, -1)))
numbers = st.floats() | st.floats(-3, 0)
told = st.builds(
    lambda ids, logprobs, exact: (tuple(ids), tuple(logprobs[: len(ids)] + [-0.5] * (len(ids) - len(logprobs))) if exact else ()),
    ids,
    st.lists(numbers),
    st.booleans(),
) | st.tuples(ids.map(tuple), st.lists(numbers).map(tuple))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Text:
    """What a run decodes with, whose tokenizer raises OverflowError for what is no number of 32 bits."""
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder)
    tokenizer = Tokenizer(folder)
    with pytest.raises(OverflowError):
        tokenizer.decode([2**32])
    return lambda ids, stop, finish: tokenizer.decode(ids)


async def hears(text: Text, segments: list[Segment], vocabulary: int) -> tuple[list[Event], list[BaseException]]:
    heard, broken = list[Event](), list[BaseException]()
    controller = Controller(
        {"a": Teller(segments)}, None, None, text, heard.append, broken.append, Timeline(), vocabulary=vocabulary
    )  # type: ignore[dict-item]
    controller.listen()
    controller.carry_out([Generate("a", Request(RequestId(0, 0), (1,), Sampling(40), seed=0))])
    asking = asyncio.create_task(controller.complete([Request(RequestId(-1, 0), (1,), Sampling(40), seed=0)]))
    for _ in range(20):
        await asyncio.sleep(0)
    asking.cancel()
    await controller.close()
    await asyncio.gather(asking, return_exceptions=True)
    return heard, broken


@given(st.lists(told, min_size=1, max_size=3), st.sampled_from(list(FinishReason)), st.sampled_from((0, SMALL)))
def test_no_answer_however_wrong_breaks_a_run(text: Text, answers, finish: FinishReason, vocabulary: int):
    """A tokenizer is never asked for the text of what is no token."""
    last = len(answers) - 1
    segments = [
        Segment(RequestId(0, 0), ids, logprobs, V0, V0, finish if at == last else None)
        for at, (ids, logprobs) in enumerate(answers)
    ]
    heard, broken = asyncio.run(hears(text, segments, vocabulary))
    assert not broken
    problems = [event.problem for event in heard if isinstance(event, SegmentArrived)]
    assert len(problems) == len(answers)
    for (ids, _), problem in zip(answers, problems, strict=True):
        wrong = any(not 0 <= token < (vocabulary or 2**32) for token in ids)
        assert ("a token of number" in problem) == wrong


async def test_an_engine_that_tells_lists_is_heard_as_one_that_tells_tuples():
    """Pieces of a completion are joined, and nobody may change one that was told."""
    ids, logprobs = [5, 6], [-0.5, -0.25]
    segments = [Segment(RequestId(0, 0), ids, logprobs, V0, V0), Segment(RequestId(0, 0), (), (), V0, V0, FinishReason.STOP)]
    heard, broken = await hears(lambda *_: "", segments, SMALL)
    ids.append(7)
    told = [event.segment for event in heard if isinstance(event, SegmentArrived)]
    assert not broken and [(each.token_ids, each.logprobs) for each in told] == [((5, 6), (-0.5, -0.25)), ((), ())]


class Numbers:
    """A source of prompts with these numbers."""

    def __init__(self, *numbers: int) -> None:
        self._numbers = numbers

    def take(self, count: int) -> tuple[tuple[Prompt, ...], bool]:
        taken, self._numbers = self._numbers[:count], self._numbers[count:]
        return tuple(Prompt(number, 0, (1,), "") for number in taken), not self._numbers


@pytest.mark.parametrize("numbers", [(0, 2, 1), (0, 0), (3, 4, 3)])
async def test_a_source_whose_prompts_are_not_in_order_is_told_so(numbers: tuple[int, ...]):
    heard: list[Event] = []
    controller = Controller({}, Numbers(*numbers), None, lambda *_: "", heard.append, heard.append, Timeline())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=rf"gave number {numbers[-1]} after number {numbers[-2]}"):
        controller.carry_out([FetchPrompts(2), FetchPrompts(1)])
    await controller.close()
