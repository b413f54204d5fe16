"""One micro-batch as flat tensors for the packed forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from rollyard.types import Sample


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows one after the other. The last token of a row predicts nothing, so it is not among the inputs."""

    ids: Tensor  # [inputs] int64
    positions: Tensor  # [inputs] int64
    lengths: tuple[int, ...]  # inputs of each row
    predicting: Tensor  # [trained] int64: the inputs whose next token is trained on
    targets: Tensor  # [trained] int64: those next tokens
    behaviour: Tensor  # [trained] float32: logprobs when sampled
    advantages: Tensor  # [trained] float32
    trained: tuple[int, ...]  # trained tokens of each row

    @classmethod
    def of(cls, samples: Sequence[Sample], device: torch.device) -> Rows | None:
        """None when no row has a trained token."""
        samples = [sample for sample in samples if any(sample.mask)]
        if not samples:
            return None
        lengths = np.array([len(sample.token_ids) for sample in samples])
        ids, mask, behaviour, advantages = (
            np.fromiter(chain.from_iterable(getattr(sample, name) for sample in samples), kind, int(lengths.sum()))
            for name, kind in (("token_ids", np.int64), ("mask", bool), ("logprobs", np.float32), ("advantages", np.float32))
        )
        ends = np.cumsum(lengths)
        is_input = np.ones(len(ids), bool)
        is_input[ends - 1] = False
        follows = np.flatnonzero(is_input) + 1  # the token after each input
        predicting = np.flatnonzero(mask[follows])
        trained = follows[predicting]
        positions = (np.arange(len(ids)) - np.repeat(ends - lengths, lengths))[is_input]
        flat = (ids[is_input], positions, predicting, ids[trained], behaviour[trained], advantages[trained])
        tensors = [torch.from_numpy(array).to(device) for array in flat]
        return cls(
            ids=tensors[0],
            positions=tensors[1],
            lengths=tuple(int(count) - 1 for count in lengths),
            predicting=tensors[2],
            targets=tensors[3],
            behaviour=tensors[4],
            advantages=tensors[5],
            trained=tuple(sum(sample.mask) for sample in samples),
        )
