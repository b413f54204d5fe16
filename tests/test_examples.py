"""The examples do what the README says they do."""

from __future__ import annotations

import ast
import json
import operator
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import rollyard
from rollyard import worker
from rollyard.chaos.faults import read_faults
from rollyard.engine.capabilities import check_capabilities
from rollyard.engine.options import check_options
from rollyard.episode.load import load_environment
from rollyard.episode.stage import Stage
from rollyard.errors import ConfigError
from rollyard.layers import resolve
from rollyard.place.bundles import Bundle, fitting
from rollyard.place.layout import layout
from rollyard.prompts.jsonl import read_rows
from rollyard.reward.function import check_columns, load_reward
from rollyard.types import FinishReason, Prompt, Reply, Reward
from tests.docs.commands import ROOT, commands
from tests.inspect.runs import write_run
from tests.tiny import tiny_folder

EXAMPLES = Path(__file__).parent.parent / "examples"
OPERATIONS: dict[str, Callable[[int, int], int]] = {"+": operator.add, "-": operator.sub}


RUN_BY = {  # a test, or a page whose commands are run by one
    "agent.py": "tests/serve/test_examples.py",
    "arithmetic.jsonl": "tests/test_examples.py",
    "cluster/1x8.toml": "tests/test_examples.py",
    "cluster/2x8.toml": "tests/test_examples.py",
    "cluster/32x8.toml": "tests/test_examples.py",
    "environment.py": "tests/test_examples.py",
    "external_trainer/requirements.txt": "tests/train/test_external.py",
    "external_trainer/trainers.py": "tests/train/test_external.py",
    "faults.toml": "tests/test_examples.py",
    "letters.py": "docs/howto/reward.md",
    "make_prompts.py": "tests/test_examples.py",
    "own_loop.py": "tests/test_examples.py",
    "own_reward.py": "tests/test_examples.py",
    "placements.toml": "docs/concepts/placements.md",
    "remote_trainer.py": "tests/serve/test_examples.py",
    "reward.py": "tests/test_examples.py",
    "reward_model/train.py": "tests/test_examples.py",
    "same_groups.py": "tests/test_examples.py",
    "trl_grpo.py": "tests/test_trl.py",
}


def test_each_example_is_run_by_a_test():
    files = [path for path in EXAMPLES.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert {path.relative_to(EXAMPLES).as_posix() for path in files} == set(RUN_BY), "a new example comes with its test"
    for name, where in RUN_BY.items():
        if where.endswith(".md"):
            assert any(f"examples/{name}" in each.text for each in commands(where) if each.here), name
        else:
            text = (ROOT / where).read_text()
            assert Path(name).stem in (text.partition("\n}\n")[2] if ROOT / where == Path(__file__) else text), name


@pytest.mark.parametrize("name", [name for name in RUN_BY if name.endswith((".py", ".toml"))])
def test_each_example_is_short_and_says_what_it_shows_and_how(name):
    text = (EXAMPLES / name).read_text()
    heading = ast.get_docstring(ast.parse(text)) or "" if name.endswith(".py") else re.match(r"(#.*\n)*", text)[0]
    assert re.search(rf"(rollyard|python) [^\n]*(\\\n[^\n]*)?examples/{name}", heading), "its heading has the command"
    assert text.count("\n") <= (250 if name.startswith("external_trainer") else 110)


def test_every_arithmetic_prompt_has_its_right_answer():
    rows = read_rows(EXAMPLES / "arithmetic.jsonl", "prompt")
    assert len(rows) == 64 == len({row.prompt for row in rows})
    for row in rows:
        problem = re.fullmatch(r"State .*: (\d+) ([+-]) (\d+) =", str(row.prompt))
        assert problem is not None
        left, sign, right = problem.groups()
        assert row.columns == {"answer": str(OPERATIONS[sign](int(left), int(right)))}


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("144", "144", 1.0),
        ("57 + 87 = 144.", "144", 1.0),
        ("The answer is 1,204", "1204", 1.0),
        ("It is -28", "-28", 1.0),
        ("It is 28", "-28", 0.0),
        ("7-3", "3", 1.0),
        ("144 or 145", "144", 0.0),
        ("2.0", "2", 1.0),
        ("no idea", "144", 0.0),
        ("", "144", 0.0),
    ],
)
def test_the_last_number_counts(completion, answer, reward):
    exact_number = load_reward(f"{EXAMPLES / 'reward.py'}:exact_number")
    check_columns(exact_number, {"answer"})
    assert exact_number("p", completion, answer=answer, level=3) == reward


def test_a_reward_of_ones_own_in_ten_lines(tmp_path, monkeypatch, capsys):
    script = EXAMPLES / "own_reward.py"
    assert len(script.read_text().splitlines()) <= 12
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(script))
    steps = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [(step, groups) for step, _, groups in steps] == [("1", "8"), ("2", "8"), ("3", "8"), ("4", "8")]
    assert all(0 <= float(reward) <= 1 for _, reward, _ in steps)
    assert (tmp_path / "runs" / "own_reward" / "report.json").is_file()


def test_the_file_of_faults_fits_a_run_with_engines_of_its_own(tmp_path):
    path = EXAMPLES / "faults.toml"
    options = {"place.placement": "async", "place.generate": 2, "run.inject": str(path), "run.out": str(tmp_path / "run")}
    config = resolve(preset="sort", environment={}, overrides=options).config
    assert {fault.what for fault in read_faults(path)} == {"kill", "stall", "slow", "corrupt"}
    with pytest.raises(ConfigError, match="no reward is judged in a process of its own"):  # the task's own is quick
        rollyard.Run(config)
    assert rollyard.Run(config, reward=lambda prompt, completion: 0.0).injector is not None


def quick(prompt: str, completion: str) -> float:
    return 0.0


async def slow(prompt: str, completion: str) -> float:
    return 0.0


@pytest.mark.parametrize(
    ("which", "options", "reward", "there"),
    [
        ("reward worker 2", {"reward.workers": 3}, quick, True),
        ("reward worker 3", {"reward.workers": 3}, quick, False),
        ("coroutine reward worker 0", {}, slow, True),
        ("coroutine reward worker 0", {}, quick, False),
        ("reward", {"reward.judge.url": "http://h:1/v1", "reward.judge.model": "m", "reward.judge.parse": r"(\d)"}, None, True),
        ("environment worker 1", {"environment.name": "{mine}", "environment.workers": 2}, quick, True),
        ("environment worker 2", {"environment.name": "{mine}", "environment.workers": 2}, quick, False),
        ("lone environment worker 0", {"environment.name": "{mine}"}, quick, True),
        ("environment worker 0", {}, quick, False),
        ("half-0", {"place.placement": "swap", "rollout.max_staleness": 1}, quick, True),
        ("trainer-0", {"place.placement": "async", "place.runtime": "ray"}, quick, True),
        ("engine-1", {"place.placement": "async", "place.generate": 2}, quick, True),
        ("engine-2", {"place.placement": "async", "place.generate": 2}, quick, False),
    ],
)
def test_whom_faults_may_name(tmp_path, which, options, reward, there):
    """All that docs/chaos.md names, and as many as there are."""
    faults, mine = tmp_path / "faults.toml", tmp_path / "mine.py"
    faults.write_text(f'[[fault]]\nwhat = "kill"\nwhich = "{which}"\nstep = 1\n')
    mine.write_text("async def play(ask, prompt):\n    return 0.0\n")
    given = {name: f"{mine}:play" if value == "{mine}" else value for name, value in options.items()}
    given |= {"run.inject": str(faults), "run.out": str(tmp_path / "run")}
    config = resolve(preset="sort", environment={}, overrides=given).config
    if there:
        assert rollyard.Run(config, reward=reward).injector is not None
    else:
        with pytest.raises(ConfigError, match=f"there is no process '{which}'"):
            rollyard.Run(config, reward=reward)


NODE = Bundle(cpus=96, gpus=8)


@pytest.mark.parametrize(("name", "nodes"), [("1x8", 1), ("2x8", 2), ("32x8", 32)])
def test_a_config_for_a_cluster_fills_that_many_nodes(name: str, nodes: int) -> None:
    config = resolve(file=EXAMPLES / "cluster" / f"{name}.toml", environment={}).config
    hosts = layout(worker.roles_of(config), nodes * 8)
    bundles, how = worker.bundles_of(config, hosts), worker.nodes_of(config)
    assert sum(bundle.gpus for bundle in bundles) == nodes * 8
    assert fitting(bundles, [NODE] * nodes, how) == len(hosts)
    assert fitting(bundles, [NODE] * (nodes - 1), how) < len(hosts)
    assert how == ("one" if nodes == 1 else "few")
    check_capabilities(config)
    check_options(config)


class Chat:
    """A tokenizer whose ids are characters, and whose answers end with a line."""

    special = ()

    def encode(self, text, *, special=True):
        return tuple(map(ord, text))

    def decode(self, ids):
        return "".join(map(chr, ids))

    def chat_after(self, messages):
        return self.encode("\n" + "".join(f"{message['role']}: {message['content']}\n" for message in messages))

    chat = chat_after


@pytest.mark.parametrize(
    ("said", "verdict"),
    [
        (["It is 144."], (1.0, 0.0)),
        (["Hm. <calc>57 + 87</calc>", "So 144"], (1.0, 1.0)),
        (["<calc>57-87</calc>", "<calc>57*87</calc>", "<calc>1+1</calc>"], (0.0, 2.0)),
        (["<calc>no</calc>"], (0.0, 0.0)),
    ],
)
async def test_the_environment_of_ones_own(said, verdict):
    left, read = list(said), []

    async def policy(asking, hearing=None):
        read.append("".join(map(chr, asking.prompt_ids)))
        text = left.pop(0)
        return Reply(tuple(map(ord, text)), text.split("</calc>")[0], FinishReason.STOP)

    player = Stage(load_environment(f"{EXAMPLES}/environment.py:WithCalculator"), Chat(), 200, 48, 8, 5.0)
    prompt = Prompt(0, 0, Chat().encode("57 + 87?\n"), "57 + 87?", {"answer": "144"})
    right, calls = verdict
    assert (await player.play(prompt, policy)).verdict == Reward(right, {"right": right, "calls": calls})
    assert not left
    if len(said) == 2:
        assert read[1] == "57 + 87?\nHm. <calc>57 + 87</calc>\nuser: <result>144</result>\n"


@pytest.mark.slow
def test_the_prompts_are_those_that_the_script_makes(monkeypatch, capsys):
    pytest.importorskip("reasoning_gym")
    monkeypatch.setattr(sys, "argv", ["make_prompts.py"])
    runpy.run_path(str(EXAMPLES / "make_prompts.py"), run_name="__main__")
    made = [json.loads(line)["answer"] for line in capsys.readouterr().out.splitlines()]
    assert made == [row.columns["answer"] for row in read_rows(EXAMPLES / "arithmetic.jsonl", "prompt")]


def test_two_runs_are_compared(tmp_path, monkeypatch, capsys):
    left = write_run(tmp_path / "run").path
    monkeypatch.setattr(sys, "argv", ["same_groups.py", str(left), str(left), "--step", "2"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(EXAMPLES / "same_groups.py"), run_name="__main__")
    assert not ended.value.code
    assert capsys.readouterr().out == "2 and 2 completions, 2 the same\n"


@pytest.mark.slow
def test_a_reward_model_is_trained_and_can_be_loaded(tmp_path, monkeypatch, capsys):
    from transformers import AutoModelForSequenceClassification

    pytest.importorskip("reasoning_gym")
    out = tmp_path / "judge"
    options = ["--tokenizer", str(tiny_folder(tmp_path)), "--out", str(out), "--steps", "2"]
    monkeypatch.setattr(sys, "argv", ["train.py", *options])
    runpy.run_path(str(EXAMPLES / "reward_model" / "train.py"), run_name="__main__")
    assert "problems it never saw: squared error" in capsys.readouterr().out
    assert AutoModelForSequenceClassification.from_pretrained(out).config.num_labels == 1


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_plain_loop_learns(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(EXAMPLES / "own_loop.py"), run_name="__main__")
    rewards = [float(line.split()[3]) for line in capsys.readouterr().out.splitlines() if line.startswith("step")]
    assert len(rewards) == 16
    assert sum(rewards[-4:]) > sum(rewards[:4]) + 0.2
