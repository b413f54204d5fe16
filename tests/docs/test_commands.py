"""Every command of the README and of docs/ that a CPU can run is run, in the order of its page; the others say why not."""

from __future__ import annotations

import ast
import re
import shutil
import socket
import textwrap
import tomllib
from collections.abc import Callable
from datetime import date, timedelta
from functools import cache
from pathlib import Path

import pytest

from tests.docs.commands import GIVEN, PAGES, Command, blocks, commands, indented, room, run, untagged
from tests.sources import ROOT

LIMIT_S = 200.0
LANE_LIMIT_S = 900.0  # of a page with runs of a real model
LONGEST = timedelta(days=120)  # ago that a command was run by hand
RUN = [page for page in PAGES if any(command.here for command in commands(page))]
IN_A_LANE = [
    pytest.param(page, by, marks=getattr(pytest.mark, by.removeprefix("make test-")), id=f"{page}-{by.removeprefix('make ')}")
    for page in PAGES
    for by in sorted({command.by for command in commands(page) if command.by.startswith("make ")})
]
SERVICE = "127.0.0.1:8000"  # where the pages serve
WORDS = re.compile(r"(?<=--)[a-z][\w.-]*|(?<=examples/)[\w/.]+")  # by which a test is known to run a command


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


def by_ci(command: str, script: str) -> bool:
    """It is a line of the script; or of targets that one makes, or that those need."""
    made = set(re.findall(r"^ *(?:\w+=\S+ )*make ([a-z-]+)", script, re.MULTILINE))
    made |= {need for target in made for need in needs(target)}
    program, *targets = command.split()
    if program == "make":
        return all(target in made or (needs(target) and needs(target) <= made) for target in targets)
    return command in script.splitlines()


def test_what_was_run_by_hand_is_run_again_now_and_then() -> None:
    """`python -m tests.docs.commands --by-hand PAGE` runs it; the new day goes into the mark."""
    old = [command for page in PAGES for command in commands(page) if command.day and date.today() - command.day > LONGEST]
    assert not old, f"run by hand more than {LONGEST.days} days ago"


@pytest.mark.parametrize("page", PAGES)
def test_what_is_run_elsewhere_is_run_there(page: str) -> None:
    for command in commands(page):
        if command.by.startswith("make "):
            continue  # below
        there = (ROOT / command.by).read_text() if command.by else ""
        if command.by == ".ci/run":
            assert command.bare == ".ci/run" or by_ci(command.bare, there), command
        elif command.by:
            words = WORDS.findall(command.bare)
            assert words and all(word in there for word in words), (command, words)


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
        "```\n\n```sh\ne   # takes long; run by make test-vllm\nf   # run by tests/a/test_b.py\n```\n\n"
        "```sh\ncat > f <<'END'\n# not a mark: not run: x\n\nEND\n```\n\n```\nrollyard run x\n```\n\n```perl\n```\n"
    )
    day = date(2026, 11, 30)
    assert commands("page.md") == [
        Command("page.md", 2, "a one   # a remark"),
        Command("page.md", 3, "b \\\n  two   # not run: needs GPUs", why="not run: needs GPUs"),
        Command("page.md", 7, "c three", time="2 minutes", day=day),
        Command("page.md", 9, "d", time="2 minutes", day=day),
        Command("page.md", 13, "e   # takes long; run by make test-vllm", by="make test-vllm"),
        Command("page.md", 14, "f   # run by tests/a/test_b.py", by="tests/a/test_b.py"),
        Command("page.md", 18, "cat > f <<'END'\n# not a mark: not run: x\n\nEND"),
    ]
    assert [command.here for command in commands("page.md")] == [True, False, False, False, False, False, True]
    assert [said.split(" ")[0] for said in untagged("page.md")] == ["page.md:25", "page.md:29"]


def test_blocks_by_indentation_are_found_and_what_belongs_to_a_list_is_none() -> None:
    inside = "- a list\n\n    goes on\n\n1. two\n\n   ```sh\n    x\n   ```\n\n    goes on\n\n!!! note\n\n    make x\n\n    more\n"
    assert not list(indented(inside + "\nA paragraph\n    that goes on.\n\n```\n\n    in a fence\n```\n"))
    assert list(indented("Such:\n\n    chmod x\n    y\n\n    z\n\nand\n\n\tls\n")) == [3, 6, 10]


def taken(address: str) -> bool:
    """Somebody listens there."""
    host, port = address.split(":")
    with socket.socket() as line:
        return line.connect_ex((host, int(port))) == 0


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """By command, a folder with what it left, which several pages look at."""

    @cache
    def made(command: str) -> Path:
        folder = tmp_path_factory.mktemp("given")
        code, said = run([Command("given", 0, command)], folder, LIMIT_S)
        assert code == 0, said
        return folder

    return made


def test_what_is_run_once_is_said_by_several_pages() -> None:
    for each in GIVEN:
        assert sum(any(command.here and command.bare == each for command in commands(page)) for page in PAGES) > 1, each


@pytest.mark.slow
@pytest.mark.timeout(2 * LIMIT_S)  # a page and what is given to it, on a machine with much other work
@pytest.mark.parametrize("page", RUN)
def test_each_command_that_is_not_marked_does_its_work(page: str, tmp_path: Path, given: Callable[[str], Path]) -> None:
    folder = tmp_path / "room"
    folder.mkdir()
    room(folder)
    chosen = [command for command in commands(page) if command.here]
    for each in {command.bare for command in chosen}.intersection(GIVEN):
        shutil.copytree(given(each), folder, dirs_exist_ok=True)
    if any(SERVICE in command.text for command in chosen) and taken(SERVICE):
        pytest.skip(f"something else is served at {SERVICE}")
    code, said = run([command for command in chosen if command.bare not in GIVEN], folder, LIMIT_S)
    assert code == 0, said


@pytest.mark.timeout(LANE_LIMIT_S + 10)
@pytest.mark.parametrize(("page", "by"), IN_A_LANE)
def test_each_command_that_needs_more_is_run_where_that_is(page: str, by: str, tmp_path: Path) -> None:
    folder = tmp_path / "room"
    folder.mkdir()
    room(folder)
    every = commands(page)
    last = max(number for number, command in enumerate(every) if command.by == by)
    code, said = run([command for command in every[: last + 1] if command.here or command.by == by], folder, LANE_LIMIT_S)
    assert code == 0, said
