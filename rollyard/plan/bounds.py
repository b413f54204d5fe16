"""What a choice takes at least, and what it should take, before anything is simulated.

`least_s` is a lower bound of the simulated time; `Estimate` is the middle of what is to be expected, and says what bounds it.
Both know nothing but lengths and costs, as `bench/theory.py` does for measured runs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from rollyard.plan.costs import Costs
from rollyard.plan.decoding import EngineCosts
from rollyard.plan.sample import Numbers, Sample
from rollyard.plan.space import Point


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds of a step, and of its parts.

    Attributes:
        step_s: in all.
        generation_s: what is written in a step, on all slots, none ever idle.
        tail_s: besides, until the longest is written; with async what a step is to last for the longest to be in time.
        training_s: on the training devices.
        sync_s: new weights, or the training state, as far as something waits for them.
    """

    step_s: float
    generation_s: float
    tail_s: float
    training_s: float
    sync_s: float


@dataclass(frozen=True)
class Pace:
    """How fast one kind of engine writes."""

    engine: EngineCosts
    _least: list[list[float]] = field(default_factory=list)  # [slots][lines] seconds a token, without its context, at best

    def at(self, running: float, context: float) -> float:
        """Seconds of a step of so many, each of which attends to `context` tokens."""
        count = max(1, round(running))
        return self.engine.step(count).at(max(running, 1.0) * context)

    def work_s(self, tokens: float, context: float, slots: int) -> float:
        """Seconds that an engine takes at least for so many decoded tokens, that attend to `context` tokens together.

        A step takes its floor and the longest of its lines, so all steps together take at least what each line says; and of a
        line's fixed part a token has no less than the least share that any number of running sequences gives it.
        """
        while len(self._least) < slots:
            cost = self.engine.step(len(self._least) + 1)
            each = [(cost.floor_s + line.fixed) / (len(self._least) + 1) for line in cost.lines]
            before = self._least[-1] if self._least else [math.inf] * len(each)
            self._least.append([min(pair) for pair in zip(each, before, strict=True)])
        return max(
            tokens * fixed + context * line.per_token
            for fixed, line in zip(self._least[slots - 1], self.engine.step(1).lines, strict=True)
        )

    def alone_s(self, prompt: float, tokens: float) -> float:
        """Seconds of one completion at least: `tokens` - 1 steps by itself, which attend to the prompt and what is written."""
        steps, cost = max(tokens - 1, 0.0), self.engine.step(1)
        context = steps * prompt + steps * (steps + 1) / 2
        return max(steps * (cost.floor_s + line.fixed) + line.per_token * context for line in cost.lines)

    def steps_s(self, steps: float) -> float:
        """Seconds of so many steps at least, whoever runs and whatever is attended to."""
        cost = self.engine.step(1)
        return steps * (cost.floor_s + max(line.fixed for line in cost.lines))


class Yard:
    """Bounds and estimates for one sample of lengths.

    Args:
        page: tokens of a page of an engine's cache.
        cut: completions may go on at another engine than they began.
        drops: groups may be dropped.
    """

    def __init__(self, sample: Sample, page: int, cut: bool = False, drops: bool = False) -> None:
        self.drops = drops
        self.sample, self.page, self.cut, self.members = sample, page, cut, sample.size * sample.lengths.shape[1]
        self._paces: dict[int, Pace] = {}
        self._spans: dict[tuple[int, float, float, float], tuple[float, float]] = {}

    def pace(self, costs: Costs) -> Pace:
        """Of its engines."""
        return self._paces.setdefault(costs.devices.tensor_parallel, Pace(costs.engine))

    # ---- bounds

    def least_s(self, point: Point, costs: Costs, first: int, steps: int) -> float:
        """Seconds of a step at least, over the steps from `first` (0 is the first of the run) up to `steps`.

        The sample has `groups_needed` groups at least. Where groups are dropped others come in their place, of which nothing
        is known: 0.
        """
        if self.drops:
            return 0.0
        pace, size, count = self.pace(costs), self.sample.size, steps - first
        if point.staleness and point.placement != "swap":
            return self._overlapped_s(point, costs, pace, first, steps)
        parts = [slice(step * size, (step + 1) * size) for step in range(first, steps)]
        trained = sum(self._trained_s(costs, part) for part in parts)
        if point.placement == "swap":
            return trained / count
        return (trained + sum(self._written_s(pace, costs, point, part) for part in parts)) / count

    def _written_s(self, pace: Pace, costs: Costs, point: Point, part: slice) -> float:
        """A batch by itself: no sooner than all slots can write it, and no sooner than its longest is written."""
        sample = self.sample
        tokens, context = float(np.sum(sample.decoded[part])), float(np.sum(sample.context[part]))
        prompt, longest = float(np.min(sample.prompts[part])), float(np.max(sample.longest[part]))
        return max(self._work_s(pace, costs, point, tokens, context), self._alone_s(pace, costs, point, prompt, longest))

    def _work_s(self, pace: Pace, costs: Costs, point: Point, tokens: float, context: float) -> float:
        """On all engines. A completion that is cut and read again has a token from each time that it is read.

        So with these nothing is known but that a step gives each of its slots one token.
        """
        if self._read_once(costs, point):
            return pace.work_s(tokens, context, point.slots) / point.engines
        return pace.steps_s(tokens / point.slots) / point.engines

    def _alone_s(self, pace: Pace, costs: Costs, point: Point, prompt: float, tokens: float) -> float:
        return pace.alone_s(prompt, tokens) if self._read_once(costs, point) else pace.steps_s(max(tokens - 1, 0.0))

    def _read_once(self, costs: Costs, point: Point) -> bool:
        """Nothing cuts a completion: weights that change, a lack of pages, an engine that is lost, a move."""
        if self.cut or point.rollover == "abort" or (not point.apart and point.oversample):
            return False
        whole = float(np.max(self.sample.prompts) + np.max(self.sample.lengths)) + self.page
        return costs.engine.kv_tokens >= point.slots * whole

    def _trained_s(self, costs: Costs, part: slice) -> float:
        return costs.train_s(int(np.sum(self.sample.trained[part])), int(np.sum(self.sample.pairs[part])))

    def _overlapped_s(self, point: Point, costs: Costs, pace: Pace, first: int, steps: int) -> float:
        """Which groups a batch has is not known before: of those that may be in it the lightest count.

        What was written before the step `first` is of groups that could be admitted by then. Of those that can be admitted
        until the last batch is taken, the heaviest are what is left.
        """
        sample, size, ahead = self.sample, self.sample.size, point.staleness
        learnt = (sample.trained, sample.pairs)
        admitted, before, count = (steps + ahead) * size, (first + ahead) * size, steps - first

        def written(numbers: Numbers) -> float:
            return max(_lightest(numbers[:admitted], steps * size) - float(np.sum(numbers[:before])), 0.0)

        work = self._work_s(pace, costs, point, written(sample.decoded), written(sample.context))
        trained = costs.training.least_s(*(_lightest(numbers[:admitted], count * size) / count for numbers in learnt))
        if not point.apart:
            return trained + work / count
        once = costs.training.least_s(*(_lightest(numbers[:admitted], size) for numbers in learnt))  # of any one batch
        longest = float(np.sort(sample.longest[:admitted])[size - 1])
        late = self._alone_s(pace, costs, point, float(np.min(sample.prompts[:admitted])), longest) + once
        return max(trained, work / count, count // (ahead + 1) * late / count)

    # ---- estimates

    def estimate(self, point: Point, costs: Costs) -> Estimate:
        """What is to be expected."""
        size = self.sample.size
        trained = costs.train_s(
            round(float(np.mean(self.sample.trained)) * size), round(float(np.mean(self.sample.pairs)) * size)
        )
        if point.placement == "async" and point.rollover != "drain":
            return self._async(point, costs, trained)
        batches = point.staleness if point.placement == "async" else 1  # that are written at a time
        share = self.members / point.engines * batches
        longest = self.sample.left_out(point.oversample) if point.oversample else self.sample.batch_longest
        work, span = (seconds / batches for seconds in self._span(costs, share, point.slots, longest))
        tail = span - work
        match point.placement:
            case "separate":
                sync = costs.copy_s + costs.transfer_s + costs.load_s
                return Estimate(span + trained + sync, work, tail, trained, sync)
            case "colocated":
                sync = costs.load_s + costs.sleep_s + costs.wake_s
                return Estimate(span + trained + sync, work, tail, trained, sync)
            case "swap":  # each half writes a batch and trains on one in two steps
                sync = costs.handoff_s + costs.load_s
                return Estimate(max((span + trained + sync) / 2, trained + sync), work / 2, tail / 2, trained, sync)
        busy = trained + costs.copy_s  # async that drains: engines empty at each version, the trainer works beside that
        return Estimate(max(span + costs.load_s / batches, busy), work, tail, trained, costs.copy_s + costs.load_s / batches)

    def _async(self, point: Point, costs: Costs, trained: float) -> Estimate:
        """Engines never empty; how far they run ahead is limited in prompts, and in versions.

        A group is under way until its longest is written, and a member until it is.
        """
        sample, pace, size = self.sample, self.pace(costs), self.sample.size
        group, ahead = self.members / size, size + point.oversample if point.oversample else size * (point.staleness + 1)
        unfinished = sample.mean / float(np.mean(sample.longest))
        running = min(unfinished * ahead * group / point.engines, self._slots(costs, point.slots))
        step_s = pace.at(running, sample.prompt + sample.running)
        read = self._prefill_s(costs, size / point.engines, running)
        if point.rollover == "abort":  # what is under way is read again
            tokens = sample.prompt + sample.running
            read += costs.engine.prefill_s(round(running * tokens), round(running * tokens**2 / 2), max(1, round(running)))
        work = self.members / point.engines * sample.mean / max(running, 1.0) * step_s + read
        sync = costs.copy_s + costs.transfer_s + costs.load_s
        tail = (sample.batch_longest * step_s + trained + sync) / (point.staleness + 1)
        tail = max(tail, float(np.mean(sample.longest)) * step_s * size / ahead)
        return Estimate(max(work + costs.load_s, trained + costs.copy_s, tail), work, tail, trained, costs.copy_s + costs.load_s)

    def _slots(self, costs: Costs, slots: int) -> float:
        """Sequences that run at a time, as far as there is room for their keys and values."""
        return max(1.0, min(slots, costs.engine.kv_tokens / (self.sample.prompt + self.sample.running)))

    def _prefill_s(self, costs: Costs, groups: float, running: float) -> float:
        prompt, beside = self.sample.prompt, max(1, round(running))
        return groups * costs.engine.prefill_s(round(prompt), round(prompt * (prompt + 1) / 2), beside)

    def _span(self, costs: Costs, members: float, slots: int, longest: float) -> tuple[float, float]:
        """Seconds in which one engine writes so many completions: if no slot were ever idle, and as it is."""
        key = (costs.devices.tensor_parallel, members, self._slots(costs, slots), longest)
        if key not in self._spans:
            self._spans[key] = self._spanned(costs, *key[1:])
        return self._spans[key]

    def _spanned(self, costs: Costs, members: float, slots: float, longest: float) -> tuple[float, float]:
        """While requests wait all slots write; then fewer and fewer, until the longest is written."""
        sample, pace = self.sample, self.pace(costs)
        running, read = min(members, slots), self._prefill_s(costs, members / self.members * sample.size, min(members, slots))
        full_s = pace.at(running, sample.prompt + sample.running)
        work = members * sample.mean / max(running, 1.0) * full_s
        waiting = members > slots
        shares, begun = (sample.remaining, sample.running) if waiting else (sample.writing, 0.0)
        places = np.minimum(sample.places, longest)
        tail = left = 0.0
        for start, end, share in zip(places[:-1], places[1:], shares[:-1], strict=True):
            context = sample.prompt + min(begun + (start + end) / 2, longest)
            tail += float(end - start) * pace.at(running * float(share), context)
            left += float(end - start) * running * float(share)
        queued = max(members * sample.mean - left, 0.0) / running * full_s if waiting else 0.0
        return work + read, max(queued + tail, work) + read


def groups_needed(staleness: int, size: int, steps: int) -> int:
    """Groups of a sample for so many steps: all that may be admitted until the last batch is taken."""
    return (steps + staleness) * size


def _lightest(numbers: Numbers, count: int) -> float:
    return float(np.sum(np.sort(numbers)[:count]))
