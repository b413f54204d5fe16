"""The figures of docs/simulator.md are those that the code gives; `python benchmarks/simulator_docs.py` writes them there."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def figures() -> ModuleType:
    spec = importlib.util.spec_from_file_location("simulator_docs", ROOT / "benchmarks" / "simulator_docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_the_page_has_what_the_preset_of_a_cluster_prints(figures: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert f"```\n{figures.block()}```" in figures.PAGE.read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_page_has_the_table_of_placements(figures: ModuleType) -> None:
    page = figures.PAGE.read_text(encoding="utf-8")
    for name in figures.ROWS:
        assert figures.row(name) in page
