"""The canary: tensors are moved well above noise and published; the engines' logprobs must move as the trainer's do.

One tensor that stays behind anywhere (not sent, not copied, packed once and never again) leaves an engine with logprobs
that the moved weights do not have. By how much is estimated for each tensor to first order. At first all are moved at
once; those that would not show well enough then are moved again by themselves, where nothing else drowns them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rollyard.model.adapter import partner
from rollyard.model.folder import EMBEDDING
from rollyard.model.transformer import CausalLM
from rollyard.types import Answer, Finding, Slice
from rollyard.weights import probe
from rollyard.weights.flat import replacing

WANTED = 10.0  # times the limit: nats a prompt that each tensor should show
FEW = 16  # tensors that are put back one by one, to see what their absence comes to
FARTHEST = 0.3  # of a tensor's own length, that it moves at most at first
LEAST_SHARE = 0.002  # of a tensor's own length, that it moves at least when it moves again
FARTHER = 3.0  # times, with each attempt
LEAST_LIMIT = 1e-3  # nats, far above the noise of float32
LIMIT = 4.0  # times the noise: what engine and trainer may differ by when all has arrived
FAR = 1.5  # times the limit: an estimate that is believed
PERIOD = 65_537  # random signs that are used again and again; prime
PART = 1 / 128  # of each number: a rounding, to learn how coarse the logprobs are

Kept = Mapping[str, Tensor]  # what is trained as it was, on the CPU
Shares = Mapping[str, Sequence[Slice]]  # by name of a tensor that engines divide: the part of each of their workers
UNDIVIDED: Shares = {}


@dataclass(frozen=True, slots=True)
class Moved:
    """What is known of moved parameters."""

    table: Tensor  # [prompts, vocab] logprobs
    shows: Mapping[str, float]  # nats by which they would differ, to first order, if this tensor had stayed behind


def keep(model: CausalLM) -> dict[str, Tensor]:
    """A copy of all that is trained, or of what is here of it."""
    return _copies(model, model.trained())


@torch.no_grad()
def restore(model: CausalLM, kept: Kept) -> None:
    """The tensors as they were, bit for bit; also when a change of them failed half way."""
    with replacing(model.stamp):
        for name, parameter in model.trained().items():
            model.parts.own(parameter).copy_(kept[name])


def least_limit(noise: float) -> float:
    """What engine and trainer may differ by, at least, given how they differ with the same weights."""
    return max(LIMIT * noise, LEAST_LIMIT)


def move(model: CausalLM, kept: Kept, names: Iterable[str], attempt: int, limit: float, shares: Shares = UNDIVIDED) -> Moved:
    """Move these tensors from where they were; the others are as they were.

    They move along their gradients, where a short way shows, and in turn up and down, so that all together hardly move the
    logprobs and one that is missing does. Each attempt goes farther: the last move may have been lost in rounding.

    A of an adapter whose B is zeros has no gradient. It moves after the others, when it has one: B has moved by then, also
    when that was not asked for.
    """
    restore(model, kept)
    parameters, asked = model.trained(), tuple(names)
    gradients = _gradients(model, {name: parameters[name] for name in asked}, attempt)
    still = [name for name, gradient in gradients.items() if partner(name) != name and not gradient.any()]
    first = dict.fromkeys((*(name for name in asked if name not in still), *map(partner, still)))
    _move(model, {name: parameters[name] for name in first if name not in still}, attempt, limit)
    _move(model, {name: parameters[name] for name in still}, attempt, limit)
    return Moved(probe.table(model), _shows(model, kept, {name: parameters[name] for name in asked}, attempt, shares))


def _move(model: CausalLM, chosen: Mapping[str, Tensor], attempt: int, limit: float) -> None:
    farther, parts, gradients = FARTHER ** (attempt - 1), model.parts, _gradients(model, chosen, attempt)
    with model.stamp.writing(), torch.no_grad():
        for number, (name, gradient) in enumerate(gradients.items()):
            parameter = chosen[name]
            here, shape = parts.own(parameter), parameter.shape
            along, effect = _direction(parts.gathered(gradient, shape).float())
            own = float(parts.gathered(here, shape).float().norm()) or 1.0
            size = min(farther * WANTED * limit * probe.PROMPTS**0.5 / (effect or 1.0), farther * FARTHEST * own)
            if attempt > 1:  # what should have shown did not: one row may have had all the effect, or rounding all the move
                size = max(size, farther * LEAST_SHARE * own)
            here.add_((along[parts.rows(shape)] * (size * (-1) ** number)).to(here.dtype))


def compare(before: Sequence[Answer], base: Tensor, after: Sequence[Answer], moved: Moved, coarser: float) -> Finding:
    """Answers with the weights as they were, and with moved ones, whose logprobs are `coarser` times as coarse."""
    return Finding(probe.distance(after, moved.table), least_limit(coarser * probe.distance(before, base)))


@torch.no_grad()
def answer_to_rounding(model: CausalLM) -> float:
    """Nats by which the probe's logprobs change when every number changes by a small part of it, up or down."""
    parameters, exact = dict(model.named_parameters()), probe.table(model)
    kept = _copies(model, parameters)
    signs = torch.randint(2, (PERIOD,), generator=torch.Generator().manual_seed(2)) * 2 - 1
    try:
        with model.stamp.writing():
            for name, parameter in parameters.items():
                factors = (1 + PART * signs).repeat(-(-parameter.numel() // PERIOD))[: parameter.numel()].view(parameter.shape)
                model.parts.own(parameter).copy_(kept[name] * factors[model.parts.rows(parameter.shape)])
        rounded = probe.table(model)
    finally:  # also of what is frozen, which nothing else puts back
        with replacing(model.stamp):
            for name, parameter in parameters.items():
                model.parts.own(parameter).copy_(kept[name])
    return float((exact.exp() * (rounded - exact).square()).sum(dim=1).mean().sqrt())


def left_behind(
    model: CausalLM, kept: Kept, after: Sequence[Answer], limit: float, shares: Shares = UNDIVIDED
) -> tuple[str, ...]:
    """Which single tensor, or part of one worker, had it stayed as it was, explains an engine's answers.

    Parameters are moved now, and stay so.
    """
    tables = _put_back(model, kept, kept, shares)
    return tuple(what for _, what, table in tables if probe.distance(after, table) <= limit)


def hidden(
    model: CausalLM, kept: Kept, moved: Moved, after: Sequence[Answer], limit: float, shares: Shares = UNDIVIDED
) -> tuple[str, ...]:
    """Tensors whose absence may hide within the limit. Parameters are moved now, and stay so.

    Where the estimate does not say by far that a tensor shows, it is put back for a moment: would these answers do then?
    That takes a forward pass for each, so only a few are looked at; the others show better when they are moved again.
    """
    unsure = sorted((name for name, nats in moved.shows.items() if nats <= FAR * limit), key=moved.shows.__getitem__)
    few, rest = unsure[-FEW:], unsure[:-FEW]
    found = {name for name, _, table in _put_back(model, kept, few, shares) if probe.distance(after, table) <= limit}
    if model.architecture.tied and EMBEDDING in moved.shows:
        halves = _halves_put_back(model, kept)
        if any(probe.distance(after, table) <= limit for table in halves):
            found.add(EMBEDDING)
    return (*rest, *sorted(found - set(rest)))


@torch.no_grad()
def _halves_put_back(model: CausalLM, kept: Kept) -> tuple[Tensor, Tensor]:
    """A tied embedding is used twice, and an engine may hold it twice: with only the head, and only the lookup, as it was."""
    parts, weight = model.parts, model.parts.own(model.head_weight)
    shape, away, before = model.head_weight.shape, weight.clone(), kept[EMBEDDING].to(weight.device)
    head = probe.with_head(model, parts.gathered(before, shape))
    with model.stamp.writing():
        weight.copy_(before)
    lookup = probe.with_head(model, parts.gathered(away, shape))
    with model.stamp.writing():
        weight.copy_(away)
    return head, lookup


def _put_back(model: CausalLM, kept: Kept, names: Iterable[str], shares: Shares) -> Iterator[tuple[str, str, Tensor]]:
    """The probe's logprobs with one tensor at a time as it was, and with the part of one worker: its name, and in words."""
    parameters = model.trained()
    for name in names:
        own, shape = model.parts.own(parameters[name]), parameters[name].shape
        parts = [(f"{name} in worker {rank}", part) for rank, part in enumerate(shares.get(name, ()))]
        for what, part in ((name, None), *parts):
            lies = _lying(part, model.parts.rows(shape))
            here, before = _of(own, lies), _of(kept[name], lies)
            away = here.clone()
            with model.stamp.writing():
                here.copy_(before)
            yield name, what, probe.table(model)
            with model.stamp.writing():
                here.copy_(away)


def _lying(part: Slice | None, rows: slice) -> Slice | None:
    """Where a part of a tensor lies in the rows that are here, which may be nowhere."""
    if part is None or part.dim:
        return part
    start, end = (min(max(row, rows.start), rows.stop) - rows.start for row in (part.start, part.end))
    return Slice(0, start, end)


def _of(tensor: Tensor, part: Slice | None) -> Tensor:
    return tensor if part is None else tensor.narrow(part.dim, part.start, part.end - part.start)


def _copies(model: CausalLM, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: model.parts.own(parameter).to("cpu", copy=True) for name, parameter in parameters.items()}


def _direction(gradient: Tensor) -> tuple[Tensor, float]:
    """Of length 1, every row of a matrix as long as the others; and the effect of going so far, to first order."""
    rows = gradient if gradient.dim() == 1 else gradient / gradient.norm(dim=1, keepdim=True).clamp_min(1e-30)
    along = rows / rows.norm().clamp_min(1e-30)
    return along, float((gradient * along).sum())


def _gradients(model: CausalLM, chosen: Mapping[str, Tensor], attempt: int) -> dict[str, Tensor]:
    """Of the probe's logprobs, of the likeliest tokens, added up with random signs over the root of their number.

    What is here of each.
    """
    if not chosen:
        return {}
    generator = torch.Generator().manual_seed(attempt)
    with torch.enable_grad():
        logprobs = probe.logprobs(model)
        likeliest = logprobs.gather(1, logprobs.detach().argmax(dim=1, keepdim=True))[:, 0]
        signs = torch.randint(2, likeliest.shape, generator=generator).to(likeliest) * 2 - 1
        total = (signs * likeliest).sum() / len(likeliest) ** 0.5
        return dict(zip(chosen, model.parts.gradients(total, list(chosen.values())), strict=True))


def _shows(model: CausalLM, kept: Kept, chosen: Mapping[str, Tensor], attempt: int, shares: Shares) -> dict[str, float]:
    """|<gradient, move>| over the root of the number of prompts, a lower bound of the root mean square over prompts.

    Of a tensor that workers divide, that of the part which shows least.
    """
    shows, parts = list[float](), model.parts
    for name, gradient in _gradients(model, chosen, attempt).items():
        move = parts.own(chosen[name]).float() - kept[name].to(gradient.device).float()
        shown = parts.gathered(gradient.float() * move, chosen[name].shape)
        each: list[Slice | None] = [part for part in shares.get(name, ()) if part.end > part.start]
        shows.append(min(abs(float(_of(shown, part).sum())) for part in each or [None]) / probe.PROMPTS**0.5)
    agreed: list[float] = parts.agreed(torch.tensor(shows, dtype=torch.float64)).tolist()
    return dict(zip(chosen, agreed, strict=True))
