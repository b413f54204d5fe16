"""Every command of the README and of docs/ that a CPU can run is run, in the order of its page; the others say why not."""

from __future__ import annotations

import ast
import re
import shutil
import textwrap
import tomllib
from datetime import date
from pathlib import Path

import pytest

from tests.docs.commands import GIVEN, PAGES, Command, blocks, commands, room, run, untagged
from tests.sources import ROOT

LIMIT_S = 200.0
RUN = [page for page in PAGES if any(not (command.why or command.time) for command in commands(page))]


@pytest.mark.parametrize("page", PAGES)
def test_blocks_say_what_they_are(page: str) -> None:
    assert not list(untagged(page))


@pytest.mark.parametrize("page", PAGES)
def test_marks_give_a_reason_or_a_day(page: str) -> None:
    for command in commands(page):
        assert len(command.why) != len("not run: "), command
        assert command.day is None or date(2026, 11, 1) <= command.day, command


def needs(target: str) -> set[str]:
    """What a target of the Makefile asks for first."""
    found = re.findall(rf"^{re.escape(target)}:([^#\n]*)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    return {need for line in found for need in line.split()}


def test_ci_does_what_is_said_of_it() -> None:
    """A mark that begins so is of .ci/run, or of targets that it makes, or that those need."""
    made = set(re.findall(r"^ *make ([a-z-]+)", (ROOT / ".ci/run").read_text(), re.MULTILINE))
    made |= {need for target in made for need in needs(target)}
    said = [command for page in PAGES for command in commands(page) if "CI" in command.why]
    assert len(said) >= 6
    for command in said:
        program, *targets = command.text.partition("  #")[0].split()
        assert command.why.startswith("not run: CI does") and program in (".ci/run", "make"), command
        assert all(target in made or (needs(target) and needs(target) <= made) for target in targets), command


@pytest.mark.parametrize("page", PAGES)
def test_blocks_in_python_and_toml_are_that(page: str) -> None:
    for line, language, body in blocks(page):
        if language == "python":
            ast.parse(textwrap.dedent(body), f"{page}:{line}")
        elif language == "toml":
            tomllib.loads(textwrap.dedent(body))


def test_what_is_a_command_and_what_marks_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.docs.commands.ROOT", tmp_path)
    (tmp_path / "page.md").write_text(
        "```sh\na one   # a remark\nb \\\n  two   # not run: needs GPUs\n\n"
        "# takes 2 minutes, run by hand on 2026-11-30\nc three\n\nd\n"
        "```\n\n```sh\ncat > f <<'END'\n# not a mark: not run: x\n\nEND\n```\n\n```\nrollyard run x\n```\n\n```perl\n```\n"
    )
    day = date(2026, 11, 30)
    assert commands("page.md") == [
        Command("page.md", 2, "a one   # a remark"),
        Command("page.md", 3, "b \\\n  two   # not run: needs GPUs", why="not run: needs GPUs"),
        Command("page.md", 7, "c three", time="2 minutes", day=day),
        Command("page.md", 9, "d", time="2 minutes", day=day),
        Command("page.md", 13, "cat > f <<'END'\n# not a mark: not run: x\n\nEND"),
    ]
    assert [said.split(" ")[0] for said in untagged("page.md")] == ["page.md:20", "page.md:24"]


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run, which several pages look at."""
    folder = tmp_path_factory.mktemp("given")
    code, said = run([Command("given", 0, GIVEN)], folder, LIMIT_S)
    assert code == 0, said
    return folder


@pytest.mark.slow
@pytest.mark.timeout(2 * LIMIT_S)  # a page and what is given to it, on a machine with much other work
@pytest.mark.parametrize("page", RUN)
def test_each_command_that_is_not_marked_does_its_work(page: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    folder = tmp_path / "room"
    folder.mkdir()
    room(folder)
    chosen = [command for command in commands(page) if not (command.why or command.time)]
    if any(command.text.partition("  #")[0] == GIVEN for command in chosen):
        shutil.copytree(request.getfixturevalue("given") / "runs", folder / "runs")
    code, said = run([command for command in chosen if command.text.partition("  #")[0] != GIVEN], folder, LIMIT_S)
    assert code == 0, said
