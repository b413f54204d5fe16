"""The commands as a user meets them, each in processes of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from rollyard import cli
from tests.inspect.runs import write_run
from tests.test_killed import JUDGE, OPTIONS

pytestmark = pytest.mark.slow


class Commands:
    """Started here, and ended with the test."""

    def __init__(self, path: Path, cache: Path) -> None:
        self.path, self._cache = path, cache
        self._started: list[subprocess.Popen[str]] = []
        (path / "judge.py").write_text(JUDGE)

    def start(self, *arguments: str, stdout: Any = subprocess.PIPE) -> subprocess.Popen[str]:
        environment = {**os.environ, "ROLLYARD_CACHE": str(self._cache), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "rollyard", *arguments]
        made = subprocess.Popen(command, cwd=self.path, env=environment, stdout=stdout, stderr=subprocess.STDOUT, text=True)
        self._started.append(made)
        return made

    def run(self, name: str, steps: int, *more: str, **how: Any) -> subprocess.Popen[str]:
        options = [f"--{option}={value}" for option, value in (OPTIONS | {"run.steps": steps}).items()]
        return self.start("run", "--preset", "sort", "--run.out", name, *options, "--dashboard", *more, **how)

    def close(self) -> None:
        for each in self._started:
            each.kill()
            each.communicate()


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With one base policy for all."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def commands(tmp_path: Path, cache: Path) -> Iterator[Commands]:
    made = Commands(tmp_path, cache)
    yield made
    made.close()


def address_of(process: subprocess.Popen[str]) -> str:
    """What it prints, once it answers."""
    assert process.stdout is not None
    for line in process.stdout:
        if found := re.search(r"http://127\.0\.0\.1:\d+/", line):
            return found[0]
    raise AssertionError("it printed no address")


def until(found: Callable[[], Any], limit_s: float = 60.0) -> Any:
    """What it gives, once it gives something."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        if value := found():
            return value
        time.sleep(0.05)
    raise AssertionError("it never came")


def gone(address: str) -> bool:
    try:
        httpx.get(address + "healthz", timeout=2)
    except httpx.TransportError:
        return True
    return False


@pytest.mark.timeout(200)
def test_a_run_is_shown_from_its_start_to_its_end(commands: Commands) -> None:
    process = commands.run("run", 6)
    address = address_of(process)
    states, names = set[str](), list[str]()
    with httpx.stream("GET", address + "api/live?after=0", timeout=60) as stream:
        assert stream.status_code == 200
        for line in stream.iter_lines():
            names += [line.removeprefix("event: ")] if line.startswith("event: ") else []
            if line.startswith("data: ") and names[-1] == "live":
                states.add(json.loads(line[6:])["activity"])
                if len(names) > 3 and "step" in names:
                    seen = httpx.get(address + "api/overview", timeout=10).json()
                    assert seen["state"] in ("running", "finished") and seen["planned"] == 6
            if names and names[-1] == "end" and line.startswith("data: "):
                break
    assert names.count("step") == 6 and names[-1] == "end" and any("policy" in state or "start" in state for state in states)
    process.communicate(timeout=60)  # it is no terminal: the page ends with the run
    assert process.returncode == 0 and gone(address)
    assert not [path for path in (commands.path / "run").iterdir() if path.name.endswith(("-wal", "-shm", ".sock"))]


@pytest.mark.timeout(200)
def test_the_page_of_a_run_that_is_killed_ends_within_three_seconds(commands: Commands) -> None:
    process = commands.run("run", 5000)
    address = address_of(process)
    until(lambda: httpx.get(address + "api/steps", timeout=10).json()["rows"])
    process.kill()
    began = time.monotonic()
    until(lambda: gone(address), 10)
    assert time.monotonic() - began < 3
    resumed = commands.start("resume", "run", "--dashboard")
    again = address_of(resumed)
    told = until(lambda: (seen := httpx.get(again + "api/overview", timeout=10).json())["steps"] > 1 and seen)
    assert told["state"] == "running" and len(told["lives"]) == 2
    resumed.send_signal(signal.SIGINT)
    resumed.communicate(timeout=60)
    assert resumed.returncode == 130 and gone(again)


@pytest.mark.timeout(200)
def test_on_a_terminal_the_page_stays_until_ctrl_c(commands: Commands) -> None:
    pty = pytest.importorskip("pty")
    ours, theirs = pty.openpty()
    process = commands.run("run", 2, "--watch.view=plain", stdout=theirs)
    os.close(theirs)
    said = ""
    while "until Ctrl-C" not in said:
        said += os.read(ours, 4096).decode()
    found = re.search(r"http://127\.0\.0\.1:\d+/", said)
    assert found and "run finished" in said
    assert httpx.get(found[0] + "api/overview", timeout=10).json()["state"] == "finished"
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=30) == 0 and gone(found[0])
    os.close(ours)


def inspected(commands: Commands, *more: str) -> tuple[subprocess.Popen[str], str]:
    write_run(commands.path / "old")
    process = commands.start("inspect", "old", "--web", *more)
    return process, address_of(process)


@pytest.mark.timeout(100)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_inspect_serves_a_run_until_it_is_told_to_end(commands: Commands, number: signal.Signals) -> None:
    process, address = inspected(commands)
    assert httpx.get(address, timeout=10).text.startswith("<!doctype html>")
    assert httpx.get(address + "api/overview", timeout=10).json()["run"] == "two lives"
    assert httpx.get(address + "api/overview", timeout=10, headers={"Host": "evil.example"}).status_code == 400
    with httpx.stream("GET", address + "api/live", timeout=10) as stream:
        assert "event: end" in stream.read().decode()
    process.send_signal(number)
    said, _ = process.communicate(timeout=30)
    assert process.returncode == (0 if number == signal.SIGINT else -signal.SIGTERM) and "Traceback" not in said and gone(address)


@pytest.mark.timeout(100)
def test_only_this_machine_can_ask(commands: Commands) -> None:
    """Nothing listens at any other address of it."""
    process, address = inspected(commands, "--json")
    port = int(address.rsplit(":", 1)[1].strip("/"))
    listening = [line.split()[1] for line in Path("/proc/net/tcp").read_text().splitlines()[1:] if line.split()[3] == "0A"]
    assert [each for each in listening if each.endswith(f":{port:04X}")] == [f"0100007F:{port:04X}"]
    taken: Sequence[str] = ["inspect", str(commands.path / "old"), "--web", "--port", str(port)]
    assert cli.main(taken) == 2
    del process


def test_a_port_that_is_taken_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert cli.main(["run", "--preset", "tiny", "--dashboard", "--port", str(port)]) == 2
    said = capsys.readouterr().err
    assert f"port {port} cannot be used" in said and "Traceback" not in said and not (tmp_path / "runs").exists()
