"""Builds ONE station from the config.

torch is imported only when a station needs it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from rollyard.config import Config
from rollyard.engine.capabilities import CAPABILITIES
from rollyard.environment import node_address
from rollyard.errors import ConfigError, TrainError
from rollyard.events import EngineId, Event, Rollover
from rollyard.exchange.folder import Job
from rollyard.model.architecture import Architecture, base_of
from rollyard.model.flops import adapter_numbers
from rollyard.model.machine import Machine, measure
from rollyard.objective import has_values, options_of
from rollyard.place.bundles import Bundle, Nodes
from rollyard.place.layout import Host, Roles
from rollyard.prompts.open import open_prompts
from rollyard.protocols.devices import Device, Spans
from rollyard.protocols.rollouts import Engine, PromptSource
from rollyard.protocols.weights import Evidence, Publisher, Receiver, TrainerEvidence
from rollyard.types import Prompt, Sampling, TensorInfo, WeightVersion
from rollyard.watch.timeline import Timeline

if TYPE_CHECKING:
    import torch

    from rollyard.model.tokenizer import Tokenizer
    from rollyard.model.transformer import CausalLM
    from rollyard.train.ranks import Ranks
    from rollyard.train.reference import Reference
    from rollyard.train.trainer import ReferenceTrainer
    from rollyard.watch.recorder import Recorder
    from rollyard.weights.canary import Shares
    from rollyard.weights.handoff import StateHandoff
    from rollyard.weights.prover import Ask
    from rollyard.weights.source import Source
    from rollyard.weights.sync import Sync

SMALL = 20_000_000  # parameters; below, one thread is faster than several
NUMBER_BYTES = {"float32": 4, "bfloat16": 2}
LOOPBACK = "127.0.0.1"
FIRST = WeightVersion(0)
DRAIN_S = 24 * 3600.0  # seconds that finishing what runs may take: as long as the longest rollout


@dataclass(frozen=True, slots=True)
class Policy:
    """The model that is trained and generates, with its tokenizer and the folder both came from."""

    model: CausalLM
    tokenizer: Tokenizer
    folder: Path
    reference: Reference | None = None  # that it is to stay near


@dataclass(frozen=True, slots=True)
class Beginning:
    """What the trainers of one life of a run begin with."""

    version: WeightVersion = FIRST
    checkpoint: Path | None = None  # that has it; None: the model, as it was found
    life: int = 0  # the incarnation of the versions that they make


FROM_THE_START = Beginning()


def window_of(config: Config, architecture: Architecture) -> int:
    """Tokens of prompt and completion at most."""
    return config.engine.window or architecture.window


def adapter_of(config: Config, architecture: Architecture) -> int:
    """Numbers of the adapter that is trained, 0 where all weights are."""
    return adapter_numbers(architecture, config.lora) if config.weights.what == "lora" else 0


def size_of(config: Config, architecture: Architecture) -> int:
    """Bytes of one version of what travels."""
    adapter = adapter_of(config, architecture)
    return adapter * NUMBER_BYTES["float32"] if adapter else architecture.parameters * NUMBER_BYTES[config.model.dtype]


def sampling_of(config: Config) -> Sampling:
    rollout = config.rollout
    return Sampling(
        rollout.max_tokens, rollout.temperature, rollout.top_p, rollout.top_k, rollout.stop, ignore_eos=rollout.ignore_eos
    )


def threads_of(config: Config, architecture: Architecture) -> int:
    """CPU threads of torch: those asked for, or one for a small model and all cores for a larger one."""
    return threads_for(config, architecture.parameters)


def threads_for(config: Config, parameters: int) -> int:
    """The same for a model with so many parameters."""
    return config.place.threads or (1 if parameters < SMALL else os.cpu_count() or 1)


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


def load_policy(config: Config, folder: Path, ranks: Ranks | None = None, checkpoint: Path | None = None) -> Policy:
    """Read the model and the tokenizer, with the adapter that is trained where the config says so.

    Args:
        folder: of the model that the run began with.
        ranks: share it: of each tensor only some rows are read.
        checkpoint: whose weights it has now, instead of those in `folder`.

    Raises ConfigError when the folder is not a model we can run exactly, or the device is not there.
    """
    from rollyard.model import adapter
    from rollyard.model.tokenizer import Tokenizer
    from rollyard.train.reference import Reference

    now = checkpoint or folder
    model = load_model(config, now, ranks)
    if config.weights.what == "lora":
        adapter.add(model, config.lora, config.run.seed)
        adapter.read(model, now)
    elif base_of(now) != now:
        remedy = "use --weights.what lora, or the model that it is for"
        raise ConfigError(f"{now} holds an adapter, and all parameters are trained", where="weights.what", remedy=remedy)
    reference = Reference.of(model, folder, lambda: load_model(config, folder, ranks)) if config.train.kl else None
    return Policy(model, Tokenizer(folder), folder, reference)


def load_model(config: Config, folder: Path, ranks: Ranks | None = None) -> CausalLM:
    """Read a model, or the one that an adapter in `folder` is for. Raises ConfigError."""
    import torch

    from rollyard.model.folder import load

    return load(base_of(folder), getattr(torch, config.model.dtype), device_of(config), ranks)


def device_of(config: Config) -> str:
    """What computes, in torch's words. Raises ConfigError when it is not there."""
    if config.place.device == "cpu":
        return "cpu"
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
    here = trains_here(config, job_of(config))
    return dtype.itemsize, measure(kind, dtype) if kind == "cpu" or here else None


async def build_prompts(
    config: Config, tokenizer: Tokenizer, done: Set[int] = frozenset()
) -> tuple[PromptSource, tuple[Prompt, ...]]:
    """The source of prompts, without those that are done, and the held-out ones."""
    return await open_prompts(config, tokenizer, done)


def build_engine(
    config: Config,
    id_: EngineId,
    policy: Policy,
    device: Device,
    receiver: Receiver,
    sole: bool = False,
    own: bool = False,
) -> Engine:
    """An embedded engine in this process. `sole`: nobody else uses the policy's parameters.

    `own`: the process is the engine's own, but for a trainer that does not work when it does.
    Beside a trainer of an adapter it has weights of its own, merged from the trainer's.
    """
    from rollyard.engine.embedded.engine import EmbeddedEngine
    from rollyard.model import adapter
    from rollyard.model.folder import tensors
    from rollyard.model.transformer import CausalLM
    from rollyard.weights.merged import Merged

    model, window = policy.model, window_of(config, policy.model.architecture)
    if model.adapted:
        model, sole = CausalLM(model.architecture, model.head_weight.dtype, model.head_weight.device), True
        base, here = adapter.base(policy.model), lambda: tensors(policy.model)
        receiver = Merged(receiver, base, config.lora.scaling, model.stamp, here)
    return EmbeddedEngine(id_, model, policy.tokenizer, device, receiver, config.engine, window, sole, own)


async def build_trainer(
    config: Config, policy: Policy, device: Device, begin: Beginning, ranks: Ranks | None = None
) -> ReferenceTrainer:
    """With the state in its checkpoint, where it begins with one. Raises TrainError when that is another's."""
    from rollyard.train.trainer import ReferenceTrainer

    trainer = await device.run(
        partial(
            ReferenceTrainer,
            policy.model,
            device,
            options_of(config),
            config.rollout.max_tokens,
            policy.folder,
            begin.version,
            ranks,
            reference=policy.reference,
            values=has_values(config),
            life=begin.life,
        )
    )
    if begin.checkpoint is not None:
        await trainer.load_state(begin.checkpoint)
        if trainer.version != begin.version:
            raise TrainError(f"{begin.checkpoint} holds the state of version {trainer.version.step}, not {begin.version.step}")
    return trainer


def transport_of(config: Config) -> str:
    """How weights reach the engines: as named, or what `auto` stands for. Beside a trainer nothing travels to them."""
    if not config.place.apart:
        return "in_place"
    if config.exchange.folder:
        return "checkpoint"
    if config.weights.transport != "auto":
        return config.weights.transport
    wanted = _fastest(config)
    return wanted if wanted in CAPABILITIES[config.engine.kind].transports else "checkpoint"


def handoff_of(config: Config) -> str:
    """How a training state goes from one half to the other."""
    return _fastest(config) if config.weights.transport == "auto" else config.weights.transport


def _fastest(config: Config) -> str:
    return "broadcast" if config.place.nodes == "spread" else "shared_memory"


def address_of(config: Config) -> str:
    """Of this machine, as engines and other trainers reach it: as named, as the cluster has it, as it is seen on the way to
    servers elsewhere, or loopback where nothing is elsewhere.

    Raises ConfigError for a server whose name nobody knows.
    """
    if named := config.weights.address or node_address():
        return named
    seen = [_seen_from(url) for url in config.engine.url]
    return next((address for address in seen if address != LOOPBACK), LOOPBACK)


def _seen_from(url: str) -> str:
    from rollyard.meeting import own_address

    parts = urlsplit(url)
    try:
        return own_address(parts.hostname or "", parts.port or 80)
    except OSError as error:
        raise ConfigError(
            f"{url} cannot be reached: {error}", where="engine.url", remedy="give addresses of running servers"
        ) from None


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
    from rollyard.weights.in_place import InPlace
    from rollyard.weights.part import PartPublisher
    from rollyard.weights.source import OwnSource

    if not policy.model.parts.first:
        return PartPublisher(OwnSource.of(policy.model), device)
    if transport_of(config) == "in_place":
        return InPlace(policy.model)
    return publisher_of(config, OwnSource.of(policy.model), device, policy.folder, scratch)


def publisher_of(config: Config, source: Source, device: Device, origin: Path, scratch: Path) -> Publisher:
    """The same for whatever moves. `origin`: the folder that the model came from."""
    from rollyard.weights.workers import WorkersPublisher

    publisher, workers = _transport(config, source, device, origin, scratch), config.engine.tensor_parallel_size
    return publisher if workers == 1 else WorkersPublisher(publisher, Architecture.from_folder(origin), workers)


def _transport(config: Config, source: Source, device: Device, origin: Path, scratch: Path) -> Publisher:
    from rollyard.weights.broadcast import BroadcastPublisher
    from rollyard.weights.checkpoint import CheckpointPublisher
    from rollyard.weights.shared_memory import SharedMemoryPublisher

    weights = config.weights
    match transport_of(config):
        case "checkpoint":
            return CheckpointPublisher(source, device, origin, scratch / "weights", weights.delta)
        case "shared_memory":
            return SharedMemoryPublisher(source, device, delta=weights.delta)
        case _:
            return BroadcastPublisher(source, device, address_of(config), weights.limit_s, weights.delta)


def build_evidence(config: Config, policy: Policy, device: Device, together: Device | None = None) -> TrainerEvidence:
    """The trainer's side of the proof that weights arrive. `together`: where ranks that share the policy look at it."""
    from rollyard.weights import evidence
    from rollyard.weights.flat import model_infos

    parts = shares_of(config, policy.model.architecture, model_infos(policy.model))
    return evidence.Evidence(policy.model, device, together, parts)


def shares_of(config: Config, shape: Architecture, tensors: Sequence[TensorInfo]) -> Shares:
    """The parts that the workers of an engine have of each tensor; of none where an engine is one."""
    from rollyard.weights.shares import shares

    workers = config.engine.tensor_parallel_size
    if workers == 1:
        return {}
    by_name = zip(tensors, zip(*shares(tensors, shape, workers), strict=True), strict=True)
    return {info.name: [part for part in parts if part is not None] for info, parts in by_name if None not in parts}


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
    from rollyard.weights.source import OwnSource

    where, limit = policy.model.head_weight.device, config.weights.limit_s
    state = OwnSource(trainer.state, policy.model.stamp, where)
    if handoff_of(config) == "broadcast":
        sender: Publisher = BroadcastPublisher(state, device, address_of(config), limit)
        receiver: Receiver = BroadcastReceiver(half, state.infos, where, limit, buffers=1)
    else:
        sender = SharedMemoryPublisher(state, device, slots=1)
        receiver = SharedMemoryReceiver(state.infos, where)
    return StateHandoff(state, device, sender, receiver)


def build_receiver(config: Config, id_: EngineId, model: CausalLM, device: torch.device, spans: Spans | None = None) -> Receiver:
    """The side of an engine that has its own memory. It takes what is trained of `model`, and brings it to `device`."""
    from rollyard.model import adapter
    from rollyard.weights.checkpoint import CheckpointReceiver
    from rollyard.weights.flat import model_infos
    from rollyard.weights.receive import BroadcastReceiver
    from rollyard.weights.shared_memory import SharedMemoryReceiver

    weights = config.weights
    infos = adapter.infos(model, config.lora) if weights.what == "lora" else model_infos(model)
    match transport_of(config):
        case "checkpoint":
            return CheckpointReceiver(infos, device, weights.delta)
        case "shared_memory":
            return SharedMemoryReceiver(infos, device)
        case _:
            return BroadcastReceiver(id_, infos, device, weights.limit_s, spans=spans)


# --------------------------------------------------------------------------------------------- where it runs


def roles_of(config: Config, job: Job | None = None) -> Roles:
    """How many engines and trainers a job has; of one that is alone, all that are asked for."""
    place = config.place
    generate = 0 if job is Job.TRAINING else place.generate
    train = 0 if job is Job.GENERATION else place.train
    judges = int(bool(config.reward.model.folder) and config.reward.model.place == "own" and job is not Job.TRAINING)
    return Roles(place.placement, generate, train, config.engine.tensor_parallel_size, judges)


def devices_there(config: Config) -> int | None:
    """Devices of this machine; None where there is no such limit: processes on a CPU, or a cluster, which says it itself."""
    if config.place.runtime == "ray" or config.engine.url or device_of(config) == "cpu":
        return None
    import torch

    return torch.cuda.device_count()


def nodes_of(config: Config) -> Nodes:
    """How hosts lie on the nodes of a cluster: as asked, or what `auto` stands for."""
    if config.place.nodes != "auto":
        return config.place.nodes
    travels = handoff_of(config) if config.place.placement == "swap" else transport_of(config)
    return "one" if travels == "shared_memory" else "few"


def bundles_of(config: Config, hosts: Sequence[Host]) -> list[Bundle]:
    """What each host is given on a cluster."""
    gpus = int(device_of(config) == "cuda" if config.place.device == "auto" else config.place.device == "cuda")
    return [Bundle(1, host.devices * gpus) for host in hosts]


def job_of(config: Config) -> Job | None:
    """Which of two jobs a run is; None where there is one."""
    return Job.GENERATION if config.exchange.folder else None


def trains_here(config: Config, job: Job | None = None) -> bool:
    """Is the trainer in this very process? One of another stack never is: it may do with its process what it likes."""
    inline, place = config.place.runtime == "inline" and job is not Job.GENERATION, config.place
    return inline and place.train == 1 and place.placement != "swap" and not config.train.adapter
