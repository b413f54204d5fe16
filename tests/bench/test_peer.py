"""A child with a protocol: what it answers, and all the ways in which it can fail to."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rollyard.bench.choice import BENCHES
from rollyard.bench.peer import FOLDER, PeerError, find, running
from rollyard.environment import settle_environment
from rollyard.errors import ConfigError, TimeLimitExceeded
from tests.bench.peers import script

ECHO = """
def generate(**asked):
    print("printed by a library")
    os.write(1, b"and past Python\\n")
    return {"got": asked["prompts"]}
"""
ROOT = Path(__file__).parents[2]


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def gone(pid: int, within_s: float) -> bool:
    until = time.monotonic() + within_s
    while alive(pid) and time.monotonic() < until:
        time.sleep(0.05)
    return not alive(pid)


async def test_answers_come_back_whatever_libraries_print(tmp_path):
    async with running(script(tmp_path, ECHO)) as peer:
        assert await peer.ask("load", 20, model="m") == {"versions": {"fake": "1.0"}}
        long = [list(range(50_000))]  # more than a pipe or a line of asyncio's default holds
        assert await peer.ask("generate", 20, prompts=long) == {"got": long}
    assert not alive(peer.pid)


async def test_a_peer_has_the_users_environment_and_none_of_rollyards(tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_WAIT_POLICY")
    monkeypatch.setenv("ROLLYARD_TUNED", "set back when this test ends")
    monkeypatch.delenv("ROLLYARD_TUNED")
    settle_environment()
    body = "\ndef generate(**asked):\n    return {name: os.environ.get(name) for name in asked['names']}\n"
    async with running(script(tmp_path, body)) as peer:
        found = await peer.ask("generate", 20, names=["OMP_WAIT_POLICY", "TOKENIZERS_PARALLELISM", "ROLLYARD_TUNED"])
    assert found == {"OMP_WAIT_POLICY": None, "TOKENIZERS_PARALLELISM": "false", "ROLLYARD_TUNED": None}


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("raise ValueError('no such thing')", "cannot generate: ValueError: no such thing"),
        ("print('last words'); sys.stdout.flush(); os._exit(7)", "exit code 7"),
        ("os.kill(os.getpid(), 9)", "exit code -9"),
        ("channel._answers.write('not json\\n'); channel._answers.flush(); time.sleep(1)", "no JSON object"),
        ("channel._answers.write('[' * 99_999 + '\\n'); channel._answers.flush(); time.sleep(1)", "no JSON object"),
        ("channel._answers.write('[1]\\n'); channel._answers.flush(); time.sleep(1)", "no JSON object"),
    ],
)
async def test_a_peer_that_fails_is_an_error_with_what_it_said(tmp_path, body, told):
    async with running(script(tmp_path, f"\ndef generate(**asked):\n    {body}\n")) as peer:
        await peer.ask("load", 20, model="the-model")
        with pytest.raises(PeerError) as caught:
            await peer.ask("generate", 20)
    assert told in str(caught.value) and "| loading the-model" in str(caught.value)
    assert not alive(peer.pid)


async def test_a_message_that_a_peer_does_not_know(tmp_path):
    async with running(script(tmp_path, "")) as peer:
        with pytest.raises(PeerError, match="does not know"):
            await peer.ask("step", 20)


async def test_no_wait_without_a_limit_and_the_process_is_ended(tmp_path):
    async with running(script(tmp_path, "\ndef generate(**asked):\n    time.sleep(600)\n")) as peer:
        await peer.ask("load", 20, model="m")
        started = time.monotonic()
        with pytest.raises(TimeLimitExceeded, match=r"more than 0\.2 s to generate"):
            await peer.ask("generate", 0.2)
        await peer.close(grace_s=0.2)
    assert time.monotonic() - started < 5 and not alive(peer.pid)


async def test_whatever_goes_wrong_beside_it_the_peer_is_ended_at_once(tmp_path):
    started = time.monotonic()
    with pytest.raises(KeyError):
        async with running(script(tmp_path, ECHO)) as peer:
            raise KeyError
    assert time.monotonic() - started < 5 and not alive(peer.pid)


def test_a_peer_dies_with_its_parent_and_so_do_its_children(tmp_path):
    busy = "\ndef generate(**asked):\n    import subprocess\n    child = subprocess.Popen(['sleep', '600'])\n"
    command = script(tmp_path, busy + "    open('pids', 'w').write(f'{os.getpid()} {child.pid}')\n    time.sleep(600)\n")
    parent = f"""
import asyncio
from pathlib import Path
from rollyard.bench.peer import Command, running
async def main():
    async with running(Command("fake", Path({str(command.python)!r}), Path({str(command.script)!r}))) as peer:
        await peer.ask("generate", 60)
asyncio.run(main())
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-c", parent], cwd=tmp_path, env=environment)
    try:
        until = time.monotonic() + 30
        while len(pids := ((tmp_path / "pids").read_text() if (tmp_path / "pids").exists() else "").split()) < 2:
            assert time.monotonic() < until and process.poll() is None
            time.sleep(0.05)
    finally:
        process.kill()
        process.wait()
    for pid in map(int, pids):
        assert gone(pid, within_s=3)


async def test_a_python_that_cannot_run(tmp_path):
    command = script(tmp_path, "")
    broken = type(command)("fake", tmp_path / "none", command.script)
    with pytest.raises(PeerError, match="cannot be started"):
        async with running(broken):
            pass


def test_a_missing_environment_names_its_make_target(tmp_path):
    (tmp_path / "peers").mkdir()
    (tmp_path / "peers" / "peer_vllm.py").touch()
    with pytest.raises(ConfigError) as caught:
        find("vllm", tmp_path)
    assert caught.value.remedy == "make bench-vllm" and str(tmp_path / ".venvs/vllm/bin/python") in caught.value.problem
    with pytest.raises(ConfigError, match="clone"):
        find("trl", tmp_path)


def test_every_peer_that_can_be_chosen_has_its_script_and_target():
    makefile = (ROOT / "Makefile").read_text()
    for name in {peer for bench in BENCHES.values() for peer in bench.peers}:
        script_ = FOLDER / "peers" / f"peer_{name}.py"
        assert script_.is_file() and "import rollyard" not in script_.read_text() and "from rollyard" not in script_.read_text()
        assert name == "hf" or f"\nbench-{name}:" in makefile
    assert find("hf").python == Path(sys.executable)
