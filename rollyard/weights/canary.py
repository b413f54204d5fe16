"""The canary: every tensor is moved well above noise and published; the engines' logprobs must move as the trainer's do.

One tensor that stays behind anywhere (not sent, not copied, packed once and never again) leaves an engine with logprobs
that no complete set of weights has. How much each tensor would show is estimated to first order, so that one too weak to
be seen is named, and not passed over. Afterwards the parameters are as they were, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from rollyard.model.transformer import CausalLM
from rollyard.weights import probe
from rollyard.weights.probe import Answer

STRENGTH = 0.3  # of a tensor's own root mean square
DIRECTIONS = 4  # random combinations of logprobs in which a tensor may show
LEAST_LIMIT = 1e-4  # nats
LIMIT = 4.0  # times the noise: what engine and trainer may differ by when all has arrived


@dataclass(frozen=True, slots=True)
class Moved:
    """What is known of the moved parameters."""

    table: Tensor  # [prompts, vocab] logprobs
    shows: Mapping[str, float]  # nats by which the logprobs would differ, to first order, if this tensor stayed behind
    kept: Mapping[str, Tensor]  # the parameters as they were


@contextmanager
def moved(model: CausalLM, seed: int = 0) -> Iterator[Moved]:
    """Inside this block the parameters are moved; afterwards they are as they were.

    They are changed under the stamp, so no engine decodes with them unless they are published.
    """
    kept = {name: parameter.detach().to("cpu", copy=True) for name, parameter in model.named_parameters()}
    try:
        with model.stamp.writing(), torch.no_grad():
            _move(model, seed)
        yield Moved(probe.table(model), _shows(model, kept), kept)
    finally:
        with model.stamp.writing(), torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(kept[name])


def _move(model: CausalLM, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        scale = float(parameter.float().square().mean().sqrt()) or 1.0  # zeros move too
        noise = torch.empty(parameter.shape).normal_(0.0, STRENGTH * scale, generator=generator)
        parameter.add_(noise.to(parameter.device, parameter.dtype))


def _shows(model: CausalLM, kept: Mapping[str, Tensor]) -> dict[str, float]:
    """|<gradient, move>| of random combinations of the probe's logprobs, their root mean square for each tensor."""
    parameters = dict(model.named_parameters())
    generator = torch.Generator().manual_seed(1)
    squares = dict.fromkeys(parameters, 0.0)
    for _ in range(DIRECTIONS):
        logprobs = _likeliest(model)
        signs = torch.randint(2, logprobs.shape, generator=generator).to(logprobs) * 2 - 1
        total = (signs * logprobs).sum() / len(logprobs) ** 0.5
        gradients = torch.autograd.grad(total, list(parameters.values()))
        for (name, parameter), gradient in zip(parameters.items(), gradients, strict=True):
            move = parameter.detach() - kept[name].to(parameter.device)
            squares[name] += float((gradient.float() * move.float()).sum()) ** 2
    return {name: (square / DIRECTIONS) ** 0.5 for name, square in squares.items()}


def _likeliest(model: CausalLM) -> Tensor:
    """`[prompts]` logprobs of the likeliest token after each, differentiable."""
    with torch.enable_grad():
        logprobs = probe.logprobs(model)
    return logprobs.gather(1, logprobs.detach().argmax(dim=1, keepdim=True))[:, 0]


@dataclass(frozen=True, slots=True)
class Finding:
    """What the canary says of one engine."""

    noise: float  # nats, with the weights as they were
    gap: float  # nats, with the moved ones
    limit: float  # nats

    @property
    def passed(self) -> bool:
        return self.gap <= self.limit


def compare(before: Sequence[Answer], base: Tensor, after: Sequence[Answer], moved_: Moved) -> Finding:
    """Answers with the weights as they were, and with the moved ones."""
    noise = probe.distance(before, base)
    return Finding(noise, probe.distance(after, moved_.table), max(LIMIT * noise, LEAST_LIMIT))


def unseen(shows: Mapping[str, float], limit: float) -> tuple[str, ...]:
    """Tensors whose absence would hide within the limit."""
    return tuple(name for name, nats in shows.items() if nats <= limit)


def left_behind(model: CausalLM, now: Moved, after: Sequence[Answer], limit: float) -> tuple[str, ...]:
    """Which single tensor, had it stayed as it was, explains the engine's answers; called while parameters are moved."""
    found = []
    for name, parameter in model.named_parameters():
        moved_value = parameter.detach().clone()
        with model.stamp.writing(), torch.no_grad():
            parameter.copy_(now.kept[name])
        if probe.distance(after, probe.table(model)) <= limit:
            found.append(name)
        with model.stamp.writing(), torch.no_grad():
            parameter.copy_(moved_value)
    return tuple(found)
