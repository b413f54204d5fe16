"""What goes wrong between processes: a frozen tensor, a death, an engine that never answers, a neighbour on the machine."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from pydantic import TypeAdapter

from rollyard import hosts
from rollyard.engine.remote import RemoteEngine
from rollyard.errors import WeightSyncError
from rollyard.model.folder import load
from rollyard.place.child import launch
from rollyard.place.inline import DeviceThread
from rollyard.types import WeightVersion
from rollyard.weights import layout, receive
from rollyard.weights.broadcast import BroadcastPublisher
from rollyard.weights.evidence import Evidence
from rollyard.weights.group import Meeting
from rollyard.weights.prover import Prover
from rollyard.weights.shared_memory import SharedMemoryPublisher
from rollyard.weights.source import OwnSource
from tests.tiny import tiny_folder
from tests.weights.freezing import freezing
from tests.weights.hosts import config
from tests.weights.moving import MOVING, sides, step
from tests.weights.syncing import driven

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
V0 = WeightVersion(0)


@pytest.mark.slow
async def test_each_tensor_that_stays_behind_in_another_process_is_caught_and_named(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path, layers=1, tied=False)
    model, device = load(folder), DeviceThread(lambda: torch.set_num_threads(1))
    publisher = SharedMemoryPublisher(OwnSource.of(model), device)
    try:
        async with freezing(folder, publisher) as there:
            await there.roll(V0)
            prover = Prover(Evidence(model, device), there.ask)
            assert (await prover.prove(["e0"], V0, there.roll)).unseen == ()
            for name, _ in model.named_parameters():
                await there.freeze(name)
                with pytest.raises(WeightSyncError, match="e0 does not decode with all the weights that it was sent") as told:
                    await prover.prove(["e0"], V0, there.roll)
                assert name in str(told.value)
                await there.freeze("")
                await there.roll(V0)
    finally:
        publisher.close()
        device.close()


@pytest.mark.slow
async def test_the_engine_that_receives_for_a_machine_is_killed(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path, layers=1)
    model, device = load(folder), DeviceThread(lambda: torch.set_num_threads(1))
    publisher = BroadcastPublisher(OwnSource.of(model), device, "127.0.0.1", 60.0, delta=True)
    children, engines, chosen = [], [], config(transport="broadcast", delta=True)
    for name in ("e0", "e1"):
        order = TypeAdapter(hosts.EngineOrder).dump_json(hosts.EngineOrder(chosen, name, folder))
        children.append(await launch("rollyard.hosts:serve_engine", order, name=f"engine {name}", environment=ENVIRONMENT))
        engines.append(hosts.remote_engine(chosen, name, children[-1]))
        await engines[-1].start()

    async def roll(number: int, *those: RemoteEngine) -> None:
        version = WeightVersion(number)
        manifest = await publisher.publish(version, [engine.id for engine in those])
        await asyncio.gather(publisher.deliver(), *(engine.prepare(manifest) for engine in those))
        for engine in those:
            await engine.load(version)
            publisher.taken(engine.id, version)

    try:
        for number in range(3):
            step(model, number)
            await roll(number, *engines)
        sent = await publisher.deliver()
        assert 0.9 < (sent.unchanged or 0.0) < 1.0
        manifest = await publisher.publish(WeightVersion(3), ["e0", "e1"])
        waiting = asyncio.ensure_future(engines[1].prepare(manifest))
        await asyncio.sleep(0.5)
        began = time.monotonic()
        os.kill(children[0].pid, signal.SIGKILL)
        outcomes = await asyncio.gather(waiting, publisher.deliver(), return_exceptions=True)
        assert time.monotonic() - began < 3
        assert "e0, which receives for this machine, is gone" in str(outcomes[0]) and isinstance(outcomes[1], WeightSyncError)
        publisher.lost("e0")
        step(model, 4)
        await roll(4, engines[1])  # what e0 held is its own now: changes are applied to a copy of that
        assert engines[1].version == WeightVersion(4)
    finally:
        for engine in engines:
            await engine.close()
        publisher.close()
        device.close()


# ------------------------------------------------------------------------------------- through the whole sync


async def test_an_engine_that_fails_at_bucket_2_of_3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_folder(tmp_path, tied=False)
    size = sum(parameter.numel() * 4 for parameter in load(folder).parameters())
    monkeypatch.setattr(layout, "BUCKET", -(-size // 3 // 64) * 64 + 64)
    fails: list[int] = []  # buckets at which the engine of rank 2 breaks, counted from its next one

    class Breaking(receive.Group):
        def __init__(self, meeting: Meeting, engine: str | None, *rest: str) -> None:
            self.engine = engine
            super().__init__(meeting, engine, *rest)

        def _start(self, bucket: torch.Tensor) -> object:
            if self.engine == "e1" and fails:
                fails[0] -= 1
                if not fails[0]:
                    fails.clear()
                    raise RuntimeError("out of memory")
            return super()._start(bucket)

    monkeypatch.setattr(receive, "Group", Breaking)
    async with driven("broadcast", folder, retries=0) as run:
        assert await run.bring(0) == ""
        fails.append(2)
        told = await run.bring(1)
        assert told.startswith("version 1 did not reach every engine: ") and "version 1 did not reach e0, e1, at bucket" in told
        assert "did not reach e1, " in told and "out of memory" in told and "of 3" in told
        assert run.engines["e1"].version == V0  # the other one may have got it all, and goes on
        assert await run.bring(2) == "" and run.has("e0") and run.has("e1")
    async with driven("broadcast", folder, retries=1) as run:
        assert await run.bring(0) == ""
        fails.append(2)
        assert await run.bring(1) == "" and run.has("e0") and run.has("e1")


async def test_an_engine_that_never_answers(tmp_path: Path) -> None:
    """It is taken out, and the other one gets the version, which it kept from coming."""
    async with driven("broadcast", tiny_folder(tmp_path), limit_s=4.0, retries=0) as run:
        assert await run.bring(0) == ""
        run.engines["e1"].answers = False
        began = time.monotonic()
        assert await run.bring(1) == "" and run.has("e0")
        assert time.monotonic() - began < 8
        assert run.silent == {"e1": "it did not do what it was told to within 4 s"} and run.engines["e1"].version == V0
        assert await run.bring(2) == "" and run.has("e0")


# ----------------------------------------------------------------------------------------------- the machine


@pytest.mark.parametrize("kind", MOVING)
async def test_two_runs_on_one_machine_do_not_meet(tmp_path: Path, kind: str) -> None:
    folders = [tiny_folder(tmp_path / str(seed), seed=seed) for seed in range(2)]
    models = [load(folder) for folder in folders]
    async with sides(kind, models[0], folders[0], engines=2) as one, sides(kind, models[1], folders[1], engines=2) as other:
        for number in range(3):
            sent = [step(model, 10 * number + run) for run, model in enumerate(models)]
            await asyncio.gather(one.send(number), other.send(number))
            for run, both in enumerate((one, other)):
                for receiver in both.receivers.values():
                    arrived = receiver.take(WeightVersion(number))
                    assert arrived is not None and all(torch.equal(arrived[name], sent[run][name]) for name in sent[run])
                both.taken(number)


@pytest.mark.slow
def test_nothing_is_left_after_a_kill(tmp_path: Path) -> None:
    """The memory belongs to processes, not to a folder, and the processes end too: nobody has to clean up after a crash."""
    mark = f"ROLLYARD_TEST_MARK={uuid.uuid4().hex}"
    folder, before = tiny_folder(tmp_path), set(os.listdir("/dev/shm"))
    code = "import sys; from pathlib import Path; from tests.weights.hosts import killed; killed(*map(Path, sys.argv[1:]))"
    command = [sys.executable, "-c", code, str(folder), str(tmp_path / "scratch")]
    name, _, value = mark.partition("=")
    ended = subprocess.run(command, check=False, timeout=120, env=ENVIRONMENT | {name: value}, capture_output=True, text=True)
    assert ended.returncode == -9, ended.stderr
    until = time.monotonic() + 10
    while processes(mark) and time.monotonic() < until:
        time.sleep(0.1)
    time.sleep(0.5)  # a process that is ending has no variables any more, and still its files
    assert not (*processes(mark), *nobodys(set(os.listdir("/dev/shm")) - before))


def processes(mark: str) -> tuple[str, ...]:
    """Those with `mark` among their variables, and what they have of our memory."""
    found: list[str] = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark.encode() in (process / "environ").read_bytes():
                links = [os.readlink(path) for path in (process / "fd").iterdir()]
                found += [f"process {process.name}", *(link for link in links if link.startswith("/memfd:rollyard-weights"))]
    return tuple(found)


MULTIPROCESSING = ("sem.mp-", "psm_")  # left by other programs that were killed meanwhile; nothing here makes such


def nobodys(names: set[str]) -> tuple[str, ...]:
    """Those in /dev/shm that no living process has: what others put there meanwhile, they use."""
    if not names:
        return ()
    used: set[str] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            used.update(os.readlink(path) for path in (process / "fd").iterdir())
            used.update(line.split()[-1] for line in (process / "maps").read_text().splitlines())
    free = (name for name in names if f"/dev/shm/{name}" not in used)
    return tuple(sorted(name for name in free if not name.startswith(MULTIPROCESSING)))
