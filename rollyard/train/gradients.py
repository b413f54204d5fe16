"""How the gradients of all ranks become one step: of ranks with copies of the parameters, and of ranks with parts of them."""

from __future__ import annotations

import math
from typing import Protocol

import torch

from rollyard.errors import TrainError
from rollyard.model.transformer import CausalLM
from rollyard.train.ranks import Ranks, fingerprint, flat_gradients


class Gradients(Protocol):
    """Each method is called by all ranks alike, in this order; `passes` also before passes without gradients."""

    def passes(self, count: int) -> int:
        """Before the first of so many forward passes here, and who knows how many elsewhere: how many each rank has to make."""
        ...

    def begin(self) -> None:
        """Before the first pass of an optimizer step."""
        ...

    def add_up(self) -> None:
        """After the last one: the parameters' gradients are those of the whole batch."""
        ...

    def clip(self, most: float) -> float:
        """Scale them down to this norm. Returns the norm they had, the same everywhere."""
        ...

    def check(self, step: int) -> None:
        """After the step, in the midst of the change. Raises TrainError on all ranks alike, when they are apart."""
        ...


class Copies:
    """Every rank has all parameters, and adds up all gradients once.

    Args:
        model: of this rank.
    """

    def __init__(self, model: CausalLM, ranks: Ranks) -> None:
        self._parameters, self._ranks = list(model.trained().values()), ranks
        self._flat: torch.Tensor | None = None

    def passes(self, count: int) -> int:
        return count

    def begin(self) -> None:
        self._flat = flat_gradients(self._parameters) if self._ranks.size > 1 else None

    def add_up(self) -> None:
        if self._flat is not None:
            self._ranks.add_up(self._flat)
            self._flat = None

    def clip(self, most: float) -> float:
        return float(torch.nn.utils.clip_grad_norm_(self._parameters, most))

    def check(self, step: int) -> None:
        """Parameters that drifted apart are found here."""
        if self._ranks.size > 1:
            found = self._ranks.gather(fingerprint(self._parameters)).flatten().tolist()
            if len(set(found)) > 1:
                ranks = " and ".join(str(rank) for rank, number in enumerate(found) if number != found[0])
                raise TrainError(f"step {step}: the parameters of rank {ranks} are not those of rank 0")


class Shards:
    """Every rank has some rows of each parameter. Each pass gathers layers and adds up gradients, so all make as many.

    Args:
        model: this rank's part of it.
    """

    def __init__(self, model: CausalLM, ranks: Ranks) -> None:
        self._model, self._ranks = model, ranks

    def passes(self, count: int) -> int:
        return int(self._ranks.gather(torch.tensor([count])).max())

    def begin(self) -> None:
        """Nothing is kept between two steps."""

    def add_up(self) -> None:
        """Each backward pass has."""

    def clip(self, most: float) -> float:
        own = self._model.parts.own
        gradients = [own(parameter.grad) for parameter in self._model.parameters() if parameter.grad is not None]
        squares = sum(float(gradient.float().square().sum(dtype=torch.float64)) for gradient in gradients)
        norm = math.sqrt(float(self._ranks.gather(torch.tensor([squares], dtype=torch.float64)).sum()))
        if most < norm < math.inf:
            for gradient in gradients:
                gradient.mul_(most / (norm + 1e-6))
        return norm

    def check(self, step: int) -> None:
        """Nothing is there twice that could differ; that all have come so far is what is left to know."""
        self._ranks.agree(f"step {step}")
