"""What a worker makes of a function: what is no number is no verdict, and nothing is ever 0 by accident."""

from __future__ import annotations

import asyncio
import math
import signal
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

from rollyard.reward.host import Asked, Judge

TEXTS = ("2+3=", "5")
COLUMNS = {"answer": "5", "level": 2}


async def judge(function, *texts: tuple[str, str], limit_s: float = 5.0, columns=COLUMNS):
    texts = texts or (TEXTS,)
    return await Judge("it", function).judge(Asked(0, limit_s, texts, [columns] * len(texts)))


async def test_sync_and_async_functions_get_texts_and_columns():
    def sync(prompt, completion, answer, **columns):
        return (prompt, completion, answer, columns) == ("2+3=", "5", "5", {"level": 2})

    async def slow(prompt, completion, *, level, **rest):
        await asyncio.sleep(0.01)
        return level / 4

    assert await judge(sync) == [(1.0, "")]
    assert await judge(slow) == [(0.5, "")]
    assert await judge(lambda *texts, answer, level: len(texts) + int(answer)) == [(7.0, "")]


class Broken:
    def __float__(self):
        raise RuntimeError("no")

    def __repr__(self):
        raise RuntimeError("no")


NONE = [None, math.nan, -math.inf, "1.0", b"1.0", 10**400, 1e39, 1j, [1], {}, object(), np.ones(2), torch.ones(3), Broken()]


@pytest.mark.parametrize("value", NONE, ids=[type(value).__name__ for value in NONE])
async def test_what_is_no_number_is_no_verdict(value):
    ((number, problem),) = await judge(lambda prompt, completion, **columns: value)
    assert number is None and problem.startswith("it returned") and len(problem) < 130


@pytest.mark.parametrize("value", [{1.0: "a", 0.5: "b"}, {0.5, 1.0}, {0.5: 1, 1.0: 2}.keys(), b"12", "12"])
async def test_rewards_of_several_come_in_the_order_of_the_completions(value):
    found = await judge(lambda prompts, completions, **columns: value, TEXTS, TEXTS)
    assert found == [(None, f"it returned a {type(value).__name__}, not a list of numbers")] * 2
    assert await judge(lambda completions, **columns: np.array([0.5, 1]), TEXTS, TEXTS) == [(0.5, ""), (1.0, "")]


NUMBERS = [(True, 1.0), (3, 3.0), (np.float32(0.5), 0.5), (np.bool_(False), 0.0), (np.array(2), 2.0), (torch.tensor(0.25), 0.25)]


@pytest.mark.parametrize(("value", "number"), [*NUMBERS, (Fraction(1, 4), 0.25), (Decimal("0.5"), 0.5), (-0.0, 0.0)])
async def test_numbers_of_all_kinds(value, number):
    assert await judge(lambda prompt, completion, **columns: value) == [(number, "")]


async def test_a_coroutine_that_is_not_declared_as_one():
    async def hidden():
        return 1.0

    ((number, problem),) = await judge(lambda prompt, completion, **columns: hidden())
    assert number is None and "declare it with async def" in problem


@pytest.mark.parametrize("error", [ValueError("x"), TimeoutError("mine"), StopIteration("x"), SystemExit(3), KeyboardInterrupt()])
async def test_an_error_is_a_missing_verdict_with_its_cause(error):
    def sync(prompt, completion, **columns):
        raise error

    ((number, problem),) = await judge(sync)
    assert number is None and problem.startswith(type(error).__name__)

    async def asynchronous(prompt, completion, **columns):
        raise error

    if not isinstance(error, StopIteration):
        ((number, problem),) = await judge(asynchronous)
        assert number is None and problem.startswith(type(error).__name__)


class Mute(Exception):
    def __str__(self):
        raise RuntimeError("no")


async def test_an_error_that_does_not_say_what_it_is():
    def sync(prompt, completion, **columns):
        raise Mute

    async def asynchronous(prompt, completion, **columns):
        raise Mute

    for function in (sync, asynchronous):
        assert await judge(function) == [(None, "Mute: it does not say why")]


async def test_a_coroutine_that_takes_too_long():
    async def forever(prompt, completion, **columns):
        await asyncio.sleep(60)

    assert await judge(forever, limit_s=0.05) == [(None, "no verdict within 0.05 s")]


async def test_a_function_may_run_a_loop_of_its_own_and_set_signals():
    async def inner():
        await asyncio.sleep(0.001)
        return 0.5

    def sync(prompt, completion, **columns):
        signal.signal(signal.SIGALRM, signal.getsignal(signal.SIGALRM))
        return asyncio.run(inner())

    assert await judge(sync) == [(0.5, "")]
    assert asyncio.get_running_loop().is_running() and await judge(sync) == [(0.5, "")]


async def test_several_at_once_get_lists():
    def lengths(prompts, completions, answer, **columns):
        assert prompts == ["p", "q"] and answer == ["5", "5"] and columns == {"level": [2, 2]}
        return [len(text) if text else None for text in completions]

    async def only_completions(completions):
        return np.array([len(text) for text in completions], np.float32)

    texts = (("p", "abc"), ("q", ""))
    assert await judge(lengths, *texts) == [(3.0, ""), (None, "it returned None")]
    assert await judge(only_completions, *texts, columns={}) == [(3.0, ""), (0.0, "")]
    for value, problem in ((0.5, "a float, not a list"), ([1.0], "1 rewards for 2 completions"), ([1, 2, 3], "3 rewards for 2")):
        found = await judge(lambda completions, value=value, **columns: value, *texts)
        assert len(found) == 2 and all(number is None and problem in said for number, said in found)


async def test_several_at_once_that_fail_are_to_be_asked_one_by_one():
    def picky(completions, **columns):
        raise ValueError("one of them")

    assert await judge(picky, ("p", "a"), ("p", "b")) == [(None, "ValueError: one of them")]


async def test_columns_that_some_have_and_others_not():
    def takes(completions, note):
        return [1.0 if one is None else 0.0 for one in note]

    asked = Asked(0, 1.0, (("p", "a"), ("p", "b")), [{"note": "x"}, {}])
    assert await Judge("it", takes).judge(asked) == [(0.0, ""), (1.0, "")]
