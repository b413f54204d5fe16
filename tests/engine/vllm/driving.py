"""vLLM as a run drives it: in a process of its own, with a trainer's model and a transport beside it."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter

from rollyard import hosts, worker
from rollyard.config import Config, EngineConfig
from rollyard.engine.capabilities import CAPABILITIES
from rollyard.engine.remote import RemoteEngine
from rollyard.engine.vllm.arguments import defaults, environment
from rollyard.environment import process_environment
from rollyard.events import Rollover
from rollyard.hosts import interpreter
from rollyard.layers import resolve
from rollyard.place.child import launch
from rollyard.place.inline import DeviceThread
from rollyard.protocols.weights import Publisher
from rollyard.types import Completion, FinishReason, Manifest, Request, Segment, VersionSpan, WeightVersion
from tests.engine.embedded.serving import Written, answers
from tests.tiny import tiny_folder

WINDOW = 256
NAME = "engine-0"


def model_folder(parent: Path, **shape: Any) -> Path:
    """A random model whose heads have 32 numbers, the fewest that vLLM takes on a CPU."""
    return tiny_folder(parent, **{"heads": 2, "kv_heads": 1, "width": 64, "window": WINDOW, **shape})


def configured(folder: Path, transport: str = "shared_memory", **options: object) -> Config:
    """`options` are of the engine section unless there is a dot in them. Pages of 32 tokens: prompts of a test fill some."""
    given = {
        "prompts.path": "prompts.jsonl",
        "model.path": str(folder),
        "place.placement": "separate",
        "place.threads": 1,
        "place.device": "cpu",
        "weights.transport": transport,
        "weights.limit_s": 60.0,  # a busy machine
        "rollout.max_tokens": 32,
    }
    engine = {"kind": "vllm", "slots": 8, "extra": '{"block_size": 32}', **options}
    return resolve(
        environment={}, overrides=given | {name if "." in name else f"engine.{name}": value for name, value in engine.items()}
    ).config


@dataclass
class Driven:
    """A started engine, and the trainer's side."""

    engine: RemoteEngine
    policy: worker.Policy
    device: DeviceThread
    publisher: Publisher

    async def offer(self, version: WeightVersion) -> Manifest:
        """Publish the trainer's parameters as they are now, and have the engine prepare them."""
        manifest = await self.publisher.publish(version, [NAME])
        await asyncio.gather(self.publisher.deliver(), self.engine.prepare(manifest))
        return manifest

    async def sync(self, version: WeightVersion, rollover: Rollover = Rollover.DRAIN) -> Manifest:
        """All the way: from then on the engine decodes with them."""
        manifest = await self.offer(version)
        await self.engine.pause(rollover)
        await self.engine.load(version)
        self.publisher.taken(NAME, version)
        await self.engine.resume()
        return manifest

    async def move(self, seed: int) -> None:
        """Other parameters for the trainer, every one of those that it trains."""

        def change() -> None:
            generator = torch.Generator().manual_seed(seed)
            with self.policy.model.stamp.writing(), torch.no_grad():
                for parameter in self.policy.model.trained().values():
                    parameter.add_(torch.empty(parameter.shape).normal_(0.0, 0.05, generator=generator))

        await self.device.run(change)

    async def ask(self, engine: str, requests: Sequence[Request]) -> list[Completion]:
        """What the prover asks with."""
        written = await answers(self.engine, requests)
        return [_completion(request, written[request.id]) for request in requests]


def _completion(request: Request, written: Written) -> Completion:
    last = written.segments[-1]
    span = VersionSpan(last.version, last.oldest_kv, len(written.token_ids))
    ids, logprobs = tuple(written.token_ids), tuple(written.logprobs)
    return Completion(request.id.group, request.id.member, ids, logprobs, (span,), written.finish or FinishReason.ERROR, "")


async def launched(serve: str, config: Config, name: str, folder: Path) -> RemoteEngine:
    """An engine in a child that runs `serve`, one of `receivers`."""
    order = TypeAdapter(hosts.EngineOrder).dump_json(hosts.EngineOrder(config, name, folder))
    variables = defaults(config.engine) | process_environment() | environment(config.engine, 1, cpu=True) | {"PYTHONPATH": root()}
    target, python = f"tests.engine.vllm.receivers:{serve}", interpreter(config.engine)
    child = await launch(target, order, name=name, python=python, environment=variables)
    return RemoteEngine(name, child, CAPABILITIES["vllm"], start_s=200.0, sync_s=20.0, drain_s=60.0)


Launch = Callable[[Config, str, Path], Awaitable[RemoteEngine]]


@asynccontextmanager
async def driving(config: Config, *, loaded: bool = True, launch: Launch = hosts.launch_engine) -> AsyncIterator[Driven]:
    """An engine that was started, and given the trainer's parameters as version 0 when `loaded`."""
    folder = Path(config.model.path)
    device = DeviceThread(lambda: torch.set_num_threads(1))
    policy = worker.load_policy(config, folder)
    publisher = worker.build_publisher(config, policy, device, folder.parent / "scratch")
    engine = await launch(config, NAME, folder)
    try:
        await engine.start()
        driven = Driven(engine, policy, device, publisher)
        if loaded:
            await driven.sync(WeightVersion(0))
        yield driven
    finally:
        await engine.close()
        publisher.close()
        device.close()


async def segments(engine: RemoteEngine, until: int) -> list[Segment]:
    """What comes until so many tokens are there."""
    found: list[Segment] = []
    async for batch in engine.segments():
        found += batch
        if sum(len(segment.token_ids) for segment in found) >= until:
            break
    return found


def freshly_started(folder: Path, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    """What vLLM writes greedily when it reads the folder itself; nothing of Rollyard is there."""
    asked = json.dumps({"model": str(folder), "prompts": [list(prompt) for prompt in prompts], "max_tokens": max_tokens})
    found: list[list[int]] = json.loads(_vllm(FRESH, asked))
    return found


FRESH = """
import json, sys
asked = json.loads(sys.stdin.read())
import vllm
engine = vllm.LLM(
    asked["model"], dtype="float32", enforce_eager=True, max_model_len=256, max_num_seqs=8, kv_cache_memory_bytes=2**26
)
params = vllm.SamplingParams(max_tokens=asked["max_tokens"], temperature=0.0, ignore_eos=True, detokenize=False)
prompts = [{"prompt_token_ids": prompt} for prompt in asked["prompts"]]
answers = engine.generate(prompts, params, use_tqdm=False)
print("ANSWER" + json.dumps([list(answer.outputs[0].token_ids) for answer in answers]), flush=True)
"""


def _vllm(script: str, asked: str) -> str:
    python = interpreter(EngineConfig(kind="vllm"))
    environment = process_environment() | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [str(python), "-c", script], input=asked, capture_output=True, text=True, env=environment, timeout=120, check=False
    )
    lines = [line.removeprefix("ANSWER") for line in done.stdout.splitlines() if line.startswith("ANSWER")]
    assert lines, done.stdout[-2000:] + done.stderr[-2000:]
    return lines[-1]


def group_of(leader: int) -> Mapping[int, str]:
    """Living processes of a process group, by id: what they are called."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            head, _, rest = (entry / "stat").read_text().rpartition(")")
        except (FileNotFoundError, ProcessLookupError):
            continue
        state, _, group = rest.split()[:3]
        if int(group) == leader and state != "Z":
            found[int(entry.name)] = head.partition("(")[2]
    return found


async def gone(processes: Sequence[int], within_s: float) -> bool:
    """Whether they all end in time."""
    until = asyncio.get_running_loop().time() + within_s
    while asyncio.get_running_loop().time() < until:
        if not any(_lives(process) for process in processes):
            return True
        await asyncio.sleep(0.1)
    return False


def _lives(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def root() -> str:
    """Where `tests` is importable from."""
    return os.fspath(Path(__file__).parents[3])
