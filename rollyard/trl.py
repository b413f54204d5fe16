"""Rollyard under TRL's `GRPOTrainer`: its `rollout_func`, served by a run whose trainer is TRL's.

    with rollyard.trl.RolloutFunc({"run.out": "runs/trl"}) as rollouts:
        trainer = GRPOTrainer(model=..., reward_funcs=..., args=GRPOConfig(...), rollout_func=rollouts)
        trainer.train()

TRL asks, judges, compares and trains; Rollyard generates, with the weights that TRL's model has just then. Nothing of TRL is
imported: what is needed of the trainer is looked at as it comes.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from rollyard.errors import ConfigError
from rollyard.layers import resolve
from rollyard.model.architecture import Architecture
from rollyard.prompts.given import GivenPrompt
from rollyard.rollouts import Rollouts, SyncRollouts
from rollyard.types import Rollout
from rollyard.watch.report import Report

if TYPE_CHECKING:
    from torch import Tensor, nn

TESTED: Final = "1.16.0"
FOLDER: Final = "rollyard"  # in TRL's output_dir: the model that the run began with, and the run
MANY: Final = 10**6  # batches, where nobody knows how many evaluations there will be
TOKENS: Final = 8192
FORMATS: Final = ("float32", "bfloat16")
NEEDED: Final = (
    "_tokenize_prompts",
    "_is_vlm",
    "num_generations",
    "num_iterations",
    "max_completion_length",
    "eos_token_ids",
    "processing_class",
    "tools",
    "accelerator",
    "args",
    "state",
)


class RolloutFunc:
    """What `GRPOTrainer(rollout_func=...)` is given. The run begins when it is called for the first time.

    What belongs to TRL is read from the trainer: prompts as its own token ids, completions a prompt, lengths, sampling. Rewards
    are TRL's; the run's own are 0 (`unjudged`). Each call is a batch of the run, of TRL's evaluations too.

    Args:
        options: of Rollyard, by their dotted names, such as engine, placement, `run.out`; not those that TRL says.

    Raises ConfigError, when it is called, for a trainer that asks for what is not there.
    """

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        self._options = dict(options or {})
        self._closing = ExitStack()
        self._rollouts: SyncRollouts | None = None
        self._trainer: Any = None
        self._out = False  # a batch is out, which what TRL trains comes of

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """The run ends with the weights that TRL's model has by now; as failed when the block did."""
        if self._rollouts is not None and error is None:
            if self._out:
                self._publish(self._rollouts)
            if self._rollouts.version.step < self._rollouts.config.run.steps:
                self._rollouts.stop("TRL has trained enough")
        self._closing.__exit__(kind, error, trace)

    @property
    def report(self) -> Report | None:
        """Of the run, once the block is left."""
        return None if self._rollouts is None else self._rollouts.report

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, list[Any]]:
        """As TRL's `RolloutFunc`: a completion for each of the prompts, which repeat as TRL wants several of one.

        Returns `prompt_ids`, `completion_ids` and `logprobs`, which are of the distribution that tokens were drawn from.
        """
        rollouts = self._rollouts or self._begin(trainer)
        prompt_ids = [tuple(map(int, ids)) for ids in trainer._tokenize_prompts(list(prompts))[0]]
        places: dict[tuple[int, ...], list[int]] = {}
        for place, ids in enumerate(prompt_ids):
            places.setdefault(ids, []).append(place)
        found: dict[int, Rollout] = {}
        size = rollouts.config.rollout.group_size
        asked = [(ids, group) for ids, each in places.items() for group in _cut(each, size)]
        for part in _cut(asked, rollouts.config.rollout.groups_per_step):
            for (_, group), written in zip(part, self._write(rollouts, [ids for ids, _ in part]), strict=True):
                found |= dict(zip(group, written, strict=False))
        each = [found[place].completion for place in range(len(prompt_ids))]
        return {
            "prompt_ids": [list(ids) for ids in prompt_ids],
            "completion_ids": [list(done.token_ids) for done in each],
            "logprobs": [list(done.logprobs) for done in each],
        }

    def _write(self, rollouts: SyncRollouts, prompts: Sequence[tuple[int, ...]]) -> list[tuple[Rollout, ...]]:
        """One batch: the completions of each prompt. One that is short, as TRL's evaluations end, is filled up."""
        if self._out:
            self._publish(rollouts)
        filled = [*prompts, *(prompts[-1] for _ in range(rollouts.config.rollout.groups_per_step - len(prompts)))]
        ids = rollouts.submit([GivenPrompt(token_ids=each) for each in filled])
        batch = rollouts.next_batch()
        if batch is None:
            problem = f"the run has ended after {rollouts.config.run.steps} batches, and TRL asks for another"
            raise ConfigError(problem, where="run.steps", remedy="leave it out, or use more")
        self._out = True
        groups = {group.id: group.rollouts for group in batch.groups}
        return [groups[id_] for id_ in ids[: len(prompts)]]

    def _publish(self, rollouts: SyncRollouts) -> None:
        rollouts.publish(weights_of(self._trainer))
        self._out = False

    def _begin(self, trainer: Any) -> SyncRollouts:
        """Start the run, with TRL's model as it is now."""
        check_trainer(trainer)
        place, said = Path(trainer.args.output_dir) / FOLDER, options_of(trainer)
        if both := sorted(said.keys() & self._options.keys()):
            problem = f"TRL's trainer says it: {said[both[0]]!r}"
            raise ConfigError(problem, where=both[0], remedy="leave it out, and set it in GRPOConfig")
        model = _saved(trainer, place / "model")
        usual = {
            "run.name": "trl",
            "run.out": str(place / "run"),
            "run.steps": _batches(trainer),
            "batch.token_budget": max(TOKENS, Architecture.from_folder(model).window),  # nothing is trained on here
        }
        config = resolve(environment={}, overrides={**usual, **self._options, **said, "model.path": str(model)}).config
        self._trainer = trainer
        self._rollouts = self._closing.enter_context(Rollouts.sync(config))
        return self._rollouts


def options_of(trainer: Any) -> dict[str, Any]:
    """What TRL's trainer says of a run, by the dotted names of Rollyard's options."""
    size, args = trainer.num_generations, trainer.args
    return {
        "model.dtype": str(trainer.model.dtype).removeprefix("torch."),
        "prompts.source": "given",
        "reward.function": ("unjudged",),
        "rollout.group_size": size,
        "rollout.groups_per_step": max(1, args.generation_batch_size // size),
        "rollout.max_tokens": trainer.max_completion_length,
        "rollout.temperature": args.temperature,
        "rollout.top_p": args.top_p,
        "rollout.top_k": max(args.top_k or 0, 0),
        "rollout.min_scored": size,
        "rollout.give_up_after": 1,  # a prompt that is dropped has no completion, and TRL needs one
        "run.seed": args.seed,
    }


def check_trainer(trainer: Any) -> None:
    """Raises ConfigError for a trainer that asks for what a run does not do."""
    if missing := [name for name in NEEDED if not hasattr(trainer, name)]:
        problem = f"this trainer has no {', '.join(missing)}: TRL's hook may change with each version"
        raise ConfigError(problem, where="rollout_func", remedy=f"use trl {TESTED}, which was tested")
    args = trainer.args
    for wanted, where, problem, remedy in (
        (trainer.accelerator.num_processes > 1, "accelerate", "several processes train, and each would ask", "use one process"),
        (args.use_vllm, "use_vllm", "TRL would start a vLLM of its own", "leave it out; Rollyard's option is engine.kind vllm"),
        (bool(trainer.tools), "tools", "TRL asks for the turns after a tool by itself", "use an environment of Rollyard's"),
        (bool(args.min_p), "min_p", "tokens are kept by top_p and top_k", "leave it out"),
        (args.repetition_penalty != 1.0, "repetition_penalty", "nothing is penalised", "leave it out"),
        (bool(args.generation_kwargs), "generation_kwargs", "they are of another engine", "leave them out"),
        (trainer._is_vlm, "model", "it reads pictures", "use a model of texts"),
        (str(trainer.model.dtype).removeprefix("torch.") not in FORMATS, "model", f"it is {trainer.model.dtype}", "use bfloat16"),
    ):
        if wanted:
            raise ConfigError(problem, where=where, remedy=remedy)


def weights_of(trainer: Any) -> Mapping[str, Tensor] | nn.Module:
    """Of TRL's model as it is now, with a LoRA adapter merged into them."""
    from rollyard.weights.given import merged_weights

    model: nn.Module = trainer.accelerator.unwrap_model(trainer.model)
    return merged_weights(model) if hasattr(model, "peft_config") else model


def _saved(trainer: Any, folder: Path) -> Path:
    """TRL's model as a Hugging Face folder, with its tokenizer and all ids that end a completion for TRL."""
    from rollyard.weights.given import write_weights

    model, weights = trainer.accelerator.unwrap_model(trainer.model), weights_of(trainer)
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    base.config.save_pretrained(folder)
    trainer.processing_class.save_pretrained(folder)
    ends = copy.deepcopy(base.generation_config)
    ends.eos_token_id = list(trainer.eos_token_ids)
    ends.save_pretrained(folder)
    write_weights(weights, folder)
    return folder


def _batches(trainer: Any) -> int:
    """How often TRL will ask, as far as that is known."""
    args = trainer.args
    if args.eval_strategy != "no":
        return MANY
    asked = trainer.state.max_steps * args.gradient_accumulation_steps
    batches: int = math.ceil(asked / (args.steps_per_generation * trainer.num_iterations))
    return batches


def _cut(what: Sequence[Any], size: int) -> Iterator[list[Any]]:
    """Parts of `size`, the last one of what is left."""
    rest = iter(what)
    while part := list(islice(rest, size)):
        yield part
