"""Each file of examples/ says its command, and is used by a test that there is."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.commands import commands
from tests.sources import ROOT

EXAMPLES = ROOT / "examples"
HERE = "tests/test_examples.py"
PAGES = "tests/docs/test_commands.py::test_each_command_that_is_not_marked_does_its_work"
CLUSTER = f"{HERE}::test_a_config_for_a_cluster_fills_that_many_nodes_and_is_simulated"  # run by nobody: needs so many GPUs
SERVED = "tests/serve/test_examples.py::test_an_agent_plays_and_a_trainer_elsewhere_learns_from_that"
USED_BY = {  # the test that runs it, or, of a function or a table, uses it
    "agent.py": SERVED,
    "arithmetic.jsonl": SERVED,
    "cluster/1x8.toml": f"{CLUSTER}[1x8-1]",
    "cluster/2x8.toml": f"{CLUSTER}[2x8-2]",
    "cluster/32x8.toml": f"{CLUSTER}[32x8-32]",
    "environment.py": f"{HERE}::test_the_environment_of_ones_own",
    "external_trainer/requirements.txt": "tests/train/test_external.py::test_ten_steps_of_deepspeed",
    "external_trainer/trainers.py": "tests/train/test_external.py::test_ten_steps_of_the_example",
    "faults.toml": f"{HERE}::test_the_faults_come_and_the_run_is_resumed",
    "letters.py": f"{PAGES}[docs/howto/reward.md]",
    "make_prompts.py": f"{HERE}::test_the_prompts_are_those_that_the_script_makes",
    "own_loop.py": f"{HERE}::test_a_plain_loop_learns",
    "own_reward.py": f"{HERE}::test_a_reward_of_ones_own_in_ten_lines",
    "placements.toml": f"{PAGES}[docs/concepts/placements.md]",
    "remote_trainer.py": SERVED,
    "reward.py": f"{HERE}::test_the_last_number_counts",
    "reward_model/train.py": f"{HERE}::test_a_reward_model_is_trained_and_can_be_loaded",
    "same_groups.py": f"{HERE}::test_two_runs_are_compared",
    "trl_grpo.py": "tests/test_trl.py::test_trl_gets_what_its_model_would_write_just_then",
}


def texts_of(path: Path, function: str) -> list[str]:
    """The texts in a test, and in what it names of its own module, directly or through others."""
    there: dict[str, ast.AST] = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            there[node.name] = node
        elif isinstance(node, ast.Assign):
            there |= {target.id: node for target in node.targets if isinstance(target, ast.Name)}
    found, seen, left = [], set(), [function]
    while left:
        for node in ast.walk(there[left.pop()]):
            if isinstance(node, ast.Name) and node.id in there and node.id not in seen:
                seen.add(node.id)
                left.append(node.id)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def test_each_file_has_its_tests() -> None:
    files = [path for path in EXAMPLES.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert {path.relative_to(EXAMPLES).as_posix() for path in files} == set(USED_BY), "a new example comes with its test"


@pytest.mark.parametrize(("name", "test"), USED_BY.items())
def test_the_test_names_the_file(name: str, test: str) -> None:
    where, function, case = re.fullmatch(r"([^:]+)::(\w+)(?:\[(.+)\])?", test).groups()  # type: ignore[union-attr]
    if test.startswith(PAGES):
        assert any(f"examples/{name}" in each.text for each in commands(case) if not (each.why or each.time))
    else:
        wanted = case.partition("-")[0] if case else Path(name).name
        assert any(re.search(rf"(^|/){re.escape(wanted)}", text) for text in texts_of(ROOT / where, function))


def test_what_a_test_names_is_found_through_others(tmp_path: Path) -> None:
    path = tmp_path / "test_it.py"
    path.write_text("A = 'a.py'\nB = 'b.py'\ndef open_a(): return A\ndef test_a(): open_a()\nasync def test_b(): B\n")
    assert texts_of(path, "test_a") == ["a.py"] and texts_of(path, "test_b") == ["b.py"]


@pytest.mark.slow
@pytest.mark.timeout(180)  # all of their modules are imported
def test_pytest_collects_the_tests() -> None:
    """In whatever lane. It fails where one of them is not there."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "", *set(USED_BY.values())]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert all(test in done.stdout for test in USED_BY.values())


@pytest.mark.parametrize("name", [name for name in USED_BY if name.endswith((".py", ".toml"))])
def test_each_is_short_and_says_what_it_shows_and_how(name: str) -> None:
    text = (EXAMPLES / name).read_text(encoding="utf-8")
    comments = re.match(r"(#.*\n)*", text)
    heading = ast.get_docstring(ast.parse(text)) or "" if name.endswith(".py") else comments[0] if comments else ""
    assert re.search(rf"(rollyard|python) [^\n]*(\\\n[^\n]*)?examples/{name}", heading), "its heading has the command"
    assert text.count("\n") <= (250 if name.startswith("external_trainer") else 110)
