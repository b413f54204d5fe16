"""Real children: they answer, say why they ended, and never outlive whoever started them."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

import rollyard
from rollyard.errors import ConfigError, EngineLost, TimeLimitExceeded, WeightSyncError
from rollyard.place import child as children
from rollyard.place.child import Child, Children, last_lines, launch

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}  # where the hosts of these tests are found
START_S = 30.0  # a busy machine may be slow


@asynccontextmanager
async def running(target: str = "tests.place.hosts:helpful", order: bytes = b"") -> AsyncIterator[Child]:
    child = await launch(target, order, name="the station", environment=ENVIRONMENT)
    try:
        yield child
    finally:
        await child.close()


def alive(pid: int) -> bool:
    """It runs; one that nobody has asked after yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def own_children() -> set[int]:
    stats = [path.read_text() for path in Path("/proc").glob("[0-9]*/stat") if path.exists()]
    return {int(stat.split()[0]) for stat in stats if int(stat.rpartition(")")[2].split()[1]) == os.getpid()}


def descriptors() -> set[str]:
    return {f"{path.name} {path.readlink()}" for path in Path("/proc/self/fd").iterdir() if path.is_symlink()}


def left_in_tmp() -> set[Path]:
    return set(Path(tempfile.gettempdir()).glob("rollyard*"))


async def eventually(condition: Callable[[], bool], within_s: float) -> None:
    until = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < until, f"not within {within_s} s"
        await asyncio.sleep(0.02)


async def test_a_child_answers_and_leaves_nothing_behind() -> None:
    folders, before, open_before = left_in_tmp(), own_children(), len(descriptors())
    async with running(order=b"made to order") as one, running(order=b"another") as two:
        first, second = [json.loads(await child.call("about", limit_s=START_S)) for child in (one, two)]
        assert first["order"] == "made to order" and second["order"] == "another"
        assert {first["pid"], second["pid"]} == {one.pid, two.pid} == own_children() - before
        with pytest.raises(WeightSyncError, match="tensor 3"):
            await one.call("fail", b"tensor 3", limit_s=5)
        await one.close()
        await one.close()
        assert not alive(one.pid) and await one.ended()
        with pytest.raises(EngineLost):
            await one.call("about", limit_s=5)
        assert json.loads(await two.call("about", limit_s=5)) == second
    assert own_children() == before
    await eventually(lambda: len(descriptors()) <= open_before, 2)
    assert left_in_tmp() == folders


async def test_a_child_imports_this_very_package() -> None:
    async with running() as child:
        about = json.loads(await child.call("about", limit_s=START_S))
    package, folder = os.path.dirname(about["rollyard"]), os.path.dirname(os.path.dirname(about["rollyard"]))
    assert os.readlink(package) == os.path.dirname(rollyard.__file__)
    assert os.listdir(folder) == ["rollyard"]


async def test_whoever_starts_children_closes_them_all() -> None:
    before, children_ = own_children(), Children()
    for name in ("one", "two"):
        await children_.launch("tests.place.hosts:helpful", b"", name=name, environment=ENVIRONMENT)
    assert len(own_children() - before) == 2
    await children_.close()
    await children_.close()
    assert own_children() == before


async def test_what_a_child_started_goes_with_it() -> None:
    async with running() as child:
        started = int(await child.call("start", limit_s=START_S))
        assert alive(started)
        await child.close()
        await eventually(lambda: not alive(started), 2)


@pytest.mark.parametrize("starts", ["start", "fork"])  # what was forked holds the socket open
async def test_a_child_that_is_killed_is_missed_within_two_seconds(starts: str) -> None:
    async with running() as child:
        started = int(await child.call(starts, limit_s=START_S))
        waiting = asyncio.create_task(child.call("about", limit_s=60))
        await waiting
        ended = asyncio.create_task(child.ended())
        began = time.monotonic()
        os.kill(child.pid, signal.SIGKILL)
        assert "was ended by signal 9" in await ended
        assert time.monotonic() - began < 2
        with pytest.raises(EngineLost, match="the station was ended by signal 9"):
            await child.call("about", limit_s=60)
        await eventually(lambda: not alive(started), 2)


async def test_a_child_that_hangs() -> None:
    async with running() as child:
        await child.call("about", limit_s=START_S)
        started = int(await child.call("start", limit_s=5))
        with pytest.raises(TimeLimitExceeded, match=r"did not answer hang within 0\.1 s"):
            await child.call("hang", limit_s=0.1)
        await eventually(lambda: "going to think" in child.said(), 20)  # a busy machine may take its time
        with pytest.raises(TimeLimitExceeded, match=r"(?s)did not answer hang within 0\.1 s.*going to think"):
            await child.call("hang", limit_s=0.1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(children, "QUIT_S", 0.3)
            began = time.monotonic()
            await child.close()
        assert time.monotonic() - began < children.QUIT_S
        assert not alive(child.pid)
        await eventually(lambda: not alive(started), 5)


@pytest.mark.parametrize(
    ("target", "cause"),
    [
        ("tests.place.broken_module:host", r"exit code 1(?s:.)*ModuleNotFoundError: No module named 'rollyard.no_such_room'"),
        ("tests.place.hosts:absent", r"exit code 1(?s:.)*AttributeError.*absent"),
        ("tests.place.hosts:broken", r"exit code 1(?s:.)*reading the tokenizer(?s:.)*KeyError: 'vocabulary'"),
    ],
)
async def test_a_child_that_cannot_work_says_why_at_once(target: str, cause: str) -> None:
    async with running(target) as child:
        with pytest.raises(EngineLost, match=cause):
            await child.call("about", limit_s=START_S)


@pytest.mark.parametrize("late", [False, True])
async def test_a_mistake_of_the_user_is_told_as_one(late: bool) -> None:
    async with running("tests.place.hosts:mistaken") as child:
        if late:  # nobody had asked yet when it was found
            await asyncio.wait_for(child.ended(), START_S)
        with pytest.raises(ConfigError) as mistake:
            await child.call("about", limit_s=START_S)
    assert (mistake.value.where, mistake.value.remedy) == ("engine.layers", "use 16")


async def test_an_interpreter_that_is_not_there() -> None:
    opened, before = len(descriptors()), own_children()
    for _ in range(3):
        with pytest.raises(EngineLost, match=r"the station cannot be started with /no/such/python: .*No such file"):
            await launch("x:y", b"", name="the station", environment=ENVIRONMENT, python=Path("/no/such/python"))
    await eventually(lambda: len(descriptors()) <= opened + 2, 2)  # the event loop's own, made at the first start
    assert own_children() == before


async def test_a_machine_that_has_no_more_to_give() -> None:
    """Whichever file or socket is the one too many: the child is not there, and nothing of it stays."""
    async with running():
        pass  # what is opened once is open
    before, (soft, hard) = own_children(), resource.getrlimit(resource.RLIMIT_NOFILE)
    most, taken, failed = max(int(name.split()[0]) for name in descriptors()) + 4, [], 0
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    try:
        with suppress(OSError):
            while True:
                taken.append(os.dup(0))
        for _ in range(len(taken)):
            try:
                async with running():
                    break
            except EngineLost as error:
                assert "the station cannot be started with" in str(error) and "Too many open files" in str(error)
                failed += 1
            os.close(taken.pop())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in taken:
            os.close(descriptor)
    assert failed > 2
    await eventually(lambda: own_children() == before, 5)


async def test_closing_during_the_start() -> None:
    async with running() as child:
        began = time.monotonic()
        await child.close()
        assert time.monotonic() - began < children.QUIT_S and not alive(child.pid)


@pytest.mark.parametrize("steps", [1, 3])
async def test_a_start_that_is_given_up_leaves_nothing(steps: int) -> None:
    opened, before = len(descriptors()), own_children()
    starting = asyncio.create_task(launch("tests.place.hosts:helpful", b"", name="the station", environment=ENVIRONMENT))
    for _ in range(steps):
        await asyncio.sleep(0)
    starting.cancel()
    with suppress(asyncio.CancelledError):
        await (await starting).close()  # it was done already
    await eventually(lambda: own_children() == before, 5)
    await eventually(lambda: len(descriptors()) <= opened + 2, 2)


PARENT = """
import asyncio, os, sys
from rollyard.place.child import launch

async def main():
    child = await launch("tests.place.hosts:helpful", b"", name="the station", environment=dict(os.environ))
    what = sys.argv[1]
    if what == "at once":
        print(child.pid, flush=True)
        os.kill(os.getpid(), 9)
    print(child.pid, (await child.call("start", limit_s=30)).decode(), flush=True)
    if what == "hanging":
        child.tell("hang")
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.mark.parametrize("what", ["at once", "working", "hanging"])
async def test_children_are_gone_within_three_seconds_of_their_parent(what: str) -> None:
    command = (sys.executable, "-c", PARENT, what)
    parent = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, env=ENVIRONMENT)
    assert parent.stdout is not None
    tree = [int(word) for word in (await parent.stdout.readline()).split()]
    assert tree
    if what != "at once":
        assert len(tree) == 2 and all(alive(pid) for pid in tree)
        await asyncio.sleep(0.2)  # so that it hangs
    with suppress(ProcessLookupError):
        parent.kill()
    await parent.wait()
    await eventually(lambda: not any(alive(pid) for pid in tree), 3)


def test_the_first_error_stands_before_the_last_lines(tmp_path: Path) -> None:
    printed = ["starting", "RuntimeError: no generator", *(f"line {number}" for number in range(40)), "ended"]
    (tmp_path / "log").write_text("\n".join(printed))
    with (tmp_path / "log").open("rb") as log:
        shown = last_lines(log).split("\n  | ")[1:]
    assert shown == ["RuntimeError: no generator", "...", *printed[-30:]]
    with (tmp_path / "log").open("rb") as log:
        assert "RuntimeError" not in last_lines(log, since=60)
