"""One frozen tree of options, and what they must satisfy together. Validators reject; they never rewrite."""

from __future__ import annotations

import json
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field

from rollyard.errors import ConfigError

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
Target = Literal["all-linear", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

Count = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(gt=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
Decay = Annotated[float, Field(ge=0, lt=1)]
NonNegative = Annotated[float, Field(ge=0)]

LEAST_TEMPERATURE = 1e-3  # logits divided by less are no longer exact in float32


class Section(BaseModel):
    """A branch of the tree: frozen, no unknown names, finite numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class RunConfig(Section):
    name: str = Field("run", description="name of the run; its folder is runs/NAME unless --run.out says otherwise")
    out: str = Field("", description="folder of the run (empty: runs/NAME)")
    overwrite: bool = Field(False, description="replace the folder of an earlier run")
    steps: Count = Field(100, description="optimizer steps")
    seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(0, description="seed of everything random in the run")


class ModelConfig(Section):
    path: str = Field("", description="folder of a Hugging Face causal LM: llama, qwen2 or qwen3 (empty: the task's base policy)")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="number format of the parameters")


class WarmupConfig(Section):
    """The base policy of a built-in task: a tiny model trained on solutions for a short while, then cached."""

    steps: Count = Field(60, description="supervised steps")
    batch: Count = Field(64, description="problems a supervised step")
    lr: Positive = Field(2e-3, description="learning rate of the supervised steps")
    seed: Natural = Field(0, description="seed of the base policy")
    layers: Count = Field(2, description="transformer layers")
    width: Count = Field(128, description="hidden size")
    feed_forward: Count = Field(384, description="feed-forward size")
    heads: Count = Field(4, description="attention heads")


class PromptsConfig(Section):
    path: str = Field("", description="JSON Lines file of prompts: a text or a list of chat messages in each line")
    field: str = Field("prompt", description="name of the field that holds the prompt; the others go to the reward by name")
    task: Literal["", "sort", "reverse", "arithmetic"] = Field("", description="a built-in task instead of a file")
    held_out: Natural = Field(0, description="prompts set aside for evaluation and never trained on")
    shuffle: bool = Field(True, description="new order in every epoch, from the run's seed")
    epochs: Natural = Field(0, description="times each prompt is used (0: as often as the steps need)")
    chat: bool = Field(True, description="use the tokenizer's chat template where it has one; texts become a user message")


class RolloutConfig(Section):
    group_size: Count = Field(8, description="completions of each prompt (K)")
    groups_per_step: Count = Field(32, description="prompts of one optimizer step (B)")
    max_tokens: Count = Field(64, description="tokens of a completion at most")
    temperature: NonNegative = Field(1.0, description="sampling temperature")
    top_p: Share = Field(1.0, description="keep the likeliest tokens that hold this share of probability")
    top_k: Natural = Field(0, description="keep this many of the likeliest tokens (0: all)")
    ignore_eos: bool = Field(False, description="go on to max_tokens whatever is drawn (to compare speeds)")
    stop: tuple[str, ...] = Field((), description="texts that end a completion (separate several with commas)")
    max_staleness: Natural = Field(0, description="versions a rollout may lag behind the one it trains (S)")
    max_live_groups: Natural = Field(0, description="cap on prompts under way (0: the staleness rule alone)")
    oversample: Natural = Field(
        0,
        description="prompts under way beyond those of one batch, within the staleness limit: a batch is made of those that "
        "are done first, the others are trained later (0: none with colocated, as many as the limit allows with async)",
    )
    order: Literal["admission", "longest"] = Field(
        "admission",
        description="who begins first of what is due together: in order, or what will be longest as far as is known",
    )
    moves: Natural = Field(
        0, description="times a running completion may go from a crowded engine to an idle one, which reads it again"
    )
    overtaking: Literal["allow", "never"] = Field("allow", description="may finished younger groups be trained before older ones")
    on_stale: Literal["wait", "drop"] = Field("wait", description="when overtaking would make an older group too stale")
    retries: Natural = Field(2, description="times a failed request is tried again, keeping its tokens")
    min_scored: Count = Field(2, description="scored members a group needs to be trained on")
    give_up_after: Count = Field(100, description="prompts dropped in a row after which the run stops as failed")


class RewardConfig(Section):
    function: str = Field("", description="FILE.py:function or package.module:function (empty: the task's own)")
    time_limit_s: Positive = Field(10.0, description="seconds one judgement may take; beyond it there is no verdict")
    concurrency: Count = Field(8, description="judgements at a time")


class AdvantageConfig(Section):
    kind: Literal["grpo", "dr_grpo", "rloo"] = Field("grpo", description="how rewards of a group become advantages")
    std: Literal["sample", "population", "none"] = Field("sample", description="which standard deviation grpo divides by")
    eps: Positive = Field(1e-4, description="added to the standard deviation")


class BatchConfig(Section):
    token_budget: Count = Field(
        8192, description="tokens of one micro-batch at most, a shared prompt counted once (GPUs repeat it in attention)"
    )


class TrainConfig(Section):
    lr: Positive = Field(1e-6, description="learning rate of AdamW after warm-up")
    betas: tuple[Decay, Decay] = Field((0.9, 0.99), description="AdamW's decay rates")
    eps: Positive = Field(1e-8, description="AdamW's epsilon")
    weight_decay: NonNegative = Field(0.0, description="AdamW's weight decay")
    warmup_steps: Natural = Field(0, description="steps over which the learning rate rises linearly")
    clip_low: Share = Field(0.2, description="the ratio is clipped below 1 minus this")
    clip_high: Positive = Field(0.2, description="the ratio is clipped above 1 plus this")
    max_grad_norm: Positive = Field(1.0, description="gradients are scaled down to this norm")
    shard: bool = Field(False, description="the trainers of place.train share one copy of the policy and its moments (FSDP2)")
    adapter: str = Field("", description="trainer of another stack: FILE.py:function or package.module:function (empty: our own)")
    extra: str = Field("", description="what the adapter's function is given besides, a JSON object")
    limit_s: Positive = Field(3600.0, description="seconds a step may take where the trainer is another process")
    precision: Literal["model", "bfloat16"] = Field(
        "model", description="number format of matrix products (bfloat16: autocast, the parameters keep their own format)"
    )
    aggregation: Literal["token", "sequence", "fixed"] = Field(
        "token", description="mean over tokens; mean over sequences of their means; or sum over sequences x max_tokens"
    )


class LoraConfig(Section):
    """Of the adapter that is trained with `weights.what = "lora"`."""

    rank: Count = Field(16, description="rank of an adapter")
    alpha: Count = Field(32, description="an adapter's effect is multiplied by alpha / rank")
    dropout: NonNegative = Field(0.0, description="share of an adapter's inputs left out (0 only: engines leave none out)")
    targets: tuple[Literal["all-linear", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"], ...] = (
        Field(
            ("all-linear",),
            description="linears that get an adapter: all-linear, or some of q_proj, k_proj, v_proj, o_proj, "
            "gate_proj, up_proj, down_proj",
        )
    )

    @property
    def modules(self) -> tuple[str, ...]:
        """Names of the linears."""
        return LINEARS if "all-linear" in self.targets else self.targets

    @property
    def scaling(self) -> float:
        """What B A is multiplied by."""
        return self.alpha / self.rank


class WeightsConfig(Section):
    what: Literal["full", "lora"] = Field("full", description="what is trained and travels: all parameters, or a LoRA adapter")
    transport: Literal["auto", "in_place", "checkpoint", "shared_memory", "broadcast"] = Field(
        "auto",
        description="how new weights reach the engines (auto: in_place where they share them, else shared_memory; "
        "broadcast with place.nodes spread)",
    )
    rollover: Literal["auto", "drain", "abort", "keep"] = Field(
        "auto",
        description="requests in flight when weights change: drain, abort or keep "
        "(auto: keep under async where the engine can, else drain)",
    )
    limit_s: Positive = Field(300.0, description="seconds that bringing a version to all engines may take")
    retries: Natural = Field(1, description="times a version is offered again after it did not reach every engine")
    delta: bool = Field(False, description="only numbers that changed travel to engines that have the version before")
    address: str = Field(
        "",
        description="of the trainer's machine, as engines and other trainers reach it (empty: the cluster's own, or loopback)",
    )
    canary: bool = Field(True, description="prove at the start that every tensor reaches every engine")
    probe: bool = Field(True, description="compare a few logprobs of engine and trainer after each load")


class EngineConfig(Section):
    kind: Literal["embedded", "vllm", "sglang", "openai"] = Field(
        "embedded", description="inference engine (openai: for judges, teachers and evaluation, not for training)"
    )
    slots: Count = Field(64, description="sequences decoded at once (vLLM's max_num_seqs)")
    page_tokens: Count = Field(16, description="tokens of one page of the key-value cache")
    pages: Natural = Field(0, description="pages of the key-value cache (0: enough for every slot at its longest)")
    step_tokens: Count = Field(2048, description="tokens of one engine step at most, decode and prefill together")
    prefill_tokens: Count = Field(
        256, description="prompt tokens of one step at most while sequences decode (embedded; from step_tokens on: no such limit)"
    )
    window: Natural = Field(0, description="tokens of prompt and completion at most (vLLM's max_model_len; 0: the model's own)")
    dtype: Literal["model", "float32", "bfloat16"] = Field("model", description="number format of its weights and cache")
    batching: Literal["continuous", "static"] = Field(
        "continuous", description="refill a slot when its sequence ends, or only when all have ended (to compare)"
    )
    share_prompts: bool = Field(True, description="compute a prompt once for all its completions")
    kernels: Literal["auto", "native", "plain"] = Field(
        "auto", description="own CPU kernels, compiled at first use, or plain torch (auto: own where a compiler is found)"
    )
    python: str = Field("", description="interpreter of an engine in its own process (empty: this one; vllm: of make vllm)")
    start_s: Positive = Field(600.0, description="seconds an engine in its own process may take to be ready")
    tensor_parallel_size: Count = Field(1, description="devices of one vLLM engine")
    gpu_memory_utilization: Share = Field(0.9, description="share of a GPU's memory that vLLM takes")
    extra: str = Field("", description="further arguments of vLLM's engine, a JSON object")
    server: bool = Field(False, description="drive vLLM as a server that is started here, not in a worker process")
    url: tuple[str, ...] = Field((), description="addresses of running SGLang or vLLM servers, one for each engine")


class PlaceConfig(Section):
    placement: Literal["colocated", "separate", "async", "swap"] = Field(
        "colocated",
        description="who generates and who trains when: the same devices in turn; each its own, in turn or at once; "
        "or two halves that trade roles",
    )
    generate: Count = Field(1, description="engines, with placement separate or async")
    train: Count = Field(1, description="data-parallel trainers; with placement colocated each has an engine too")
    restarts: Natural = Field(1, description="times each engine in its own process is started again after it was lost")
    runtime: Literal["inline", "ray"] = Field(
        "inline", description="where the stations run: this process and its children, or actors of a Ray cluster"
    )
    ray_address: str = Field("", description="of a running Ray cluster, such as auto or HOST:PORT (empty: one of its own)")
    nodes: Literal["auto", "one", "spread"] = Field(
        "auto",
        description="Ray nodes that hosts lie on: all on one, each on its own, or (auto) as few as they fit on, and one where "
        "weights go through its memory",
    )
    silent_s: Positive = Field(30.0, description="seconds without a sign of life after which an actor counts as lost")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="what computes (auto: a GPU where torch sees one)")
    threads: Natural = Field(0, description="CPU threads of torch (0: chosen by model size)")

    @property
    def apart(self) -> bool:
        """Engines have processes and weights of their own."""
        return self.placement in ("separate", "async")


class EvalConfig(Section):
    every: Natural = Field(0, description="also evaluate every n steps (0: first and last only)")
    samples: Count = Field(1, description="completions of each held-out prompt")


class CheckpointConfig(Section):
    every: Natural = Field(0, description="write a checkpoint every n steps besides the last (0: the last only)")
    keep: Count = Field(2, description="newest checkpoints kept")


class WatchConfig(Section):
    view: Literal["auto", "live", "plain", "quiet"] = Field(
        "auto", description="what the terminal shows (auto: live on a terminal, else plain)"
    )


class Config(Section):
    """Everything a run depends on."""

    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    warmup: WarmupConfig = WarmupConfig()
    prompts: PromptsConfig = PromptsConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    batch: BatchConfig = BatchConfig()
    train: TrainConfig = TrainConfig()
    lora: LoraConfig = LoraConfig()
    weights: WeightsConfig = WeightsConfig()
    engine: EngineConfig = EngineConfig()
    place: PlaceConfig = PlaceConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    watch: WatchConfig = WatchConfig()


# ---------------------------------------------------------------------------------------------- checking


def check(config: Config) -> None:
    """What the options together must satisfy. Raises ConfigError for the first that does not hold."""
    _check_prompts(config)
    _check_rollout(config.rollout)
    _check_group_size(config)
    _check_warmup(config.warmup)
    _check_staleness(config)
    _check_place(config)
    _check_engine(config.engine)
    _check_adapter(config)
    _check_lora(config)


def _check_prompts(config: Config) -> None:
    prompts = config.prompts
    if bool(prompts.path) == bool(prompts.task):
        found = "both are given" if prompts.path else "neither is given"
        remedy = "give --prompts FILE.jsonl, or --prompts.task, or start from a preset such as --preset sort"
        raise ConfigError(f"prompts come from a file or from a built-in task, but {found}", where="prompts.path", remedy=remedy)
    if prompts.path and not config.model.path:
        remedy = "give --model FOLDER, a Hugging Face causal LM"
        raise ConfigError("prompts from a file need a model", where="model.path", remedy=remedy)


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
    if place.ray_address and place.runtime != "ray":
        problem = "a Ray cluster is named, and the run does not use Ray"
        raise ConfigError(problem, where="place.ray_address", remedy="add --place.runtime ray")
    if place.nodes == "spread" and place.runtime != "ray":
        problem = "hosts are to lie on several nodes, and the run does not use Ray"
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


def _check_shared(config: Config) -> None:
    """Every device has an engine and a trainer with one set of parameters."""
    place, kind, transport = config.place, config.engine.kind, config.weights.transport
    if kind != "embedded":
        problem = f"engine {kind} has a process and memory of its own"
        raise ConfigError(problem, where="engine.kind", remedy="use --place.placement separate or async, or engine embedded")
    if place.generate > 1:
        problem = f"with placement {place.placement} every trainer has one engine, and {place.generate} more are asked for"
        raise ConfigError(
            problem, where="place.generate", remedy="leave it out and use place.train, or placement separate or async"
        )
    if place.placement == "colocated" and transport not in ("auto", "in_place"):
        problem = f"a colocated engine decodes with the trainer's own parameters: nothing travels by {transport}"
        raise ConfigError(problem, where="weights.transport", remedy="use in_place, or --place.placement separate")
    if place.placement == "swap" and place.train > 1:
        problem = f"each of two halves trains by itself, and {place.train} trainers are asked for"
        raise ConfigError(problem, where="place.train", remedy="use 1 with placement swap")
    if place.placement == "swap" and transport not in ("auto", "shared_memory", "broadcast"):
        problem = f"the training state does not travel by {transport}"
        raise ConfigError(problem, where="weights.transport", remedy="use shared_memory or broadcast with placement swap")


def _check_apart(config: Config) -> None:
    """Engines have devices of their own."""
    place, kind, transport = config.place, config.engine.kind, config.weights.transport
    if (kind == "sglang" or config.engine.url) and len(config.engine.url) != place.generate:
        problem = f"{place.generate} engines need as many running servers, and {len(config.engine.url)} are named"
        raise ConfigError(problem, where="engine.url", remedy="give such as --engine.url http://127.0.0.1:30000")
    if transport == "in_place":
        problem = "an engine in its own process cannot decode with the trainer's own parameters"
        raise ConfigError(problem, where="weights.transport", remedy="use shared_memory, broadcast or checkpoint")


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
        if not is_address(url):
            raise ConfigError(f"{url!r} is no address", where="engine.url", remedy="give such as http://127.0.0.1:30000")
    if len({url.rstrip("/") for url in engine.url}) < len(engine.url):
        raise ConfigError("a server is named twice", where="engine.url", remedy="give each engine a server of its own")


def _check_object(text: str, where: str, example: str) -> None:
    try:
        extra = json.loads(text or "{}")
    except ValueError as error:
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
    if place.train > 1:
        problem = f"an external trainer is one for the run, and {place.train} are asked for"
        raise ConfigError(problem, where="place.train", remedy="use 1; ranks of its own are the adapter's to start")


def is_address(url: str) -> bool:
    """A host over HTTP, with a port that there can be."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def _check_warmup(warmup: WarmupConfig) -> None:
    if warmup.width % (2 * warmup.heads):
        problem = f"a width of {warmup.width} does not split into {warmup.heads} heads of an even size"
        raise ConfigError(problem, where="warmup.width", remedy=f"use a multiple of {2 * warmup.heads}")


def _check_group_size(config: Config) -> None:
    size, kind = config.rollout.group_size, config.advantage.kind
    if size < 2:
        problem = f"{kind} compares the completions of one prompt, and group_size is {size}"
        raise ConfigError(problem, where="rollout.group_size", remedy="use at least 2, usually 8")
    if config.rollout.min_scored > size:
        problem = f"a group of {size} can never have {config.rollout.min_scored} scored members"
        raise ConfigError(problem, where="rollout.min_scored", remedy=f"use at most {size}")
