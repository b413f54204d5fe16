"""What functions take as judges, and what they cannot be given."""

from __future__ import annotations

import functools

import pytest

from rollyard import functions
from rollyard.errors import ConfigError
from rollyard.reward.function import Takes, check_columns, check_function, load_reward
from rollyard.reward.shipped import exact_match
from rollyard.types import Completion, FinishReason, Prompt

PROMPT = Prompt(0, 0, (1,), "2+3=", {"answer": "5", "level": 2})
DONE = Completion(0, 0, (4, 5, 1), (-1.0, -1.0, -1.0), (), FinishReason.STOP, "5")


def test_functions_by_name(tmp_path):
    path = tmp_path / "judge.py"
    path.write_text("import math\nLIMIT = 3\ndef half(prompt, completion, **columns):\n    return 0.5\ndef one(prompt): ...\n")
    assert load_reward(f"{path}:half")("p", "c") == 0.5
    assert load_reward("rollyard.reward.shipped:exact_match") is exact_match
    broken = tmp_path / "broken.py"
    broken.write_text("import no_such_module_anywhere\n")
    leaves = tmp_path / "leaves.py"
    leaves.write_text("import sys\nsys.exit('no licence')\n")
    for name, problem in (
        (f"{path}:nothing", "has no 'nothing' (its functions: half, one)"),
        (f"{path}:LIMIT", "is a int, not a function"),
        (f"{path}:one", "takes 1 positional"),
        (f"{tmp_path}/absent.py:f", "there is no file"),
        (f"{broken}:f", "ModuleNotFoundError"),
        (f"{leaves}:f", "cannot be imported: SystemExit: no licence"),
        ("no_such_package_anywhere:f", "cannot be imported"),
        ("justaname", "names no function"),
    ):
        with pytest.raises(ConfigError) as raised:
            load_reward(name)
        assert problem in str(raised.value), name


def test_an_import_that_takes_long_is_told(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(functions, "TOLD_AFTER_S", 0.05)
    path = tmp_path / "slow.py"
    path.write_text("import time\ntime.sleep(0.5)\ndef f(prompt, completion): ...\n")
    load_reward(f"{path}:f")
    assert capsys.readouterr().err == f"still importing {path} (reward.function) after 0.05 s\n"


def test_a_needed_column_must_be_there():
    def needs(prompt, completion, answer, *, level, note="x", **rest): ...

    def several(completions, answer, **rest): ...

    check_columns(needs, {"answer", "level"})
    with pytest.raises(ConfigError, match=r"needs a column 'level'.*the prompts have: answer"):
        check_columns(needs, {"answer"})
    check_columns(several, {"answer"})
    with pytest.raises(ConfigError, match="needs a column 'answer'"):
        check_columns(several, set())


def test_columns_that_cannot_be_given_are_told_at_once():
    def by_position(prompt, completion, answer, /): ...

    def any_column(question, completion, **columns): ...

    def after_star(*texts, answer): ...

    def counts(prompt, completion, tokens): ...

    def several(prompts, completions, **columns): ...

    with pytest.raises(ConfigError, match="'answer' by position only"):
        check_columns(by_position, {"answer"})
    with pytest.raises(ConfigError, match="a column 'question'"):
        check_columns(any_column, {"question"})
    with pytest.raises(ConfigError, match="needs a column 'answer'"):
        check_columns(after_star, set())
    with pytest.raises(ConfigError, match="a column 'tokens', and the reward is given something else"):
        check_columns(counts, {"tokens"})
    with pytest.raises(ConfigError, match="a column 'prompts'"):
        check_columns(several, {"prompts"})
    check_columns(after_star, {"answer", "texts"})
    check_columns(any_column, {"answer", "tokens"})
    check_columns(counts, set())
    check_columns(lambda question, completion, answer: 0, {"question", "answer"})  # it is not given the column


def test_a_function_is_given_what_it_asks_for():
    def all_(prompt, completion, **columns): ...

    def some(prompt, completion, level, *, tokens, finish="x"): ...

    def several(completions, max_tokens, **columns): ...

    async def by_position(prompt, completion, level=0, /): ...

    asked = [Takes.of(function) for function in (all_, some, several, by_position)]
    assert [takes.arguments(PROMPT, DONE, 64) for takes in asked] == [
        {"answer": "5", "level": 2},
        {"level": 2, "tokens": 3, "finish": "stop"},
        {"answer": "5", "level": 2, "max_tokens": 64},
        {},  # a column is never given by position
    ]
    assert [takes.batched for takes in asked] == [False, False, True, False]
    assert [takes.asynchronous for takes in asked] == [False, False, False, True]
    assert asked[2].texts == ("prompts", "completions") and Takes.of(lambda completions: 0).texts == ("completions",)


def test_objects_that_are_called():
    class Patient:
        async def __call__(self, prompt, completion, level):
            return level

    assert Takes.of(Patient()).asynchronous
    assert Takes.of(functools.partial(Patient().__call__, level=5)).asynchronous
    check_function(Patient(), "patient")
    with pytest.raises(ConfigError, match="takes 1 positional"):
        check_function(lambda prompt: 0, "one")
    check_function(lambda completions: 0, "several")


def test_a_function_that_hides_its_parameters():
    with pytest.raises(ConfigError, match="does not tell what parameters"):
        load_reward("builtins:max")
