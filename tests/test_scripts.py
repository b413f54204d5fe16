"""Scripts beside the package, those of benchmarks/ and of docs/: each can be read by the interpreter, and says what it does.

What they write is looked at elsewhere, or by whoever runs them: they take minutes, and some a browser or another environment.
"""

from __future__ import annotations

import importlib.util
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sources import ROOT

FOLDERS = ("benchmarks", "benchmarks/peers", "benchmarks/published", "docs", "docs/building")
SCRIPTS = [path.relative_to(ROOT).as_posix() for folder in FOLDERS for path in sorted((ROOT / folder).glob("*.py"))]
ASKED = [
    name for name in SCRIPTS if "__main__" in (ROOT / name).read_text() and "/peers/" not in name
]  # those speak by a protocol


def test_no_script_is_left_out() -> None:
    found = {path for folder in ("benchmarks", "docs") for path in (ROOT / folder).rglob("*.py") if ".venvs" not in path.parts}
    assert {path.relative_to(ROOT).as_posix() for path in found} == set(SCRIPTS)


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if nothing had been imported: a script finds its neighbours by names that others use too."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").is_relative_to(ROOT / "benchmarks"):
            del sys.modules[name]


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_can_be_imported_and_does_nothing_then(name: str, beside: None, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "docs/building/hooks.py":
        pytest.importorskip("mkdocs")
    path = ROOT / name
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(f"script_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)


@pytest.mark.parametrize("name", ASKED)
def test_a_script_says_what_it_does_and_does_nothing_else(
    name: str, beside: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / name), run_name="__main__")
    assert not ended.value.code
    assert "usage: " in capsys.readouterr().out
