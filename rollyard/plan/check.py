"""What the options of a scenario must satisfy together, and what of it this version could not run."""

from __future__ import annotations

from collections.abc import Callable

from rollyard import combinations
from rollyard.config import BUILT_IN, Config
from rollyard.engine.capabilities import check_capabilities
from rollyard.engine.options import check_options
from rollyard.engine.vllm import arguments as vllm
from rollyard.errors import ConfigError
from rollyard.plan.joins import joins_of
from rollyard.plan.models import architecture_of
from rollyard.plan.scenario import FailuresConfig, Scenario, WorkloadConfig
from rollyard.plan.trace import read_trace
from rollyard.warmup import architecture
from rollyard.weights.shares import check_divides
from rollyard.worker import window_of

ANY_TASK = "sort"  # stands for prompts that nobody names, while the rest is checked
DRAWN = ("mean_tokens", "sigma", "between", "prompt_tokens", "prompt_sigma")  # of lengths that no trace gives
COMPLETIONS = 20_000_000  # that a run may have: some 24 times as many as the preset `thousand`, and about an hour
ENGINES, DEVICES, MEMBERS = 16_384, 1_000_000, 16_384  # at a time, that train or are an engine's, of a group
ENDED = ("mean_tokens", "sigma", "between", "growth")  # of completions that end by themselves


def check_scenario(scenario: Scenario) -> None:
    """Raises ConfigError for the first that does not hold.

    All that the core goes by must satisfy what a run's options do. What only carries it out need not: that engines of this
    version cannot be run so is told by `obstacle`.
    """
    combinations.check_rules(scenario)
    _check_size(scenario)
    _check_modelled(scenario)
    _check_workload(scenario)
    _check_failures(scenario)


def obstacle(scenario: Scenario) -> str:
    """Why this version of Rollyard could not run it as it is; empty when it could."""
    return _refusal(scenario, _check_options)


def refusal(scenario: Scenario) -> str:
    """Why `rollyard run` would refuse it, before it loads anything; empty when it would not.

    Besides an `obstacle` it is what does not go with the model: all that can be told from its config.json alone.
    """
    return _refusal(scenario, _check_options, lambda config: _check_model(config, scenario))


def _refusal(scenario: Scenario, *checks: Callable[[Config], None]) -> str:
    config = Config(**{name: getattr(scenario, name) for name in Config.model_fields})
    if not (config.prompts.path or config.prompts.dataset or config.prompts.task):
        config = config.model_copy(update={"prompts": config.prompts.model_copy(update={"task": ANY_TASK})})
    try:
        for check in checks:
            check(config)
    except ConfigError as error:
        return f"{error.where}: {error.problem}"
    return ""


def _check_size(scenario: Scenario) -> None:
    """What would take hours, or more memory than there is, before it begins."""
    run, rollout, place = scenario.run, scenario.rollout, scenario.place
    batch = rollout.groups_per_step * rollout.group_size
    engines = {"separate": place.generate, "async": place.generate, "colocated": place.train}.get(place.placement, 2)
    evaluations = 2 + (run.steps // scenario.eval.every if scenario.eval.every else 0)
    held_out = scenario.prompts.held_out * scenario.eval.samples
    coming = sum(join.engines for join in joins_of(scenario) if join.engines > 0)
    many = "failures.joins" if coming else "place.generate" if place.apart else "place.train"
    sizes = (
        ("rollout.group_size", "completions of a prompt", rollout.group_size, MEMBERS),
        ("run.steps", "completions, of all steps and those under way,", batch * (run.steps + rollout.max_staleness), COMPLETIONS),
        (many, "engines", engines + coming, ENGINES),
        ("engine.tensor_parallel_size", "devices of an engine", scenario.engine.tensor_parallel_size, DEVICES),
        ("place.train", "devices that train", place.train, DEVICES),
        ("prompts.held_out", "held-out prompts", scenario.prompts.held_out, DEVICES),
        ("eval.every", "completions, of all evaluations,", held_out * evaluations, COMPLETIONS),
        ("engine.slots", "slots of an engine", scenario.engine.slots, DEVICES),
    )
    for where, what, size, most in sizes:
        if size > most:
            raise ConfigError(f"{size:,} {what} are more than are simulated", where=where, remedy=f"use at most {most:,}")


def _check_options(config: Config) -> None:
    combinations.check(config)
    check_capabilities(config)
    check_options(config)


def _check_model(config: Config, scenario: Scenario) -> None:
    """What goes with the shape of the policy; without one, with that of the scenario's task."""
    shape = architecture_of(config.model.path) if config.model.path else architecture(scenario)
    combinations.check_window(config, shape.window)
    if config.engine.kind == "vllm":
        window, rank = window_of(config, shape), config.lora.rank if config.weights.what == "lora" else 0
        vllm.check(config.engine, config.rollout.temperature, window, cpu=config.place.device == "cpu", rank=rank)
        check_divides(shape, config.engine.tensor_parallel_size)


def _check_modelled(scenario: Scenario) -> None:
    """Options of a run that a simulated one has no model of, and that there is a policy."""
    if not scenario.model.path and scenario.prompts.task not in BUILT_IN:
        remedy = "give --model with a folder, a config.json or a name such as qwen2.5-7b, or start from a preset"
        raise ConfigError("no model is named", where="model.path", remedy=remedy)
    if scenario.environment.name:
        problem = "a simulated prompt is answered once, and no environment plays"
        raise ConfigError(problem, where="environment.name", remedy="leave it out")
    if scenario.engine.batching != "continuous":
        problem = "a modelled engine refills a slot as soon as its sequence ends"
        raise ConfigError(problem, where="engine.batching", remedy="use continuous")
    if scenario.run.inject:
        problem = "faults happen to processes, and a simulated run has none"
        raise ConfigError(problem, where="run.inject", remedy="leave it out, and use such as --failures.node_hours 1000")


def _check_workload(scenario: Scenario) -> None:
    workload, cap = scenario.workload, scenario.rollout.max_tokens
    if workload.trace:
        _check_unheeded(workload, DRAWN, f"lengths are those of {workload.trace}")
        if scenario.rollout.ignore_eos:
            _check_unheeded(workload, ("growth",), f"with rollout.ignore_eos every completion has {cap} tokens")
        return
    if scenario.rollout.ignore_eos:
        _check_unheeded(workload, ENDED, f"with rollout.ignore_eos every completion has {cap} tokens")
    mean, where = workload.mean_tokens, "workload.mean_tokens"
    if 0 < mean < 1:
        raise ConfigError(f"{mean:g} tokens are less than one", where=where, remedy="use at least 1, or 0 for the usual")
    if mean > cap or (mean == cap > 1 and workload.sigma):
        problem = f"a mean of {mean:g} tokens is not to be had where completions are cut at {cap}"
        remedy = f"use less than {cap}, or more rollout.max_tokens"
        raise ConfigError(problem, where=where, remedy=remedy)


def check_window(scenario: Scenario, window: int, held: int) -> None:
    """Raises ConfigError when prompts leave no room for an answer, or when an engine may get a request that it can never finish.

    Args:
        window: tokens of prompt and completion at most.
        held: tokens that an engine has keys and values of at most.
    """
    workload, most = scenario.workload, scenario.rollout.max_tokens
    if window <= workload.prompt_tokens and not workload.trace:
        problem = f"prompts of {workload.prompt_tokens} tokens leave no room in a window of {window}"
        raise ConfigError(problem, where="workload.prompt_tokens", remedy=f"use less than {window}")
    longest = workload.prompt_tokens if not workload.prompt_sigma else window  # drawn ones have no end but the window
    if workload.trace:
        longest = max(read_trace(workload.trace).prompts)
    if held < (needed := min(window, longest + most)):
        problem = f"an engine has keys and values of {held:,} tokens, and a prompt with its completion may have {needed:,}"
        shorter = f", or --engine.window {held}, which cuts there" if held else ""
        raise ConfigError(problem, where="engine.pages", remedy=f"use 0, or more{shorter}")


def _check_unheeded(workload: WorkloadConfig, names: tuple[str, ...], why: str) -> None:
    usual = WorkloadConfig()
    for name in names:
        if getattr(workload, name) != getattr(usual, name):
            raise ConfigError(f"{why}, and this is not looked at", where=f"workload.{name}", remedy="leave it out")


def _check_failures(scenario: Scenario) -> None:
    failures, place = scenario.failures, scenario.place
    if failures.node_hours and not place.apart:
        problem = f"with placement {place.placement} a node that fails takes the trainer with it, and the run ends"
        raise ConfigError(problem, where="failures.node_hours", remedy="use placement separate or async, or leave it out")
    if failures.restart_s != FailuresConfig().restart_s and not (failures.node_hours or failures.joins):
        problem = "no engine is lost, and none comes"
        raise ConfigError(problem, where="failures.restart_s", remedy="add --failures.node_hours, or leave it out")
    joins_of(scenario)
