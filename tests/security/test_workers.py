"""Processes that run users' code: what they may take of memory, and of the disk by printing."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

import rollyard
from rollyard import prints
from rollyard.config import Config
from rollyard.environment import process_environment
from rollyard.errors import ConfigError, RollyardError
from rollyard.place.child import Children, launch
from rollyard.reward.combine import Combined
from rollyard.reward.open import open_functions
from rollyard.types import Completion, FinishReason, Prompt, Reward

PROMPT = Prompt(0, 0, (1,), "2+3=", {})
MIB = 2**20


def config(**changes: object) -> Config:
    return rollyard.resolve(preset="tiny", environment={}, overrides={f"reward.{n}": v for n, v in changes.items()}).config


async def judged(function: object, scratch: Path, *texts: str, **changes: object) -> list[Reward]:
    children = Children(at_once=True)
    scorer = Combined(open_functions(config(workers=1, **changes), function, children.launch, scratch))
    try:
        found = []
        for text in texts:
            done = Completion(0, 0, (1,), (-1.0,), (), FinishReason.STOP, text)
            found.append(await scorer.score(PROMPT, done))
        return found
    finally:
        await scorer.close()
        await children.close()


def hoard(prompt: str, completion: str) -> float:
    """Keeps what it took, so that a process that went on would have no room for anything."""
    kept = hoard.__dict__.setdefault("kept", [])
    while completion == "much":
        kept.append(bytearray(16 * MIB))
    return float(len(bytearray(64 * MIB)) > 0)


async def test_who_takes_too_much_memory_has_no_verdict_and_others_have(tmp_path: Path) -> None:
    first, much, second = await judged(hoard, tmp_path, "some", "much", "some", memory_mib=1024)
    assert (first.value, much.value, second.value) == (1.0, None, 1.0)
    assert "MemoryError: more than 1024 MiB" in much.problem


async def test_a_limit_that_is_too_small_to_begin_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="1 MiB are the most, and a worker takes") as caught:
        await judged(hoard, tmp_path, "some", memory_mib=1)
    assert caught.value.where == "reward.memory_mib"


def torch_and_numpy(prompt: str, completion: str) -> float:
    import numpy
    import torch

    return float(torch.ones(10_000_000).sum()) * float(numpy.ones(1)[0]) / 1e7


@pytest.mark.slow
async def test_libraries_that_reserve_much_and_take_little_work(tmp_path: Path) -> None:
    (found,) = await judged(torch_and_numpy, tmp_path, "some", memory_mib=2048, time_limit_s=50)
    assert found.value == 1.0


# -------------------------------------------------------------------------------------------------------------- prints


def test_a_file_that_is_too_long_keeps_its_beginning_and_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prints, "MOST", 100)
    monkeypatch.setattr(prints, "FIRST", 10)
    monkeypatch.setattr(prints, "LAST", 20)
    path = tmp_path / "log"
    path.write_bytes(b"beginning!" + b"x" * 500 + b"the very end of it!!")
    handle = os.open(path, os.O_RDWR)
    writer = os.open(path, os.O_WRONLY)
    prints.append_only(handle)
    prints.append_only(writer)
    prints.shorten(handle)
    os.write(writer, b"and more")
    assert path.read_bytes() == b"beginning!\n... 500 bytes are left out ...\nthe very end of it!!and more"
    prints.shorten(handle)
    assert path.read_bytes().endswith(b"and more")
    os.close(handle)
    os.close(writer)


def chatty(prompt: str, completion: str) -> float:
    for _ in range(300):
        sys.stdout.write("x" * 9_999 + "\n")
    return 1.0


async def test_the_log_of_rewards_stays_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prints, "MOST", 2 * MIB)
    monkeypatch.setattr(prints, "LOOK_S", 0.01)
    found = await judged(chatty, tmp_path, *["a"] * 6)
    assert {reward.value for reward in found} == {1.0}
    content = (tmp_path / "reward.log").read_bytes()
    assert b"bytes are left out" in content and len(content) < 12 * MIB


async def chatters(channel: object, order: bytes) -> None:
    while True:
        sys.stdout.write("y" * 99_999 + "\n")
        await asyncio.sleep(0)


async def test_the_log_of_a_process_stays_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prints, "MOST", 2 * MIB)
    monkeypatch.setattr("rollyard.place.child.LOOK_S", 0.01)
    root = str(Path(__file__).parents[2])
    environment = {**process_environment(), "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    child = await launch("tests.security.test_workers:chatters", b"", name="it", environment=environment)
    try:
        for _ in range(3000):
            await asyncio.sleep(0.01)
            if b"left out" in os.pread(child._log.fileno(), 2**18, 0):
                break
        said = child.said()
        assert b"left out" in os.pread(child._log.fileno(), 2**18, 0) and "yyy" in said
    finally:
        child.kill()
        await child.close()
    with pytest.raises(RollyardError):
        await child.call("x", limit_s=1)
