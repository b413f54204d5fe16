"""Training rows from judged groups. Masks come from lengths, never from the value of a token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollyard.batch.balance import split
from rollyard.batch.pack import pack
from rollyard.types import Completion, Group, Rollout, Sample, Sampling, TrainBatch, Turn, VersionSpan


def build(
    step: int, groups: Sequence[Group], advantages: Sequence[Sequence[float | None]], budget: int, sampling: Sampling
) -> TrainBatch:
    """The batch of one optimizer step, for a trainer that is one. See `shards`."""
    return shards(step, groups, advantages, budget, sampling, 1)[0]


def shards(
    step: int,
    groups: Sequence[Group],
    advantages: Sequence[Sequence[float | None]],
    budget: int,
    sampling: Sampling,
    ranks: int,
) -> tuple[TrainBatch, ...]:
    """The batch of one optimizer step, a part of it for each data-parallel rank. Members without a verdict are left out.

    Args:
        step: the version it trains.
        groups: judged groups.
        advantages: one number for each rollout of each group, None where there is no verdict.
        budget: tokens of a micro-batch at most.
        sampling: how the tokens were drawn.
        ranks: how many parts, at least 1. Where samples are few, some have none.

    Raises:
        ConfigError: a sample alone is longer than the budget.
    """
    samples = [
        row
        for group, values in zip(groups, advantages, strict=True)
        for rollout, advantage in zip(group.rollouts, values, strict=True)
        if advantage is not None
        for row in rows(group, rollout, advantage)
    ]
    return tuple(TrainBatch(step, pack(part, budget), sampling) for part in split(samples, ranks, budget))


def rows(group: Group, rollout: Rollout, advantage: float) -> list[Sample]:
    """One rollout as training rows: nothing to learn on the prompt, the advantage on every sampled token.

    An episode is one row as long as each turn's prompt begins with all that came before it; what its environment put between
    gets mask 0. Where that was rewritten, such as by a chat template that leaves out earlier reasoning, another row begins. So
    every sampled token is in exactly one row, after the very tokens that it was sampled after.

    Example, the turns (3, 4) -> 5 6, (3, 4, 5, 6, 8, 9) -> 7 and (3, 8) -> 2: 3 4 5 6 8 9 7 with the mask 0011001, and 3 8 2
    with 001.
    """
    done = rollout.completion
    found: list[_Row] = []
    first = 0
    for turn in _answers(group, done):
        seen = found[-1].token_ids if found else ()
        if not found or turn.prompt_ids[: len(seen)] != seen:
            found.append(_Row())
        found[-1].extend(turn.prompt_ids, done, first, first + turn.tokens, advantage)
        first += turn.tokens
    every, spans = len(done.token_ids), _Spans(done.spans)
    return [
        Sample(
            group=group.id,
            member=done.member,
            token_ids=row.token_ids,
            mask=row.mask,
            logprobs=row.logprobs,
            advantages=row.advantages,
            spans=spans.next(row.sampled),
            part=part,
            others=every - row.sampled,
        )
        for part, row in enumerate(found)
    ]


def _answers(group: Group, done: Completion) -> Sequence[Turn]:
    """What was written after which prompt, in the order of the completion's tokens. Turns without tokens teach nothing."""
    turns = [turn for turn in done.turns if turn.tokens]
    return turns or (Turn(group.prompt.token_ids, len(done.token_ids), done.finish),)


@dataclass(slots=True)
class _Row:
    """A row that grows: four tuples, as long as each other."""

    token_ids: tuple[int, ...] = ()
    mask: tuple[bool, ...] = ()
    logprobs: tuple[float, ...] = ()
    advantages: tuple[float, ...] = ()
    sampled: int = 0

    def extend(self, prompt: Sequence[int], done: Completion, first: int, end: int, advantage: float) -> None:
        """What comes next: the rest of `prompt`, which begins with all that is here, and tokens `first` to `end` of `done`."""
        between, sampled = prompt[len(self.token_ids) :], end - first
        self.token_ids += (*between, *done.token_ids[first:end])
        self.mask += (False,) * len(between) + (True,) * sampled
        self.logprobs += (*(0.0,) * len(between), *done.logprobs[first:end])
        self.advantages += (0.0,) * len(between) + (advantage,) * sampled
        self.sampled += sampled


class _Spans:
    """Gives out what covers the next tokens of a completion."""

    def __init__(self, spans: Sequence[VersionSpan]) -> None:
        self._left = list(spans)

    def next(self, tokens: int) -> tuple[VersionSpan, ...]:
        found: list[VersionSpan] = []
        while tokens:
            span = self._left.pop(0)
            if span.tokens > tokens:
                self._left.insert(0, span._replace(tokens=span.tokens - tokens))
                span = span._replace(tokens=tokens)
            found.append(span)
            tokens -= span.tokens
        return tuple(found)
