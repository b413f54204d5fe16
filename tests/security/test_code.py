"""What the code may do at all: read nothing that can run code, and listen nowhere but where docs/security.md says."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.sources import ROOT, modules, nodes, text

PAGE = (ROOT / "docs/security.md").read_text()

# What runs code that it reads. Called by these names, whatever they are imported as.
BUILT_IN = {"eval", "exec", "compile", "__import__"}
RUNS = {
    *("pickle", "cPickle", "_pickle", "dill", "joblib", "marshal", "shelve", "cloudpickle", "yaml", "jsonpickle"),
    *("os.system", "os.popen", "os.execv", "os.execve", "os.execvp", "os.posix_spawn", "subprocess.getoutput"),
    *("torch.load", "torch.save", "torch.package", "torch.hub", "numpy.load", "np.load", "tarfile", "zipfile"),
    *("shutil.unpack_archive", "tempfile.mktemp"),
}
ALLOWED = {
    ("rollyard/reward/origin.py", "cloudpickle"): "a user's function, in a file of the run's folder that nobody else may write",
}
FLAGS = {"shell", "trust_remote_code", "allow_pickle"}  # True is what they may not be
LISTENS = {
    *("bind", "listen", "create_server", "start_server", "start_unix_server", "create_unix_server", "serve_forever"),
    *("create_datagram_endpoint", "TCPStore", "init_process_group", "HTTPServer", "ThreadingHTTPServer", "TCPSite", "run_app"),
    *("create_device", "init_rpc", "uds", "--uds", "--host", "--port", "uvicorn"),
}
LISTENERS = {
    "rollyard/control.py": {"bind", "start_unix_server"},
    "rollyard/meeting.py": {"create_server", "TCPStore", "create_device"},
    "rollyard/engine/vllm/server.py": {"--uds"},
    "rollyard/engine/vllm/arguments.py": {"uds"},  # which it refuses to be given
    "rollyard/engine/http.py": {"uds"},  # connects to that one
    "rollyard/model/shards.py": {"init_process_group"},  # of torch's "fake" kind, which has no line
    "rollyard/train/external.py": {"bind"},  # of a signature
    "rollyard/ring.py": {"listen"},  # to engines of its own
    "rollyard/serve/command.py": {"create_server"},
    "rollyard/serve/server.py": {"uvicorn"},
    "rollyard/dashboard/serving.py": {"--port", "bind", "uvicorn"},
    "rollyard/episode/verifiers.py": {"create_server"},
    "rollyard/inspect/command.py": {"--port"},  # its option, for that one
    "rollyard/cli.py": {"--port"},  # the same
    "rollyard/bench/sync.py": {"TCPStore"},
    "rollyard/bench/consumer.py": {"TCPStore", "create_device"},
}


Nodes = tuple[ast.AST, ...]


def sources() -> Iterator[tuple[str, Nodes]]:
    for path in modules():
        yield str(path.relative_to(ROOT)), nodes(path)


def dotted(node: ast.AST) -> str:
    """`a.b.c` as it stands there, else nothing."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=attr) if above := dotted(value):
            return f"{above}.{attr}"
    return ""


def names(module: Nodes) -> Iterator[str]:
    """All that is imported, and all that is named with dots."""
    for node in module:
        match node:
            case ast.Import():
                yield from (alias.name for alias in node.names)
            case ast.ImportFrom(module=str(module)):
                yield module
                yield from (f"{module}.{alias.name}" for alias in node.names)
            case ast.Name() | ast.Attribute():
                yield dotted(node)


def code_runners(module: Nodes) -> set[str]:
    found = {name for name in names(module) if name in RUNS or name.partition(".")[0] in RUNS}
    calls = [node for node in module if isinstance(node, ast.Call)]
    found |= {call.func.id for call in calls if isinstance(call.func, ast.Name) and call.func.id in BUILT_IN}
    flags = {key.arg for call in calls for key in call.keywords if key.arg in FLAGS and ast.unparse(key.value) != "False"}
    return {name.partition(".")[0] if name.partition(".")[0] in RUNS else name for name in found} | {str(each) for each in flags}


def listeners(module: Nodes) -> set[str]:
    found = set[str]()
    for node in module:
        match node:
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if name in LISTENS:
                found.add(name)
            case ast.keyword(arg=str(name)) | ast.Constant(value=str(name)) | ast.alias(name=name) if name in LISTENS:
                found.add(name)
    return found & LISTENS


def test_nothing_runs_code_that_it_reads() -> None:
    found = {(path, name) for path, module in sources() for name in code_runners(module)}
    assert found == set(ALLOWED)


def test_transformers_runs_no_code_of_a_model_folder_and_unpickles_nothing() -> None:
    found = 0
    for path, module in sources():
        source = text(ROOT / path)
        for node in module:
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "from_pretrained":
                found += 1
                given = {key.arg: ast.unparse(key.value) for key in node.keywords}
                safe = '"trust_remote_code": False' in source if None in given else given.get("trust_remote_code") == "False"
                weights = "Model" not in ast.unparse(node.func) or None in given or given.get("use_safetensors") == "True"
                assert safe and weights, f"{path}:{node.lineno}"
    assert found == 4


def test_examples_load_weights_only() -> None:
    for path in (ROOT / "examples").rglob("*.py"):
        for node in nodes(path):
            if isinstance(node, ast.Call) and dotted(node.func) == "torch.load":
                assert {key.arg: ast.unparse(key.value) for key in node.keywords}.get("weights_only") == "True", path


def test_only_these_listen() -> None:
    found = {path: names for path, module in sources() if (names := listeners(module))}
    assert found == LISTENERS
    for path in LISTENERS:
        assert f"`{path.removeprefix('rollyard/')}`" in PAGE, f"docs/security.md says nothing of {path}"


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("import pickle as p", "pickle"),
        ("from torch import load", "torch.load"),
        ("torch.load(path)", "torch.load"),
        ("eval(text)", "eval"),
        ("import yaml.constructor", "yaml"),
        ("run(x, shell=flag)", "shell"),
        ("from numpy import load", "numpy.load"),
    ],
)
def test_each_way_to_run_code_would_be_seen(code: str, name: str) -> None:
    assert code_runners(tuple(ast.walk(ast.parse(code)))) == {name}


@pytest.mark.parametrize(
    "code", ["await asyncio.start_server(f)", "s.bind(x)", "HTTPServer(a, b)", "[x, '--host', y]", "f(uds=x)", "import uvicorn"]
)
def test_each_way_to_listen_would_be_seen(code: str) -> None:
    async_code = f"async def f():\n    {code}"
    assert listeners(tuple(ast.walk(ast.parse(async_code))))


def test_every_test_that_the_page_names_is_there() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", PAGE)
    assert len(named) > 15
    for path, test in named:
        assert (ROOT / path).is_file(), path
        assert not test or f"def {test}(" in (ROOT / path).read_text(), f"{path}::{test}"
