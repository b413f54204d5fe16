"""Environments by name, and what is refused before anything starts."""

from __future__ import annotations

import pytest

from rollyard.episode.calculator import Calculator, calculate
from rollyard.episode.load import check_environment, load_environment
from rollyard.episode.stage import Played
from rollyard.errors import ConfigError
from rollyard.types import FinishReason, Prompt, Reply, Reward
from tests.episode.toys import PROMPT, Says, stage

FILE = """
class Good:
    async def episode(self, ask, prompt):
        return 0.5

async def also(ask, prompt):
    return 0.25

class Plain:
    def episode(self, ask, prompt):
        return 0.5

class Needs:
    def __init__(self, tool):
        pass

class Leaves:
    def __init__(self):
        raise SystemExit("no licence")

async def narrow(ask):
    pass

number = 3
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(FILE)
    return path


async def test_a_class_and_a_function(file):
    for name, value in (("Good", 0.5), ("also", 0.25)):
        played = await stage(load_environment(f"{file}:{name}")).play(PROMPT, Says())
        assert played == Played(Reward(value, {"environment": value}), "")
    assert isinstance(load_environment("calculator"), Calculator)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("abacus", "there is no environment 'abacus'.*one of: calculator"),
        ("{file}:Plain", "has no coroutine `episode`"),
        ("{file}:Needs", "cannot be made: TypeError.*without arguments"),
        ("{file}:Leaves", "cannot be made: SystemExit: no licence"),
        ("{file}:narrow", "takes 1 positional"),
        ("{file}:number", "is a int, not a function"),
        ("{file}:gone", r"has no 'gone' \(its classes and functions: Good, Plain, Needs, Leaves, also, narrow\)"),
        ("{file}x:gone", "there is no file|cannot be imported"),
    ],
)
def test_what_is_none(file, name, problem):
    with pytest.raises(ConfigError, match=f"(?s)environment.name.*{problem}"):
        load_environment(name.format(file=file))


def test_what_is_given_directly():
    assert check_environment(given := Calculator(), "Calculator") is given
    with pytest.raises(ConfigError, match="has no coroutine `episode`"):
        check_environment(3, "int")


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("[17*23]", "391"),
        ("so [17+23]", "40"),
        ("[3-17]", "-14"),
        ("[17*23", None),
        ("[17*23]?", None),
        ("[1*1234567]", None),
        ("[2**9]", None),
        ("391", None),
    ],
)
def test_calls(text, result):
    assert calculate(text) == result


class Spelt:
    """A tokenizer whose ids are characters."""

    special = ()

    def encode(self, text, *, special=True):
        return tuple(map(ord, text))

    def decode(self, ids):
        return "".join(map(chr, ids))

    chat = chat_after = None


@pytest.mark.parametrize(
    ("answers", "turns", "verdict"),
    [
        (["391"], ["2*3="], (0.0, 0.0)),
        (["6"], ["2*3="], (1.0, 0.0)),
        (["[2*3]", "6"], ["2*3=", "2*3=[2*3]6="], (1.0, 1.0)),
        (["[2*3]", "[6*1]", "6"], ["2*3=", "2*3=[2*3]6=", "2*3=[2*3]6=[6*1]6="], (1.0, 1.0)),
        (["[2*3]", "[6*1]", "[6*1]"], ["2*3=", "2*3=[2*3]6=", "2*3=[2*3]6=[6*1]6="], (0.0, 1.0)),
    ],
)
async def test_the_calculator(answers, turns, verdict):
    left, asked = list(answers), []

    async def policy(asking, hearing=None):
        asked.append("".join(map(chr, asking.prompt_ids)))
        assert asking.stop == ("]",)
        text = left.pop(0)
        return Reply(tuple(map(ord, text)), text.split("]")[0], FinishReason.STOP)

    own = stage(Calculator())
    own = type(own)(own.environment, Spelt(), 200, 9, 8, 5.0)
    prompt = Prompt(0, 0, tuple(map(ord, "2*3=")), "2*3=", {"answer": "6"})
    right, used = verdict
    assert (await own.play(prompt, policy)).verdict == Reward(right, {"exact_match": right, "used_tool": used})
    assert asked == turns
