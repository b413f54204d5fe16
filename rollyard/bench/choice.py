"""Which benchmarks there are. Imports no torch, so that the command line can list them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from rollyard.bench.result import Result
from rollyard.bench.setting import Setting
from rollyard.bench.turns import Tell

MODEL = Path("models/smollm2-135m")  # where `make model` puts it
SECTIONS = ("engine", "batch", "train")  # of the config, that may be changed to see what they do


@dataclass(frozen=True, slots=True)
class Bench:
    """What it measures, and what may be chosen; the first of each is the default."""

    text: str
    workloads: tuple[str, ...]
    peers: tuple[str, ...] = ()


BENCHES = {
    "engine": Bench(
        "tokens per second of the engine, beside Hugging Face generate or vLLM, or beside itself (static, prefix, queue, decode)",
        ("64x1", "8x8", "one", "ragged", "static", "prefix", "queue", "decode"),
        ("hf", "vllm"),
    ),
    "train": Bench("seconds of a training step, beside its matrix products alone", ("8x8", "ragged")),
    "sync": Bench(
        "milliseconds from new parameters to an engine that has them, by every transport, beside raw copies "
        "(delta: with shares of changed numbers; relay: to several engines of this machine; adapter: of an adapter alone)",
        ("idle", "delta", "relay", "adapter"),
    ),
    "step": Bench("seconds of a whole GRPO step, beside TRL's GRPOTrainer", ("fixed", "natural"), ("trl",)),
}

TAILS = "what is done about long answers, with engines that only take time: the wait for the last tenth of each batch"
LOADS = ("speed", "areal", "soak")
LOAD = (
    "what orchestration costs, with stations that answer at once: completions and events a second (speed), beside AReaL's "
    "executor (areal), and 100,000 rollouts of which some fail (soak)"
)
PLACEMENTS = "one workload under all placements: with stations that only take time, beside theory, and with the tiny model"


async def load(workload: str, rounds: int, tell: Tell) -> tuple[Any, RenderableType]:
    """What was found, and as people read it. Raises RunFailed, PeerError, LostError, ConfigError, TimeLimitExceeded."""
    from rollyard.bench import beside, soak
    from rollyard.bench import load as speed

    if workload == "soak":
        soaked = await soak.bench(tell)
        return soaked, soak.table(soaked)
    if workload == "areal":
        found = await beside.bench(rounds, tell)
        return found, beside.table(found)
    measured = await speed.bench(rounds, tell)
    return measured, speed.table(measured)


async def measure(bench: str, setting: Setting, tell: Tell) -> Result:
    """Run one of them. Raises ConfigError, PeerError, EngineError, TrainError, TimeLimitExceeded."""
    from rollyard.bench import adapter, decode, generate, step, sync, train, travel

    if setting.workload == "decode":
        return await decode.bench(setting, tell)
    if setting.workload == "adapter":
        return await adapter.bench(setting, tell)
    if setting.workload in ("delta", "relay"):
        return await travel.bench(setting, tell)
    run = {"engine": generate.bench, "train": train.bench, "step": step.bench, "sync": sync.bench}[bench]
    return await run(setting, tell)
