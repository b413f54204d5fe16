"""What options must satisfy together: the first combination that does not hold is told, before anything loads."""

from __future__ import annotations

import difflib
import json
from urllib.parse import urlsplit

from rollyard.config import (
    BUILT_IN,
    LEAST_TEMPERATURE,
    NAME_CHARACTERS,
    AdvantageConfig,
    Config,
    EngineConfig,
    ExchangeConfig,
    ForecastConfig,
    JudgeConfig,
    LoraConfig,
    PlaceConfig,
    PromptsConfig,
    RemoteConfig,
    RewardConfig,
    RewardModelConfig,
    RolloutConfig,
    WarmupConfig,
)
from rollyard.errors import ConfigError
from rollyard.objective import check_objective


def check(config: Config) -> None:
    """What the options together must satisfy. Raises ConfigError for the first that does not hold."""
    _check_prompts(config)
    check_rules(config)
    _check_place(config)
    _check_adapter(config)
    _check_lora(config)
    _check_exchange(config)


def check_rules(config: Config) -> None:
    """What holds whatever can be carried out: a simulated run's options satisfy this, and may be of what no engine does yet."""
    _check_name(config.run.name)
    _check_rollout(config.rollout)
    _check_advantage(config)
    _check_warmup(config.warmup)
    _check_staleness(config)
    _check_sizes(config)
    _check_engine(config.engine)
    check_objective(config)
    _check_models(config.reward)
    _check_forecast(config.forecast)


def _check_name(name: str) -> None:
    """It is that of one folder in runs/, and stands in reports."""
    where, remedy = "run.name", "give such as sort-2; --run.out says where else the folder is to be"
    if not name.strip() or name in (".", "..") or any(sign in "/\\" or not sign.isprintable() for sign in name):
        raise ConfigError(f"{name!r} is not the name of one folder", where=where, remedy=remedy)
    if len(name) > NAME_CHARACTERS:
        problem = f"a name of {len(name)} characters, where {NAME_CHARACTERS} are the most"
        raise ConfigError(problem, where=where, remedy=remedy)


def _check_forecast(forecast: ForecastConfig) -> None:
    if not forecast.step_s and forecast != ForecastConfig():
        problem = "a forecast is given, and not how long a step takes"
        raise ConfigError(problem, where="forecast.step_s", remedy="give its seconds, or leave the section out")


def _check_models(reward: RewardConfig) -> None:
    """Models that judge."""
    model, judge, remote = reward.model, reward.judge, reward.remote
    if not model.folder and model != RewardModelConfig():
        problem = "options of a reward model are given, and there is none"
        raise ConfigError(problem, where="reward.model.folder", remedy="name its folder, or leave them out")
    if model.place == "colocated" and model.restarts != RewardModelConfig().restarts:
        problem = "a reward model on the trainer's device has no process of its own"
        raise ConfigError(problem, where="reward.model.restarts", remedy="use --reward.model.place own, or leave it out")
    if not judge.url and judge != JudgeConfig():
        problem = "options of a judge are given, and there is none"
        raise ConfigError(problem, where="reward.judge.url", remedy="give such as http://127.0.0.1:8000/v1, or leave them out")
    if not remote.url and remote != RemoteConfig():
        problem = "options of a remote judge are given, and there is none"
        raise ConfigError(problem, where="reward.remote.url", remedy="give its address, or leave them out")
    if remote.url:
        check_address(remote.url, "reward.remote.url", "http://127.0.0.1:8000/score", "ROLLYARD_REWARD_KEY")
    for url in judge.url:
        check_address(url, "reward.judge.url", "http://127.0.0.1:8000/v1", "ROLLYARD_JUDGE_KEY")
    if judge.url and not judge.model:
        problem = "the judge's servers are named, and not the model that they are asked for"
        raise ConfigError(problem, where="reward.judge.model", remedy="give the name that the server lists under /v1/models")
    if 0 < judge.temperature < LEAST_TEMPERATURE:
        problem = f"a temperature of {judge.temperature:g} overflows float32"
        raise ConfigError(problem, where="reward.judge.temperature", remedy=f"use 0 or at least {LEAST_TEMPERATURE:g}")


def _check_given(config: Config) -> None:
    """Prompts that code submits."""
    prompts, usual = config.prompts, PromptsConfig()
    for name in ("path", "dataset", "subset", "split", "columns", "task", "options", "field", "held_out", "shuffle", "epochs"):
        if getattr(prompts, name) != getattr(usual, name):
            problem = "prompts are submitted by code, and this is of prompts from a file or a task"
            raise ConfigError(problem, where=f"prompts.{name}", remedy="leave it out, or leave out prompts.source")
    if not config.model.path:
        problem = "prompts that are submitted need a model"
        raise ConfigError(problem, where="model.path", remedy="give --model FOLDER, a Hugging Face causal LM")


def _check_prompts(config: Config) -> None:
    prompts = config.prompts
    if prompts.source == "given":
        _check_given(config)
        return
    if prompts.waiting != PromptsConfig().waiting:
        problem = "nobody submits prompts: they come from a file or a task"
        raise ConfigError(problem, where="prompts.waiting", remedy="leave it out, or use --prompts.source given")
    named = [name for name in ("path", "dataset", "task") if getattr(prompts, name)]
    if len(named) != 1:
        found = f"{' and '.join(f'prompts.{name}' for name in named)} are given" if named else "none is given"
        remedy = "give --prompts FILE.jsonl, or --prompts.task, or start from a preset such as --preset sort"
        problem = f"prompts come from a file, a data set or a task, but {found}"
        raise ConfigError(problem, where="prompts.path", remedy=remedy)
    _check_data(prompts)
    built_in, of_gym = prompts.task in BUILT_IN, prompts.task.startswith("reasoning_gym/")
    of_verifiers = prompts.task.startswith("verifiers/")
    if prompts.task and not (built_in or of_gym or of_verifiers):
        near = difflib.get_close_matches(prompts.task, BUILT_IN, n=1)
        remedy = f"did you mean {near[0]}?" if near else f"one of {', '.join(BUILT_IN)}, or reasoning_gym/NAME, or verifiers/NAME"
        raise ConfigError(f"there is no task {prompts.task!r}", where="prompts.task", remedy=remedy)
    if not built_in and not config.model.path:
        problem = f"{prompts.task} needs a model" if prompts.task else "prompts from a file need a model"
        raise ConfigError(problem, where="model.path", remedy="give --model FOLDER, a Hugging Face causal LM")
    _check_object(prompts.options, "prompts.options", '{"min_terms": 2, "max_terms": 3}')
    if prompts.options and not (of_gym or of_verifiers):
        problem = "options are for a task of reasoning-gym or verifiers, and the prompts are not from one"
        raise ConfigError(problem, where="prompts.options", remedy="leave them out, or use --prompts.task reasoning_gym/NAME")
    if of_verifiers != (config.environment.name == "verifiers"):
        problem = "tasks of verifiers are played by its environment, and that plays no others"
        remedy = "use both --prompts.task verifiers/NAME and --environment.name verifiers, or neither"
        raise ConfigError(problem, where="environment.name", remedy=remedy)


def _check_data(prompts: PromptsConfig) -> None:
    """Options of files and data sets."""
    for name in ("subset", "split", "columns"):
        if getattr(prompts, name) and prompts.task:
            problem = f"{name} is of a file or a data set, and the prompts are a task's"
            raise ConfigError(problem, where=f"prompts.{name}", remedy="leave it out")
    names = [each.partition("=")[0] for each in prompts.columns]
    if len(set(names)) < len(names) or not all(names):
        problem = f"{','.join(prompts.columns)!r} names a column twice, or one without a name"
        raise ConfigError(problem, where="prompts.columns", remedy="give such as answer=solution,level")


def _check_rollout(rollout: RolloutConfig) -> None:
    if 0 < rollout.temperature < LEAST_TEMPERATURE:
        problem = f"a temperature of {rollout.temperature:g} overflows float32"
        raise ConfigError(problem, where="rollout.temperature", remedy=f"use at least {LEAST_TEMPERATURE:g}")
    if rollout.temperature == 0:
        problem = "greedy completions of a prompt are all alike and have no importance ratio"
        raise ConfigError(problem, where="rollout.temperature", remedy="use a temperature above 0, usually 1")
    if 0 < rollout.max_live_groups < rollout.groups_per_step:
        problem = f"with at most {rollout.max_live_groups} live prompts a batch of {rollout.groups_per_step} never fills"
        raise ConfigError(problem, where="rollout.max_live_groups", remedy=f"use 0 or at least {rollout.groups_per_step}")


def _check_staleness(config: Config) -> None:
    rollout, placement = config.rollout, config.place.placement
    limit = rollout.max_staleness
    if limit and placement == "separate":
        problem = f"a run that trains and generates in turn has nothing that is {limit} versions old"
        raise ConfigError(problem, where="rollout.max_staleness", remedy="use 0 with placement separate, or placement async")
    if limit and placement == "colocated" and not rollout.oversample:
        problem = f"without prompts to spare every batch waits for all of its own, and nothing is {limit} versions old"
        raise ConfigError(problem, where="rollout.max_staleness", remedy="use 0, or add --rollout.oversample")
    if limit != 1 and placement == "swap":
        problem = f"one half generates the next batch while the other trains: a rollout lags by 1 version, not {limit}"
        raise ConfigError(problem, where="rollout.max_staleness", remedy="use 1 with placement swap")
    if rollout.moves and (placement == "swap" or (placement == "colocated" and config.place.train == 1)):
        problem = f"with placement {placement} one engine generates, and there is no other to move to"
        raise ConfigError(problem, where="rollout.moves", remedy="use 0, or placement separate or async")
    if rollout.on_stale == "drop" and (not limit or rollout.overtaking == "never"):
        problem = "no group is overtaken" if rollout.overtaking == "never" else "nothing is ever older than it may be"
        remedy = "use --rollout.overtaking allow" if limit else "add --rollout.max_staleness 1 or more"
        raise ConfigError(problem, where="rollout.on_stale", remedy=f"{remedy}, or leave it out")
    _check_oversample(rollout, placement)


def _check_oversample(rollout: RolloutConfig, placement: str) -> None:
    spare = rollout.oversample
    if not spare:
        return
    if placement == "swap":
        problem = "one half writes one batch, and no prompt beyond it"
        raise ConfigError(problem, where="rollout.oversample", remedy="use 0 with placement swap, or placement async")
    if not rollout.max_staleness:
        problem = f"{spare} prompts beyond a batch are trained at a later version, and nothing may be older than the newest"
        remedy = "use 0 with placement separate" if placement == "separate" else "add --rollout.max_staleness 1, or more"
        raise ConfigError(problem, where="rollout.oversample", remedy=remedy)
    if spare > rollout.max_staleness * rollout.groups_per_step:
        most = rollout.max_staleness * rollout.groups_per_step
        problem = f"a limit of {rollout.max_staleness} versions leaves room for {most} prompts beyond a batch, not {spare}"
        raise ConfigError(problem, where="rollout.oversample", remedy=f"use at most {most}")
    if rollout.max_live_groups:
        problem = f"a batch and {spare} more are under way with oversample, and max_live_groups is another such limit"
        raise ConfigError(problem, where="rollout.oversample", remedy="leave out rollout.max_live_groups")
    if rollout.overtaking == "never":
        problem = "prompts to spare are of use where those that are done first may be trained first"
        raise ConfigError(problem, where="rollout.oversample", remedy="use --rollout.overtaking allow")
    if rollout.on_stale == "drop":
        problem = "dropping the prompts that come late would leave out the long answers"
        raise ConfigError(problem, where="rollout.oversample", remedy="use --rollout.on_stale wait")


def _check_place(config: Config) -> None:
    place, kind = config.place, config.engine.kind
    if kind == "openai":
        problem = "an OpenAI-compatible server takes no new weights: it is for judges, teachers and evaluation"
        raise ConfigError(problem, where="engine.kind", remedy="train with embedded, vllm or sglang")
    _check_no_secret(place.ray_address, "place.ray_address", "give such as HOST:PORT, and the cluster's token by RAY_AUTH_TOKEN")
    if place.ray_address and place.runtime != "ray":
        problem = "a Ray cluster is named, and the run does not use Ray"
        raise ConfigError(problem, where="place.ray_address", remedy="add --place.runtime ray")
    if place.nodes != "auto" and place.runtime != "ray":
        problem = "how hosts lie on nodes is for a cluster, and the run does not use Ray"
        raise ConfigError(problem, where="place.nodes", remedy="add --place.runtime ray and --place.ray_address, or use auto")
    if place.nodes == "spread" and config.weights.transport == "shared_memory":
        problem = "weights that go through the memory of one node do not reach others"
        raise ConfigError(problem, where="place.nodes", remedy="use auto or one, or --weights.transport broadcast")
    if place.ray_address and place.device == "auto":
        problem = "which devices the nodes of a running cluster have is not known here"
        raise ConfigError(problem, where="place.device", remedy="say cpu or cuda with place.ray_address")
    if config.train.shard:
        _check_shard(place)
    if place.apart:
        _check_apart(config)
    else:
        _check_shared(config)
    _check_delta(config)


def _check_delta(config: Config) -> None:
    if not config.weights.delta:
        return
    if not config.place.apart:
        problem = f"with placement {config.place.placement} engines decode with the trainer's own parameters: nothing travels"
        raise ConfigError(problem, where="weights.delta", remedy="leave it out, or use placement separate or async")
    if config.engine.kind == "sglang":
        problem = "sglang reads whole folders by itself: nobody there could apply what changed"
        raise ConfigError(problem, where="weights.delta", remedy="leave it out, or use engine embedded or vllm")


def _check_shard(place: PlaceConfig) -> None:
    """Trainers have a part of the parameters each."""
    if not place.apart:
        problem = f"with placement {place.placement} engines decode with their trainer's parameters, which would be a part"
        raise ConfigError(problem, where="train.shard", remedy="use it with --place.placement separate or async")
    if place.train < 2:
        problem = "one trainer has nobody to share the policy with"
        raise ConfigError(problem, where="train.shard", remedy="use it with --place.train 2 or more")


def _check_sizes(config: Config) -> None:
    """How many generate and train, and which way weights go between them at all."""
    place, transport = config.place, config.weights.transport
    if not place.apart and place.generate > 1:
        problem = f"with placement {place.placement} every trainer has one engine, and {place.generate} more are asked for"
        raise ConfigError(
            problem, where="place.generate", remedy="leave it out and use place.train, or placement separate or async"
        )
    if place.placement == "swap" and place.train > 1:
        problem = f"each of two halves trains by itself, and {place.train} trainers are asked for"
        raise ConfigError(problem, where="place.train", remedy="use 1 with placement swap")
    if place.placement == "swap" and transport not in ("auto", "shared_memory", "broadcast"):
        problem = f"the training state does not travel by {transport}"
        raise ConfigError(problem, where="weights.transport", remedy="use shared_memory or broadcast with placement swap")
    if place.apart and transport == "in_place":
        problem = "an engine in its own process cannot decode with the trainer's own parameters"
        raise ConfigError(problem, where="weights.transport", remedy="use shared_memory, broadcast or checkpoint")


def _check_shared(config: Config) -> None:
    """Every device has an engine and a trainer with one set of parameters."""
    place, kind, transport = config.place, config.engine.kind, config.weights.transport
    if kind != "embedded":
        problem = f"engine {kind} has a process and memory of its own"
        raise ConfigError(problem, where="engine.kind", remedy="use --place.placement separate or async, or engine embedded")
    if place.placement == "colocated" and transport not in ("auto", "in_place"):
        problem = f"a colocated engine decodes with the trainer's own parameters: nothing travels by {transport}"
        raise ConfigError(problem, where="weights.transport", remedy="use in_place, or --place.placement separate")


def _check_apart(config: Config) -> None:
    """Engines have devices of their own."""
    place, kind = config.place, config.engine.kind
    if (kind == "sglang" or config.engine.url) and len(config.engine.url) != place.generate:
        problem = f"{place.generate} engines need as many running servers, and {len(config.engine.url)} are named"
        raise ConfigError(problem, where="engine.url", remedy="give such as --engine.url http://127.0.0.1:30000")


def _check_lora(config: Config) -> None:
    lora, engine = config.lora, config.engine
    if config.weights.what == "full":
        if lora != LoraConfig():
            problem = "options of an adapter are given, and all parameters are trained"
            raise ConfigError(problem, where="lora", remedy="add --weights.what lora, or leave them out")
        return
    if lora.dropout:
        problem = "with dropout the trainer's function is another one at every step, and no engine has it"
        raise ConfigError(problem, where="lora.dropout", remedy="use 0")
    if not lora.targets or len(set(lora.targets)) < len(lora.targets) or ("all-linear" in lora.targets and len(lora.targets) > 1):
        problem = f"{', '.join(lora.targets) or 'nothing'} names no set of linears"
        raise ConfigError(problem, where="lora.targets", remedy="use all-linear alone, or each linear once")
    if config.train.shard:
        problem = "ranks that share a policy by rows share all of it, and an adapter is around whole tensors"
        raise ConfigError(
            problem, where="train.shard", remedy="leave it out: each rank has the frozen parameters and the adapter"
        )
    if engine.tensor_parallel_size > 1:
        problem = f"an adapter was never brought to an engine of {engine.tensor_parallel_size} workers"
        raise ConfigError(problem, where="engine.tensor_parallel_size", remedy="use 1, or --weights.what full")
    if config.train.adapter:
        problem = "the trainer of another stack publishes all parameters"
        raise ConfigError(problem, where="weights.what", remedy="use full")
    if engine.kind == "sglang" or engine.url:
        problem = "a server that runs already is not given an adapter"
        raise ConfigError(problem, where="weights.what", remedy="use full, or engine embedded or vllm that is started by the run")


def _check_engine(engine: EngineConfig) -> None:
    _check_object(engine.extra, "engine.extra", '{"enforce_eager": true}')
    if engine.server and (engine.kind != "vllm" or engine.url):
        problem = "it runs already" if engine.url else f"engine {engine.kind} starts no server"
        raise ConfigError(problem, where="engine.server", remedy="leave it out, or use engine vllm without engine.url")
    if engine.url and engine.kind == "embedded":
        raise ConfigError("an embedded engine is no server", where="engine.url", remedy="leave it out, or name another engine")
    for url in engine.url:
        check_engine_address(url)
    if len({url.rstrip("/") for url in engine.url}) < len(engine.url):
        raise ConfigError("a server is named twice", where="engine.url", remedy="give each engine a server of its own")


def _check_object(text: str, where: str, example: str) -> None:
    try:
        extra = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"no JSON: {error}", where=where, remedy=f"give such as {example}") from None
    if not isinstance(extra, dict):
        raise ConfigError(f"{text} is no object", where=where, remedy=f"give such as {example}")


def _check_adapter(config: Config) -> None:
    """A trainer of another stack has a process of its own, and is one for the run whatever it is made of."""
    train, place = config.train, config.place
    _check_object(train.extra, "train.extra", '{"stage": 3}')
    if not train.adapter:
        if train.extra:
            raise ConfigError("there is no adapter to be given it", where="train.extra", remedy="name one, or leave it out")
        return
    if not place.apart:
        problem = f"with placement {place.placement} engines decode with the parameters of our own trainer"
        raise ConfigError(problem, where="train.adapter", remedy="use --place.placement separate or async")
    if config.weights.what != "full":
        problem = "what an external trainer publishes are whole tensors, not an adapter in this sense"
        raise ConfigError(problem, where="weights.what", remedy="use full")
    if place.train > 1:
        problem = f"an external trainer is one for the run, and {place.train} are asked for"
        raise ConfigError(problem, where="place.train", remedy="use 1; ranks of its own are the adapter's to start")


def check_engine_address(url: str) -> None:
    """See `check_address`."""
    check_address(url, "engine.url", "http://127.0.0.1:30000", "ROLLYARD_ENGINE_KEY")


def check_address(url: str, where: str, example: str, key: str) -> None:
    """Raises ConfigError for what is no host over HTTP with a port that there can be, and for one with more in it.

    Options are kept in the run's folder and shown in messages; a password, or a query, may be a secret.

    Args:
        key: the variable that a secret is given by.
    """
    _check_no_secret(url, where, f"give such as {example}, and the key by {key}")  # before anything of it is shown
    try:
        parts = urlsplit(url)
        fits = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and url.isprintable()
    except ValueError:
        fits = False
    if not fits:
        raise ConfigError(f"{url!r} is no address", where=where, remedy=f"give such as {example}")


def _check_no_secret(address: str, where: str, remedy: str) -> None:
    if any(sign in address for sign in "@?#"):
        problem = "an address has no user, no password and no query here: it is kept in the run's folder, and shown"
        raise ConfigError(problem, where=where, remedy=remedy)


def _check_warmup(warmup: WarmupConfig) -> None:
    if warmup.width % (2 * warmup.heads):
        problem = f"a width of {warmup.width} does not split into {warmup.heads} heads of an even size"
        raise ConfigError(problem, where="warmup.width", remedy=f"use a multiple of {2 * warmup.heads}")


def _check_advantage(config: Config) -> None:
    size, kind = config.rollout.group_size, config.advantage.kind
    if size < 2 and kind not in ("reinforce++", "gae"):
        problem = f"{kind} compares the completions of one prompt, and group_size is {size}"
        raise ConfigError(problem, where="rollout.group_size", remedy="use at least 2, usually 8")
    if size < 2 and config.rollout.filter == "flat":
        problem = "the one reward of a group is always equal to itself"
        raise ConfigError(problem, where="rollout.filter", remedy="use none, or --rollout.group_size 2 or more")
    if config.rollout.min_scored > size:
        problem = f"a group of {size} can never have {config.rollout.min_scored} scored members"
        raise ConfigError(problem, where="rollout.min_scored", remedy=f"use at most {size}")
    if config.rollout.filter == "none" and config.rollout.refills != RolloutConfig().refills:
        problem = "no prompt is asked in place of another"
        raise ConfigError(problem, where="rollout.refills", remedy="add --rollout.filter flat, or leave it out")
    _check_heeded(config.advantage)


def _check_heeded(advantage: AdvantageConfig) -> None:
    """Options that this kind does not look at."""
    kind, usual = advantage.kind, AdvantageConfig()
    if kind != "gae" and (advantage.gamma, advantage.lam) != (usual.gamma, usual.lam):
        where = "advantage.gamma" if advantage.gamma != usual.gamma else "advantage.lam"
        raise ConfigError(f"{kind} looks at no token by itself", where=where, remedy="add --advantage.kind gae, or leave it out")
    if kind in ("dr_grpo", "rloo") and (advantage.std, advantage.eps) != (usual.std, usual.eps):
        where = "advantage.std" if advantage.std != usual.std else "advantage.eps"
        problem = f"{kind} divides by no standard deviation"
        raise ConfigError(problem, where=where, remedy="use such as --advantage.kind grpo, or leave it out")
    if advantage.std == "none" and advantage.eps != usual.eps:
        problem = "there is no standard deviation that it could be added to"
        raise ConfigError(problem, where="advantage.eps", remedy="use --advantage.std sample or population, or leave it out")


def _check_exchange(config: Config) -> None:
    """Generation and training in two jobs."""
    place, weights, train = config.place, config.weights, config.train
    if not config.exchange.folder:
        if config.exchange != ExchangeConfig():
            problem = "there is no other job to wait for"
            raise ConfigError(problem, where="exchange.limit_s", remedy="name the folder that both share, or leave it out")
        return
    if not place.apart:
        problem = f"two jobs share no device, and with placement {place.placement} generation and training do"
        raise ConfigError(problem, where="place.placement", remedy="use separate or async with exchange.folder")
    if weights.transport not in ("auto", "checkpoint"):
        problem = f"two jobs share a folder alone: weights do not travel by {weights.transport}"
        raise ConfigError(problem, where="weights.transport", remedy="leave it out with exchange.folder, or use checkpoint")
    if weights.delta:
        problem = "versions that two jobs share are whole folders"
        raise ConfigError(problem, where="weights.delta", remedy="leave it out with exchange.folder")
    if weights.what != "full":
        problem = "two jobs share whole versions so far, no adapters"
        raise ConfigError(problem, where="weights.what", remedy="use full with exchange.folder")
    if train.shard or train.adapter:
        where = "train.shard" if train.shard else "train.adapter"
        problem = "what is known of a version is written by one trainer of ours that has all of it"
        raise ConfigError(problem, where=where, remedy="leave it out with exchange.folder")
    if config.engine.tensor_parallel_size > 1:
        problem = "versions that two jobs share are for engines that are one worker each so far"
        raise ConfigError(problem, where="engine.tensor_parallel_size", remedy="use 1 with exchange.folder")


def check_window(config: Config, limit: int) -> None:
    """Raises ConfigError when what is asked does not fit the model's window, of `limit` tokens."""
    window, max_tokens = config.engine.window or limit, config.rollout.max_tokens
    if window > limit:
        problem = f"{window} tokens are more than the model's window of {limit}"
        raise ConfigError(problem, where="engine.window", remedy=f"use at most {limit}, or 0 for the model's own")
    if max_tokens >= window:
        problem = f"{max_tokens} tokens leave no room for a prompt in a window of {window}"
        raise ConfigError(problem, where="rollout.max_tokens", remedy=f"use less than {window}")
    if config.batch.token_budget < window:
        problem = f"a prompt with its completion may have {window} tokens, more than a micro-batch of {config.batch.token_budget}"
        raise ConfigError(problem, where="batch.token_budget", remedy=f"use at least {window}, or a smaller engine.window")
    _check_pages(config.engine, window)


def _check_pages(engine: EngineConfig, window: int) -> None:
    if engine.page_tokens > window:
        problem = f"a page of {engine.page_tokens} tokens is longer than the window of {window}"
        raise ConfigError(problem, where="engine.page_tokens", remedy=f"use at most {window}, usually 16")
    needed = -(-window // engine.page_tokens) + 1  # one more: where a completion leaves its prompt, a page is copied
    if 0 < engine.pages < needed:
        problem = f"{engine.pages} pages of {engine.page_tokens} tokens do not hold one sequence of {window}"
        raise ConfigError(problem, where="engine.pages", remedy=f"use 0 or at least {needed}")
