"""Builds the stations of one run, each in the process where the layout puts it.

A host is this process, a child of it, or an actor of a Ray cluster. Whatever it is, the run speaks to its engine and its
trainer through the same protocols.
"""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence, Set
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from rollyard import worker
from rollyard.caller import Caller
from rollyard.chaos.injector import Injector
from rollyard.config import Config
from rollyard.engine.remote import Bend
from rollyard.environment import only_devices
from rollyard.episode.open import open_player
from rollyard.errors import ConfigError
from rollyard.events import EngineId
from rollyard.exchange.folder import Job
from rollyard.exchange.generation import Generation
from rollyard.hosts import HostOrder, Launch, attach_engine, launch_engine, launch_host, remote_engine
from rollyard.judges import build_judges
from rollyard.model.architecture import Architecture
from rollyard.place.child import Children
from rollyard.place.inline import DeviceThread
from rollyard.place.layout import REWARD_MODEL, Host, layout
from rollyard.protocols.devices import Spans
from rollyard.protocols.processes import Process
from rollyard.protocols.rollouts import Engine, Environment, PromptSource, Scorer
from rollyard.protocols.training import Trainer
from rollyard.protocols.weights import Evidence, Handoff, Publisher, Receiver, TrainerEvidence
from rollyard.reward.open import Given, joined, open_functions
from rollyard.rollout.controller import Text
from rollyard.stations import Stations, Trainers
from rollyard.texts import visible
from rollyard.types import Prompt
from rollyard.watch.accounts import ENGINE, SCORER, TRAINER

if TYPE_CHECKING:
    from rollyard.place.ray import Cluster
    from rollyard.weights.ranks import Together

S = TypeVar("S")
EXCHANGE = "exchange"  # in the place of the host of a trainer that another job has


@dataclass(slots=True)
class Found:
    """What the hosts have, as they are built."""

    engines: dict[EngineId, Engine] = field(default_factory=dict)
    trainers: list[tuple[Host, Trainer]] = field(default_factory=list)
    publishers: list[tuple[Host, Publisher]] = field(default_factory=list)
    evidence: list[tuple[Host, Evidence]] = field(default_factory=list)
    handoffs: dict[EngineId, Handoff] = field(default_factory=dict)
    starts: list[Callable[[], Awaitable[None]]] = field(default_factory=list)
    spans: list[tuple[str, str, Spans]] = field(default_factory=list)


class Builder:
    """Builds the stations of one run.

    Args:
        config: of the run.
        folder: of the model that the run began with.
        scratch: the run's folder, for what travels by disk.
        device: for the trainer that is in this process.
        built: closes what was built, the last first; also what was built before something failed.
        job: which part of the stations, where two jobs share them.
        begin: what trainers begin with.
        injector: lets the processes be hit, where faults are to happen.
        caller: trains, in the place of our own trainer.
    """

    def __init__(
        self,
        config: Config,
        folder: Path,
        scratch: Path,
        device: DeviceThread,
        built: AsyncExitStack,
        job: Job | None = None,
        begin: worker.Beginning = worker.FROM_THE_START,
        injector: Injector | None = None,
        caller: Caller | None = None,
    ) -> None:
        self._config, self._folder, self._scratch, self._begin = config, folder, scratch, begin
        self._caller = caller
        self._device, self._built, self._job, self._injector = device, built, job, injector
        self._cluster: Cluster | None = None
        self._places: dict[str, int] = {}  # bundles of the cluster, by host
        self._left: dict[str, tuple[str, ...]] = {}  # where hosts were that left it
        self._found = Found()
        self._urls = {f"engine-{number}": url for number, url in enumerate(config.engine.url)}
        self._numbers: dict[str, range] = {}  # of GPUs, by host

    async def build(
        self,
        reward: Given | None,
        environment: Environment | None,
        exchange: Generation | None = None,
        done: Set[int] = frozenset(),
    ) -> Stations:
        """Raises ConfigError for what only loading shows, EngineLost and TrainerLost for a host that does not start.

        Args:
            environment: given directly, instead of `environment.name`.
            exchange: with a job that trains.
            done: ids of prompts that are not to be asked again.
        """
        from rollyard.model.tokenizer import Tokenizer

        config = self._config
        tokenizer = await self._device.run(Tokenizer, self._folder)
        tokenizer.check_stop(config.rollout.stop, "rollout.stop")
        source, held_out = await worker.build_prompts(config, tokenizer, done)
        workers = Children(at_once=True)
        self._built.push_async_callback(workers.close)
        playing, judging = (self._hit(workers.launch, kind) for kind in ("environment", "reward"))
        player = open_player(config, environment, tokenizer, self._folder, playing, self._scratch, self._built)
        functions = open_functions(config, reward, judging, self._scratch, optional=player is not None)
        for part in functions:
            self._built.push_async_callback(part.scorer.close)
        await self._host_all()
        scorer = joined(config, functions, await self._judges(judging))
        self._built.push_async_callback(scorer.close)
        if exchange is not None:
            self._record(exchange)
        return replace(self._joined(source, held_out, scorer, tokenizer.completion_text, exchange), player=player)

    async def trainers(self) -> Trainers:
        """Of a job that only trains. Raises ConfigError for what only loading shows, TrainerLost for a host that cannot start."""
        await self._host_all()
        found = self._found
        trainer = self._grouped([trainer for _, trainer in found.trainers])
        return Trainers(trainer, len(found.trainers), cast(TrainerEvidence, found.evidence[0][1]), tuple(found.starts))

    # ---------------------------------------------------------------------------------------------- the hosts

    async def _host_all(self) -> None:
        config = self._config
        roles = worker.roles_of(config, self._job)
        hosts = layout(roles, worker.devices_there(config))
        here = worker.trains_here(config, self._job)
        away = [host for host in hosts if not (here and host.rank == 0)]
        self._launches = await self._launchers(hosts, [host for host in away if host.name not in self._urls])
        self._built.push_async_callback(self._close_engines)
        for host in hosts:
            if host not in away:
                await self._build_here(host)
        names = [host.engine for host in away if host.rank is None and host.engine is not None]
        await _together([self._add_engine(name) for name in names])
        self._found.engines |= {name: self._found.engines.pop(name) for name in names}  # in their order
        others = [host for host in away if host.rank is not None]
        for host, channel in zip(others, await _together([self._launched(host) for host in others]), strict=True):
            self._reach(host, channel)

    async def _launchers(self, hosts: Sequence[Host], away: Sequence[Host]) -> dict[str, Launch]:
        """What starts each host that is not here, by name: on devices, or in a bundle, of its own."""
        config = self._config
        if config.place.runtime == "inline":
            children = Children()
            self._built.push_async_callback(children.close)
            given = _devices(hosts, first=worker.trains_here(config, self._job))
            self._numbers = dict(zip((host.name for host in hosts), given, strict=True))
            self._launch = children.launch
            return {host.name: self._hit_host(host, self._on_own(host.name)) for host in away}
        from rollyard.place.ray import Cluster

        place, nodes, start_s = config.place, worker.nodes_of(config), config.engine.start_s
        bundles, address = worker.bundles_of(config, away), place.ray_address
        cluster = Cluster(bundles, address=address, nodes=nodes, start_s=start_s, silent_s=place.silent_s)
        self._built.push_async_callback(cluster.close)
        await cluster.start()
        self._cluster, self._places = cluster, {host.name: number for number, host in enumerate(away)}
        return {host.name: self._hit_host(host, partial(cluster.launch, bundle=number)) for number, host in enumerate(away)}

    def _hit(self, launch: Launch, kind: str) -> Launch:
        """Starts processes that faults can hit, where there are any."""
        return launch if self._injector is None else self._injector.launching(launch, (kind,))

    def _hit_host(self, host: Host, launch: Launch) -> Launch:
        return (
            launch
            if self._injector is None
            else self._injector.launching(launch, kinds_of(host, self._config), host.name, host.engine or "")
        )

    def _nodes(self) -> dict[str, tuple[str, ...]]:
        """Where each host was on a cluster, the last one last."""
        if self._cluster is None:
            return {}
        found = self._cluster.nodes
        return self._left | {name: found[number] for name, number in self._places.items() if number in found}

    async def _build_here(self, host: Host) -> None:
        """In this process: the trainer's device is a thread of it."""
        config, device, found = self._config, self._device, self._found
        policy = await device.run(worker.load_policy, config, self._folder, None, self._begin.checkpoint)
        trainer: Trainer
        if self._caller is None:
            trainer = await worker.build_trainer(config, policy, device, self._begin)
        else:
            from rollyard.weights.given import GivenWeights

            self._caller.begin(GivenWeights(policy.model, policy.folder), device, self._begin.version, self._begin.life)
            trainer = self._caller
        self._built.push_async_callback(trainer.close)
        publisher = worker.build_publisher(config, policy, device, self._scratch)
        self._built.callback(publisher.close)
        found.trainers.append((host, trainer))
        found.spans.append((host.name, TRAINER, device.spans))
        found.publishers.append((host, publisher))
        found.evidence.append((host, worker.build_evidence(config, policy, device)))
        if host.engine is not None:
            receiver = cast(Receiver, publisher)  # it is both
            build = partial(worker.build_engine, config, host.engine, policy, device, receiver)
            found.engines[host.engine] = await device.run(build)  # there, since it may compile

    async def _judges(self, workers: Launch) -> dict[str, Scorer]:
        """Models that judge, by their names in reports."""
        judges = await build_judges(self._config, self._device, self._launches.get(REWARD_MODEL), workers, self._scratch)
        if judges.remote is not None:
            self._found.starts.append(judges.remote.start)
            self._found.spans.append((REWARD_MODEL, SCORER, judges.remote.spans))
        return judges.scorers

    async def _launched(self, host: Host) -> Process:
        """A process with a trainer."""
        begin = replace(self._begin, checkpoint=self._begin.checkpoint and self._begin.checkpoint.resolve())
        order = HostOrder(self._config, host, self._folder.resolve(), self._scratch.resolve(), begin)
        return await launch_host(order, self._launches[host.name])

    async def _add_engine(self, name: EngineId) -> None:
        """Known as soon as it is there, so that it is closed whatever becomes of the others."""
        self._found.engines[name] = await self._engine(name)

    def _record(self, exchange: Generation) -> None:
        """The folder in the place of a trainer: it has the weights, and what is known of them."""
        import torch

        from rollyard.weights.recorded import RecordedWeights

        shape, folder, dtype = Architecture.from_folder(self._folder), exchange.folder, getattr(torch, self._config.model.dtype)
        recorded = RecordedWeights(
            lambda version: folder.weights(version.step),
            lambda version: folder.write_offered(version.step),
            shape,
            dtype,
            self._device,
            self._scratch / "canary",
        )
        self._built.callback(recorded.close)
        self._found.publishers.append((Host(EXCHANGE, 0), recorded))
        self._found.evidence.append((Host(EXCHANGE, 0), recorded))

    async def _engine(self, name: EngineId, url: str = "") -> Engine:
        """One with a process of its own: a new one, or a server that is running. Raises ConfigError where there is no room."""
        config = self._config
        if url:
            self._urls[name] = url
        if name in self._urls:
            return attach_engine(config, name, self._urls[name], self._folder)
        if name not in self._launches:
            self._launches[name] = await self._one_more(name)
        return await launch_engine(config, name, self._folder, self._launches[name], self._bending(name))

    def _bending(self, name: EngineId) -> Bend | None:
        return None if self._injector is None else self._injector.bending(name)

    async def _one_more(self, name: str) -> Launch:
        """What starts an engine that was not there at the start. Raises ConfigError where there is no room."""
        config = self._config
        host = Host(name, config.engine.tensor_parallel_size, engine=name)
        if self._cluster is not None:
            (bundle,) = worker.bundles_of(config, [host])
            number = self._places[name] = await self._cluster.more(bundle)
            return self._hit_host(host, partial(self._cluster.launch, bundle=number))
        there, size = worker.devices_there(config), config.engine.tensor_parallel_size
        if there is not None:
            used = {number for numbers in self._numbers.values() for number in numbers}
            free = (range(first, first + size) for first in range(there - size + 1))
            found = next((numbers for numbers in free if used.isdisjoint(numbers)), None)
            if found is None:
                problem = f"an engine needs {size} devices, and {there - len(used)} of {there} are free"
                raise ConfigError(problem, where="place.generate", remedy="remove another engine first")
            self._numbers[name] = found
        return self._hit_host(host, self._on_own(name))

    def _on_own(self, name: str) -> Launch:
        """Starts a child that sees its own GPUs alone."""
        if worker.device_of(self._config) != "cuda":
            return self._launch
        return partial(_on_devices, self._launch, self._numbers[name])

    async def _release(self, name: EngineId) -> None:
        if self._cluster is not None and name in self._places:
            number = self._places.pop(name)
            self._left[name] = self._cluster.nodes.get(number, ())
            await self._cluster.less(number)
        self._numbers.pop(name, None)
        self._launches.pop(name, None)
        self._urls.pop(name, None)

    def _reach(self, host: Host, channel: Process) -> None:
        """The stations of another process."""
        from rollyard.train.remote import RemoteTrainer
        from rollyard.weights.remote import RemoteEvidence, RemoteHandoff, RemotePublisher

        config, found, limit = self._config, self._found, self._config.weights.limit_s
        start_s, step_s = config.engine.start_s, config.train.limit_s
        trainer = RemoteTrainer(host.name, channel, self._begin.version, start_s=start_s, step_s=step_s)
        found.trainers.append((host, trainer))
        found.starts.append(trainer.start)
        found.publishers.append((host, RemotePublisher(channel, limit)))
        found.evidence.append((host, RemoteEvidence(channel, limit)))
        if host.engine is None:
            self._built.push_async_callback(channel.close)
            found.spans.append((host.name, TRAINER, trainer.spans))
            channel.ready()
        else:
            bend = self._bending(host.engine)
            found.engines[host.engine] = remote_engine(config, host.engine, channel, alone=False, bend=bend)
            found.spans.append((host.name, TRAINER, found.engines[host.engine].spans))
            found.handoffs[host.engine] = RemoteHandoff(channel, limit)

    # ----------------------------------------------------------------------------------------- joined together

    def _joined(
        self, source: PromptSource, held_out: tuple[Prompt, ...], scorer: Scorer, text: Text, exchange: Generation | None
    ) -> Stations:
        config, found, shape = self._config, self._found, Architecture.from_folder(self._folder)
        swap = config.place.placement == "swap"
        trainers: dict[EngineId | None, Trainer] = {}
        if swap:
            trainers = {host.engine: trainer for host, trainer in found.trainers}
        elif exchange is None:
            trainers = {None: self._grouped([trainer for _, trainer in found.trainers])}
        return Stations(
            source=source,
            held_out=held_out,
            scorer=scorer,
            text=text,
            window=worker.window_of(config, shape),
            size=worker.size_of(config, shape),
            vocabulary=shape.vocab_size,
            engines=found.engines,
            trainers=trainers,
            ranks=1 if swap else len(found.trainers),
            publishers=self._serving(found.publishers),
            evidence=self._believed(),
            handoffs=found.handoffs if swap else {},
            launch=self._engine if config.place.apart else None,
            release=self._release,
            spans=(*((id_, ENGINE, engine.spans) for id_, engine in found.engines.items()), *found.spans),
            nodes=self._nodes,
            starts=(*found.starts, *(engine.start for engine in found.engines.values())),
            exchange=exchange,
        )

    def _grouped(self, trainers: list[Trainer]) -> Trainer:
        if len(trainers) == 1:
            return trainers[0]
        from rollyard.train.group import Member, TrainerGroup

        members, train = [cast(Member, trainer) for trainer in trainers], self._config.train
        group = TrainerGroup(members, self._config.weights.address, train.limit_s, shards=train.shard)
        if train.shard:
            self._share(group.together)
        return group

    def _share(self, together: Together) -> None:
        """What the trainers' sides do, all do at once: nobody has more than a part of the policy."""
        from rollyard.weights.ranks import RanksEvidence, RanksPublisher

        found = self._found
        first = found.publishers[0][0]
        found.publishers = [(first, RanksPublisher([publisher for _, publisher in found.publishers], together))]
        found.evidence = [(first, RanksEvidence([evidence for _, evidence in found.evidence], together))]

    def _serving(self, beside: list[tuple[Host, S]]) -> dict[EngineId, S]:
        """Who serves each engine: what is beside it, or the first trainer's."""
        own = {host.engine: each for host, each in beside}
        return {engine: own.get(engine, beside[0][1]) for engine in self._found.engines}

    def _believed(self) -> Evidence:
        from rollyard.weights.many import ManyEvidence

        by_engine = self._serving(self._found.evidence)
        return ManyEvidence(by_engine) if len(set(by_engine.values())) > 1 else next(iter(by_engine.values()))

    async def _close_engines(self) -> None:
        engines = self._found.engines.values()
        for met in await asyncio.gather(*(engine.close() for engine in engines), return_exceptions=True):
            if isinstance(met, BaseException):
                problem = visible(f"closing the run: {type(met).__name__}: {met}")
                warnings.warn(problem, RuntimeWarning, stacklevel=2)


async def _together(calls: Sequence[Coroutine[Any, Any, S]]) -> list[S]:
    """What all of them give, in their order. When one fails, the others are given up."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def kinds_of(host: Host, config: Config) -> tuple[str, ...]:
    """What faults call its process, besides its name."""
    found = ["reward"] if host.name == REWARD_MODEL else []
    found += ["trainer"] if host.rank is not None else []
    found += ["engine", host.engine] if host.engine is not None else []
    return (*found, *(["actor"] if config.place.runtime == "ray" else []))


def _devices(hosts: Sequence[Host], *, first: bool) -> list[range]:
    """Which GPUs each host is given, by number; `first`: the trainer that is in this process has number 0."""
    found, taken = [], int(first)
    for host in hosts:
        here = first and host.rank == 0
        found.append(range(1) if here else range(taken, taken + host.devices))
        taken += 0 if here else host.devices
    return found


def _on_devices(launch: Launch, numbers: range, *args: Any, environment: Mapping[str, str], **named: Any) -> Awaitable[Process]:
    """Start a process that sees these GPUs alone."""
    return launch(*args, environment={**environment, **only_devices(numbers)}, **named)
