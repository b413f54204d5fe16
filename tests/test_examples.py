"""The examples do what the README says they do."""

from __future__ import annotations

import json
import operator
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import rollyard
from rollyard import cli, worker
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
from rollyard.watch.read import read_report
from tests.inspect.runs import write_run
from tests.small import BASE
from tests.sources import ROOT
from tests.tiny import tiny_folder

EXAMPLES = Path(__file__).parent.parent / "examples"
OPERATIONS: dict[str, Callable[[int, int], int]] = {"+": operator.add, "-": operator.sub}


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


def said_by(name):
    """The commands of an example's heading, in words."""
    heading = re.match(r"(#.*\n)*", (EXAMPLES / name).read_text())[0]
    lines = re.sub(r"^# ?", "", heading, flags=re.MULTILINE).replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=False)[1:] for line in lines if line.startswith("  rollyard ")]


FEW = ["--run.steps=12", "--rollout.group_size=4", "--rollout.groups_per_step=8", "--prompts.held_out=0", "--view=plain"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_faults_come_and_the_run_is_resumed(tmp_path):
    """The commands of the heading, with few prompts: what comes by chance, or after many seconds, may then not come."""
    run, resume = said_by("faults.toml")
    (tmp_path / "examples").symlink_to(EXAMPLES)
    command, environment = [sys.executable, "-m", "rollyard"], os.environ | {"PYTHONPATH": str(ROOT)}
    options = [*FEW, "--engine.kernels=plain", *(f"--warmup.{name}={value}" for name, value in BASE.items())]

    def done(*words):
        return subprocess.run([*command, *words], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=140)

    first = done(*run, *options)
    assert first.returncode == -signal.SIGKILL, first.stderr
    second = done(*resume)
    assert second.returncode == 0, second.stderr
    report = read_report(tmp_path / "runs" / "sort" / "report.json")
    assert report.steps == 12 and report.members.admitted == report.members.trained + sum(report.members.dropped.values())
    came = {each.fault: each for each in report.survival}
    assert came.keys() >= {1, 2, 5}, "an engine killed, a reward worker that stood still, the run killed"
    assert came[5].process == "run" and came[5].life == 0 and came[5].outcome.startswith("resumed after step")
    assert all(each.outcome for each in report.survival)


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
def test_a_config_for_a_cluster_fills_that_many_nodes_and_is_simulated(
    name: str, nodes: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(EXAMPLES.parent)
    run, simulate = said_by(f"cluster/{name}.toml")
    assert run[:2] == ["run", f"examples/cluster/{name}.toml"]
    assert cli.main([*simulate, "--run.steps=2", "--json"]) == 0
    simulated = json.loads(capsys.readouterr().out)
    assert cli.main([*simulate, "--run.steps=2", "--costs.recompute=false"]) == 0  # as our own trainer is told
    assert "does not fit" not in capsys.readouterr().out
    assert simulated["devices"] == nodes * 8 and simulated["steps"] == 2
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
