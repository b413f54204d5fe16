"""Published steps: the page has what was published, and says of its rows what the simulator still says; the orders hold."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks" / "published"
PAGE = ROOT / "docs" / "published.md"
QUICK = {"t3-rlinf": 2, "t2-gb200-30b-16-on": 3, "t2-gb200-30b-16-1-off": 5}  # rows, and steps of each
WRONG = {("t1-64-multi", "t1-64-partial")}  # the first was published as faster


@pytest.fixture(scope="module")
def published() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tables", FOLDER / "tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("| \n").split("|")]


@pytest.fixture(scope="module")
def page(published: ModuleType) -> dict[str, list[str]]:
    """Lines of steps on the page, by file of their scenario."""
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    found: dict[str, list[str]] = {}
    for row in published.ROWS:
        label = row.label + (" (fitted)" if row.calibrates else "")
        found[row.file] = next(cells(line) for line in lines if cells(line)[0] == label)
    return found


def constants(published: ModuleType, name: str) -> Any:
    found = re.search(rf"\| `{name}` \| x ([\d.]+) \| ([\d.]+) s \|", PAGE.read_text(encoding="utf-8"))
    assert found is not None
    return published.Constants(float(found[1]), float(found[2]))


def number(text: str) -> float:
    return float(text.replace(",", ""))


def test_every_row_is_on_the_page_with_what_was_published(published: ModuleType, page: dict[str, list[str]]) -> None:
    for row in published.ROWS:
        _, _, step_s, *_ = page[row.file]
        assert number(step_s) == pytest.approx(row.step_s, abs=0.06)
    assert {path.stem for path in (FOLDER / "scenarios").glob("*.toml")} == set(page)


def test_the_page_says_how_many_ratios_hold(published: ModuleType, page: dict[str, list[str]]) -> None:
    errors = {row.file: int(page[row.file][6].rstrip("%")) for row in published.ROWS if row.against}
    text = PAGE.read_text(encoding="utf-8")
    for table in ("T1", "T2"):
        of = [abs(errors[row.file]) for row in published.ROWS if row.table == table and row.against]
        assert f"{sum(error <= 15 for error in of)} of {len(of)} ratios within 15%." in text


def test_modes_come_in_the_published_order_but_where_the_page_says_so(published: ModuleType, page: dict[str, list[str]]) -> None:
    """Of rows on as many devices of one kind."""
    size = {row.file: (row.table, row.file.rsplit("-", 1 + row.file.endswith("-off"))[0]) for row in published.ROWS}
    wrong = {
        (one.file, other.file)
        for one in published.ROWS
        for other in published.ROWS
        if size[one.file] == size[other.file]
        and one.step_s < 0.99 * other.step_s  # others are told as equal
        and number(page[one.file][1]) >= number(page[other.file][1])
    }
    assert wrong == WRONG


def test_the_page_says_what_the_simulator_says(published: ModuleType, page: dict[str, list[str]]) -> None:
    """With fewer steps than on the page: those differ by the longest of their answers. Bound by training, asynchronous loses."""
    found = {}
    for row in published.ROWS:
        if row.file in QUICK:
            found[row.file] = published.run(row, constants(published, row.fitted), steps=QUICK[row.file]).step_s
            assert found[row.file] == pytest.approx(number(page[row.file][1]), rel=0.1)
    assert found["t2-gb200-30b-16-1-off"] > 1.1 * found["t2-gb200-30b-16-on"]
