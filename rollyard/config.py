"""One frozen tree of options. Validators reject; they never rewrite."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from rollyard.texts import Host
from rollyard.types import LARGEST

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

Count = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(gt=0, le=1)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
Decay = Annotated[float, Field(ge=0, lt=1)]
NonNegative = Annotated[float, Field(ge=0)]
Words = Annotated[str, Field(min_length=1)]

BUILT_IN = ("sort", "reverse", "arithmetic", "calculator")  # tasks with a base policy of their own
NAME_CHARACTERS = 100  # of a run's name: file systems have an end, and what is put around it needs some
LEAST_TEMPERATURE = 1e-3  # logits divided by less are no longer exact in float32


def _held(number: float) -> float:
    if abs(number) > LARGEST:
        raise ValueError("input should be a number that float32 holds, up to 3.4e38")
    return number


def _each_once(names: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(names)) < len(names):
        raise ValueError("one of them is named twice")
    return names


Factor = Annotated[float, AfterValidator(_held)]
Tracker = Literal["tensorboard", "wandb", "mlflow", "opentelemetry"]


class Section(BaseModel):
    """A branch of the tree: frozen, no unknown names, finite numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class RunConfig(Section):
    name: str = Field("run", description="name of the run; its folder is runs/NAME unless --run.out says otherwise")
    out: str = Field("", description="folder of the run (empty: runs/NAME)")
    overwrite: bool = Field(False, description="replace the folder of an earlier run")
    steps: Count = Field(100, description="batches to train on; each makes a new version of the policy")
    seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(0, description="seed of everything random in the run")
    inject: str = Field("", description="TOML file of faults that are to happen to the run's processes (empty: none)")


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
    source: Literal["auto", "given"] = Field(
        "auto", description="where prompts come from: a file or a task, as named; or (given) code that submits them to `Rollouts`"
    )
    path: str = Field(
        "",
        description="a file of prompts, JSON Lines or Parquet, or a folder with a data set of Hugging Face datasets: in each row "
        "a text or a list of chat messages",
    )
    dataset: str = Field("", description="a data set of the Hugging Face hub, such as openai/gsm8k (with HF_HUB_OFFLINE=0)")
    subset: str = Field("", description="which subset of such a data set, where it has several")
    split: str = Field("", description="which split of it, where it has several, such as train")
    field: str = Field("prompt", description="name of the field that holds the prompt; the others go to the reward by name")
    columns: tuple[Words, ...] = Field(
        (),
        description="fields that go to the reward, NAME or NEW_NAME=FIELD, separated with commas (empty: all, by their names)",
    )
    task: str = Field(
        "",
        description="a task instead of a file: sort, reverse, arithmetic or calculator, or reasoning_gym/NAME or verifiers/NAME "
        "for one of those packages'",
    )
    options: str = Field("", description="options of reasoning-gym's dataset or of verifiers' environment, a JSON object")
    held_out: Natural = Field(0, description="prompts set aside for evaluation and never trained on")
    shuffle: bool = Field(True, description="new order in every epoch, from the run's seed")
    epochs: Natural = Field(0, description="times each prompt is used (0: as often as the steps need)")
    waiting: Count = Field(
        1024, description="submitted prompts that may wait to be asked, with source given; whoever submits more waits too"
    )
    chat: bool = Field(True, description="use the tokenizer's chat template where it has one; texts become a user message")
    system: str = Field("", description="system message before each such user message (empty: none)")


class RolloutConfig(Section):
    group_size: Count = Field(8, description="completions of each prompt (K)")
    groups_per_step: Count = Field(32, description="prompts of one optimizer step (B)")
    max_tokens: Count = Field(64, description="tokens of a completion at most")
    temperature: NonNegative = Field(1.0, description="sampling temperature")
    top_p: Share = Field(1.0, description="keep the likeliest tokens that hold this share of probability")
    top_k: Natural = Field(0, description="keep this many of the likeliest tokens (0: all)")
    ignore_eos: bool = Field(False, description="go on to max_tokens whatever is drawn (to compare speeds)")
    stop: tuple[Words, ...] = Field((), description="texts that end a completion (separate several with commas)")
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
    filter: Literal["none", "flat"] = Field(
        "none",
        description="dynamic sampling: a prompt whose completions all have the same reward is dropped (flat), and another is "
        "asked in its place",
    )
    refills: Count = Field(
        128, description="prompts dropped so for each batch at most; beyond it they are trained on as they are"
    )


class EnvironmentConfig(Section):
    """Episodes of several turns instead of one answer to each prompt."""

    name: str = Field(
        "",
        description="who plays with the policy: calculator, verifiers, FILE.py:NAME or package.module:NAME of a class or "
        "coroutine function (empty: nobody, each prompt is answered once)",
    )
    turns: Count = Field(8, description="answers of the policy in an episode at most, of rollout.max_tokens each")
    limit_s: Positive = Field(30.0, description="seconds it may work between two answers; beyond it there is no verdict")
    workers: Natural = Field(
        1, description="processes that play episodes (0: the run's own, where an environment that blocks stops everything)"
    )
    memory_mib: Natural = Field(
        0,
        description="MiB that each of them may allocate; beyond it the episode has no verdict and the process goes (0: any)",
    )


class RewardModelConfig(Section):
    """A sequence classifier that judges, beside the reward functions."""

    folder: str = Field("", description="folder of a Hugging Face sequence classifier that judges too (empty: none)")
    label: str = Field("", description="which of its labels is the reward, where it has several: a name, or its number")
    weight: Factor = Field(1.0, description="what its verdict is multiplied by in the reward (0: only reported)")
    place: Literal["own", "colocated"] = Field(
        "own", description="a process with a device of its own, or the trainer's device, in turn with what else runs there"
    )
    token_budget: Count = Field(8192, description="tokens of one of its batches at most, padding counted")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="number format of its parameters")
    limit_s: Positive = Field(120.0, description="seconds a verdict may take once its batch has begun; beyond it there is none")
    wait_s: Positive = Field(
        1800.0, description="seconds a text may wait for its batch to begin; beyond it the run stops as failed: it is overloaded"
    )
    restarts: Natural = Field(1, description="times its own process is started again after it was lost")


class JudgeConfig(Section):
    """A language model behind an OpenAI-compatible interface that judges, beside the reward functions."""

    url: tuple[str, ...] = Field((), description="addresses of servers with one model that judges, up to /v1 (empty: none)")
    model: str = Field("", description="its name there")
    template: str = Field(
        "Question:\n{prompt}\n\nAnswer:\n{completion}\n\nRate the answer from 0 (useless) to 10 (perfect). "
        "Reply with the number only.",
        description="what it is asked: {prompt}, {completion} and columns are filled in, {{ and }} are braces",
    )
    parse: str = Field(
        "number", description="how its answer is read: number (there is exactly one), or a regular expression with one group"
    )
    scale: Factor = Field(0.1, description="what the number it gives is multiplied by")
    weight: Factor = Field(1.0, description="what its verdict is multiplied by in the reward (0: only reported)")
    max_tokens: Count = Field(64, description="tokens of its answer at most")
    temperature: NonNegative = Field(0.0, description="its sampling temperature")
    retries: Natural = Field(3, description="times a request that failed is tried again")
    limit_s: Positive = Field(120.0, description="seconds a verdict of it may take, all tries included; beyond it there is none")
    concurrency: Count = Field(16, description="requests under way at each of its servers")


class RemoteConfig(Section):
    """A judge behind an HTTP address, beside the reward functions: POST {prompt, completion, columns} -> {"reward": number}."""

    url: str = Field("", description="address that is sent what to judge (empty: none)")
    weight: Factor = Field(1.0, description="what its verdict is multiplied by in the reward (0: only reported)")
    retries: Natural = Field(3, description="times a request is tried again: no connection, a status of 429, or of 500 and more")
    limit_s: Positive = Field(60.0, description="seconds a verdict of it may take, all tries included; beyond it there is none")
    concurrency: Count = Field(32, description="requests under way at a time")
    cache: Natural = Field(65536, description="verdicts kept, by what was sent (0: everything is sent)")


class RewardConfig(Section):
    function: tuple[str, ...] = Field(
        (), description="FILE.py:function, package.module:function, or a name such as exact_match (empty: the task's own)"
    )
    weights: tuple[Factor, ...] = Field((), description="of each of them in the sum (empty: 1; 0: only reported)")
    time_limit_s: Positive = Field(10.0, description="seconds one judgement may take; beyond it there is no verdict")
    workers: Count = Field(4, description="processes at most that run functions, one call at a time each; they start as needed")
    start_s: Positive = Field(120.0, description="seconds one of them may take to be ready, imports included")
    memory_mib: Natural = Field(
        0, description="MiB that each of them may allocate; beyond it there is no verdict and the process is replaced (0: any)"
    )
    concurrency: Count = Field(32, description="judgements at a time by coroutine functions, which share one process")
    batch: Count = Field(32, description="completions at most that a function of several (prompts, completions) gets at once")
    pattern: str = Field("", description="regular expression of the reward called regex")
    format: str = Field(
        r"\s*<think>.*?</think>\s*<answer>.*?</answer>\s*", description="regular expression of the reward called format"
    )
    overlong_buffer: Natural = Field(
        0, description="tokens before max_tokens from which on soft_overlong punishes (0: a fifth of max_tokens)"
    )
    give_up_after: Count = Field(
        16, description="workers lost in a row, none of which answered a call, after which the run stops as failed"
    )
    model: RewardModelConfig = RewardModelConfig()
    judge: JudgeConfig = JudgeConfig()
    remote: RemoteConfig = RemoteConfig()


class AdvantageConfig(Section):
    kind: Literal["grpo", "dr_grpo", "rloo", "reinforce++", "reinforce++_baseline", "gae"] = Field(
        "grpo",
        description="how rewards become advantages: against the group (grpo, dr_grpo, rloo), against the batch (reinforce++, or "
        "with the group's mean taken off first), or token by token against a value head (gae)",
    )
    std: Literal["sample", "population", "none"] = Field(
        "sample", description="which standard deviation grpo, reinforce++ and gae divide by"
    )
    eps: Positive = Field(1e-4, description="added to the standard deviation")
    gamma: Share = Field(1.0, description="what gae discounts by a token")
    lam: Annotated[float, Field(ge=0, le=1)] = Field(
        1.0, description="gae's lambda: 1 goes by the outcome alone, less trusts the value head more"
    )
    overlong: Literal["keep", "mask"] = Field(
        "keep",
        description="completions that were cut by max_tokens or the window: trained on like others, or compared with the others "
        "and not trained on",
    )


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
    loss: Literal["ppo", "gspo", "cispo"] = Field(
        "ppo", description="clipped ratio of each token; of each row as a whole; or a clipped weight on each token's logprob"
    )
    clip_low: Share = Field(0.2, description="the ratio is clipped below 1 minus this (1: never)")
    clip_high: Positive = Field(0.2, description="the ratio is clipped above 1 plus this (DAPO: more than clip_low)")
    correction: Literal["auto", "none", "truncate", "mask"] = Field(
        "auto",
        description="what tokens weigh whose probability differed when they were sampled: the ratio up to correction_cap, or 0 "
        "outside correction_floor and correction_cap (auto: truncate where rollouts may be stale or the engine is not our own)",
    )
    correction_level: Literal["token", "sequence"] = Field(
        "token", description="one weight for each token, or the product of a row's for all of them"
    )
    correction_cap: Positive = Field(2.0, description="largest importance weight")
    correction_floor: NonNegative = Field(0.0, description="least importance weight with correction mask (0: none)")
    minibatches: Count = Field(1, description="optimizer steps on each batch, each on an equal share of its prompts")
    kl: NonNegative = Field(0.0, description="weight of the KL divergence from the policy that the run began with (0: off)")
    kl_kind: Literal["k1", "k2", "k3"] = Field(
        "k3", description="estimator: k1 is taken from the advantages, k2 and k3 are added to the loss"
    )
    value_lr: Positive = Field(1e-3, description="learning rate of the value head (with advantage.kind gae)")
    value_clip: Positive = Field(0.2, description="a value farther than this from what it was before the step is not pushed on")
    value_body: NonNegative = Field(
        0.0, description="weight of the value loss in the policy's own gradient (0: only the head learns from it)"
    )
    max_grad_norm: Positive = Field(1.0, description="gradients are scaled down to this norm")
    shard: bool = Field(False, description="the trainers of place.train share one copy of the policy and its moments (FSDP2)")
    adapter: str = Field("", description="trainer of another stack: FILE.py:function or package.module:function (empty: our own)")
    extra: str = Field("", description="what the adapter's function is given besides, a JSON object")
    limit_s: Positive = Field(3600.0, description="seconds a step may take where the trainer is another process")
    precision: Literal["model", "bfloat16"] = Field(
        "model", description="number format of matrix products (bfloat16: autocast, the parameters keep their own format)"
    )
    recompute: bool = Field(False, description="layers are computed again in the backward pass: less memory, a third more work")
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
    address: Host = Field(
        "",
        description="of the trainer's machine, as engines and other trainers reach it (empty: the cluster's own, or loopback)",
    )
    canary: bool = Field(True, description="prove at the start that every tensor reaches every engine")
    probe: bool = Field(True, description="compare a few logprobs of engine and trainer after each load")
    probe_every: Natural = Field(
        1, description="steps after which they are also compared beside training, where engines are apart (0: only after loads)"
    )


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
    python: str = Field("", description="interpreter of an engine in its own process (empty: of make vllm for vllm, else ours)")
    start_s: Positive = Field(600.0, description="seconds an engine in its own process may take to be ready")
    silent_s: Positive = Field(
        300.0, description="seconds that an engine which holds requests may write nothing and take no step, until it is taken out"
    )
    faults: Count = Field(3, description="wrong answers (ten right ones make up for one) for which an engine is taken out")
    failures: Count = Field(16, description="prompts in a row that fail at an engine, for which it is taken out")
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


class ExchangeConfig(Section):
    """Two jobs instead of one: `rollyard run` generates, `rollyard train` trains, and they share a folder."""

    folder: str = Field("", description="folder that a generation and a training job share, and nothing else (empty: one job)")
    limit_s: Positive = Field(24 * 3600.0, description="seconds that one of two jobs waits for the other before it gives up")


class WatchConfig(Section):
    view: Literal["auto", "live", "plain", "quiet"] = Field(
        "auto", description="what the terminal shows (auto: live on a terminal, else plain)"
    )
    sinks: Annotated[tuple[Tracker, ...], AfterValidator(_each_once)] = Field(
        (),
        description="where metrics go besides metrics.jsonl: tensorboard, wandb, mlflow, opentelemetry (separate several with "
        "commas)",
    )
    project: Words = Field("rollyard", description="what wandb (project) and mlflow (experiment) keep the run under")


class ForecastConfig(Section):
    """What a simulation expects of a step, as `rollyard plan` writes it; the report sets it beside what happened.

    Seconds are those of a step's phases, means over all steps but the first. Without `step_s` there is no forecast.
    """

    source: str = Field("", description="what the forecast is of: Rollyard's version and the simulated scenario")
    step_s: NonNegative = Field(0.0, description="seconds of a step (0: there is no forecast)")
    generate_s: NonNegative = Field(0.0, description="of these: generation that nothing else hides")
    score_s: NonNegative = Field(0.0, description="of these: scoring that generation does not hide")
    train_s: NonNegative = Field(0.0, description="of these: training")
    sync_s: NonNegative = Field(0.0, description="of these: bringing weights to the engines")
    checkpoint_s: NonNegative = Field(0.0, description="of these: writing checkpoints")
    trained_tokens_per_s: NonNegative = Field(0.0, description="tokens trained on in a second of a step, whatever is done in it")
    engine_busy: Fraction = Field(0.0, description="share of these steps' time in which the engines' devices are busy")
    trainer_busy: Fraction = Field(0.0, description="likewise the trainers' devices")
    slots_busy: Fraction = Field(0.0, description="mean share of decode slots at work while engines step")


class Config(Section):
    """Everything a run depends on."""

    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    warmup: WarmupConfig = WarmupConfig()
    prompts: PromptsConfig = PromptsConfig()
    rollout: RolloutConfig = RolloutConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
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
    exchange: ExchangeConfig = ExchangeConfig()
    watch: WatchConfig = WatchConfig()
    forecast: ForecastConfig = ForecastConfig()
