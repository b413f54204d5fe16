"""A real model whose logits are set: what may follow a token depends on that token alone.

The body adds nothing to an embedding that is one number in one place, so the head's columns are the logits to the last bit
that a norm leaves. Engines decode it, and the trainer trains on it, as any other folder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.tiny import tiny_folder

NEVER = -1e4  # a logit: its probability is 0 in float32
WIDTH = 128
PIECES = ("an", "swer", "</ans", "wer>!", "x", "<eos>", "q")
EOS = 5

Table = Mapping[int, Mapping[int, float]]


def chain_folder(parent: Path, table: Table, *, vocab: int = WIDTH, ends: Sequence[int] = (1,), **config: Any) -> Path:
    """A llama in which `table[token][following]` are logits; all others are NEVER, and nothing is said after other tokens."""
    folder = tiny_folder(parent, tied=False, layers=1, width=WIDTH, vocab=vocab, eos_token_id=list(ends), **config)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    logits = torch.full((vocab, vocab), NEVER)
    for token, following in table.items():
        for after, logit in following.items():
            logits[token, after] = logit
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
        elif name == "model.norm.weight":
            tensor.fill_(1.0)
        elif name == "model.embed_tokens.weight":
            tensor.copy_(torch.eye(WIDTH)[:vocab] * WIDTH**0.5)  # of mean square 1, so the norm leaves it as it is
        elif name == "lm_head.weight":
            tensor.zero_()
            tensor[:, :vocab] = logits.t() / WIDTH**0.5
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, {"format": "pt"})
    for name in ("config.json", "generation_config.json"):
        written = folder / name
        written.write_text(json.dumps(json.loads(written.read_text()) | {"eos_token_id": list(ends)}))
    return folder


def spelt(*tokens: int) -> dict[int, dict[int, float]]:
    """Each token is followed by the next."""
    return {token: {after: 0.0} for token, after in pairwise(tokens)}


def save_pieces(folder: Path) -> None:
    """A tokenizer of PIECES. The model has more ids than it: as those that real models fill their vocabulary with."""
    fast = FastTokenizer(models.WordLevel({word: index for index, word in enumerate(PIECES)}, unk_token="x"))
    fast.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast.decoder = decoders.Fuse()
    fast.add_special_tokens(["<eos>"])
    PreTrainedTokenizerFast(tokenizer_object=fast, eos_token="<eos>").save_pretrained(folder)
