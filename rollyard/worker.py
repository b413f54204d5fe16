"""Builds ONE station from the config.

torch is imported only when a station needs it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING

from rollyard.config import Config
from rollyard.engine.capabilities import CAPABILITIES
from rollyard.errors import ConfigError
from rollyard.events import EngineId, Event, Rollover
from rollyard.model.architecture import Architecture
from rollyard.model.machine import Machine, measure
from rollyard.place.layout import Roles
from rollyard.prompts.open import open_prompts
from rollyard.protocols import Device, Engine, Evidence, PromptSource, Publisher, Receiver, Scorer, Spans
from rollyard.reward.function import FunctionScorer, RewardFunction, exact_match, load_reward
from rollyard.types import Prompt, Sampling, WeightVersion
from rollyard.watch.timeline import Timeline

if TYPE_CHECKING:
    import torch

    from rollyard.model.tokenizer import Tokenizer
    from rollyard.model.transformer import CausalLM
    from rollyard.train.ranks import Ranks
    from rollyard.train.trainer import ReferenceTrainer
    from rollyard.watch.recorder import Recorder
    from rollyard.weights.handoff import StateHandoff
    from rollyard.weights.prover import Ask
    from rollyard.weights.sync import Sync

SMALL = 20_000_000  # parameters; below, one thread is faster than several
NUMBER_BYTES = {"float32": 4, "bfloat16": 2}
DRAIN_S = 24 * 3600.0  # seconds that finishing what runs may take: as long as the longest rollout


@dataclass(frozen=True, slots=True)
class Policy:
    """The model that is trained and generates, with its tokenizer and the folder both came from."""

    model: CausalLM
    tokenizer: Tokenizer
    folder: Path


def window_of(config: Config, architecture: Architecture) -> int:
    """Tokens of prompt and completion at most."""
    return config.engine.window or architecture.window


def sampling_of(config: Config) -> Sampling:
    rollout = config.rollout
    return Sampling(
        rollout.max_tokens, rollout.temperature, rollout.top_p, rollout.top_k, rollout.stop, ignore_eos=rollout.ignore_eos
    )


def threads_of(config: Config, architecture: Architecture) -> int:
    """CPU threads of torch: those asked for, or one for a small model and all cores for a larger one."""
    return config.place.threads or (1 if architecture.parameters < SMALL else os.cpu_count() or 1)


def set_threads(count: int) -> None:
    """Called on the device's thread before it computes."""
    import torch

    torch.set_num_threads(count)


def begin(config: Config) -> None:
    """Start what takes long and needs nothing else, on a thread of its own: compiling the engine's kernels."""
    from rollyard.engine.embedded.compile import KernelsUnavailable, kernels

    def compile_kernels() -> None:
        with suppress(KernelsUnavailable):  # the engine asks again, and says why
            kernels()

    if config.engine.kernels != "plain" and config.place.device != "cuda":
        Thread(target=compile_kernels, name="compiler", daemon=True).start()


def ranks_of(config: Config, rank: int | None) -> Ranks | None:
    """The ranks that share a policy, as the trainer of `rank` sees them; None where each has all of it."""
    import torch

    from rollyard.train.ranks import Ranks

    shared = config.train.shard and rank is not None
    return Ranks(torch.device(device_of(config)), rank or 0, config.place.train) if shared else None


def joint(what: str, policy: Policy, device: Device, ranks: Ranks | None) -> Device:
    """Where that is done which ranks that share a policy have to do together."""
    from rollyard.train.ranks import Joint

    return device if ranks is None else Joint(device, ranks, what, policy.model.parts.recover)


def load_policy(config: Config, folder: Path, ranks: Ranks | None = None) -> Policy:
    """Read the model and the tokenizer. `ranks` share it: of each tensor only some rows are read.

    Raises ConfigError when the folder is not a model we can run exactly, or the device is not there.
    """
    import torch

    from rollyard.model.folder import load
    from rollyard.model.tokenizer import Tokenizer

    return Policy(load(folder, getattr(torch, config.model.dtype), device_of(config), ranks), Tokenizer(folder), folder)


def device_of(config: Config) -> str:
    """What computes, in torch's words. Raises ConfigError when it is not there."""
    import torch

    if config.place.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if config.place.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("torch sees no GPU", where="place.device", remedy="use auto or cpu, or a CUDA build of torch")
    return config.place.device


def measure_machine(config: Config) -> tuple[int, Machine | None]:
    """Bytes of a number of the policy, and what a device can do at most: None for a GPU that other processes use.

    Called on the device's thread, before anything has taken memory there.
    """
    import torch

    dtype, kind = getattr(torch, config.model.dtype), device_of(config)
    return dtype.itemsize, measure(kind, dtype) if kind == "cpu" or trains_here(config) else None


def build_prompts(config: Config, tokenizer: Tokenizer, done: Set[int] = frozenset()) -> tuple[PromptSource, tuple[Prompt, ...]]:
    """The source of prompts, without those that are done, and the held-out ones."""
    return open_prompts(config, tokenizer, done)


def build_engine(config: Config, id_: EngineId, policy: Policy, device: Device, receiver: Receiver, sole: bool = False) -> Engine:
    """An embedded engine in this process. `sole`: nobody else uses the policy's parameters."""
    from rollyard.engine.embedded.engine import EmbeddedEngine

    window = window_of(config, policy.model.architecture)
    return EmbeddedEngine(id_, policy.model, policy.tokenizer, device, receiver, config.engine, window, sole)


def build_trainer(
    config: Config, policy: Policy, device: Device, version: WeightVersion, ranks: Ranks | None = None
) -> ReferenceTrainer:
    from rollyard.train.trainer import ReferenceTrainer

    return ReferenceTrainer(policy.model, device, config.train, config.rollout.max_tokens, policy.folder, version, ranks)


def reward_of(config: Config, given: RewardFunction | None) -> RewardFunction:
    """The function given directly, the one that is named, or the task's own. Raises ConfigError when there is none."""
    if given is not None:
        return given
    if config.reward.function:
        return load_reward(config.reward.function)
    if config.prompts.task:
        return exact_match
    raise ConfigError("prompts from a file need a reward", where="reward.function", remedy="give --reward FILE.py:function")


def build_scorer(config: Config, reward: RewardFunction | None) -> Scorer:
    function = reward_of(config, reward)
    return FunctionScorer(function, config.reward, trusted=function is exact_match)


def transport_of(config: Config) -> str:
    """How weights reach the engines: as named, or what `auto` stands for. Beside a trainer nothing travels to them."""
    if not config.place.apart:
        return "in_place"
    if config.weights.transport != "auto":
        return config.weights.transport
    return "shared_memory" if "shared_memory" in CAPABILITIES[config.engine.kind].transports else "checkpoint"


def rollover_of(config: Config) -> Rollover:
    """What becomes of requests in flight: as named, or what `auto` stands for. Only under async are there any."""
    if config.weights.rollover != "auto":
        return Rollover(config.weights.rollover)
    keeps = config.place.placement == "async" and CAPABILITIES[config.engine.kind].keep
    return Rollover.KEEP if keeps else Rollover.DRAIN


def build_publisher(config: Config, policy: Policy, device: Device, scratch: Path) -> Publisher:
    """The trainer's side of the transport. One that is in place is the receiver as well.

    Args:
        device: where ranks that share the policy do the same at the same time.
    """
    from rollyard.weights.broadcast import BroadcastPublisher
    from rollyard.weights.checkpoint import CheckpointPublisher
    from rollyard.weights.in_place import InPlace
    from rollyard.weights.part import PartPublisher
    from rollyard.weights.shared_memory import SharedMemoryPublisher
    from rollyard.weights.source import Source

    model, weights = policy.model, config.weights
    if not model.parts.first:
        return PartPublisher(Source.of(model), device)
    match transport_of(config):
        case "in_place":
            return InPlace(model)
        case "checkpoint":
            return CheckpointPublisher(Source.of(model), device, policy.folder, scratch / "weights", weights.delta)
        case "shared_memory":
            return SharedMemoryPublisher(Source.of(model), device, delta=weights.delta)
        case _:
            return BroadcastPublisher(Source.of(model), device, weights.address, weights.limit_s, weights.delta)


def build_evidence(policy: Policy, device: Device, together: Device | None = None) -> Evidence:
    """The trainer's side of the proof that weights arrive. `together`: where ranks that share the policy look at it."""
    from rollyard.weights import evidence

    return evidence.Evidence(policy.model, device, together)


def build_sync(
    config: Config,
    publishers: Mapping[EngineId, Publisher],
    evidence: Evidence,
    engines: Mapping[EngineId, Engine],
    ask: Ask,
    post: Callable[[Event], None],
    timeline: Timeline,
    recorder: Recorder,
) -> Sync:
    """What brings versions to the engines. `ask` gets completions from one of them."""
    from rollyard.weights.prover import Prover
    from rollyard.weights.sync import Sync

    return Sync(publishers, Prover(evidence, ask, config.weights.limit_s), engines, config.weights, post, timeline, recorder)


def build_handoff(config: Config, half: EngineId, policy: Policy, trainer: ReferenceTrainer, device: Device) -> StateHandoff:
    """What brings the whole state of the trainer of `half` to the other half, and back."""
    from rollyard.weights.broadcast import BroadcastPublisher
    from rollyard.weights.handoff import StateHandoff
    from rollyard.weights.receive import BroadcastReceiver
    from rollyard.weights.shared_memory import SharedMemoryPublisher, SharedMemoryReceiver
    from rollyard.weights.source import Source

    where, limit = policy.model.head_weight.device, config.weights.limit_s
    state = Source(trainer.state, policy.model.stamp, where)
    if config.weights.transport == "broadcast":
        sender: Publisher = BroadcastPublisher(state, device, config.weights.address, limit)
        receiver: Receiver = BroadcastReceiver(half, state.infos, where, limit, buffers=1)
    else:
        sender = SharedMemoryPublisher(state, device, slots=1)
        receiver = SharedMemoryReceiver(state.infos, where)
    return StateHandoff(state, device, sender, receiver)


def build_receiver(config: Config, id_: EngineId, model: CausalLM, device: torch.device, spans: Spans | None = None) -> Receiver:
    """The side of an engine that has its own memory. It takes what `model` has, and brings it to `device`."""
    from rollyard.weights.checkpoint import CheckpointReceiver
    from rollyard.weights.flat import model_infos
    from rollyard.weights.receive import BroadcastReceiver
    from rollyard.weights.shared_memory import SharedMemoryReceiver

    infos, weights = model_infos(model), config.weights
    match transport_of(config):
        case "checkpoint":
            return CheckpointReceiver(infos, device, weights.delta)
        case "shared_memory":
            return SharedMemoryReceiver(infos, device)
        case _:
            return BroadcastReceiver(id_, infos, device, weights.limit_s, spans=spans)


# --------------------------------------------------------------------------------------------- where it runs


def roles_of(config: Config) -> Roles:
    """How many engines and trainers are asked for."""
    return Roles(config.place.placement, config.place.generate, config.place.train, config.engine.tensor_parallel_size)


def devices_there(config: Config) -> int | None:
    """Devices of this machine; None where there is no such limit: processes on a CPU, or a cluster, which says it itself."""
    if config.place.runtime == "ray" or config.engine.url or device_of(config) == "cpu":
        return None
    import torch

    return torch.cuda.device_count()


def trains_here(config: Config) -> bool:
    """Is the trainer in this very process?"""
    return config.place.runtime == "inline" and config.place.train == 1 and config.place.placement != "swap"
