"""Functions as judges: what is no number is no verdict, what hangs costs itself only, nothing is ever 0 by accident."""

from __future__ import annotations

import asyncio
import math
import threading
import time

import pytest

from rollyard.config import RewardConfig
from rollyard.errors import ConfigError, ScoringError
from rollyard.reward.function import FunctionScorer, check_columns, exact_match, load_function
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


@pytest.mark.parametrize("value", [None, math.nan, math.inf, "1.0", [1], object()])
async def test_what_is_no_number_is_no_verdict(value):
    reward = await judge(lambda prompt, completion: value)
    assert reward.value is None and repr(value)[:5] in reward.problem


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
    assert load_function(f"{path}:half")("p", "c") == 0.5
    assert load_function("rollyard.reward.function:exact_match") is exact_match
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
            load_function(name)
        assert problem in str(raised.value), name


def test_a_needed_column_must_be_there():
    def needs(prompt, completion, answer, *, level, note="x", **rest): ...

    check_columns(needs, {"answer", "level"})
    with pytest.raises(ConfigError, match=r"needs a column 'level'.*the prompts have: answer"):
        check_columns(needs, {"answer"})
