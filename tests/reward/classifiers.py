"""Tiny sequence classifiers in real Hugging Face folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.tiny import CHARACTERS, SPECIAL, save_tokenizer

EXTRA = 20  # ids without a text, so that there is always one that no text has
VOCABULARY = len(SPECIAL) + len(CHARACTERS) + EXTRA


def classifier_folder(folder: Path, family: str = "llama", *, chat: bool = False, **config: Any) -> Path:
    """A random classifier of `family` with one label, written into `folder`. `config` overrides config.json."""
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification

    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "max_position_embeddings": 128,
        "num_labels": 1,
        "initializer_range": 0.3,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": None,
    }
    if family in ("llama", "qwen2"):
        shape["num_key_value_heads"] = 2
    model = AutoModelForSequenceClassification.from_config(AutoConfig.for_model(family, **(shape | config)))
    model.save_pretrained(folder)
    save_tokenizer(folder, chat=chat)
    return folder
