"""Looks at everything that a config names, before anything loads."""

from __future__ import annotations

from collections.abc import Set
from importlib.util import find_spec
from pathlib import Path

from rollyard import hosts, worker
from rollyard.chaos.faults import KINDS, check_faults, read_faults
from rollyard.combinations import check_window
from rollyard.config import Config, TrainConfig
from rollyard.engine.capabilities import check_capabilities
from rollyard.engine.options import check_options
from rollyard.engine.vllm import arguments as vllm
from rollyard.episode import workers as episodes
from rollyard.episode.load import SHIPPED
from rollyard.episode.open import environment_of
from rollyard.errors import ConfigError
from rollyard.exchange.folder import Job, check_place
from rollyard.model.architecture import Architecture
from rollyard.place.layout import REWARD_MODEL, layout
from rollyard.prompts.open import check_prompts
from rollyard.protocols.rollouts import Environment
from rollyard.reward import workers as rewards
from rollyard.reward.classifier import check_folder as check_classifier
from rollyard.reward.function import Takes
from rollyard.reward.judge import check_parse, check_template
from rollyard.reward.open import Given, check_rewards, judges_of, reads_in_workers
from rollyard.train.external import load_adapter
from rollyard.watch.trackers.open import check_trackers
from rollyard.weights.shares import check_divides


def check(
    config: Config,
    architecture: Architecture,
    reward: Given | None = None,
    environment: Environment | None = None,
    *,
    caller: bool = False,
) -> None:
    """Look at all that the config names. Raises ConfigError; nothing is loaded, and nothing stays written.

    Args:
        architecture: of the policy.
        reward: what is given directly, instead of `reward.function`.
        environment: given directly, instead of `environment.name`.
        caller: who runs this trains by itself.
    """
    given = config.prompts.source == "given"
    if caller:
        _check_caller(config)
    elif given:
        problem = "prompts are submitted to a library or a service, and this is a run by itself"
        remedy = "use rollyard.Rollouts, or its resume, or prompts of a file or a task"
        raise ConfigError(problem, where="prompts.source", remedy=remedy)
    if config.exchange.folder:
        check_place(Path(config.exchange.folder))
    check_trackers(config.watch.sinks)
    check_capabilities(config)
    check_options(config)
    layout(worker.roles_of(config, worker.job_of(config)), worker.devices_there(config))
    columns = check_prompts(config)
    if not given:  # else each is looked at as it comes
        check_judged(config, reward, environment, columns)
    _check_models(config)
    check_window(config, architecture.window)
    _check_limit(config, worker.job_of(config))
    if config.run.inject:
        _check_faults(config, reward)
    if config.train.adapter:
        load_adapter(config.train.adapter)
    if config.place.apart and not config.engine.url:
        hosts.interpreter(config.engine)
    if config.engine.kind == "vllm":
        window = worker.window_of(config, architecture)
        cpu, rank = worker.device_of(config) == "cpu", config.lora.rank if config.weights.what == "lora" else 0
        vllm.check(config.engine, config.rollout.temperature, window, cpu=cpu, rank=rank)
        check_divides(architecture, config.engine.tensor_parallel_size)
    if config.weights.what == "lora" and find_spec("peft") is None:
        problem = "an adapter is trained with PEFT, which is not installed"
        raise ConfigError(problem, where="weights.what", remedy="pip install 'rollyard[lora]', or use full")


def _check_caller(config: Config) -> None:
    """What goes with a trainer that is code of somebody else in this very process."""
    place, train = config.place, config.train
    for wanted, where, problem, remedy in (
        (place.placement == "swap", "place.placement", "two halves trade their trainers, and the caller has one", "use another"),
        (place.train > 1, "place.train", f"the caller is one trainer, and {place.train} are asked for", "use 1"),
        (place.runtime == "ray", "place.runtime", "the caller trains in this process, not in an actor", "use inline"),
        (bool(train.adapter), "train.adapter", "the caller trains", "leave it out"),
        (train.kl > 0, "train.kl", "the caller's loss is its own, and so is what it stays near", "leave it out"),
        (config.advantage.kind == "gae", "advantage.kind", "a caller has no value head that is asked", "use such as grpo"),
        (config.weights.what == "lora", "weights.what", "what a caller publishes are whole tensors", "use full; merge adapters"),
        (bool(config.exchange.folder), "exchange.folder", "the caller trains, not another job", "leave it out"),
    ):
        if wanted:
            raise ConfigError(problem, where=where, remedy=remedy)


def check_judged(config: Config, reward: Given | None, environment: Environment | None, columns: Set[str]) -> None:
    """Raises ConfigError when who judges cannot judge prompts with these columns."""
    check_rewards(config, reward, columns, optional=environment_of(config, environment) is not None)
    if config.reward.judge.url:
        check_template(config.reward.judge.template, columns)


def _check_models(config: Config) -> None:
    """Those that judge."""
    model, judge = config.reward.model, config.reward.judge
    if model.folder:
        check_classifier(model)
        if model.place == "colocated" and not worker.trains_here(config, worker.job_of(config)):
            problem = "the trainer, whose device the reward model is to share, is in another process"
            remedy = "use own, or one trainer with runtime inline in this job"
            raise ConfigError(problem, where="reward.model.place", remedy=remedy)
    if judge.url:
        check_parse(judge.parse)


def _check_faults(config: Config, reward: Given | None) -> None:
    """Each is of a process that the run has, apart from its own."""
    job, own = worker.job_of(config), "the {} is in the run's own process: name the run"
    hosts = layout(worker.roles_of(config, job), worker.devices_there(config))
    here = worker.trains_here(config, job)
    away = [host for host in hosts if not (here and host.rank == 0) and not (host.engine and config.engine.url)]
    there = dict.fromkeys(KINDS, "")
    if not any(host.engine for host in away):
        there["engine"] = "engines are running servers, not the run's" if config.engine.url else own.format("engine")
    if all(host.rank is None for host in away):
        there["trainer"] = own.format("trainer") if here else "another job trains"
    if config.place.runtime != "ray":
        there["actor"] = "the run has no actors without place.runtime ray"
    if config.environment.name in ("", *SHIPPED) or not config.environment.workers:
        there["environment"] = "no environment plays in a process of its own"
    judges = judges_of(config, reward, optional=True)
    functions, reads = [judge for judge, _ in judges if not judge.direct], reads_in_workers(config)
    if all(host.name != REWARD_MODEL for host in away) and not functions and not reads:
        there["reward"] = "no reward is judged in a process of its own"
    there |= {name: "" for host in away for name in (host.name, host.engine) if name}
    pools = {rewards.ALONE: config.reward.workers if functions or reads else 0}
    pools[rewards.TOGETHER] = int(any(Takes.of(judge.function).asynchronous for judge in functions))
    if not there["environment"]:
        plays = config.environment.workers
        pools |= {episodes.SHARED: plays, episodes.ALONE: max(plays, episodes.SUSPECTS)}
    there |= {f"{name} {number}": "" for name, size in pools.items() for number in range(size)}
    engines = {"engine", *(name for host in away if host.engine for name in (host.name, host.engine))}
    path = Path(config.run.inject)
    check_faults(read_faults(path), there, engines, path)


def check_training(config: Config, architecture: Architecture) -> None:
    """The same for a job that only trains. Raises ConfigError."""
    if not config.exchange.folder:
        problem = "a training job shares a folder with the job that generates, and none is named"
        raise ConfigError(problem, where="exchange.folder", remedy="give --exchange.folder DIR to both, or use `rollyard run`")
    check_place(Path(config.exchange.folder))
    layout(worker.roles_of(config, Job.TRAINING), worker.devices_there(config))
    check_window(config, architecture.window)
    _check_limit(config, Job.TRAINING)


def _check_limit(config: Config, job: Job | None) -> None:
    """Only who asks another process for a step can give up waiting."""
    if config.train.limit_s != TrainConfig().limit_s and worker.trains_here(config, job):
        problem = "the trainer is in this process, and nobody could end its step"
        raise ConfigError(problem, where="train.limit_s", remedy="leave it out with one trainer and runtime inline")
