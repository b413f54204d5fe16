"""Tasks of reasoning-gym: always the same problem at a place, on its own side, judged by the dataset's own rule."""

from __future__ import annotations

import json
from decimal import Decimal
from fractions import Fraction

import pytest
import reasoning_gym

from rollyard import gym
from rollyard.combinations import check
from rollyard.config import Config
from rollyard.errors import ConfigError
from rollyard.model.tokenizer import Tokenizer
from rollyard.prompts.open import check_prompts, open_prompts
from rollyard.reward.gym import reasoning_gym as reward
from tests.tiny import tiny_folder

SUM = "reasoning_gym/chain_sum"
SMALL = '{"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}'


def config(task: str = SUM, options: str = "", **prompts) -> Config:
    return Config.model_validate({"model": {"path": "m"}, "prompts": {"task": task, "options": options, **prompts}})


def column(problem: gym.Problem) -> dict[str, object]:
    """As prompts have it."""
    return {"source": list(problem.source), "entry": problem.entry}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    return Tokenizer(tiny_folder(tmp_path_factory.mktemp("model"), chat=True))


def test_a_problem_is_the_datasets_own():
    problem = gym.training(SUM, SMALL, seed=5, place=1234)
    name, options, seed = problem.source
    entry = reasoning_gym.create_dataset(name, seed=seed, size=500, **json.loads(options))[1234 % 500]
    assert (entry["question"], entry["answer"]) == (problem.question, problem.answer)


@pytest.mark.parametrize("task", ["chain_sum", "countdown", "gsm_symbolic"])
def test_streams_are_seeded_endless_and_never_held_out(task):
    task = gym.PREFIX + task
    places = [0, 1, 499, 500, 50_001]
    drawn = [gym.training(task, "", 3, place) for place in places]
    gym._dataset.cache_clear()
    assert drawn == [gym.training(task, "", 3, place) for place in places]
    assert len({problem.question for problem in drawn}) == 5
    assert [p.question for p in drawn] != [gym.training(task, "", 4, place).question for place in places]
    assert not any(problem.held_out for problem in drawn)
    held_out = tuple(filter(None, gym.held_out(task, "", 5)))
    assert len({problem.question for problem in held_out}) == 5 and all(problem.held_out for problem in held_out)


def test_sides_are_apart_even_where_there_are_few_problems():
    trained = {gym.training(SUM, SMALL, 0, place).question for place in range(600)}
    held_out = {problem.question for problem in gym.held_out(SUM, SMALL, 15) if problem}
    assert 100 < len(trained) < 200 and len(held_out) == 15 and not trained & held_out
    with pytest.raises(ConfigError, match=r"only \d+ different problems that may be held out"):
        tuple(gym.held_out(SUM, SMALL, 30))


def test_neighbouring_runs_do_not_share_their_problems():
    """A dataset adds the index to its seed: taken as it is, run 4 would have run 3's problems, one place earlier."""
    three, four = ({gym.training(SUM, "", seed, place).question for place in range(200)} for seed in (3, 4))
    assert len(three & four) < 10


@pytest.mark.parametrize(
    ("completion", "value"),
    [
        ("{}", 1.0),
        ("  {}\n", 1.0),
        ("<think>1 or 2</think>\n<answer>{}</answer>", 1.0),
        ("<answer>99999</answer> no: <answer> {} </answer>", 1.0),
        ("{} <answer>99999</answer>", 0.0),
        ("99999", 0.0),
        ("", 0.0),
    ],
)
def test_the_answer_stands_in_tags_or_is_all_there_is(completion, value):
    problem = gym.training(SUM, SMALL, 0, 7)
    text = completion.replace("{}", problem.answer)
    assert reward(problem.question, text, column(problem)) == value


def test_what_has_many_right_answers_is_judged_by_the_dataset():
    problem = gym.training("reasoning_gym/countdown", "", 0, 0)
    entry = reasoning_gym.create_dataset("countdown", seed=problem.source.seed, size=500)[0]
    assert reward("", entry["metadata"]["expression"], column(problem)) == 1.0
    assert reward("", "1 + 1", column(problem)) < 0.1


@pytest.mark.parametrize("task", ["arc_1d", "rearc", "isomorphic_strings"])
def test_what_the_dataset_knows_of_a_problem_gets_to_whoever_judges(task):
    """Tuples and keys that are numbers, which JSON has not; and problems that another process would make otherwise."""
    for place in range(3):
        problem = gym.training(gym.PREFIX + task, "", 0, place)
        gym._dataset.cache_clear()
        assert reward(problem.question, problem.answer, json.loads(json.dumps(column(problem)))) == 1.0
    value = {"a": (1, [2, (3,)], {"b": None}), 4: {}, "f": [Fraction(1, 3), Decimal("0.10")], "dict": [], "tuple": [5]}
    assert gym._unpacked(json.loads(json.dumps(gym._packed(value)))) == value


def test_several_datasets_at_once():
    options = json.dumps({"datasets": [{"name": each, "weight": 1, "config": {}} for each in ("chain_sum", "gcd")]})
    drawn = [gym.training("reasoning_gym/composite", options, 0, place) for place in range(20)]
    assert {"arithmetic" in problem.question for problem in drawn} == {True, False}
    assert all(reward("", problem.answer, column(problem)) == 1.0 for problem in drawn)


@pytest.mark.filterwarnings("ignore:the tokenizer does not know:RuntimeWarning")
async def test_prompts_and_the_columns_that_the_reward_needs(tokenizer):
    asked = config(options=SMALL, held_out=3, system="be brief")
    assert check_prompts(asked) == {"answer", "problem"}
    source, held_out = await open_prompts(asked, tokenizer)
    (first, second), exhausted = source.take(2)
    assert not exhausted and first.text.startswith("State the final answer")
    assert tokenizer.decode(first.token_ids) == f"system=be briefuser={first.text}assistant=".replace("S", "").replace(":", "")
    assert reward(second.text, str(second.columns["answer"]), second.columns["problem"]) == 1.0
    assert json.loads(json.dumps(first.columns)) == first.columns
    assert len({prompt.text for prompt in (*held_out, first, second)}) == 5
    assert (await open_prompts(asked, tokenizer, frozenset({0})))[0].take(1)[0][0].text == second.text


@pytest.mark.parametrize(
    ("task", "options", "told"),
    [
        ("reasoning_gym/chain_sums", "", "did you mean reasoning_gym/chain_sum"),
        ("reasoning_gym/", "", "such as reasoning_gym/chain_sum"),
        (SUM, '{"max_term": 3}', "did you mean max_terms"),
        (SUM, '{"colour": 3}', "it has: min_terms"),
        (SUM, '{"seed": 3}', "come from the stream's place"),
        (SUM, '{"min_terms": 9}', "max_terms must be >= min_terms"),
        (SUM, '{"min_terms": "two"}', "does not work with"),
    ],
)
def test_what_there_is_not_is_told_with_what_is_near(task, options, told):
    with pytest.raises(ConfigError) as raised:
        check_prompts(config(task, options))
    assert told in str(raised.value)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"prompts": {"task": "srot"}}, "did you mean sort"),
        ({"prompts": {"task": "gsm8k"}}, "or reasoning_gym/NAME"),
        ({"prompts": {"task": SUM}}, "needs a model"),
        ({"prompts": {"task": SUM, "options": "[1]"}, "model": {"path": "m"}}, "is no object"),
        ({"prompts": {"task": "sort", "options": "{}"}}, "options are for a task of reasoning-gym or verifiers"),
    ],
)
def test_combinations(given, told):
    with pytest.raises(ConfigError) as raised:
        check(Config.model_validate(given))
    assert told in str(raised.value)


async def test_a_system_message_needs_a_template(tmp_path):
    with pytest.raises(ConfigError, match="there is none"):
        await open_prompts(config(system="be brief"), Tokenizer(tiny_folder(tmp_path)))
