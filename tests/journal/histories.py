"""Random histories of runs of several lives, and what they leave to the next one, told without any journal."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from random import Random

from rollyard.events import Admit, BatchTrained, Drop, Event, Generate, Instruction, Keep, Score, Scored, Train
from rollyard.lives import GroupsRecovered, Reuse, Wrote
from rollyard.types import (
    Begun,
    Completion,
    DropReason,
    FinishReason,
    Group,
    Partial,
    Prompt,
    Request,
    RequestId,
    Reward,
    Rollout,
    Sampling,
    Segment,
    VersionSpan,
    WeightVersion,
)

MEMBERS, BATCH, STOPPED = 2, 2, DropReason.STOPPED
Entry = Event | Instruction


@dataclass
class Row:
    """A checkpoint's."""

    version: WeightVersion
    folder: str
    trained: tuple[int, ...]  # prompts that its weights were trained on: what only the weights know


@dataclass
class Member:
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[WeightVersion] = field(default_factory=list)  # of each token
    completion: Completion | None = None
    reward: Reward | None = None
    dropped: DropReason | None = None

    @property
    def open(self) -> bool:
        return self.completion is None and self.dropped is None

    def write(self, ids: Iterable[int], logprobs: Iterable[float], versions: Iterable[WeightVersion]) -> None:
        self.ids += ids
        self.logprobs += logprobs
        self.versions += versions

    def spans(self) -> tuple[VersionSpan, ...]:
        spans: list[VersionSpan] = []
        for version in self.versions:
            if spans and spans[-1].version == version:
                spans[-1] = spans[-1]._replace(tokens=spans[-1].tokens + 1)
            else:
                spans.append(VersionSpan(version, version, 1))
        return tuple(spans)


@dataclass
class Standing:
    """How one prompt stands in one life."""

    prompt: Prompt
    members: list[Member]
    dropped: DropReason | None = None

    @property
    def complete(self) -> bool:
        """Every member has been judged, or has left for good."""
        fates = [m.reward is not None or m.dropped not in (None, STOPPED) for m in self.members]
        return all(fates) and any(m.reward is not None for m in self.members)

    def group(self) -> Group:
        done = [Rollout(m.completion, m.reward) for m in self.members if m.completion and m.reward]
        return Group(self.prompt, tuple(done))

    def begun(self) -> Begun:
        left = [(index, m) for index, m in enumerate(self.members) if m.dropped in (None, STOPPED)]
        return Begun(
            self.prompt.id,
            tuple(Rollout(m.completion, m.reward) for _, m in left if m.completion and m.reward),
            tuple(m.completion for _, m in left if m.completion and not m.reward),
            tuple(Partial(index, tuple(m.ids), tuple(m.logprobs), m.spans()) for index, m in left if not m.completion and m.ids),
        )


def told(lives: Iterable[Iterable[Entry]]) -> tuple[dict[int, Standing], dict[int, tuple[int, ...]]]:
    """How every prompt stands, and the batch of every step, after these entries of each life."""
    standing: dict[int, Standing] = {}
    batches: dict[int, tuple[int, ...]] = {}
    for life in lives:
        for entry in life:
            match entry:
                case Admit(prompt):
                    standing[prompt.id] = Standing(prompt, [Member() for _ in range(MEMBERS)])
                case Wrote(segment):
                    count = len(segment.token_ids)
                    member = standing[segment.request.group].members[segment.request.member]
                    member.write(segment.token_ids, segment.logprobs, [segment.version] * count)
                case Generate(_, request):
                    member, kept = standing[request.id.group].members[request.id.member], len(request.written_ids)
                    del member.ids[kept:], member.logprobs[kept:], member.versions[kept:]
                case Score(prompt, completion):
                    standing[prompt.id].members[completion.member].completion = completion
                case Scored(group, member_, reward):
                    standing[group].members[member_].reward = reward
                case Keep(found, recovered=True):
                    _take(standing[found.id], found.rollouts)
                case Reuse(begun):
                    _take(standing[begun.group], begun.rollouts)
                    for part in begun.partials:
                        versions = [span.version for span in part.spans for _ in range(span.tokens)]
                        standing[begun.group].members[part.member].write(part.token_ids, part.logprobs, versions)
                case Drop(group, None, reason):
                    standing[group].dropped = reason
                case Drop(group, int(member_), reason):
                    standing[group].members[member_].dropped = reason
                case Train(step, groups):
                    batches[step] = tuple(group.id for group in groups)
    return standing, batches


def _take(standing: Standing, rollouts: Iterable[Rollout]) -> None:
    for each in rollouts:
        member = standing.members[each.completion.member]
        member.completion, member.reward = each.completion, each.reward


def left(row: Row | None, lives: Iterable[Iterable[Entry]]) -> tuple[frozenset[int], GroupsRecovered]:
    """Prompts that are done, and what is recovered, when the next life begins at this checkpoint."""
    standing, taken = told(lives)
    done = set(row.trained if row else ()) | {id_ for id_, each in standing.items() if each.dropped not in (None, STOPPED)}
    batches: list[tuple[Group, ...]] = []
    while ids := taken.get((row.version.step if row else 0) + len(batches)):
        if not all(standing[id_].complete and id_ not in done for id_ in ids):
            break
        batches.append(tuple(standing[id_].group() for id_ in ids))
        done.update(ids)
    rest = [standing[id_] for id_ in sorted(standing) if id_ not in done]
    groups = tuple(each.group() for each in rest if each.complete)
    begun = (each.begun() for each in rest if not each.complete)
    used = tuple(each for each in begun if each.rollouts or each.completions or each.partials)
    return frozenset(done), GroupsRecovered(groups, tuple(batches), used)


class Life:
    """One life of a run whose decisions are thrown. Every action says what a conductor would in one step.

    Args:
        life: its incarnation.
        row: the checkpoint where it begins; None: at the beginning.
        done, found: what earlier lives left.
    """

    def __init__(self, random: Random, life: int, row: Row | None, done: frozenset[int], found: GroupsRecovered) -> None:
        self.random, self.life = random, life
        self.begun = self.version = row.version if row else WeightVersion(0, life)
        self.weights = row.trained if row else ()  # prompts that they were trained on
        self.standing: dict[int, Standing] = {}
        self.waiting = list(found.batches)  # stored ones, not begun yet
        self.training: tuple[Group, ...] = ()
        self.next_batch = self.version.step
        self._found = {group.id: group for group in found.groups}
        self._begun = {begun.group: begun for begun in found.begun}
        self._done, self._next = done, 0
        self._batches = found.batches

    def open(self) -> list[Entry]:
        entries: list[Entry] = []
        for group in (group for batch in self._batches for group in batch):
            entries += [Admit(group.prompt), *self._absent(group), Keep(group, recovered=True)]
        return entries + self._take_stored()

    def _take_stored(self) -> list[Entry]:
        if not self.waiting or self.training:
            return []
        self.training = self.waiting.pop(0)
        self.next_batch += 1
        return [Train(self.next_batch - 1, self.training)]

    def _absent(self, group: Group) -> list[Entry]:
        """Its members that are not to be trained on."""
        judged = {rollout.completion.member: rollout.reward.value for rollout in group.rollouts}
        reasons = {index: DropReason.NO_VERDICT if index in judged else DropReason.FAILED for index in range(MEMBERS)}
        return [Drop(group.id, index, reason) for index, reason in reasons.items() if judged.get(index) is None]

    def act(self) -> list[Entry]:
        """Something happens."""
        actions: list[Callable[[], list[Entry]]] = [self._admit, self._write, self._write, *[self._finish] * 3]
        actions += [*[self._judge] * 4, self._ask_again, self._fail, self._drop, self._train, self._train]
        return self.random.choice(actions)()

    def stop(self) -> list[Entry]:
        """What is live, or being trained, is dropped."""
        entries: list[Entry] = []
        for group in self.training:
            judged = (each.completion.member for each in group.rollouts if each.reward.value is not None)
            entries += [*(Drop(group.id, member, STOPPED) for member in judged), Drop(group.id, None, STOPPED)]
        for standing in self.standing.values():
            entries += self._drops(standing, STOPPED)
        return entries

    def _admit(self) -> list[Entry]:
        while self._next in self._done or self._next % 5 == 3:  # sparse
            self._next += 1
        prompt = Prompt(self._next, 0, (self._next + 1,), f"{self._next}", {"a": self._next})
        standing = self.standing[prompt.id] = Standing(prompt, [Member() for _ in range(MEMBERS)])
        self._next += 1
        entries: list[Entry] = [Admit(prompt)]
        group, begun = self._found.pop(prompt.id, None), self._begun.pop(prompt.id, None)
        if self.random.random() < 0.2:  # too old
            return entries
        if group is not None:
            entries += [*self._absent(group), Keep(group, recovered=True)]
        elif begun is not None:
            if self.random.random() < 0.3:
                begun = Begun(prompt.id, begun.rollouts, begun.completions, begun.partials[1:])
            entries += [Reuse(begun), *(Score(prompt, done) for done in begun.completions)]
        self.standing[prompt.id] = told([entries])[0][prompt.id]
        return entries if standing else []

    def _members(self, wanted: Callable[[Member], bool]) -> tuple[Standing, int, Member] | None:
        found = [
            (standing, index, member)
            for standing in self.standing.values()
            for index, member in enumerate(standing.members)
            if wanted(member)
        ]
        return self.random.choice(found) if found else None

    def _write(self) -> list[Entry]:
        if (found := self._members(lambda m: m.open)) is None:
            return []
        standing, index, member = found
        ids = tuple(self.random.randrange(100) for _ in range(self.random.randint(1, 3)))
        segment = Segment(RequestId(standing.prompt.id, index), ids, (-0.5,) * len(ids), self.version, self.version)
        member.write(ids, segment.logprobs, [self.version] * len(ids))
        return [Wrote(segment)]

    def _ask_again(self) -> list[Entry]:
        if (found := self._members(lambda m: m.open)) is None:
            return []
        standing, index, member = found
        kept = self.random.choice([0, len(member.ids), self.random.randint(0, len(member.ids))])
        del member.ids[kept:], member.logprobs[kept:], member.versions[kept:]
        request = Request(RequestId(standing.prompt.id, index, 1), standing.prompt.token_ids, Sampling(9), 0, tuple(member.ids))
        return [Generate("a", request)]

    def _finish(self) -> list[Entry]:
        if (found := self._members(lambda m: m.open)) is None:
            return []
        standing, index, member = found
        member.write([7], [-0.25], [self.version])
        tokens = tuple(member.ids), tuple(member.logprobs), member.spans()
        member.completion = Completion(standing.prompt.id, index, *tokens, FinishReason.STOP, "done")
        return [Score(standing.prompt, member.completion)]

    def _judge(self) -> list[Entry]:
        if (found := self._members(lambda m: m.completion is not None and m.reward is None and m.dropped is None)) is None:
            return []
        standing, index, member = found
        member.reward = Reward(self.random.choice([0.0, 0.5, 1.0, 1.0, 1.0, None]))
        entries: list[Entry] = [Scored(standing.prompt.id, index, member.reward)]
        if member.reward.value is None:
            return entries + self._leave(standing, index, DropReason.NO_VERDICT)
        return entries + self._settle(standing)

    def _fail(self) -> list[Entry]:
        found = self._members(lambda m: m.open) if self.random.random() < 0.1 else None
        return [] if found is None else self._leave(found[0], found[1], DropReason.FAILED)

    def _leave(self, standing: Standing, index: int, reason: DropReason) -> list[Entry]:
        standing.members[index].dropped = reason
        return [Drop(standing.prompt.id, index, reason), *self._settle(standing)]

    def _settle(self, standing: Standing) -> list[Entry]:
        final = [m.dropped is not None or m.reward is not None for m in standing.members]
        if not all(final):
            return []
        if any(m.dropped is None for m in standing.members):
            return [Keep(standing.group())]
        return self._gone(standing, DropReason.FAILED)

    def _drop(self) -> list[Entry]:
        if not self.standing or self.random.random() < 0.9:
            return []
        return self._gone(self.random.choice(list(self.standing.values())), DropReason.OVERSAMPLED)

    def _gone(self, standing: Standing, reason: DropReason) -> list[Entry]:
        del self.standing[standing.prompt.id]
        return self._drops(standing, reason)

    def _drops(self, standing: Standing, reason: DropReason) -> list[Entry]:
        group = standing.prompt.id
        members = [Drop(group, index, reason) for index, m in enumerate(standing.members) if m.dropped is None]
        return [*members, Drop(group, None, reason)]

    def _train(self) -> list[Entry]:
        """Training ends, or a batch is taken."""
        if self.training:
            ids = tuple(group.id for group in self.training)
            assert not set(ids) & set(self.weights), "trained twice"
            self.weights += ids
            self.version, self.training = WeightVersion(self.version.step + 1, self.life), ()
            return [BatchTrained(self.version)]
        if self.waiting:
            return self._take_stored()
        ready = [standing for standing in self.standing.values() if standing.complete]
        if len(ready) < BATCH:
            return []
        self.training = tuple(standing.group() for standing in self.random.sample(ready, BATCH))
        for group in self.training:
            del self.standing[group.id]
        self.next_batch += 1
        return [Train(self.next_batch - 1, self.training)]
