"""Real actors: they keep the promises of a child, say why they ended, and never outlive whoever started them.

Ray takes seconds to start, so most tests share one cluster.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
import pytest_asyncio
from pydantic import TypeAdapter

import rollyard
from rollyard import hosts
from rollyard.config import Config, EngineConfig, PlaceConfig, WeightsConfig
from rollyard.engine.capabilities import CAPABILITIES
from rollyard.engine.remote import RemoteEngine
from rollyard.errors import ConfigError, EngineLost, RollyardError, TimeLimitExceeded, WeightSyncError
from rollyard.model.folder import load
from rollyard.place import actor as actors
from rollyard.place import ray as runtime
from rollyard.place.bundles import Bundle
from rollyard.place.child import Children
from rollyard.place.inline import DeviceThread
from rollyard.place.ray import Actor, Cluster
from rollyard.protocols.processes import Channel
from rollyard.types import Request, RequestId, Sampling, WeightVersion
from rollyard.weights.checkpoint import CheckpointPublisher
from rollyard.weights.source import OwnSource
from tests.tiny import tiny_folder

pytestmark = [pytest.mark.ray, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
HELPFUL, CHATTING = "tests.place.hosts:helpful", "tests.place.hosts:chatting"
START_S = 60.0  # a busy machine may be slow
RELAY = Path(sys.executable)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster() -> AsyncIterator[Cluster]:
    cluster = Cluster([Bundle()] * 3, address="local")
    await cluster.start()
    yield cluster
    await cluster.close()


@asynccontextmanager
async def running(cluster: Cluster, target: str, order: bytes = b"", python: Path | None = None) -> AsyncIterator[Actor]:
    actor = await cluster.launch(target, order, name="the station", environment=ENVIRONMENT, python=python)
    try:
        yield actor
    finally:
        await actor.close()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def descendants(pid: int) -> set[int]:
    """All that a process started, and what that started."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):
            stat = path.read_text()
            parents[int(stat.split()[0])] = int(stat.rpartition(")")[2].split()[1])
    found: set[int] = set()
    while more := {child for child, parent in parents.items() if parent in found | {pid}} - found:
        found |= more
    return found


async def eventually(condition: Callable[[], bool], within_s: float) -> None:
    until = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < until, f"not within {within_s} s"
        await asyncio.sleep(0.02)


def answering(reply: bytes) -> Callable[[bytes], Awaitable[bytes]]:
    async def answer(content: bytes) -> bytes:
        return reply + content

    return answer


# ------------------------------------------------------------------------------------------- what a channel promises


@pytest.mark.parametrize("python", [None, RELAY])
async def test_both_ends_call_and_everything_comes_in_order(cluster: Cluster, python: Path | None) -> None:
    async with running(cluster, CHATTING, python=python) as actor:
        heard: list[bytes] = []

        async def hear(content: bytes) -> bytes:
            heard.append(content)
            return b""

        actor.handle("greet", answering(b"hello "))
        actor.handle("tokens", hear)
        actor.ready()
        assert await actor.call("ask", b"far\n\x00end", limit_s=START_S) == b"heard hello far\n\x00end"
        for _ in range(5):
            heard.clear()
            assert await actor.call("pause", limit_s=20) == b"paused"
            assert heard == [b"%d" % number for number in range(500)]
        for number in range(500):
            actor.tell("tell", b"%d" % number)
        assert await actor.call("recall", limit_s=20) == b" ".join(b"%d" % number for number in range(500))
        content = os.urandom(20_000_000)
        assert await actor.call("echo", content, limit_s=60) == content
        assert await asyncio.gather(*(actor.call("echo", b"%d" % n, limit_s=20) for n in range(300))) == [
            b"%d" % n for n in range(300)
        ]


@pytest.mark.parametrize("python", [None, RELAY])
async def test_errors_keep_their_class(cluster: Cluster, python: Path | None) -> None:
    async with running(cluster, CHATTING, python=python) as actor:
        with pytest.raises(ConfigError) as mistake:
            await actor.call("mistake", limit_s=START_S)
        assert (mistake.value.problem, mistake.value.where, mistake.value.remedy) == ("no GPU", "place.device", "use cpu")
        with pytest.raises(RollyardError, match="KeyError: 'vocabulary'") as bug:
            await actor.call("bug", limit_s=5)
        assert type(bug.value) is RollyardError
        with pytest.raises(RollyardError, match="asked for dance"):
            await actor.call("dance", limit_s=5)
    async with running(cluster, HELPFUL, python=python) as actor:
        with pytest.raises(WeightSyncError, match="tensor 3") as sync:
            await actor.call("fail", b"tensor 3", limit_s=START_S)
        assert sync.value.retryable


@pytest.mark.parametrize("python", [None, RELAY])
async def test_a_call_that_nobody_answers(cluster: Cluster, python: Path | None) -> None:
    async with running(cluster, CHATTING, python=python) as actor:
        await actor.call("echo", limit_s=START_S)
        with pytest.raises(TimeLimitExceeded, match=r"the station did not answer never within 0\.2 s"):
            await actor.call("never", limit_s=0.2)
        assert await actor.call("echo", b"still there", limit_s=5) == b"still there"
    async with running(cluster, HELPFUL, python=python) as actor:
        started = int(await actor.call("start", limit_s=START_S))
        with pytest.raises(TimeLimitExceeded, match=r"(?s)did not answer hang within 0\.5 s.*going to think"):
            await actor.call("hang", limit_s=0.5)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(actors, "QUIT_S", 0.3)
            began = time.monotonic()
            await actor.close()
        assert time.monotonic() - began < 3
        await eventually(lambda: not alive(actor.pid) and not alive(started), 2)


@pytest.mark.parametrize("python", [None, RELAY])
async def test_closing_fails_what_is_open_and_frees_the_bundle(cluster: Cluster, python: Path | None) -> None:
    for _ in range(4):  # more often than there are bundles
        async with running(cluster, CHATTING, python=python) as actor:
            waiting = asyncio.create_task(actor.call("never", limit_s=60))
            await asyncio.sleep(0)
            began = time.monotonic()
            await actor.close()
            await actor.close()
            assert time.monotonic() - began < 8  # the target's imports are waited for
            with pytest.raises(EngineLost, match="the station ended"):
                await waiting
            with pytest.raises(EngineLost):
                actor.tell("echo")
            await eventually(lambda pid=actor.pid: not alive(pid), 2)  # type: ignore[misc]


async def test_what_an_actor_is_given(cluster: Cluster) -> None:
    given = {**ENVIRONMENT, "ROLLYARD_CACHE": "/somewhere", "SOMETHING": "else", "ROLLYARD_ENGINE_KEY": "secret"}
    for python in (None, RELAY):
        actor = await cluster.launch(CHATTING, b"", name="the station", environment=given, python=python)
        found = json.loads(await actor.call("environment", limit_s=START_S))
        await actor.close()
        assert (found["ROLLYARD_CACHE"], found["SOMETHING"]) == ("/somewhere", "else")
        assert found["OMP_NUM_THREADS"] == "1" and "ROLLYARD_ENGINE_KEY" not in found
    async with running(cluster, HELPFUL, b"made to order") as one, running(cluster, HELPFUL, b"another", RELAY) as two:
        first, second = [json.loads(await actor.call("about", limit_s=START_S)) for actor in (one, two)]
        assert (first["order"], second["order"]) == ("made to order", "another")
        assert first["pid"] == one.pid and second["pid"] in descendants(two.pid)
        assert os.path.realpath(first["rollyard"]) == os.path.realpath(rollyard.__file__)  # noqa: ASYNC240


# --------------------------------------------------------------------------------------------------- how it ends


@pytest.mark.parametrize("python", [None, RELAY])
async def test_a_killed_actor_is_missed_within_two_seconds_and_others_go_on(cluster: Cluster, python: Path | None) -> None:
    async with running(cluster, CHATTING) as other, running(cluster, HELPFUL, python=python) as actor:
        started = int(await actor.call("start", limit_s=START_S))
        waiting = asyncio.create_task(actor.call("never", limit_s=60))
        ended = asyncio.create_task(actor.ended())
        began = time.monotonic()
        os.kill(actor.pid, signal.SIGKILL)
        assert "its worker process has died" in await ended
        assert time.monotonic() - began < 2
        for call in (waiting, actor.call("about", limit_s=60)):
            with pytest.raises(EngineLost, match="the station died: its worker process has died"):
                await call
        await eventually(lambda: not alive(started), 3)
        assert await other.call("echo", b"unharmed", limit_s=START_S) == b"unharmed"
        async with running(cluster, CHATTING) as again:  # and the bundle is free
            assert await again.call("echo", b"again", limit_s=START_S) == b"again"


async def test_an_actor_that_is_busy_is_not_silent(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its event loop stands still; its node does not."""
    monkeypatch.setattr(cluster, "_silent_s", 1.0)
    async with running(cluster, HELPFUL) as actor:
        await actor.call("about", limit_s=START_S)
        with pytest.raises(TimeLimitExceeded):
            await actor.call("hang", limit_s=4)
        assert not actor.lost
        os.kill(actor.pid, signal.SIGSTOP)
        assert await asyncio.wait_for(actor.ended(), 4) == "was silent for 1 s"


async def test_a_child_behind_an_actor_that_is_killed(cluster: Cluster) -> None:
    async with running(cluster, HELPFUL, python=RELAY) as actor:
        about = json.loads(await actor.call("about", limit_s=START_S))
        began = time.monotonic()
        os.kill(about["pid"], signal.SIGKILL)
        assert "was ended by signal 9" in await actor.ended()
        assert time.monotonic() - began < 2
        with pytest.raises(EngineLost, match="the station was ended by signal 9"):
            await actor.call("about", limit_s=60)
        await eventually(lambda: not alive(actor.pid), 3)


@pytest.mark.parametrize("python", [None, RELAY])
@pytest.mark.parametrize(
    ("target", "cause"),
    [
        ("tests.place.broken_module:host", r"ModuleNotFoundError: No module named 'rollyard.no_such_room'"),
        ("tests.place.hosts:absent", r"AttributeError.*absent"),
        ("tests.place.hosts:broken", r"reading the tokenizer(?s:.)*KeyError: 'vocabulary'"),
    ],
)
async def test_an_actor_that_cannot_work_says_why(cluster: Cluster, target: str, cause: str, python: Path | None) -> None:
    async with running(cluster, target, python=python) as actor:
        with pytest.raises(EngineLost, match=f"the station (failed|ended with exit code 1)(?s:.)*{cause}"):
            await actor.call("about", limit_s=START_S)
        await eventually(lambda: not alive(actor.pid), 3)


@pytest.mark.parametrize("python", [None, RELAY])
async def test_a_mistake_of_the_user_is_told_as_one(cluster: Cluster, python: Path | None) -> None:
    async with running(cluster, "tests.place.hosts:mistaken", python=python) as actor:
        with pytest.raises(ConfigError) as mistake:
            await actor.call("about", limit_s=START_S)
    assert (mistake.value.where, mistake.value.remedy) == ("engine.layers", "use 16")


async def test_an_interpreter_that_is_not_there(cluster: Cluster) -> None:
    for _ in range(4):  # no bundle is lost by it
        with pytest.raises(EngineLost, match=r"the station cannot be started with /no/such/python: .*No such file"):
            await cluster.launch(HELPFUL, b"", name="the station", environment=ENVIRONMENT, python=Path("/no/such/python"))


async def test_a_start_that_is_given_up_leaves_nothing(cluster: Cluster) -> None:
    for _ in range(4):
        starting = asyncio.create_task(cluster.launch(HELPFUL, b"", name="the station", environment=ENVIRONMENT))
        await asyncio.sleep(0.05)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
    async with running(cluster, CHATTING) as one, running(cluster, CHATTING) as two, running(cluster, CHATTING) as three:
        assert len({one.pid, two.pid, three.pid}) == 3
        with pytest.raises(ValueError, match="every bundle hosts something"):
            await cluster.launch(CHATTING, b"", name="one too many", environment=ENVIRONMENT)


# --------------------------------------------------------------------------------------------------- the cluster


async def test_what_does_not_fit_is_refused(cluster: Cluster) -> None:
    crowd = Cluster([Bundle(1, 1)] * 2, limit_s=0.5)  # uses the Ray that is there already
    with pytest.raises(ConfigError) as misfit:
        await crowd.start()
    assert "2 hosts with 1 CPU and 1 GPU on one node were asked of Ray, which has 1 node with 3 CPUs" in misfit.value.problem
    assert "2 hosts with 1 CPU and 1 GPU fit no node, however empty" in misfit.value.remedy
    with pytest.raises(ConfigError, match=r"1 of the 2 hosts find a node of their own; use --place\.nodes auto"):
        await Cluster([Bundle()] * 2, limit_s=0.5, nodes="spread").start()
    late = Cluster([Bundle()], limit_s=0.5)
    with pytest.raises(ConfigError, match=r"nothing free .*all fit once others are done"):
        await late.start()
    async with running(cluster, CHATTING) as actor:  # the others are unharmed
        assert await actor.call("echo", b"here", limit_s=START_S) == b"here"


async def test_one_more_host_has_the_place_of_one_that_left_or_is_refused(cluster: Cluster) -> None:
    with pytest.raises(ConfigError, match="1 node with 3 CPUs, and of that nothing free"):
        await cluster.more(Bundle())
    await cluster.less(1)
    with pytest.raises(ConfigError, match="all fit once others are done"):
        await cluster.more(Bundle(2))
    assert await cluster.more(Bundle()) == 1
    async with running(cluster, CHATTING) as actor:
        assert await actor.call("echo", b"here", limit_s=START_S) == b"here"


@pytest.mark.parametrize("nodes", ["one", "few", "spread"])
async def test_where_one_more_host_may_be(nodes: str) -> None:
    labels = {"one": {"ray.io/node-id": "in(a,b)"}, "few": None, "spread": {"ray.io/node-id": "!in(a,b)"}}
    assert runtime._beside({"b", "", "a"}, nodes) == labels[nodes]
    assert runtime._beside({""}, nodes) is None


async def test_two_more_hosts_at_once_do_not_get_one_node(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, homes, asked = Cluster([Bundle()], nodes="spread"), {"group": "a", "group-0": "b", "group-1": "c"}, list[object]()
    cluster._places = [("group", 0)]

    async def reserved(bundles: object, where: object) -> str:
        asked.append(where)
        await asyncio.sleep(0.01)
        return f"group-{len(asked) - 1}"

    monkeypatch.setattr(cluster, "_reserved", reserved)
    monkeypatch.setattr(runtime, "_home", lambda group, number: homes[group])
    monkeypatch.setattr(runtime, "_unused", Bundle)
    assert sorted(await asyncio.gather(cluster.more(Bundle()), cluster.more(Bundle()))) == [1, 2]
    assert asked == [{"ray.io/node-id": "!in(a)"}, {"ray.io/node-id": "!in(a,b)"}]


@pytest.mark.parametrize(("address", "problem"), [("nowhere", "'nowhere' is no address"), ("127.0.0.1:1", "nothing answers at")])
async def test_an_address_where_no_cluster_is(address: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as mistake:
        await runtime.reach(address)
    assert mistake.value.where == "place.ray_address" and "HOST:PORT" in mistake.value.remedy


DRIVER = """
import asyncio, os, sys
from pathlib import Path
from rollyard.place.bundles import Bundle
from rollyard.place.ray import Cluster

async def main():
    cluster = Cluster([Bundle()] * 2, address="local")
    await cluster.start()
    given = dict(name="the station", environment=dict(os.environ))
    one = await cluster.launch("tests.place.hosts:helpful", b"", **given)
    two = await cluster.launch("tests.place.hosts:helpful", b"", python=Path(sys.executable), **given)
    started = [int(await actor.call("start", limit_s=60)) for actor in (one, two)]
    one.tell("hang")
    print(one.pid, two.pid, *started, flush=True)
    if await asyncio.to_thread(sys.stdin.readline) == "wait\\n":
        print("lost", await two.ended(), flush=True)
    await two.close()
    await cluster.close()
    print("closed", flush=True)
    await asyncio.to_thread(sys.stdin.readline)

asyncio.run(main())
"""


def command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")


async def gone(tree: set[int], within_s: float) -> None:
    until = time.monotonic() + within_s
    while left := {pid for pid in tree if alive(pid)}:
        assert time.monotonic() < until, f"not within {within_s} s: {[command(pid) for pid in left]}"
        await asyncio.sleep(0.02)


def lead(tree: set[int]) -> int:
    """The process group of Ray's own processes."""
    return os.getpgid(next(pid for pid in tree if "raylet/raylet" in command(pid)))


@pytest.mark.parametrize("ends", ["killed", "closed", "without Ray"])
async def test_a_cluster_of_another_process_leaves_nothing(cluster: Cluster, ends: str) -> None:
    """Not of Ray's processes either. It stands beside the one of these tests meanwhile."""
    pipes = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE}
    driver = await asyncio.create_subprocess_exec(sys.executable, "-c", DRIVER, env=ENVIRONMENT, **pipes)
    assert driver.stdin is not None and driver.stdout is not None
    try:
        pids = [int(word) for word in (await driver.stdout.readline()).split()]
        tree = descendants(driver.pid)
        assert len(pids) == 4 and set(pids) <= tree and len(tree) > 8
        if ends == "killed":
            driver.kill()
            await gone(tree, 3)
        else:
            if ends == "without Ray":
                driver.stdin.write(b"wait\n")
                os.killpg(lead(tree), signal.SIGKILL)
                said = await asyncio.wait_for(driver.stdout.readline(), 2)
                assert said == b"lost is gone with Ray, which was ended by signal 9\n"
            driver.stdin.write(b"close\n")
            while (line := await driver.stdout.readline()) not in (b"closed\n", b""):
                pass  # Ray prints there, too
            assert line
            await gone(tree, 2)
            assert not descendants(driver.pid)
    finally:
        with suppress(ProcessLookupError):
            driver.kill()
        await driver.wait()
    async with running(cluster, CHATTING) as actor:
        assert await actor.call("echo", b"here", limit_s=START_S) == b"here"


# ---------------------------------------------------------------------------------------------------- an engine


async def written_by(channel: Channel, config: Config, folder: Path, scratch: Path) -> list[tuple[tuple[int, ...], list[float]]]:
    """What an engine at the other end writes, greedily and not."""
    engine = RemoteEngine("engine-0", channel, CAPABILITIES["embedded"], start_s=START_S, sync_s=20, drain_s=20)
    device = DeviceThread()
    publisher = CheckpointPublisher(OwnSource.of(load(folder)), device, folder, scratch)
    try:
        await engine.start()
        await engine.prepare(await publisher.publish(WeightVersion(0), ["engine-0"]))
        await engine.load(WeightVersion(0))
        engine.generate(
            [Request(RequestId(n, 0), (5, 6, 7 + n), Sampling(20, float(n), ignore_eos=True), seed=n) for n in range(2)]
        )
        tokens: dict[int, list[int]] = {0: [], 1: []}
        logprobs: dict[int, list[float]] = {0: [], 1: []}
        async for segments in engine.segments():
            for segment in segments:
                tokens[segment.request.group] += segment.token_ids
                logprobs[segment.request.group] += segment.logprobs
            if all(len(written) == 20 for written in tokens.values()):
                break
        return [(tuple(tokens[n]), logprobs[n]) for n in range(2)]
    finally:
        await engine.close()
        publisher.close()
        device.close()


async def test_an_engine_in_an_actor_writes_what_one_in_a_child_writes(cluster: Cluster, tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path)
    config = Config(
        engine=EngineConfig(slots=4, window=64, kernels="plain"),
        place=PlaceConfig(placement="separate", threads=1, device="cpu"),
        weights=WeightsConfig(transport="checkpoint"),
    )
    order = TypeAdapter(hosts.EngineOrder).dump_json(hosts.EngineOrder(config, "engine-0", folder))
    written = []
    for number, launcher in enumerate((Children(), cluster)):
        channel = await launcher.launch("rollyard.hosts:serve_engine", order, name="engine-0", environment=ENVIRONMENT)
        written.append(await written_by(channel, config, folder, tmp_path / f"scratch-{number}"))
    assert written[0] == written[1]
    assert all(len(tokens) == 20 for tokens, _ in written[0])


async def test_a_fault_hits_an_actor_where_it_is(cluster: Cluster) -> None:
    """It stands still, goes on, and is killed: by itself, for nobody else may be on its node."""
    async with running(cluster, HELPFUL) as actor:
        await actor.call("about", limit_s=START_S)
        began, holding = time.monotonic(), asyncio.create_task(actor.victim.hold(2.0, 1.0))
        await asyncio.sleep(0.7)  # by then it does
        await actor.call("about", limit_s=START_S)
        assert time.monotonic() - began > 1.9
        await holding
        actor.victim.kill()
        assert "died" in await asyncio.wait_for(actor.ended(), START_S)
