"""A sequence classifier from a Hugging Face folder: texts in, one number each out, whatever batch they are in."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rollyard.config import RewardModelConfig
from rollyard.errors import ConfigError, ScoringError

if TYPE_CHECKING:
    from rollyard.types import Completion, Prompt

FOLDER, LABEL = "reward.model.folder", "reward.model.label"
KIND: Final = "ForSequenceClassification"
LONG: Final = 10**6  # tokens; tokenizers without a limit name a number beyond


@dataclass(frozen=True, slots=True)
class Asked:
    """What is judged: a conversation, and the assistant's answer to it."""

    messages: tuple[Mapping[str, str], ...]  # role and content; empty for a text that is no conversation
    prompt: str
    completion: str

    @classmethod
    def of(cls, prompt: Prompt, completion: Completion) -> Asked:
        return cls(prompt.messages, prompt.text, completion.text)


@dataclass(frozen=True, slots=True)
class Row:
    """What the model is given of it. `types` say which of two texts a token is of, where the model looks at that."""

    ids: tuple[int, ...]  # [tokens]
    types: tuple[int, ...]  # [tokens]


def check_folder(config: RewardModelConfig) -> None:
    """Raises ConfigError when the folder has no sequence classifier, or not this label. Nothing is loaded."""
    folder, remedy = Path(config.folder), "give the folder of a Hugging Face sequence classifier"
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}", where=FOLDER, remedy=remedy)
    file = folder / "config.json"
    if not file.exists():
        raise ConfigError(f"{folder} has no {file.name}", where=FOLDER, remedy=remedy)
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}", where=FOLDER, remedy=remedy) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} cannot be read: {error}", where=FOLDER, remedy=remedy) from None
    if not isinstance(found, dict):
        raise ConfigError(f"{file} holds no JSON object", where=FOLDER, remedy=remedy)
    try:
        _check(config, found)
    except (TypeError, ValueError, AttributeError, LookupError) as error:  # a word where a list should be
        raise ConfigError(f"{file} is no configuration: {error}", where=FOLDER, remedy=remedy) from None


def _check(config: RewardModelConfig, found: Mapping[str, Any]) -> None:
    kinds = found.get("architectures") or ["nothing"]
    if not any(str(kind).endswith(KIND) for kind in kinds):
        problem = f"{config.folder} holds {kinds[0]}, which is no sequence classifier"
        raise ConfigError(problem, where=FOLDER, remedy=f"give a folder of ...{KIND}, such as Llama{KIND}")
    labels = found.get("id2label") or {"0": "LABEL_0", "1": "LABEL_1"}  # transformers leaves out two with these names
    label_of(config, {int(number): str(name) for number, name in labels.items()})


def label_of(config: RewardModelConfig, labels: Mapping[int, str]) -> int:
    """Which output of the model is the reward. Raises ConfigError."""
    if not config.label:
        if len(labels) == 1:
            return 0
        names = ", ".join(labels.values())
        raise ConfigError(f"the classifier has {len(labels)} labels: {names}", where=LABEL, remedy="say which one is the reward")
    for number, name in labels.items():
        if config.label in (name, str(number)):
            return number
    remedy = f"one of: {', '.join(labels.values())}"
    raise ConfigError(f"the classifier has no label {config.label!r}", where=LABEL, remedy=remedy)


class Classifier:
    """Holds the model on a device. Called there.

    What it says of a text is the logit of a classifier with one label, and of one that was trained for regression; else the
    probability of the label: the softmax over all, or the sigmoid where a text may have several.

    A text is: prompt and completion by the model's own chat template, as a user's message (or the prompt's messages) and the
    assistant's answer; without a template both as a pair where the tokenizer separates pairs, else one after the other.

    Args:
        config: folder, label and number format.
        device: in torch's words.

    Raises ConfigError when it cannot be read.
    """

    def __init__(self, config: RewardModelConfig, device: str) -> None:
        import torch
        from safetensors import SafetensorError
        from transformers import AutoModelForSequenceClassification
        from transformers.utils import logging

        from rollyard.model.tokenizer import Tokenizer

        check_folder(config)
        self._tokenizer = Tokenizer(Path(config.folder), where=FOLDER)
        dtype = getattr(torch, config.dtype)
        logging.disable_progress_bar()  # the terminal is the run's
        try:
            model, loaded = AutoModelForSequenceClassification.from_pretrained(
                config.folder,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                dtype=dtype,
                output_loading_info=True,
            )
        except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
            raise ConfigError(f"{config.folder} cannot be read: {error}", where=FOLDER, remedy="fetch it again") from error
        if missing := sorted(loaded["missing_keys"]):  # transformers would make them up, and only warn
            problem = f"{config.folder} has no {', '.join(missing[:3])}"
            raise ConfigError(problem, where=FOLDER, remedy="give the folder of a classifier that was trained")
        self._model = model.to(device).eval()
        self._label = label_of(config, model.config.id2label)
        self._settings = model.config.get_text_config()
        pad = self._settings.pad_token_id
        self._pad = pad if pad is not None and 0 <= pad < self._settings.vocab_size else None
        self._device = torch.device(device)
        self._most = min(self._tokenizer.most_tokens, getattr(self._settings, "max_position_embeddings", LONG))
        self._budget = config.token_budget

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self._model.parameters())

    def row(self, asked: Asked) -> Row:
        """Raises ScoringError for a text that is longer than the model or a batch may be, or is none."""
        tokenizer = self._tokenizer
        if tokenizer.has_chat_template:
            messages = asked.messages or ({"role": "user", "content": asked.prompt},)
            try:
                ids = tokenizer.chat([*messages, {"role": "assistant", "content": asked.completion}], answered=True)
            except ConfigError as error:  # some take no system message, or ask for roles in turn
                raise ScoringError(f"the reward model: {error.problem}") from error
            row = Row(ids, (0,) * len(ids))
        elif tokenizer.separates:
            row = Row(*tokenizer.pair(asked.prompt, asked.completion))
        else:
            ids = tokenizer.encode(asked.prompt + asked.completion)
            row = Row(ids, (0,) * len(ids))
        if not row.ids:
            raise ScoringError("the reward model's tokenizer makes no token of the text")
        if len(row.ids) > self._most:
            raise ScoringError(f"{len(row.ids)} tokens are more than the reward model takes ({self._most})")
        if len(row.ids) > self._budget:
            raise ScoringError(f"{len(row.ids)} tokens are more than reward.model.token_budget ({self._budget})")
        return row

    def judge(self, rows: Sequence[Row]) -> list[float]:
        """One number for each row, in their order.

        Rows are padded on the right. A decoder is read at the last token that is not its pad token. Where the config names
        none, transformers reads a single text at its end and refuses several: they are padded with a token that none of
        them has then, so that each is read at its own end.
        """
        pad = self._pad if self._pad is not None else self._unused(rows)
        if pad is None:
            return [self._logits([row], 0)[0] for row in rows]
        return self._logits(rows, pad)

    def _unused(self, rows: Sequence[Row]) -> int | None:
        used = {token_id for row in rows for token_id in row.ids}
        return next((token_id for token_id in range(self._settings.vocab_size) if token_id not in used), None)

    def _logits(self, rows: Sequence[Row], pad: int) -> list[float]:
        import torch

        width, device = max(len(row.ids) for row in rows), self._device
        self._settings.pad_token_id = pad if self._pad is not None or len(rows) > 1 else None
        ids = torch.tensor([row.ids + (pad,) * (width - len(row.ids)) for row in rows], device=device)
        given: dict[str, Any] = {"attention_mask": self._mask(rows, width)}
        if self._tokenizer.typed:
            given["token_type_ids"] = torch.tensor([row.types + (0,) * (width - len(row.ids)) for row in rows], device=device)
        with torch.inference_mode():
            logits = self._model(ids, **given).logits.float()
            return [float(value) for value in self._values(logits)]

    def _mask(self, rows: Sequence[Row], width: int) -> Any:
        import torch

        return torch.tensor([[1] * len(row.ids) + [0] * (width - len(row.ids)) for row in rows], device=self._device)

    def _values(self, logits: Any) -> Any:
        """`[rows]` of `[rows, labels]`."""
        kind = self._model.config.problem_type
        if logits.shape[1] > 1 and kind == "multi_label_classification":
            logits = logits.sigmoid()
        elif logits.shape[1] > 1 and kind != "regression":
            logits = logits.softmax(-1)
        return logits[:, self._label]
