"""The hostile world over several lives: what one leaves in its records, the next begins with."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import asdict, replace

from rollyard import events as ev
from rollyard.lives import Reuse
from rollyard.rollout.core import RolloutCore
from rollyard.rollout.recovery import counts_before
from rollyard.rollout.state import Counts
from rollyard.types import Begun, Completion, Group, Partial, Prompt, WeightVersion
from tests.records import Records
from tests.rollout.playground import Playground
from tests.rollout.ward import Ward
from tests.rollout.world import World


class FirstLife(World):
    """Keeps records, and writes a checkpoint every so many steps.

    Args:
        every: steps; 0: none is written.
    """

    def __init__(self, *args, every: int = 0, **named) -> None:
        super().__init__(*args, **named)
        self.every, self.total, self.records = every, len(self.source), Records(self.policy.group_size)

    def noted(self, message, said) -> None:
        taken = (each for each in said if isinstance(each, ev.BatchTaken))
        self.records.step(message, [*said, *(ev.Train(each.step, each.groups) for each in taken)])

    def trainer(self) -> None:
        before = self.version
        super().trainer()
        if self.version > before and self.every and not self.version % self.every:
            self.records.checkpoint(WeightVersion(self.version), deepcopy(asdict(self.core.counts)))

    def live_for(self, actions: int) -> None:
        """Until it is killed, unless it has come to its end before."""
        self.start()
        for _ in range(actions):
            if self.over:
                break
            self.act()
        self.check_partials()
        self.records.kill(self.random)

    def check_partials(self) -> None:
        """Whatever a member has written is on record, before anything of that is lost."""
        stories = self.records.stories()
        for key in ((id_, k) for id_ in self.live for k in range(self.policy.group_size)):
            if key not in self.done and key not in self.member_dropped:
                written = stories[key[0]].written.get(key[1], [])
                expected = [] if self.policy.turns else self.tokens[key]  # an episode is played anew
                assert [(token, by.step) for token, _, by, _ in written] == expected


class NextLife(FirstLife):
    """Begins with what the records of those before it say, and with nothing else.

    Args:
        limit: of staleness; less than before makes what there is too old now and then.
    """

    def __init__(self, first: FirstLife, seed: int, limit: int) -> None:
        rules = replace(first.policy, max_staleness=limit, oversample=first.policy.oversample if limit else 0)
        super().__init__(rules, first.total, 2, 4, seed, first.odds, first.rollover, every=first.every)
        self.records, self.past = first.records, first.records.past()
        past, self.version, self.life = self.past, self.past.version.step, first.records.life
        self.before = counts_before(past.counters or asdict(Counts()), past.dropped, past.members_dropped)
        self.core = RolloutCore(self.policy, self.version, deepcopy(self.before))
        self.source = [prompt for prompt in self.source if prompt.id not in past.done]
        self.generated, self.trained_tokens = self.before.tokens.generated, self.before.tokens.trained
        self.refills, self.unfiltered = self.before.refills, self.before.unfiltered
        self.filtered = past.recovered.filtered
        self.owed = self.before.dropped.get("filtered", 0) - self.refills
        self.stored = list(past.recovered.batches)
        self.next_batch = self.version + len(self.stored)
        self.complete = {group.id: group for group in past.recovered.groups}
        self.begun = {begun.group: begun for begun in past.recovered.begun}
        self.awaited: dict[int, Begun | Group] = {}  # what must be used again of a prompt that was just admitted
        assert self.before.trained == sum(map(len, past.trained)) and self.before.dropped == past.dropped
        assert self.before.members_admitted == self.policy.group_size * self.before.admitted

    def start(self) -> None:
        self.send(self.past.recovered)
        self.send(ev.GenerationOpened())
        for name, engine in self.engines.items():
            engine.version = self.version
            self.send(ev.EngineUp(name, engine.slots, self.named(self.version)))

    @property
    def in_training(self) -> int:
        return super().in_training + sum(map(len, self.stored))

    def check(self) -> None:
        super().check()
        assert not self.awaited, "not used again"

    def take(self, output: ev.Instruction | ev.Signal) -> None:
        match output:
            case ev.Admit(prompt) if prompt.id in (stored := {group.id: group for batch in self.stored for group in batch}):
                assert prompt.id not in self.admitted
                self.admitted.add(prompt.id)
                self.awaited[prompt.id] = stored[prompt.id]
            case ev.Admit(prompt):
                super().take(output)
                self.expect(prompt)
            case ev.Keep(group, recovered=True):
                assert group == self.awaited.pop(group.id)
                for rollout in group.rollouts:
                    self.know(rollout.completion)
                    self.done[group.id, rollout.completion.member] = rollout.completion
                    self.rewards[group.id, rollout.completion.member] = rollout.reward
                self.kept[group.id] = group
            case Reuse(begun):
                assert begun == self.awaited.pop(begun.group)
                for rollout in begun.rollouts:
                    self.know(rollout.completion)
                    self.done[begun.group, rollout.completion.member] = rollout.completion
                    self.rewards[begun.group, rollout.completion.member] = rollout.reward
                for done in begun.completions:
                    self.know(done)
                for part in begun.partials:
                    self.know(part, begun.group)
            case ev.BatchTaken(step, groups) if self.stored:
                batch = self.stored.pop(0)
                assert groups == batch and step == self.version and self.training is None
                self.wanted, self.training = False, [group.id for group in batch]
                self.batches.append(tuple(self.training))
            case _:
                super().take(output)

    def expect(self, prompt: Prompt) -> None:
        """What is fresh enough for the place that its prompt has now; the rest is lost."""
        allowed = self.due(prompt.id) - self.policy.max_staleness

        def fresh(written: Completion | Partial) -> bool:
            return all(span.version.step >= allowed for span in written.spans)

        complete = self.complete.pop(prompt.id, None)
        if complete is not None and all(fresh(rollout.completion) for rollout in complete.rollouts):
            self.awaited[prompt.id] = complete
            return
        begun = self.begun.pop(prompt.id, None) if complete is None else Begun(prompt.id, complete.rollouts)
        if begun is None:
            return
        whole = [*(rollout.completion for rollout in begun.rollouts), *begun.completions, *begun.partials]
        rollouts = tuple(each for each in begun.rollouts if fresh(each.completion) and each.reward.value is not None)
        single = not self.policy.turns
        completions = tuple(filter(fresh, begun.completions)) if single else ()
        partials = tuple(filter(fresh, begun.partials)) if single else ()
        used = Begun(prompt.id, rollouts, completions, partials)
        self.generated += sum(len(each.token_ids) for each in whole)
        self.generated -= sum(len(each.completion.token_ids) for each in rollouts)
        self.generated -= sum(len(each.token_ids) for each in (*completions, *partials))
        if used != Begun(prompt.id):
            self.awaited[prompt.id] = used

    def know(self, written: Completion | Partial, group: int | None = None) -> None:
        """The referee's books of what was written before."""
        versions = [span.version.step for span in written.spans for _ in range(span.tokens)]
        key = (written.group if isinstance(written, Completion) else group, written.member)
        self.tokens[key] = list(zip(written.token_ids, versions, strict=True))
        self.generated += len(written.token_ids)


class FirstPlayed(FirstLife, Playground):
    """With environments."""


class NextPlayed(NextLife, Playground):
    """With environments: what they had begun, they begin anew."""


class FirstWard(FirstLife, Ward):
    """With engines that are not fit."""


class NextWard(NextLife, Ward):
    """With engines that are not fit. What an earlier life wrote is believed."""

    def know(self, written: Completion | Partial, group: int | None = None) -> None:
        super().know(written, group)
        key = (written.group if isinstance(written, Completion) else group, written.member)
        self.wrong[key] = [""] * len(written.token_ids)
