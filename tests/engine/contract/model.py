"""The tiny model of the suite, and what transformers says about it."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch

from rollyard.types import Request
from tests.engine.embedded.serving import Reference
from tests.tiny import CHARACTERS, SPECIAL, tiny_folder

WINDOW = 256
PROMPTS = tuple(tuple(2 + (7 * name + 3 * at) % 40 for at in range(3 + 5 * name % 17)) for name in range(8))
LONG = 96  # tokens of a completion that can be cut before its end
ENDS_WITHIN = 24  # tokens: some completions of PROMPTS end by themselves within so many, and some do not


def model_folder(parent: Path, like: Path | None = None) -> Path:
    """A random llama that vLLM can run as well (heads of 32), with two end-of-sequence tokens, one of them often written.

    `like`: other weights for the model of that folder.
    """
    folder = tiny_folder(parent, heads=2, kv_heads=1, width=64, seed=0 if like is None else 1, window=WINDOW)
    ends = [1, _often_written(folder)] if like is None else json.loads((like / "config.json").read_text())["eos_token_id"]
    for name in ("config.json", "generation_config.json"):
        path = folder / name
        path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": ends}))
    return folder


def text(token_ids: Sequence[int]) -> str:
    """The tokenizer's text, character by character."""
    return "".join(CHARACTERS[token - len(SPECIAL)] for token in token_ids if token >= len(SPECIAL))


class Model:
    """What a completion must be, from transformers and by hand."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ends = frozenset(json.loads((folder / "config.json").read_text())["eos_token_id"])
        self._reference = Reference(folder)
        self._known: dict[tuple[int, ...], list[int]] = {}

    def greedy(self, request: Request) -> list[int]:
        """All tokens of the completion, those written before included: until an end, a stop string, or the last allowed."""
        tokens = self._continued(request.prompt_ids, len(request.written_ids) + request.sampling.max_tokens)
        whole = (tokens[:count] for count in range(1, len(tokens) + 1))
        return next((part for part in whole if self.ended(request, part)), tokens)

    def ended(self, request: Request, tokens: Sequence[int]) -> bool:
        """These tokens end by themselves, rather than for want of room."""
        sampling = request.sampling
        last_is_end = tokens[-1:] and tokens[-1] in self.ends and not sampling.ignore_eos
        return bool(last_is_end) or any(stop in text(tokens) for stop in sampling.stop)

    def logprobs(self, request: Request, token_ids: Sequence[int]) -> list[float]:
        """Of each token of a completion, under the distribution it is drawn from: temperature, then the kept set."""
        sampling = request.sampling
        logits = self._reference.logits(request.prompt_ids, token_ids).double() / (sampling.temperature or 1.0)
        rows = torch.softmax(logits, dim=-1).tolist()
        if not sampling.temperature:
            return [math.log(row[token]) for row, token in zip(rows, token_ids, strict=True)]
        return [_kept_logprob(row, token, sampling.top_p, sampling.top_k) for row, token in zip(rows, token_ids, strict=True)]

    def _continued(self, prompt: tuple[int, ...], most: int) -> list[int]:
        """What follows the prompt when nothing but the window ends it, `most` tokens at most."""
        most = min(most, WINDOW - len(prompt))
        if len(self._known.get(prompt, ())) < most:
            self._known[prompt] = _unending(self._reference, prompt, most)
        return self._known.get(prompt, [])[: max(most, 0)]


@cache
def model_of(folder: Path) -> Model:
    return Model(folder)


def _kept_logprob(row: list[float], token: int, top_p: float, top_k: int) -> float:
    """By hand: sort, keep, renormalise."""
    ranked = sorted(range(len(row)), key=lambda index: -row[index])
    ranked = ranked[:top_k] if top_k else ranked
    mass, kept, held = sum(row[index] for index in ranked), [], 0.0
    for index in ranked:
        if held >= top_p * mass:
            break
        kept.append(index)
        held += row[index]
    assert token in kept, "a token outside its kept set"
    return math.log(row[token] / held)


@torch.no_grad()
def _unending(reference: Reference, prompt: tuple[int, ...], most: int) -> list[int]:
    """Greedy tokens of `generate`, one prompt at a time, to the last one asked for."""
    ids = torch.tensor([prompt])
    out = reference.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=most,
        eos_token_id=None,
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()


def _often_written(folder: Path) -> int:
    """A token that ends some completions of PROMPTS after a few tokens, and others not at all."""
    reference = Reference(folder)
    whole = [_unending(reference, prompt, ENDS_WITHIN) for prompt in PROMPTS]
    for token in range(len(SPECIAL), len(SPECIAL) + len(CHARACTERS)):
        ending = [tokens.index(token) for tokens in whole if token in tokens]
        if 2 <= len(ending) <= len(PROMPTS) - 3 and max(ending) >= 4:
            return token
    raise AssertionError("no token ends some prompts' completions and not others'")
