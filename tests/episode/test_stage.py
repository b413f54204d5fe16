"""One episode: what the environment may do, and what becomes of what it should not."""

from __future__ import annotations

import asyncio
import sys

import numpy as np
import pytest

from rollyard.episode.host import PLAYED
from rollyard.episode.load import FromFunction
from rollyard.episode.stage import Played
from rollyard.episode.transcript import Transcript
from rollyard.types import Asking, FinishReason, Reply, Reward
from tests.episode.toys import PROMPT, Says, Toy, stage


def plays(function):
    return stage(FromFunction(function))


async def test_what_was_sampled_is_never_tokenized_again():
    """The policy writes he llo, 1 2, though the tokenizer would have written hello, 3: the next prompt has 1 2."""

    async def episode(ask, prompt):
        talk = Transcript(ask, prompt)
        first = await talk.answer()
        assert first.text == "hello" and ask.encode(first.text) == (3,)
        talk.add("=hello")
        second = await talk.answer(max_tokens=2, stop=("d",))
        return float(second.text == " world")

    policy = Says((1, 2), (6,))
    assert await plays(episode).play(PROMPT, policy) == Played(Reward(1.0, {"environment": 1.0}), "hello=hello world")
    assert policy.asked == [Asking((4,), 9), Asking((4, 1, 2, 5, 3), 2, ("d",))]


async def test_messages_come_after_an_answer_as_the_template_has_them():
    """The template ends an answer with <eos>, 7: once, whether the policy has written it or was cut before."""

    async def episode(ask, prompt):
        talk = Transcript(ask, prompt)
        await talk.answer()
        talk.say({"role": "tool", "content": "="})
        await talk.answer()
        talk.say({"role": "tool", "content": "="})
        await talk.answer()

    policy = Says((1, 7), (2,), (3,))
    assert (await plays(episode).play(PROMPT, policy)).verdict is None
    assert [asked.prompt_ids for asked in policy.asked] == [(4,), (4, 1, 7, 5, 7), (4, 1, 7, 5, 7, 2, 7, 5, 7)]


async def test_a_rewritten_conversation_is_told_by_its_answers():
    async def episode(ask, prompt):
        await ask(prompt.token_ids)
        await ask((5,))

    assert (await plays(episode).play(PROMPT, Says((1, 2), (6,)))).text == "hello\n world"


@pytest.mark.parametrize(
    ("value", "verdict"),
    [
        (1, Reward(1.0, {"environment": 1.0})),
        (True, Reward(1.0, {"environment": 1.0})),
        (Reward(0.5, {"a": 1.0}), Reward(0.5, {"a": 1.0})),
        (Reward(None, problem="no"), Reward(None, problem="no")),
        (Reward(None, {"a": 1}, "no \udce9"), Reward(None, {"a": 1.0}, "no \\udce9")),
        (Reward(np.float32(0.5), {"a": np.int64(2), "b\udce9": True}), Reward(0.5, {"a": 2.0, "b\\udce9": 1.0})),
        (np.float32(0.5), Reward(0.5, {"environment": 0.5})),
        (None, None),
    ],
)
async def test_verdicts(value, verdict):
    async def episode(ask, prompt):
        return value

    assert (await plays(episode).play(PROMPT, Says())).verdict == verdict


class Wild:
    """Raises what it was made with, whatever it is asked for."""

    def __init__(self, error) -> None:
        self._error = error

    def raises(self, *_):
        raise self._error

    __float__ = __repr__ = __str__ = items = raises


WRONG = [float("nan"), float("inf"), 1e39, "1", [1], Wild(RuntimeError("no")), Wild(SystemExit(3)), "\udce9"]


def _within(value):
    """As a verdict, in the place of a Reward's value, and among its parts."""
    return [value, Reward(value), Reward(1.0, {"a": 1.0, "b": value}), Reward(None, {"a": value})]


MALFORMED = [
    Reward(1.0, {"used": None}),
    Reward(1.0, None),
    Reward(1.0, Wild(RuntimeError("no"))),
    Reward(1.0, {3: 1.0}),
    Reward(1.0, [("a", 1.0)]),
    Reward(None, problem=ValueError("no")),
]


@pytest.mark.parametrize("value", [*(each for wrong in WRONG for each in _within(wrong)), *MALFORMED])
async def test_what_is_no_verdict(value):
    async def episode(ask, prompt):
        return value

    played = await plays(episode).play(PROMPT, Says())
    assert played.verdict is not None and played.verdict.value is None and not played.verdict.parts
    assert "the environment returned" in played.verdict.problem
    assert PLAYED.validate_json(PLAYED.dump_json((played,))) == (played,), "it can leave its process"


class Mute(Exception):
    def __str__(self):
        raise RuntimeError("no")


@pytest.mark.parametrize(
    ("error", "problem"),
    [
        (Mute(), "Mute: it does not say why"),
        (OSError("caf\udce9"), "OSError: caf\\udce9"),
        (KeyboardInterrupt(), "RuntimeError: KeyboardInterrupt: "),
    ],
)
async def test_whatever_it_raises_is_told_as_a_text(error, problem):
    async def episode(ask, prompt):
        raise error

    played = await plays(episode).play(PROMPT, Says())
    assert played.verdict == Reward(None, problem=problem)
    assert PLAYED.validate_json(PLAYED.dump_json((played,))) == (played,)


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        (lambda ask: ask(()), "ValueError: () are no ids"),
        (lambda ask: ask((8,)), "ValueError: (8,) are no ids of a vocabulary of 8"),
        (lambda ask: ask((-1,)), "ValueError: (-1,) are no ids"),
        (lambda ask: ask(("a",)), "TypeError"),
        (lambda ask: ask((1,), max_tokens=10), "ValueError: 10 tokens are asked for, and rollout.max_tokens is 9"),
        (lambda ask: ask((1,), max_tokens=0), "ValueError: 0 tokens"),
        (lambda ask: ask((1,), stop="x"), "ValueError: stop is 'x'"),
        (lambda ask: ask((1,), stop=["x", ""]), "ValueError: stop is ['x', '']"),
        (lambda ask: ask((1,), stop=[b"x"]), "ValueError: stop is [b'x']"),
        (lambda ask: ask((1,), stop=3), "TypeError"),
        (lambda ask: ask((1,), stop=("x", "\ud83d")), "ValueError: stop is ('x', '\\ud83d'), and no text ever holds half"),
        (lambda ask: ask((1,), stop=["x<eos>"]), "ValueError: stop is ['x<eos>'], and no text ever holds"),
        (lambda ask: 1 / 0, "ZeroDivisionError"),
        (lambda ask: sys.exit(3), "RuntimeError: SystemExit: 3"),
    ],
)
async def test_a_mistake_costs_the_verdict_and_nothing_else(wrong, problem):
    async def episode(ask, prompt):
        await wrong(ask)

    verdict = (await plays(episode).play(PROMPT, Says())).verdict
    assert verdict is not None and verdict.value is None and verdict.problem.startswith(problem)


async def test_stop_strings_may_come_one_by_one():
    async def episode(ask, prompt):
        await ask((1,), stop=(text for text in "xy"))
        return 1.0

    policy = Says((1,))
    assert (await plays(episode).play(PROMPT, policy)).verdict == Reward(1.0, {"environment": 1.0})
    assert policy.asked == [Asking((1,), 9, ("x", "y"))]


async def test_one_answer_at_a_time():
    async def episode(ask, prompt):
        await asyncio.gather(ask((1,)), ask((2,)))

    verdict = (await plays(episode).play(PROMPT, Says((1,), (2,)))).verdict
    assert verdict is not None and "one at a time" in verdict.problem


async def test_turns_end():
    """After its two turns it is told so; to ask once more is a mistake."""

    async def episode(ask, prompt):
        while True:
            await ask(prompt.token_ids)

    policy = Says((1,), (1,), ())
    verdict = (await stage(FromFunction(episode), turns=2).play(PROMPT, policy)).verdict
    assert len(policy.asked) == 3 and verdict is not None and "2 turns are over" in verdict.problem


async def test_its_own_work_is_limited_and_waiting_for_the_policy_is_not():
    async def slow(asking, hearing=None):
        await asyncio.sleep(0.3)
        return Reply((1,), "he", FinishReason.STOP)

    async def patient(ask, prompt):
        await ask(prompt.token_ids)
        return 1.0

    async def hangs(ask, prompt):
        await ask(prompt.token_ids)
        await asyncio.sleep(60)

    async def stubborn(ask, prompt):
        for _ in range(3):
            try:
                await asyncio.sleep(0.2)
            except asyncio.CancelledError:
                continue

    assert (await stage(FromFunction(patient), limit_s=0.1).play(PROMPT, slow)).verdict == Reward(1.0, {"environment": 1.0})
    for episode in (hangs, stubborn):
        verdict = (await stage(FromFunction(episode), limit_s=0.1).play(PROMPT, Says((1,)))).verdict
        assert verdict == Reward(None, problem="the environment neither asked nor ended within 0.1 s")


async def test_an_environment_that_ends_does_not_wait_for_what_it_asked():
    async def never(asking, hearing=None):
        await asyncio.Event().wait()

    async def episode(ask, prompt):
        try:
            await asyncio.wait_for(ask(prompt.token_ids), 0.05)
        except TimeoutError:
            return 0.25

    async with asyncio.timeout(3):
        played = await plays(episode).play(PROMPT, never)
    assert played.verdict == Reward(0.25, {"environment": 0.25})


async def test_what_breaks_the_policy_is_not_the_environments_fault():
    async def breaks(asking, hearing=None):
        raise OSError("no engine")

    ended = asyncio.Event()

    async def episode(ask, prompt):
        try:
            await ask(prompt.token_ids)
        finally:
            ended.set()

    with pytest.raises(OSError, match="no engine"):
        await plays(episode).play(PROMPT, breaks)
    async with asyncio.timeout(1):
        await ended.wait()


def test_the_toy_has_two_spellings():
    assert Toy().decode((1, 2)) == Toy().decode((3,)) == "hello" and Toy().encode("hello") == (3,)
