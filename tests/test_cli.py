"""The command line as a user meets it: exit codes, one clear error, a clean stop."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest

from rollyard import cli
from tests.sources import ROOT
from tests.tiny import tiny_folder


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ROLLYARD_CACHE", str(tmp_path / "cache"))
    return tmp_path


def test_the_map_has_each_command(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    commands = re.findall(r"^    ([a-z]+) ", capsys.readouterr().out, re.MULTILINE)
    assert {"run", "plan"} <= set(commands)
    listed = re.search(r"^  cli\.py +the command line: (.*)$", (ROOT / "docs/architecture.md").read_text(), re.MULTILINE)
    assert sorted(listed[1].split(", ")) == sorted(commands)


def test_a_preset_runs_and_both_spellings_of_an_option_work(here, capsys):
    assert cli.main(["run", "--preset", "tiny", "--rollout.group_size=2", "--steps", "2", "--view", "plain"]) == 0
    report = json.loads((here / "runs" / "tiny" / "report.json").read_text())
    assert report["steps"] == 2 and report["members"]["admitted"] == 2 * 8 * 2
    assert "step 2/2" in capsys.readouterr().out
    assert cli.main(["inspect", "runs/tiny", "--check"]) == 0
    assert all(line.startswith("sound") for line in capsys.readouterr().out.splitlines())
    assert cli.main(["inspect", "runs/tiny", "rollout", "0", "1"]) == 0
    assert "for want of a tokenizer" not in capsys.readouterr().out
    assert cli.main(["inspect", "runs/tiny", "export", "out.jsonl", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rollouts"] == 2 * 8 * 2


def test_explain_shows_values_and_where_they_come_from(here, capsys):
    assert cli.main(["explain", "--preset", "tiny", "--lr", "0.5"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if "." in line.split()[0]}
    assert "0.5" in lines["train.lr"] and "command line" in lines["train.lr"]
    assert "preset tiny" in lines["rollout.group_size"] and "default" in lines["train.weight_decay"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["run"], "none is given"),
        (["run", "--preset", "srot"], "there is no preset"),
        (["run", "none.toml"], "no such file"),
        (["run", "--preset", "tiny", "--name", "../../x"], "is not the name of one folder"),
        (["run", "--preset", "tiny", "--out", "x" * 300], "cannot be the run's folder"),
        (["run", "--preset", "tiny", "--out", "/proc/x"], "cannot be written"),
        (["run", "--preset", "tiny", "--rollout.gruop_size", "3"], "gruop_size"),
        (["run", "--preset", "tiny", "--group-size", "one"], "'one' does not fit"),
        (["run", "--preset", "tiny", "--group-size", "1"], "at least 2"),
        (["run", "--preset", "tiny", "--max-tokens", "64"], "leave no room"),
        (["run", "--preset", "tiny", "--model", "nowhere"], "nowhere"),
        (["run", "--model", "m", "--prompts", "none.jsonl", "--reward", "x.py:f"], "there is no folder m"),
        (["run", "--preset", "tiny", "--reward", "none.py:f"], "there is no file"),
        (["run", "--preset", "tiny", "--train.lrr", "1"], "did you mean --train.lr?"),
        (["run", "--preset", "tiny", "--batch.token_budget", "9"], "use at least 64"),
        (["run", "--preset", "tiny", "--engine.pages", "1"], "use 0 or at least 5"),
        (["run", "--preset", "tiny", "--engine.page_tokens", "1000000"], "use at most 64"),
        (["resume", "runs/x", "--preset", "tiny"], "a run goes on with the options in its config.toml"),
        (["resume", "runs/x", "--run.stpes", "3"], "did you mean --run.steps?"),
        (["resume", "runs/x", "y"], "'y' is too much"),
        (["inspect", "runs/x", "--train.lr=3"], "there is no option '--train.lr'        see `rollyard inspect --help`"),
        (["inspect", "runs/x", "steps", "--limt", "3"], "did you mean --limit?"),
        (["train", "--preset", "tiny"], "give --exchange.folder DIR to both"),
        (["dance"], "invalid choice"),
        (["bench"], "WHAT"),
        (["bench", "engine", "--workload", "none"], "invalid choice: 'none'"),
        (["bench", "engine", "--model", "nowhere"], "there is no folder nowhere"),
        (["bench", "train", "--peer", "hf"], "--peer"),
        (["bench", "step", "--rounds", "0"], "'0' does not fit: give a whole number of at least 1"),
        (["bench", "train", "--run.steps", "3"], "--run.steps"),
        (["bench", "train", "--model", ".", "--train.lr", "fast"], "'fast' does not fit"),
    ],
)
def test_mistakes_end_with_2_and_no_traceback(here, capsys, arguments, told):
    assert cli.main(arguments) == 2
    captured = capsys.readouterr()
    assert told in captured.err.replace("\n", " ") and "Traceback" not in captured.err
    assert not (here / "runs").exists()


@pytest.mark.parametrize(
    ("command", "usage"),
    [
        ("run", "[-h] [--preset NAME] [--dashboard] [--port N] [FILE.toml]"),
        ("resume", "[-h] [--dashboard] [--port N] RUN_FOLDER"),
        ("serve", "[-h] [--preset NAME] [--explain] [FILE.toml]"),
    ],
)
def test_the_usage_has_the_command_and_the_help_all_options(capsys, command, usage):
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    first, blank, *text = capsys.readouterr().out.splitlines()
    assert first == f"usage: rollyard {command} {usage} [OPTION VALUE ...]" and not blank
    assert "Options with short names: --model, --prompts," in " ".join(text)
    assert any(line.startswith("  --run.name TEXT, --name TEXT") for line in text)


def test_what_is_told_does_not_drive_the_terminal(here, capsys):
    """A cause may quote what users' code raised, and that what a policy wrote."""
    assert cli.main(["run", "--preset", "tiny", "--reward", "\x1b]0;owned\x07\x9b2J:f"]) == 2
    told = capsys.readouterr().err
    assert "␛]0;owned" in told.replace("\n", "") and not any(sign in told for sign in "\x1b\x07\x9b")


def test_a_warning_is_a_line_without_a_place_in_the_code_and_in_python_it_stays_one(here, capsys, monkeypatch):
    def explain(resolved):
        warnings.warn("two\nlines, \x1b[2J of [it]", RuntimeWarning, stacklevel=1)
        return 0

    monkeypatch.setattr(cli, "_explain", explain)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert cli.main(["explain", "--preset", "tiny"]) == 0
    assert capsys.readouterr().err == "warning: two lines, ␛[2J of [it]\n"
    with pytest.warns(RuntimeWarning, match="two"):
        explain(None)


@pytest.mark.parametrize("cause", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_told_with_the_folder_and_what_helps(here, capsys, monkeypatch, cause):
    def full(self, content):
        raise OSError(cause, os.strerror(cause))

    monkeypatch.setattr(Path, "write_bytes", full)  # the first file of a run
    assert cli.main(["run", "--preset", "tiny", "--out", "x"]) == 2
    told = capsys.readouterr().err
    assert f"{os.strerror(cause)}: 'x'" in told and "make room there" in told
    monkeypatch.setattr(cli, "_run", lambda resolved, port: full(None, b""))
    assert cli.main(["run", "--preset", "tiny"]) == 1
    assert "make room there" in capsys.readouterr().err


def test_a_failing_run_ends_with_1_and_leaves_a_report(here, capsys):
    (here / "judge.py").write_text("def broken(prompt, completion):\n    raise ValueError('no')\n")
    arguments = ["--reward", "judge.py:broken", "--rollout.give_up_after", "3", "--view", "quiet"]
    assert cli.main(["run", "--preset", "tiny", *arguments]) == 1
    assert "ValueError: no" in capsys.readouterr().err.replace("\n", " ")
    assert json.loads((here / "runs" / "tiny" / "report.json").read_text())["finished"]["failed"] is True


def test_bench_prints_one_json_object_or_a_table(here, capsys):
    folder = str(tiny_folder(here))
    arguments = ["bench", "train", "--model", folder, "--rounds", "1", "--threads", "1", "--batch.token_budget", "1024"]
    assert cli.main([*arguments, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["bench"] == "train" and len(result["ratios"]) == 1 and result["options"] == {"batch.token_budget": "1024"}
    assert result["threads"] == 1 and [len(side["values"]) for side in result["sides"]] == [1, 1]
    assert cli.main(arguments) == 0
    assert "times as fast as its matrix products alone" in capsys.readouterr().out.replace("\n", " ")


def start(here: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-m",
        "rollyard.cli",
        "run",
        "--preset",
        "tiny",
        "--steps",
        "100000",
        "--view",
        "plain",
        *arguments,
    ]
    return subprocess.Popen(command, cwd=here, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ)


def test_ctrl_c_while_the_command_is_imported():
    code = """
import signal, sys
class Press:
    def find_spec(self, name, path=None, target=None):
        if name == "rollyard.config":
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Press())
from rollyard.__main__ import main
sys.exit(main())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.slow
def test_ctrl_c_is_a_clean_stop_with_the_report_so_far(here):
    process = start(here)
    metrics = here / "runs" / "tiny" / "metrics.jsonl"
    until = time.monotonic() + 50
    while not (metrics.exists() and metrics.read_text().count("\n") >= 2):
        assert time.monotonic() < until and process.poll() is None, process.communicate()
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 130 and "Traceback" not in err
    report = json.loads((here / "runs" / "tiny" / "report.json").read_text())
    assert report["finished"] == {"cause": "stopped by Ctrl-C", "failed": False} and report["steps"] >= 2
    assert report["admitted"] == report["trained"] + sum(report["dropped"].values())
    saved = here / "runs" / "tiny" / "checkpoints" / f"step-{report['steps']:06d}" / "model.safetensors"
    assert saved.exists()


@pytest.mark.slow
def test_ctrl_c_while_the_base_policy_is_made(here):
    process = start(here, "--warmup.steps", "100000")
    until = time.monotonic() + 30
    while not (here / "runs" / "tiny" / "journal.sqlite").exists():
        assert time.monotonic() < until and process.poll() is None, process.communicate()
        time.sleep(0.1)
    time.sleep(1.0)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=40)
    assert process.returncode == 130 and "Traceback" not in err
