"""What each placement should take, from the lengths alone: no core, no engine, no event loop has part in it."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property

PARAMETERS = 1e8
BYTES_PER_S = 2e11  # between devices
WEIGHT_BYTES, STATE_BYTES = 2, 14  # a parameter: in bfloat16; with moments and a float32 copy


@dataclass(frozen=True)
class Work:
    """One workload, the same for every placement.

    The length of a completion follows from its prompt and its place in the group alone: lognormal, cut at `cap` tokens as
    `max_tokens` cuts. A sequence takes `token_s` a token, however many share its engine.

    Training work is given as a share of the generation work: `ratio` is seconds of generation on all slots, none ever
    idle, over seconds of training on the one training device.
    """

    ratio: float
    steps: int = 60
    groups: int = 16  # B
    size: int = 8  # K
    generate: int = 4  # devices
    train: int = 1  # devices
    slots: int = 16  # of a device
    staleness: int = 2  # of async
    median: int = 10  # tokens
    sigma: float = 1.0
    cap: int = 40  # tokens
    token_s: float = 0.005
    copy_s: float = 0.0005  # copying the weights out of the trainer
    load_s: float = 0.0005  # an engine switches to weights that are near

    def length(self, prompt: int, member: int) -> int:
        """Tokens of one completion."""
        drawn = random.Random(f"{prompt}/{member}").lognormvariate(math.log(self.median), self.sigma)
        return min(max(round(drawn), 1), self.cap)

    @cached_property
    def lengths(self) -> tuple[tuple[int, ...], ...]:
        """Tokens `[steps][B * K]`, in the order of admission."""
        return tuple(
            tuple(self.length(step * self.groups + group, member) for group in range(self.groups) for member in range(self.size))
            for step in range(self.steps)
        )

    @cached_property
    def tokens(self) -> int:
        """Of the whole run."""
        return sum(map(sum, self.lengths))

    def settings(self) -> dict[str, object]:
        """Everything but the ratio, for the record."""
        own = {name: value for name, value in asdict(self).items() if name != "ratio"}
        moving = {"transfer_s": self.transfer_s, "handoff_s": self.handoff_s}
        return own | moving | {"mean": self.tokens / (self.steps * self.groups * self.size), "cut": self.cut}

    @property
    def cut(self) -> float:
        """Share of completions that are cut at `cap`."""
        lengths = [length for step in self.lengths for length in step]
        return sum(length == self.cap for length in lengths) / len(lengths)

    @property
    def devices(self) -> int:
        return self.generate + self.train

    @property
    def half_slots(self) -> int:
        """Of one of two halves."""
        return self.devices * self.slots // 2

    @property
    def generation_s(self) -> float:
        """Seconds of generation a step on all slots of the generation devices, none ever idle."""
        return self.tokens * self.token_s / (self.generate * self.slots * self.steps)

    @property
    def training_s(self) -> float:
        """Seconds of a training step on the training devices of `separate` and `async`."""
        return self.generation_s / self.ratio

    @property
    def bound_s(self) -> float:
        """What no placement with these pools comes below, a step: the longer of generation and training."""
        return max(self.generation_s, self.training_s)

    @property
    def transfer_s(self) -> float:
        """Seconds the weights travel."""
        return WEIGHT_BYTES * PARAMETERS / BYTES_PER_S

    @property
    def handoff_s(self) -> float:
        """Seconds the training state travels."""
        return STATE_BYTES * PARAMETERS / BYTES_PER_S

    @property
    def sync_s(self) -> float:
        """Seconds until idle engines have weights that travelled."""
        return self.copy_s + self.transfer_s + self.load_s

    def on(self, devices: float) -> float:
        """Seconds of a training step on so many devices."""
        return self.training_s * self.train / devices


def schedule(lengths: Iterable[int], slots: int) -> list[int]:
    """When each is written, in token times: it takes the slot that is free first, in the order given (list scheduling)."""
    free, ends = [0] * slots, []
    for length in lengths:
        ends.append(free[0] + length)
        heapq.heapreplace(free, ends[-1])
    return ends


def stale_s(work: Work) -> float:
    """Seconds a step that a staleness limit S leaves at least, where every batch has a completion as long as the longest.

    What is trained in batch n was begun at version n - S at the earliest, that is after batch n - S - 1 was trained and its
    weights had travelled. So S + 1 steps hold a training step, a sync and the longest completion. It counts the shortest of
    the batches' longest.
    """
    longest_s = min(map(max, work.lengths)) * work.token_s
    return (longest_s + work.training_s + work.sync_s) / (work.staleness + 1)


def makespan(lengths: Iterable[int], slots: int) -> int:
    """Token times until all are written."""
    return max(schedule(lengths, slots))


def separate(work: Work) -> float:
    """Seconds of the run: in turn a batch on all slots, which waits for its longest, a training step, a sync."""
    return work.steps * (work.sync_s + work.training_s) + sum(_batches(work, work.generate * work.slots))


def colocated(work: Work) -> float:
    """Seconds of the run: all devices write a batch, then all train. Weights are in place and only loaded."""
    return work.steps * (work.load_s + work.on(work.devices)) + sum(_batches(work, work.devices * work.slots))


def swap(work: Work) -> float:
    """Seconds of the run. A half that has trained loads its weights and generates, whatever the other does meanwhile.

    A batch is trained when it is written, the step before is done and the state was handed over. The first two are written
    by one half, one after the other: nobody has trained before them.
    """
    slots, training_s = work.half_slots, work.on(work.devices / 2)
    alone = _batches(work, slots)
    size = work.groups * work.size
    first = schedule([length for lengths in work.lengths[:2] for length in lengths], slots)
    written = [work.load_s + max(first[at : at + size]) * work.token_s for at in range(0, len(first), size)]
    free = written[0] + training_s
    for step in range(1, work.steps):
        if step + 1 < work.steps:
            written.append(free + work.load_s + alone[step + 1])
        free = max(written[step], free) + work.handoff_s + training_s
    return free


def swap_in_turn(work: Work) -> float:
    """Seconds of a swap whose halves change roles only when both are done: the longer of both, and the handoff."""
    training_s = work.on(work.devices / 2)
    first, *later = _batches(work, work.half_slots)
    return first + sum(max(generation_s, training_s) + work.handoff_s for generation_s in later) + training_s


def _batches(work: Work, slots: int) -> Sequence[float]:
    """Seconds of each batch by itself on so many slots `[steps]`."""
    return [makespan(lengths, slots) * work.token_s for lengths in work.lengths]
