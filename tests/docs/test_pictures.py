"""The drawn pictures of README.md and docs/ are what their scripts draw."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.docs.commands import PAGES
from tests.sources import ROOT

DOCS = ROOT / "docs"
BY_LOT = {"terminal.svg", "pictures/trace.svg", "assets/icon.svg"}  # of a real run, no two of which are alike; and drawn by hand
TEXT = "{http://www.w3.org/2000/svg}text"


COLUMN = 12.2  # of a character, in the units of a terminal's picture


def shown(picture: Path) -> list[str]:
    """The lines of a terminal's picture."""
    lines: dict[float, str] = {}
    for text in sorted(ElementTree.parse(picture).iter(TEXT), key=lambda text: float(text.attrib["x"])):
        y, before = float(text.attrib["y"]), round(float(text.attrib["x"]) / COLUMN)
        lines[y] = lines.get(y, "").ljust(before) + "".join(text.itertext()).replace("\xa0", " ")
    return [lines[y] for y in sorted(lines)]


def labels(lines: list[str]) -> list[str]:
    """What stands at the left of each."""
    return [found[1] for line in lines if (found := re.match(r"│ (\S+)", line))]


def test_timelines_and_pictures_are_drawn_anew_to_the_byte() -> None:
    drawn: dict[str, str] = runpy.run_path(str(DOCS / "building/pictures.py"))["pictures"]()
    for name, text in drawn.items():
        assert text == (DOCS / name).read_text(encoding="utf-8"), f"docs/{name}: run python docs/building/pictures.py"
    assert {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.svg")} == set(drawn) | BY_LOT


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_each_picture_is_shown_by_a_page(kind: str) -> None:
    text = "".join((ROOT / page).read_text(encoding="utf-8") for page in PAGES)
    pictures = [*DOCS.glob(f"*.{kind}"), *(DOCS / "pictures").glob(f"*.{kind}")]
    assert pictures and [path.name for path in pictures if path.name not in text] == []


@pytest.mark.slow
def test_the_terminals_picture_has_every_line_of_a_run_and_a_speed(tmp_path: Path) -> None:
    """In a process of its own: it is a run. One of the same kind, which takes seconds."""
    made = tmp_path / "terminal.svg"
    command = [sys.executable, str(DOCS / "make_terminal_picture.py"), str(made)]
    longer = ["--preset", "tiny", "--set", "rollout.group_size=32"]  # steps that take longer than the view is not refreshed
    subprocess.run([*command, *longer], cwd=ROOT, check=True, timeout=50)
    for picture in (made, DOCS / "terminal.svg"):
        lines = shown(picture)
        (live,) = (re.search(r"([\d,]+) tokens/s ", line) for line in lines if "tokens/s" in line)
        (whole,) = (re.search(r"([\d,]+) a second of generation", line) for line in lines if "a second" in line)
        assert live and whole
        assert int(live[1].replace(",", "")) > 0 and int(whole[1].replace(",", "")) > 0, picture
        assert any(re.search(r"now +generate +\d+/\d+ completions judged", line) for line in lines), picture
    assert labels(shown(DOCS / "terminal.svg")) == labels(shown(made)), "run python docs/make_terminal_picture.py"
