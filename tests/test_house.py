"""The rules of the house that no linter knows. What each rule is for stands in docs/architecture.md."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sources import PACKAGE, ROOT, modules, nodes, text, tree

HEAVY = {"torch", "transformers", "ray", "vllm"}
CLOCKS = {"time", "datetime"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports(path: Path) -> Iterator[str]:
    """Top-level names of all that is imported, also inside functions."""
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.split(".")[0]


def contract(name: str) -> dict[str, list[str]]:
    (found,) = (c for c in PROJECT["tool"]["importlinter"]["contracts"] if c["id"] == name)
    return dict(found)


def loaded_by(*names: str, before: str = "") -> set[str]:
    """What a fresh interpreter holds after importing these modules."""
    code = f"import importlib, sys\n{before}\nfor n in {names!r}: importlib.import_module(n)\nprint(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=30)
    return set(run.stdout.split())


# ---------------------------------------------------------------------------------------------------- imports


CONTROL = (
    "rollyard",
    "rollyard.conductor",
    "rollyard.config",
    "rollyard.weights.sync",
    "rollyard.weights.remote",
    "rollyard.cli",
)


def test_the_control_plane_imports_without_torch() -> None:
    """Together, so that one interpreter shows it of each."""
    loaded = loaded_by(*CONTROL)
    assert set(CONTROL) <= loaded
    assert not loaded & HEAVY


def test_pure_modules_load_no_torch_and_no_runtime() -> None:
    """By themselves: without rollyard/__init__.py, which offers the loop and so asyncio."""
    pure = contract("pure")["source_modules"]
    bare = f"sys.modules['rollyard'] = root = type(sys)('rollyard')\nroot.__path__ = [{str(PACKAGE)!r}]"
    loaded = loaded_by(*pure, before=bare)
    assert set(pure) <= loaded
    assert not loaded & (HEAVY | {"asyncio"})


@pytest.mark.parametrize("name", contract("pure")["source_modules"])
def test_pure_modules_import_no_clock(name: str) -> None:
    found = set(imports(ROOT / f"{name.replace('.', '/')}.py"))
    assert not found & (HEAVY | CLOCKS | {"asyncio"})


def test_a_module_that_calls_itself_pure_is_held_to_it() -> None:
    claims = {name_of(path) for path in modules() if "(PURE)" in (ast.get_docstring(tree(path)) or "")}
    assert claims <= set(contract("pure")["source_modules"])


def test_package_files_hold_only_a_docstring() -> None:
    for path in PACKAGE.glob("*/**/__init__.py"):
        assert [type(node) for node in tree(path).body] == [ast.Expr], f"{path} would run code whenever the room is imported"


# ----------------------------------------------------------------------------------------------------- layout


def rooms() -> set[str]:
    """Packages (with a slash) and single files under rollyard/."""
    files = {path.name for path in PACKAGE.glob("*.py")} - {"__init__.py"}
    folders = {f"{path.name}/" for path in PACKAGE.iterdir() if path.is_dir() and path.name[0] not in "._"}
    return files | folders


def test_the_map_lists_exactly_the_rooms_that_exist() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    found = re.search(r"^```\nrollyard/\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert found, "docs/architecture.md has no map"
    listed = [line.split()[0] for line in found[1].splitlines() if line.strip()]
    assert len(listed) == len(set(listed))
    assert set(listed) == rooms()


def test_the_docstring_of_the_package_has_each_folder_but_the_presets() -> None:
    told = (ast.get_docstring(tree(PACKAGE / "__init__.py")) or "").split()
    assert [room for room in rooms() if room.endswith("/") and room.strip("/") not in told] == ["presets/"]


def test_the_page_shows_the_layers_that_are_checked() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    shown = re.search(r"^```\n(__main__\n.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert shown, "docs/architecture.md has no layers"
    exist = {room.removesuffix("/").removesuffix(".py") for room in rooms()}
    checked = []
    for layer in contract("layers")["layers"]:
        names = [name.strip("() ") for name in layer.split("|")]
        checked.append(" | ".join(name for name in names if name in exist))
    assert shown[1].splitlines() == [layer for layer in checked if layer]


def test_no_room_for_odds_and_ends() -> None:
    names = {part for path in modules() for part in path.relative_to(PACKAGE).with_suffix("").parts}
    assert not names & {"utils", "util", "common", "helpers", "helper", "misc"}


def functions(node: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """All in it, also within others. No expression has any."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield child
            yield from functions(child)


def test_files_and_functions_stay_short() -> None:
    for path in (*modules(), *sorted((ROOT / "tests").rglob("*.py"))):
        assert text(path).count("\n") <= 500, f"{path} has more than 500 lines"
        for node in functions(tree(path)):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length < 60, f"{path}:{node.lineno} {node.name} has {length} lines"


def reads_environment(path: Path) -> bool:
    named = {"environ", "environb", "getenv", "getenvb", "putenv"}
    for node in nodes(path):
        if isinstance(node, ast.Attribute) and node.attr in named and isinstance(node.value, ast.Name) and node.value.id == "os":
            return True
        if isinstance(node, ast.ImportFrom) and node.module == "os" and named & {alias.name for alias in node.names}:
            return True
    return False


def test_two_modules_read_the_environment() -> None:
    reading = {name_of(path) for path in modules() if reads_environment(path)}
    assert reading == {"rollyard.layers", "rollyard.environment"}


# ------------------------------------------------------------------------------------ the files around the code


def test_every_marker_has_a_lane() -> None:
    options = PROJECT["tool"]["pytest"]["ini_options"]
    markers = [marker.split(":")[0] for marker in options["markers"]]
    assert options["addopts"][-2:] == ["-m", f"not ({' or '.join(markers)})"], "the ordinary lane leaves out exactly these"
    outside = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}  # this may be `make test`
    told = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    for marker in markers:
        assert f"`make test-{marker}`" in told
        command = ["make", "--dry-run", f"test-{marker}"]
        plan = subprocess.run(command, cwd=ROOT, env=outside, capture_output=True, text=True, check=True, timeout=30)
        said = plan.stdout.rstrip()
        assert "pytest -q " in said and said.endswith(f" -m {marker}")


def requirement_name(requirement: str) -> str:
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert found, requirement
    return found[0].lower().replace("_", "-")


def declared() -> set[str]:
    project = PROJECT["project"]
    extras = [requirement for extra in project["optional-dependencies"].values() for requirement in extra]
    return {requirement_name(requirement) for requirement in project["dependencies"] + extras}


def test_each_dependency_is_accounted_for() -> None:
    page = (ROOT / "docs/dependencies.md").read_text()
    explained = re.findall(r"^### (\S+)$", page, re.MULTILINE)
    assert len(explained) == len(set(explained))
    assert set(explained) == declared() | {requirement_name(r) for r in PROJECT["build-system"]["requires"]}


PACKAGES = {"mlflow": "mlflow-skinny", "opentelemetry": "opentelemetry-api"}  # called otherwise than what is imported of them
ELSEWHERE = {"vllm", "psutil"}  # imported only where vLLM runs, in an environment of its own


def test_what_is_imported_is_declared() -> None:
    found = {name for path in modules() for name in imports(path)} - {"rollyard"} - ELSEWHERE - set(sys.stdlib_module_names)
    assert {requirement_name(PACKAGES.get(name, name)) for name in found} <= declared()


def test_each_dependency_is_pinned() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][0-9a-z.]*", pin) for pin in pins), "exact, public versions only"
    assert declared() <= {requirement_name(pin) for pin in pins}
