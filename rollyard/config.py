"""One frozen tree of options. The only reader of the environment.

Values come in layers, later ones win: default < preset < file < environment < command line. `resolve` joins the
layers, remembers where each value came from, and checks the whole. Validators reject; they never rewrite.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo

from rollyard.errors import ConfigError
from rollyard.events import Rollover

Count = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(gt=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]


class Section(BaseModel):
    """A branch of the tree: frozen, no unknown names, finite numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class RunConfig(Section):
    name: str = Field("run", description="name of the run; its folder is runs/NAME unless --run.out says otherwise")
    out: str = Field("", description="folder of the run (empty: runs/NAME)")
    overwrite: bool = Field(False, description="replace the folder of an earlier run")
    steps: Count = Field(100, description="optimizer steps")
    seed: Natural = Field(0, description="seed of everything random in the run")


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
    stop: tuple[str, ...] = Field((), description="texts that end a completion (separate several with commas)")
    max_staleness: Natural = Field(0, description="versions a rollout may lag behind the one it trains (S)")
    max_live_groups: Natural = Field(0, description="cap on prompts admitted and not yet trained or dropped (0: the staleness rule alone)")
    overtaking: Literal["allow", "never"] = Field("allow", description="may finished younger groups be trained before older ones")
    on_stale: Literal["wait", "drop"] = Field("wait", description="when overtaking would make an older group too stale: wait for it or drop it")
    retries: Natural = Field(2, description="times a failed request is tried again, keeping its tokens")
    min_scored: Count = Field(2, description="scored members a group needs to be trained on")
    give_up_after: Count = Field(100, description="prompts dropped in a row after which the run stops as failed")


class RewardConfig(Section):
    function: str = Field("", description="FILE.py:function or package.module:function, called (prompt, completion, **columns) -> float (empty: the task's own)")
    time_limit_s: Positive = Field(10.0, description="seconds one judgement may take; beyond it there is no verdict")
    concurrency: Count = Field(8, description="judgements at a time")


class AdvantageConfig(Section):
    kind: Literal["grpo", "dr_grpo", "rloo"] = Field("grpo", description="how rewards of a group become advantages")
    std: Literal["sample", "population", "none"] = Field("sample", description="which standard deviation grpo divides by")
    eps: Positive = Field(1e-4, description="added to the standard deviation")


class BatchConfig(Section):
    token_budget: Count = Field(8192, description="tokens of one micro-batch at most (prompt and completion)")


class TrainConfig(Section):
    lr: Positive = Field(1e-6, description="learning rate of AdamW after warm-up")
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = Field((0.9, 0.99), description="AdamW's decay rates")
    eps: Positive = Field(1e-8, description="AdamW's epsilon")
    weight_decay: NonNegative = Field(0.0, description="AdamW's weight decay")
    warmup_steps: Natural = Field(0, description="steps over which the learning rate rises linearly")
    clip_low: Share = Field(0.2, description="the ratio is clipped below 1 minus this")
    clip_high: Positive = Field(0.2, description="the ratio is clipped above 1 plus this")
    max_grad_norm: Positive = Field(1.0, description="gradients are scaled down to this norm")
    aggregation: Literal["token", "sequence", "fixed"] = Field(
        "token", description="mean over tokens; mean over sequences of their means; or sum over sequences x max_tokens"
    )


class WeightsConfig(Section):
    transport: Literal["in_place"] = Field("in_place", description="how new weights reach the engine")
    rollover: Rollover = Field(Rollover.DRAIN, description="requests in flight when weights change: drain, abort or keep")


class EngineConfig(Section):
    kind: Literal["embedded"] = Field("embedded", description="inference engine")
    slots: Count = Field(64, description="sequences decoded at once")
    page_tokens: Count = Field(16, description="tokens of one page of the key-value cache")
    pages: Natural = Field(0, description="pages of the key-value cache (0: enough for every slot at its longest)")
    step_tokens: Count = Field(2048, description="tokens of one engine step at most, decode and prefill together")
    window: Natural = Field(0, description="tokens of prompt and completion at most (0: the model's own)")


class PlaceConfig(Section):
    placement: Literal["colocated"] = Field("colocated", description="who generates and who trains when")
    runtime: Literal["inline"] = Field("inline", description="where the stations run")
    threads: Natural = Field(0, description="CPU threads of torch (0: chosen by model size)")


class EvalConfig(Section):
    every: Natural = Field(0, description="evaluate on the held-out prompts every n steps besides first and last (0: first and last only)")
    samples: Count = Field(1, description="completions of each held-out prompt")


class CheckpointConfig(Section):
    every: Natural = Field(0, description="write a checkpoint every n steps besides the last (0: the last only)")
    keep: Count = Field(2, description="newest checkpoints kept")


class WatchConfig(Section):
    view: Literal["auto", "live", "plain", "quiet"] = Field("auto", description="what the terminal shows (auto: live on a terminal, plain otherwise)")


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
    weights: WeightsConfig = WeightsConfig()
    engine: EngineConfig = EngineConfig()
    place: PlaceConfig = PlaceConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    watch: WatchConfig = WatchConfig()
