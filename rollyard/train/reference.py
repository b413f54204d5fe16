"""The policy that a run began with, which the one that is trained is not to leave far behind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from rollyard.model import adapter
from rollyard.model.transformer import CausalLM
from rollyard.train.learn import policy_logprobs
from rollyard.train.rows import Rows
from rollyard.types import Sampling


class Reference:
    """Says the logprobs of a policy that never changes.

    Args:
        model: that policy; or the one that is trained, with an adapter.
        tensors: of the adapter as it was at first, which stand in for the trained ones during each pass.
    """

    def __init__(self, model: CausalLM, tensors: Mapping[str, Tensor] | None = None) -> None:
        self.model, self._tensors = model, tensors or {}
        if not tensors:
            model.requires_grad_(False)

    @classmethod
    def of(cls, model: CausalLM, folder: Path, load: Callable[[], CausalLM]) -> Reference:
        """The policy in `folder` beside `model`, which is trained: with its own adapter, or a copy, which `load` reads.

        Raises ConfigError for an adapter that does not fit.
        """
        return cls(model, adapter.initial(model, folder)) if model.adapted else cls(load())

    def logprobs(self, rows: Rows, sampling: Sampling, products: torch.dtype) -> Tensor:
        """Of the trained tokens, under the distribution they would have been drawn from: `[trained]` float32."""
        with adapter.standing_in(self.model, self._tensors):
            return policy_logprobs(self.model, rows, sampling, products)
