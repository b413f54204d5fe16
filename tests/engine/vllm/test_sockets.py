"""Sockets of servers that are started here: short paths, and nothing stays of those whose owner was killed."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from rollyard.engine.vllm.server import OwnServer
from rollyard.engine.vllm.sockets import make_folder
from rollyard.environment import process_environment
from rollyard.errors import ConfigError

ROOT = Path(__file__).parents[3]
KILLED = """
import os, signal
from rollyard.engine.vllm.sockets import make_folder
print(make_folder(), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ROLLYARD_CACHE", str(tmp_path))
    return tmp_path / "vllm"


def test_what_a_killed_owner_left_is_swept_and_only_that(cache: Path) -> None:
    environment = process_environment() | {"PYTHONPATH": str(ROOT)}
    dead = subprocess.run([sys.executable, "-c", KILLED], env=environment, stdout=subprocess.PIPE, text=True, check=False)
    left = Path(dead.stdout.strip())
    (left / "http").touch()
    elsewhere = cache / f"otherbox-{left.name.split('-')[1]}-abcdefgh"  # the same id on another machine
    elsewhere.mkdir()
    mine = make_folder()
    assert left.parent == cache and not left.exists()
    again = make_folder()
    assert sorted(cache.iterdir()) == sorted([elsewhere, mine, again])


async def test_a_server_that_is_closed_leaves_nothing(cache: Path) -> None:
    own = OwnServer(dict, {})
    assert Path(own.socket).parent.is_dir()
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(own.socket)
    await own.close()
    assert not os.listdir(cache)


def test_a_cache_too_deep_for_a_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLYARD_CACHE", str(tmp_path / ("deep" * 30)))
    with pytest.raises(ConfigError, match=r"ROLLYARD_CACHE: .*107 bytes"):
        make_folder()
