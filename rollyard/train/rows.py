"""One micro-batch as flat tensors for the packed forward pass. A prompt that several samples share is in it once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollyard.model.attention import Tree
from rollyard.types import Sample, WeightVersion

# On a CPU the activations of so many tokens stay in its cache from one operation to the next.
CACHED_TOKENS = 1200


@dataclass(frozen=True, slots=True)
class Rows:
    """Families one after the other: a prompt, then what each of its samples adds to it.

    The last token of a sample predicts nothing, so it is not among the inputs; the last one of a prompt predicts the first
    token of every sample. Example: the samples (2, 3 | 4, 5) and (2, 3 | 6) have the inputs 2 3 4, at 0 1 2, and the tree
    Tree(2, (1,)); predicting is 1 2 1 for the targets 4 5 6.
    """

    ids: Tensor  # [inputs] int64
    positions: Tensor  # [inputs] int64
    trees: tuple[Tree, ...]
    predicting: Tensor  # [trained] int64: the inputs whose next token is trained on
    targets: Tensor  # [trained] int64: those next tokens
    behaviour: Tensor  # [trained] float32: logprobs when sampled
    advantages: Tensor  # [trained] float32
    trained: tuple[int, ...]  # trained tokens of each sample
    whole: tuple[int, ...]  # trained tokens of its rollout, in all of that one's rows
    values: Tensor | None = None  # [trained] float32, where there is a value head: before this batch
    returns: Tensor | None = None  # [trained] float32, likewise
    fresh: Tensor | None = None  # [trained] bool, where a version is given: it wrote the token (`written_by`)

    @classmethod
    def of(
        cls,
        families: Sequence[Sequence[Sample]],
        device: torch.device,
        *,
        values: bool = False,
        version: WeightVersion | None = None,
    ) -> Rows:
        """Each family's samples begin with the same prompt, and have a trained token each. `values`: and values, and returns."""
        ids: list[Sequence[int]] = []
        positions: list[Iterable[int]] = []
        trees: list[Tree] = []
        predicting: list[NDArray[np.int64]] = []
        first = 0  # input of this family
        for members in families:
            shared = prompt_tokens(members[0])
            trees.append(tree_of(members))
            ids.append(members[0].token_ids[:shared])
            positions.append(range(shared))
            branch = first + shared
            for sample in members:
                ids.append(sample.token_ids[shared:-1])
                positions.append(range(shared, len(sample.token_ids) - 1))
                at = np.flatnonzero(sample.mask)
                predicting.append(np.where(at == shared, first + shared - 1, branch + at - shared - 1))
                branch += len(sample.token_ids) - 1 - shared
            first = branch
        samples = [sample for members in families for sample in members]
        trained = _flat([sample.mask for sample in samples], bool)

        def of_trained(name: str, kind: type) -> Tensor:
            return torch.from_numpy(_flat([getattr(sample, name) for sample in samples], kind)[trained]).to(device)

        return cls(
            ids=torch.from_numpy(_flat(ids, np.int64)).to(device),
            positions=torch.from_numpy(_flat(positions, np.int64)).to(device),
            trees=tuple(trees),
            predicting=torch.from_numpy(np.concatenate(predicting)).to(device),
            targets=of_trained("token_ids", np.int64),
            behaviour=of_trained("logprobs", np.float32),
            advantages=of_trained("advantages", np.float32),
            trained=tuple(sum(sample.mask) for sample in samples),
            whole=tuple(sum(sample.mask) + sample.others for sample in samples),
            values=of_trained("values", np.float32) if values else None,
            returns=of_trained("returns", np.float32) if values else None,
            fresh=None if version is None else torch.from_numpy(written_by(samples, version)).to(device),
        )


def prompt_tokens(sample: Sample) -> int:
    """How many tokens come before the first one that is trained on."""
    return sample.mask.index(True)


def written_by(samples: Sequence[Sample], version: WeightVersion) -> NDArray[np.bool_]:
    """`[trained]`: which tokens a version wrote, attending to nothing older."""
    found = [np.zeros(sum(sample.mask), np.bool_) for sample in samples]
    for sample, own in zip(samples, found, strict=True):
        first = 0
        for span in sample.spans:
            own[first : first + span.tokens] = span.version == version == span.oldest_kv
            first += span.tokens
    return np.concatenate(found)


def tree_of(members: Sequence[Sample]) -> Tree:
    """The inputs of samples with the same prompt. A sample by itself is one sequence."""
    if len(members) == 1:
        return Tree(len(members[0].token_ids) - 1)
    shared = prompt_tokens(members[0])
    return Tree(shared, tuple(len(sample.token_ids) - 1 - shared for sample in members if len(sample.token_ids) - 1 > shared))


def families(samples: Iterable[Sample]) -> list[list[Sample]]:
    """Samples by their prompt, in order. Those without a trained token are left out: nothing is to be computed.

    Raises ValueError for a sample whose first token is trained on: nothing predicts it.
    """
    found: dict[tuple[int, ...], list[Sample]] = {}
    for sample in samples:
        if sample.mask[0]:
            raise ValueError(f"sample {sample.group}/{sample.member} has no prompt: nothing predicts its first token")
        if any(sample.mask):
            found.setdefault(sample.token_ids[: prompt_tokens(sample)], []).append(sample)
    return list(found.values())


def pieces(samples: Iterable[Sample], limit: int | None) -> list[list[list[Sample]]]:
    """Families cut into parts of about `limit` inputs at most (None: one part), a larger family by itself."""
    parts: list[list[list[Sample]]] = []
    room = 0
    for members in families(samples):
        tokens = tree_of(members).tokens
        if not parts or (limit is not None and tokens > room):
            parts.append([])
            room = limit or 0
        parts[-1].append(members)
        room -= tokens
    return parts


def _flat(parts: Sequence[Iterable[float]], kind: type) -> NDArray[Any]:
    return np.fromiter((value for part in parts for value in part), kind)
