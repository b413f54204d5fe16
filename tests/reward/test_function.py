"""Functions as judges: what is no number is no verdict, what hangs costs itself only, nothing is ever 0 by accident."""

from __future__ import annotations

import asyncio
import functools
import math
import threading
import time

import pytest

from rollyard.config import RewardConfig
from rollyard.errors import ConfigError, ScoringError
from rollyard.reward.function import FunctionScorer, check_columns, exact_match, load_reward
from rollyard.types import Completion, FinishReason, Prompt, Reward

PROMPT = Prompt(0, 0, (1,), "2+3=", {"answer": "5", "level": 2})


def completion(text: str = "5") -> Completion:
    return Completion(0, 0, (1,), (-1.0,), (), FinishReason.STOP, text)


async def judge(function, text: str = "5", **config) -> Reward:
    scorer = FunctionScorer(function, RewardConfig(**config))
    try:
        return await scorer.score(PROMPT, completion(text))
    finally:
        await scorer.close()


async def test_sync_and_async_functions_get_text_and_columns():
    def sync(prompt, completion, answer, **columns):
        return (prompt, completion, answer, columns) == ("2+3=", "5", "5", {"level": 2})

    async def slow(prompt, completion, *, level):
        await asyncio.sleep(0.01)
        return level / 4

    assert await judge(sync) == Reward(1.0, {"sync": 1.0})
    assert await judge(slow) == Reward(0.5, {"slow": 0.5})
    assert await judge(lambda prompt, completion: 3) == Reward(3.0, {"<lambda>": 3.0})


@pytest.mark.parametrize("value", [None, math.nan, math.inf, "1.0", b"1.0", 10**400, 1j, [1], object()])
async def test_what_is_no_number_is_no_verdict(value):
    reward = await judge(lambda prompt, completion: value)
    assert reward.value is None and repr(value)[:5] in reward.problem and len(reward.problem) < 120


ERRORS = [ValueError("no number"), TimeoutError("mine"), StopIteration("x"), SystemExit(3), KeyError("a")]


@pytest.mark.parametrize("error", ERRORS)
async def test_an_error_is_a_missing_verdict_with_its_cause(error):
    def sync(prompt, completion):
        raise error

    async def asynchronous(prompt, completion):
        raise error

    reward = await judge(sync)
    assert reward.value is None and reward.problem.startswith(type(error).__name__)
    if not isinstance(error, (SystemExit, StopIteration)):
        assert (await judge(asynchronous)).problem.startswith(type(error).__name__)


async def test_a_judge_that_hangs_costs_its_own_verdict_only():
    release = threading.Event()
    scorer = FunctionScorer(lambda p, c: release.wait(20) if c == "hang" else 1.0, RewardConfig(time_limit_s=0.2, concurrency=2))
    began = time.perf_counter()
    rewards = await asyncio.gather(*(scorer.score(PROMPT, completion(text)) for text in ("hang", "a", "b", "c")))
    assert time.perf_counter() - began < 2
    assert [reward.value for reward in rewards] == [None, 1.0, 1.0, 1.0]
    assert rewards[0].problem == "no verdict within 0.2 s"
    await scorer.score(PROMPT, completion("hang"))
    with pytest.raises(ScoringError, match="2 judgements never ended"):
        await scorer.score(PROMPT, completion("a"))
    release.set()
    await scorer.close()


async def test_an_async_judge_that_hangs():
    reward = await judge(lambda p, c: None, time_limit_s=0.1)
    assert reward.value is None

    async def forever(prompt, completion):
        await asyncio.sleep(60)

    assert (await judge(forever, time_limit_s=0.1)).problem == "no verdict within 0.1 s"


async def test_threads_are_used_again():
    scorer = FunctionScorer(lambda p, c: threading.get_ident(), RewardConfig())
    names = {(await scorer.score(PROMPT, completion())).value for _ in range(20)}
    await scorer.close()
    assert len(names) == 1


def test_functions_by_name(tmp_path):
    path = tmp_path / "judge.py"
    path.write_text("import math\nLIMIT = 3\ndef half(prompt, completion, **columns):\n    return 0.5\ndef one(prompt): ...\n")
    assert load_reward(f"{path}:half")("p", "c") == 0.5
    assert load_reward("rollyard.reward.function:exact_match") is exact_match
    broken = tmp_path / "broken.py"
    broken.write_text("import no_such_module_anywhere\n")
    for name, problem in (
        (f"{path}:nothing", "has no 'nothing' (its functions: half, one)"),
        (f"{path}:LIMIT", "is a int, not a function"),
        (f"{path}:one", "takes 1 positional"),
        (f"{tmp_path}/absent.py:f", "there is no file"),
        (f"{broken}:f", "ModuleNotFoundError"),
        ("no_such_package_anywhere:f", "cannot be imported"),
        ("justaname", "names no function"),
    ):
        with pytest.raises(ConfigError) as raised:
            load_reward(name)
        assert problem in str(raised.value), name


def test_a_needed_column_must_be_there():
    def needs(prompt, completion, answer, *, level, note="x", **rest): ...

    check_columns(needs, {"answer", "level"})
    with pytest.raises(ConfigError, match=r"needs a column 'level'.*the prompts have: answer"):
        check_columns(needs, {"answer"})


def test_columns_that_cannot_be_given_are_told_at_once():
    def by_position(prompt, completion, answer, /): ...

    def any_column(question, completion, **columns): ...

    def after_star(*texts, answer): ...

    with pytest.raises(ConfigError, match="'answer' by position only"):
        check_columns(by_position, {"answer"})
    with pytest.raises(ConfigError, match="a column 'question'"):
        check_columns(any_column, {"question"})
    with pytest.raises(ConfigError, match="needs a column 'answer'"):
        check_columns(after_star, set())
    check_columns(after_star, {"answer", "texts"})
    check_columns(any_column, {"answer"})
    check_columns(lambda question, completion, answer: 0, {"question", "answer"})  # it is not given the column


async def test_columns_by_name_only_and_after_a_star():
    assert (await judge(lambda *texts, answer: len(texts) + int(answer))).value == 7
    assert (await judge(lambda prompt, completion, level=0, /: level)).value == 0  # a column is never given by position


async def test_objects_that_are_called():
    class Judge:
        def __call__(self, prompt, completion, level):
            return level

    class Patient:
        async def __call__(self, prompt, completion, level):
            await asyncio.sleep(0)
            return level

    assert await judge(Judge()) == Reward(2.0, {"Judge": 2.0})
    assert await judge(Patient()) == Reward(2.0, {"Patient": 2.0})
    assert (await judge(functools.partial(Patient().__call__, level=5))).value is not None


def test_a_function_that_hides_its_parameters():
    with pytest.raises(ConfigError, match="does not tell what parameters"):
        load_reward("builtins:max")


async def test_a_judge_that_ends_after_the_run_is_no_error():
    """Its loop is closed by then. An error on its thread would fail this test."""
    release, ended = threading.Event(), threading.Event()

    def late(prompt, completion):
        release.wait(20)
        ended.set()
        return 1.0

    def run() -> None:
        asyncio.run(judge(late, time_limit_s=0.05))

    await asyncio.to_thread(run)
    release.set()
    assert await asyncio.to_thread(ended.wait, 20)
    names = [thread for thread in threading.enumerate() if thread.name == "reward"]
    for thread in names:
        await asyncio.to_thread(thread.join, 20)


async def test_no_more_judgements_at_a_time_than_asked_for():
    running = peak = 0

    async def counted(prompt, completion):
        nonlocal running, peak
        running += 1
        peak = max(peak, running)
        await asyncio.sleep(0.01)
        running -= 1
        return 1.0

    scorer = FunctionScorer(counted, RewardConfig(concurrency=3))
    await asyncio.gather(*(scorer.score(PROMPT, completion()) for _ in range(10)))
    await scorer.close()
    assert peak == 3
