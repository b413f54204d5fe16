"""Several judges as one: values by hand, and what one without a verdict costs."""

from __future__ import annotations

import asyncio
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

import rollyard
from rollyard.config import Config
from rollyard.errors import ConfigError, ScoringError
from rollyard.place.child import Children
from rollyard.reward.combine import Combined, Part, combine
from rollyard.reward.open import check_rewards, judges_of, open_functions
from rollyard.types import Completion, FinishReason, Prompt, Reward

PROMPT = Prompt(0, 0, (1,), "2+3=", {"answer": "5"})
DONE = Completion(0, 0, (1,), (-1.0,), (), FinishReason.STOP, "5")


class Says:
    """A judge that says this after a while, or fails with it."""

    def __init__(self, said: Reward | Exception, after_s: float = 0.0) -> None:
        self.said, self.after_s, self.closed, self.ended = said, after_s, False, ""

    async def score(self, prompt: Prompt, completion: Completion) -> Reward:
        try:
            await asyncio.sleep(self.after_s)
        except asyncio.CancelledError:
            self.ended = "cut"
            raise
        if isinstance(self.said, Exception):
            raise self.said
        return self.said

    async def close(self) -> None:
        self.closed = True


def test_the_weighted_sum_by_hand():
    verdicts = {"right": Reward(1.0), "short": Reward(-0.5), "seen": Reward(7.0)}
    assert combine(verdicts, {"right": 2.0, "short": 0.5, "seen": 0.0}) == Reward(
        1.75, {"right": 1.0, "short": -0.5, "seen": 7.0}
    )


@pytest.mark.parametrize(
    "missing", [Reward(None, problem="hung"), Reward(math.nan, problem="hung"), Reward(math.inf, problem="hung")]
)
def test_a_missing_part_with_a_weight_is_no_verdict_and_the_others_are_told(missing):
    found = combine({"right": Reward(1.0), "style": missing}, {"right": 1.0, "style": 0.1})
    assert found == Reward(None, {"right": 1.0}, "style: hung")
    assert combine({"right": Reward(1.0), "style": missing}, {"right": 1.0, "style": 0.0}) == Reward(1.0, {"right": 1.0})
    assert combine({"style": missing}, {"style": 1.0}) == Reward(None, {}, "hung")
    assert combine({"a": missing, "b": missing}, {"a": 1.0, "b": 1.0}).problem == "a: hung; b: hung"


def test_a_sum_that_no_float32_holds_is_no_verdict():
    verdicts = {"a": Reward(3e38), "b": Reward(3e38)}
    found = combine(verdicts, {"a": 1.0, "b": 1.0})
    assert found.value is None and found.parts == {"a": 3e38, "b": 3e38} and "6e+38" in found.problem
    assert combine(verdicts, {"a": 1.0, "b": -1.0}).value == 0.0
    for weights in ({"a": 1e308, "b": -1e308}, {"a": 5e269, "b": 5e269}):  # their terms are infinite, or their sum is
        found = combine(verdicts, weights)
        assert found.value is None and "a by its weight, " in found.problem and "no finite float32 number" in found.problem
    assert combine({"a": Reward(1e200)}, {"a": 1.0}) == Reward(None, {}, "1e+200 is no verdict")


VERDICT = st.one_of(st.none(), st.floats(-1e6, 1e6, allow_nan=False))


@given(st.dictionaries(st.text("abc", min_size=1), st.tuples(VERDICT, st.floats(-10, 10, allow_nan=False)), min_size=1))
def test_the_value_is_the_sum_of_the_parts_or_nothing(drawn):
    weights = {name: weight for name, (_, weight) in drawn.items()}
    found = combine({name: Reward(value) for name, (value, _) in drawn.items()}, weights)
    assert found.parts == {name: value for name, (value, _) in drawn.items() if value is not None}
    if any(value is None and weight for value, weight in drawn.values()):
        assert found.value is None and found.problem
    else:
        assert found.value == math.fsum(weights[name] * value for name, value in found.parts.items())


async def test_all_parts_are_asked_at_once():
    parts = [Part(name, Says(Reward(1.0), 0.2)) for name in "abcde"]
    scorer = Combined(parts)
    began = asyncio.get_running_loop().time()
    assert (await scorer.score(PROMPT, DONE)).value == 5.0
    assert asyncio.get_running_loop().time() - began < 0.8
    await scorer.close()
    assert all(part.scorer.closed for part in parts)


async def test_a_part_that_cannot_go_on_ends_it_and_the_others_are_cut():
    slow = Says(Reward(1.0), 60.0)
    with pytest.raises(ScoringError, match="used up"):
        await Combined([Part("slow", slow), Part("bad", Says(ScoringError("used up")))]).score(PROMPT, DONE)
    await asyncio.sleep(0)
    assert slow.ended == "cut"


def test_names_and_weights_that_do_not_go_together():
    def one(prompt, completion): ...

    def config(**changes: object) -> Config:
        named = {name.replace("__", "."): value for name, value in changes.items()}
        return rollyard.resolve(preset="tiny", environment={}, overrides=named).config

    for given_, changes, problem in (
        ([one, one], {}, "two rewards are called 'one'"),
        ([], {}, "there is no reward"),
        ([one], {"reward__weights": "1,2"}, "2 weights for 1 rewards"),
        ([one], {"reward__weights": "0"}, "no reward counts"),
        ({"a": one, "b": 3}, {}, "b is a int, not a function"),
        ({"a/b c": one}, {}, "a reward cannot be called 'a/b c' (give it a name of letters, digits and _ - . alone)"),
        ({"a": one, "": one}, {}, "a reward cannot be called ''"),
        (None, {"reward__function": "exactmatch"}, "there is no reward called 'exactmatch' (one of: exact_match"),
        (None, {"reward__function": "exact_match,exact_match"}, "two rewards are called 'exact_match'"),
    ):
        with pytest.raises(ConfigError) as raised:
            check_rewards(config(**changes), given_, {"answer"})
        assert problem in str(raised.value).replace("reward.function: ", ""), problem
    named = {"größe_2.b-c": one, "x": lambda prompt, completion: 1.0}
    assert [judge.name for judge, _ in judges_of(config(), named)] == list(named)
    assert [judge.name for judge, _ in judges_of(config(), named["x"])] == ["lambda"]
    assert [judge.name for judge, _ in judges_of(config(), {"right": one, "again": one})] == ["right", "again"]
    assert [(judge.name, weight) for judge, weight in judges_of(config(), None)] == [("exact_match", 1.0)]


async def test_functions_from_files_by_name_and_weight(tmp_path):
    (tmp_path / "a.py").write_text("def right(prompt, completion, answer): return completion == answer\n")
    (tmp_path / "b.py").write_text("def length(prompt, completion): return len(completion)\n")
    named = f"{tmp_path}/a.py:right,{tmp_path}/b.py:length"
    overrides = {"reward.function": named, "reward.weights": "2,0.5"}
    config = rollyard.resolve(preset="tiny", environment={}, overrides=overrides).config
    children = Children(at_once=True)
    scorer = Combined(open_functions(config, None, children.launch, tmp_path))
    assert await scorer.score(PROMPT, DONE) == Reward(2.5, {"right": 1.0, "length": 1.0})
    await scorer.close()


@pytest.mark.parametrize("option", ["weights", "model.weight", "judge.weight", "judge.scale", "remote.weight"])
def test_a_factor_that_no_float32_holds_is_refused(option):
    with pytest.raises(ConfigError, match=rf"reward\.{option}.*a number that float32 holds"):
        rollyard.resolve(preset="tiny", environment={}, overrides={f"reward.{option}": "1e300"})


def test_rewards_that_ship_and_their_options():
    def found(columns: set[str], **changes: object) -> dict[str, dict[str, object]]:
        named = {f"reward.{name}": value for name, value in changes.items()}
        config = rollyard.resolve(preset="tiny", environment={}, overrides=named | {"rollout.max_tokens": 20}).config
        check_rewards(config, None, columns)
        return {judge.name: dict(judge.settings) for judge, _ in judges_of(config, None)}

    everything = "exact_match,numeric_match,regex,format,length_penalty,soft_overlong"
    assert found({"answer"}, function=everything, pattern="a+") == {
        "exact_match": {},
        "numeric_match": {},
        "regex": {"pattern": "a+"},
        "format": {"form": r"\s*<think>.*?</think>\s*<answer>.*?</answer>\s*"},
        "length_penalty": {},
        "soft_overlong": {"buffer": 4},
    }
    assert found(set(), function="soft_overlong", overlong_buffer=20) == {"soft_overlong": {"buffer": 20}}
    for columns, changes, told in (
        ({"answer"}, {"function": "regex"}, "reward.pattern: nothing is looked for"),
        ({"answer"}, {"function": "regex", "pattern": "(a"}, "reward.pattern: '(a' is no regular expression"),
        ({"pattern"}, {"function": "regex", "pattern": "a"}, "a column 'pattern', and the reward is given something else"),
        ({"answer"}, {"pattern": "a"}, "reward.pattern: it is for the reward called regex, which does not judge"),
        ({"answer"}, {"time_limit_s": 3}, "reward.time_limit_s: no reward is judged in a worker process"),
        ({"answer"}, {"function": "length_penalty", "workers": 2}, "reward.workers: no reward is judged in a worker"),
        ({"answer"}, {"start_s": 3}, "reward.start_s: no reward"),
        ({"answer"}, {"give_up_after": 3}, "reward.give_up_after: no reward"),
        ({"answer"}, {"function": "format", "concurrency": 3}, "reward.concurrency: no reward is a coroutine function"),
        ({"answer"}, {"function": "format", "batch": 3}, "reward.batch: no reward is a function of several"),
        ({"answer"}, {"overlong_buffer": 3}, "reward.overlong_buffer: it is for the reward called soft_overlong"),
        (set(), {"function": "soft_overlong", "overlong_buffer": 21}, "longer than a completion of 20"),
        (set(), {"function": "numeric_match"}, "needs a column 'answer'"),
        ({"tokens"}, {"function": "length_penalty"}, "a column 'tokens'"),
    ):
        with pytest.raises(ConfigError) as raised:
            found(columns, **changes)
        assert told in str(raised.value)


def test_a_reward_whose_package_is_not_there(monkeypatch):
    monkeypatch.setattr("rollyard.reward.open.find_spec", lambda name: None)
    config = rollyard.resolve(preset="tiny", environment={}, overrides={"reward.function": "math_verify"}).config
    with pytest.raises(ConfigError, match=r"math_verify needs math-verify, .*pip install 'rollyard\[math\]'"):
        check_rewards(config, None, {"answer"})
