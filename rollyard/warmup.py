"""The base policy of a built-in task: a tiny model, trained on solutions for a short while, then cached.

It joins the task's problems, the model and the supervised trainer, which do not know each other.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable
from pathlib import Path

from rollyard.config import Config
from rollyard.durable import naming
from rollyard.errors import ConfigError
from rollyard.model.architecture import Architecture
from rollyard.prompts.tasks.task import TASKS, Task

RECIPE = 3  # goes up when the same config would make another policy
EOS, UNKNOWN = "<eos>", "?"  # ids 0 and 1; the task's characters follow. Whatever else is sampled shows in the text.
WINDOW = 64  # tokens
INIT_STD = 0.06  # of the first weights; at a width of 128 it learns twice as fast as with the usual 0.02


def base_policy(config: Config, cache: Path, progress: Callable[[str], None]) -> Path:
    """The folder of the task's base policy, made now unless the cache holds it. Called on a device's thread.

    Args:
        config: its `prompts.task` and `warmup` say which policy.
        cache: folder of cached policies.
        progress: told in words how far it is; what it raises ends the work.
    """
    folder = policy_folder(config, cache)
    if not folder.is_dir():
        _make(TASKS[config.prompts.task], config, folder, progress)
    return folder


def policy_folder(config: Config, cache: Path) -> Path:
    """Where the task's base policy is, once it was made."""
    named = json.dumps([RECIPE, config.prompts.task, config.warmup.model_dump()])
    return cache / f"{config.prompts.task}-{hashlib.blake2b(named.encode(), digest_size=6).hexdigest()}"


def architecture(config: Config) -> Architecture:
    """The shape of the task's base policy, a small llama whose tokens are the task's characters. Raises ConfigError."""
    warmup = config.warmup
    if warmup.width % (2 * warmup.heads):
        problem = f"a width of {warmup.width} cannot be split into {warmup.heads} heads of an even size"
        raise ConfigError(problem, where="warmup.width", remedy=f"use a multiple of {2 * warmup.heads}")
    return Architecture(
        family="llama",
        vocab_size=len(_vocabulary(TASKS[config.prompts.task])),
        hidden_size=warmup.width,
        layers=warmup.layers,
        heads=warmup.heads,
        kv_heads=warmup.heads,
        head_dim=warmup.width // warmup.heads,
        feed_forward=warmup.feed_forward,
        window=WINDOW,
        tied=True,
        eos_ids=frozenset({0}),
    )


def _vocabulary(task: Task) -> list[str]:
    return [EOS, UNKNOWN, *dict.fromkeys(task.alphabet)]


def _make(task: Task, config: Config, folder: Path, progress: Callable[[str], None]) -> None:
    from rollyard.model.folder import save
    from rollyard.model.tokenizer import Tokenizer
    from rollyard.model.transformer import CausalLM
    from rollyard.train.supervised import TrainingRow, fit

    warmup, shape = config.warmup, architecture(config)
    with tempfile.TemporaryDirectory() as draft:
        source = Path(draft)
        with naming(source):
            (source / "config.json").write_text(json.dumps(shape.to_hf()))
            (source / "generation_config.json").write_text(json.dumps({"eos_token_id": 0}))
            _save_tokenizer(_vocabulary(task), source)
        tokenizer = Tokenizer(source)

        def row(before: str, answer: str) -> TrainingRow:
            prompt = tokenizer.encode(before)
            return prompt + tokenizer.encode(answer) + (0,), len(prompt)

        def batch(step: int) -> list[TrainingRow]:
            problems = range(step * warmup.batch, (step + 1) * warmup.batch)
            return [row(*lesson) for index in problems for lesson in task.lessons(warmup.seed, index)]

        batches = (batch(step) for step in range(warmup.steps))
        model = CausalLM(shape)
        model.initialise(warmup.seed, INIT_STD)
        told = f"making the base policy of {task.name}"
        fit(model, batches, lr=warmup.lr, progress=lambda done: progress(f"{told}: {done} of {warmup.steps} steps"))
        _save_once(lambda: save(model, folder, source), folder)


def _save_once(save: Callable[[], None], folder: Path) -> None:
    """Another run may have made the same policy meanwhile; then it is there, and theirs is as good."""
    try:
        save()
    except OSError:  # FileExistsError, or ENOTEMPTY from the rename
        if not folder.is_dir():
            raise


def _save_tokenizer(vocabulary: list[str], folder: Path) -> None:
    """A real fast tokenizer whose tokens are single characters."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({token: index for index, token in enumerate(vocabulary)}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(EOS, special=True, normalized=False)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS)
    fast.save_pretrained(folder)
