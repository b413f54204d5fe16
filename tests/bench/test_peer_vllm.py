"""benchmarks/peers/peer_vllm.py with a vLLM that only notes what it was asked, and starts processes as vLLM does."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from rollyard.bench.peer import FOLDER, Command, Peer, PeerError, running
from tests.bench.test_peer import gone

COMMAND = Command("vllm", Path(sys.executable), FOLDER / "peers" / "peer_vllm.py")
VLLM = """
import json, multiprocessing, os, time
from types import SimpleNamespace

__version__ = "fake"
NAMES = ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_CPU_OMP_THREADS_BIND")

class SamplingParams:
    def __init__(self, **given):
        self.given = given

def worker(queue):
    print("INFO: printed by a worker", flush=True)
    os.write(1, b"and past Python\\n")
    queue.put(os.getpid())
    time.sleep(600)

class LLM:
    def __init__(self, model, **options):
        print("INFO: loading")
        spawn = multiprocessing.get_context("spawn")
        queue = spawn.Queue()
        spawn.Process(target=worker, args=(queue,), daemon=True).start()
        self.worker = queue.get(timeout=60)

    def generate(self, asked, params, use_tqdm):
        print("INFO: generating")
        notes = (self.worker, [os.environ.get(name) for name in NAMES], [one.given for one in params])
        with open(os.environ["NOTES"], "w") as file:
            json.dump(notes, file)
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[3] * one.given["max_tokens"])]) for one in params]
"""


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the fake writes what it saw."""
    (tmp_path / "vllm.py").write_text(VLLM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("NOTES", str(tmp_path / "notes"))
    return tmp_path / "notes"


async def load(peer: Peer, threads: int) -> dict[str, object]:
    return await peer.ask("load", 60, model="m", dtype="float32", threads=threads, window=64)


async def test_processes_threads_and_tokens_as_they_are_asked_for(notes):
    cores = sorted(os.sched_getaffinity(0))
    async with running(COMMAND) as peer:
        assert (await load(peer, len(cores)))["versions"]["vllm"] == "fake"  # type: ignore[index]
        answer = await peer.ask("generate", 60, prompts=[[5], [6, 7]], lengths=[2, 3], temperature=1.0, batch=2, seed=0)
        assert answer["ids"] == [[3, 3], [3, 3, 3]] and answer["seconds"] < 1.0  # without the wait after it
        worker, environment, params = json.loads(notes.read_text())
        assert not gone(worker, within_s=0)
    assert environment == ["1", ",".join(map(str, cores))]
    plain = {"ignore_eos": True, "temperature": 1.0, "logprobs": 0, "detokenize": False}
    assert params == [{"max_tokens": length, **plain} for length in (2, 3)]
    assert gone(worker, within_s=3)


async def test_more_threads_than_cores_cannot_be_bound(notes):
    async with running(COMMAND) as peer:
        with pytest.raises(PeerError, match="a core of its own"):
            await load(peer, len(os.sched_getaffinity(0)) + 1)
