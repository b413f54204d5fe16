"""A small hostile world for the core, and a referee that keeps its own books from what goes in and comes out.

Nothing here looks into the core: the referee knows only events, instructions and the rules of the design.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rollyard import events as ev
from rollyard.lives import Wrote
from rollyard.rollout.answers import wrong_tokens
from rollyard.rollout.core import RolloutCore
from rollyard.rollout.policy import RolloutPolicy
from rollyard.rollout.state import Counts
from rollyard.types import Completion, FinishReason, Group, Prompt, Request, RequestId, Reward, Segment, WeightVersion
from tests.rollout.engines import WorldEngine

VOCABULARY = 50


def heard(engine: str, segment: Segment, text: str = "") -> ev.SegmentArrived:
    """As the shell tells it, which has looked at the tokens."""
    return ev.SegmentArrived(engine, segment, text, wrong_tokens(segment, VOCABULARY))


@dataclass
class Odds:
    """Shares of actions that go wrong."""

    error: float = 0.0
    death: float = 0.0
    no_verdict: float = 0.0
    wrong_answer: float = 0.0
    trickle: bool = False  # a source may have fewer prompts just now than are asked for
    coarse: bool = False  # a verdict is 0 or 1, so that groups are flat now and then


class World:
    def __init__(
        self, policy: RolloutPolicy, prompts: int, engines: int, slots: int, seed: int, odds: Odds, rollover: ev.Rollover
    ):
        self.policy, self.random, self.odds, self.rollover = policy, random.Random(seed), odds, rollover
        self.core = RolloutCore(policy)
        self.before = Counts()  # of earlier lives
        self.life = 0
        self.version = self.next_batch = 0
        self.source = [Prompt(i, i, tuple(range(1, 2 + i % 3)), f"p{i}") for i in range(prompts)]
        self.prompts = {prompt.id: prompt.token_ids for prompt in self.source}
        self.cursor = self.asked = 0
        self.exhausted = self.finished = self.wanted = False
        self.engines = {f"e{i}": WorldEngine(slots) for i in range(engines)}
        self.to_score: list[Completion] = []
        self.training: list[int] | None = None
        # the referee's books
        self.live: list[int] = []
        self.admitted: set[int] = set()
        self.trained: list[int] = []
        self.dropped: dict[int, str] = {}
        self.member_dropped: dict[tuple[int, int], str] = {}
        self.tokens: dict[tuple[int, int], list[tuple[int, int]]] = {}  # (token, version) of each member
        self.done: dict[tuple[int, int], Completion] = {}
        self.rewards: dict[tuple[int, int], Reward] = {}
        self.batches: list[tuple[int, ...]] = []
        self.kept: dict[int, Group] = {}  # finished groups
        self.abort_wanted: set[RequestId] = set()
        self.moving: set[RequestId] = set()
        self.offered: set[str] = set()
        self.relieved = False  # a request has ended by itself just now, and none has gone out since
        self.moves: Counter[tuple[int, int]] = Counter()
        self.endings = 0  # of requests: how fast engines are is known from these
        self.generated = self.trained_tokens = 0
        self.filtered = self.owed = self.refills = self.unfiltered = 0
        self.now = 0.0

    # ------------------------------------------------------------------------------------------- messages

    def send(self, message: ev.Event | ev.Signal) -> None:
        self.now += 1.0
        self.relieved = False
        if isinstance(message, ev.SegmentArrived):
            self.generated += len(message.segment.token_ids)
            self.relieved = message.segment.finish in (FinishReason.STOP, FinishReason.LENGTH)
        said = self.core.step(message, self.now)
        self.noted(message, said)
        for output in said:
            self.take(output)
        self.check()

    def noted(self, message: ev.Event | ev.Signal, said: list[ev.Instruction | ev.Signal]) -> None:
        """The core has said this."""

    def take(self, output: ev.Instruction | ev.Signal) -> None:
        match output:
            case ev.FetchPrompts(count):
                assert count > 0 and not self.exhausted and not self.asked
                self.asked = count
            case ev.Admit(prompt):
                self.on_admit(prompt)
            case ev.Generate(engine, request):
                self.on_generate(engine, request)
            case ev.Abort(engine, requests):
                if self.engines[engine].up:
                    self.abort_wanted |= set(requests) & set(self.engines[engine].running)
            case ev.Move(engine, request, to):
                self.on_move(engine, request, to)
            case ev.Score(_, completion):
                key = (completion.group, completion.member)
                assert key not in self.done
                assert [t for t, _ in self.tokens[key]] == list(completion.token_ids)
                spelt = [s.version.step for s in completion.spans for _ in range(s.tokens)]
                assert [v for _, v in self.tokens[key]] == spelt
                self.done[key] = completion
                self.to_score.append(completion)
            case ev.Drop(group, member, reason, _):
                self.on_drop(group, member, reason)
            case ev.BatchTaken(step, groups):
                self.on_batch(step, [g.id for g in groups], groups)
            case ev.Keep(group, recovered):
                assert group.id in self.live, "only what may be trained is kept"
                if self.policy.filter == "flat" and self.flat(group.id) and not recovered:
                    assert self.filtered == self.policy.refills, "there was room for another prompt"
                    self.unfiltered += 1
                self.kept[group.id] = group
            case ev.RolloutsFinished():
                self.finished = True
            case ev.RolloutsFailed() | Wrote():
                pass
            case _:
                raise AssertionError(output)

    # -------------------------------------------------------------------------------------------- referee

    def named(self, step: int) -> WeightVersion:
        """A version of this life."""
        return WeightVersion(step, self.life)

    def due(self, group: int) -> int:
        return self.next_batch + self.live.index(group) // self.policy.groups_per_batch

    def on_admit(self, prompt: Prompt) -> None:
        assert prompt.id not in self.admitted
        if self.owed:
            self.owed, self.refills = self.owed - 1, self.refills + 1
        self.admitted.add(prompt.id)
        self.live.append(prompt.id)
        assert self.due(prompt.id) <= self.version + self.policy.max_staleness, "admitted too early"
        for k in range(self.policy.group_size):
            self.tokens[prompt.id, k] = []

    def on_generate(self, name: str, request: Request) -> None:
        engine = self.engines[name]
        key = request.id[:2]
        assert engine.up and not engine.held and engine.version is not None, "an unsynced engine was asked"
        assert len(engine.running) < engine.slots
        assert engine.version >= self.due(request.id.group) - self.policy.max_staleness, "too old for this group"
        attempts = [r for e in self.engines.values() for r in e.running if r[:2] == key and r not in self.abort_wanted]
        assert not attempts, "two attempts at one member"
        assert key not in self.done and key not in self.member_dropped
        assert list(request.written_ids) == self.written(key)
        assert not any(self.due(group) < self.due(key[0]) for group, _ in self.waiting()), "what is due first goes first"
        room = min(self.most(request), self.policy.window - len(request.prompt_ids))
        assert request.sampling.max_tokens == room - len(request.written_ids) > 0
        engine.running[request.id] = request
        engine.tokens[request.id] = len(request.prompt_ids) + len(request.written_ids)
        self.relieved = False

    def written(self, member: tuple[int, int]) -> list[int]:
        """What it has of the answer under way."""
        return [token for token, _ in self.tokens[member]]

    def most(self, request: Request) -> int:
        """Tokens that may be asked for."""
        return self.policy.sampling.max_tokens

    def on_move(self, source: str, request: RequestId, to: str) -> None:
        """Its tokens go on, so it is no attempt that was given up."""
        member = request[:2]
        assert request in self.engines[source].running and request not in self.moving | self.abort_wanted and to != source
        assert not list(self.waiting()), "there is work for the other engine"
        busy = {name: len(self.engines[name].running) for name in (source, to)}
        assert busy[source] >= 2 or self.endings >= 16, "with so little known no engine is slow"
        version = self.engines[to].version
        assert version is not None and version >= self.due(request.group) - self.policy.max_staleness
        self.moves[member] += 1
        assert self.moves[member] <= self.policy.moves
        self.moving.add(request)

    def on_drop(self, group: int, member: int | None, reason: str) -> None:
        assert group in self.admitted
        if member is not None:
            assert (group, member) not in self.member_dropped
            self.member_dropped[group, member] = reason
            return
        assert group not in self.dropped and group not in self.trained
        self.dropped[group] = reason
        if group in self.live:
            self.live.remove(group)
        else:
            assert self.training is not None and group in self.training
        assert all((group, k) in self.member_dropped for k in range(self.policy.group_size))
        if reason == "filtered":
            self.filtered, self.owed = self.filtered + 1, self.owed + 1
            assert self.policy.filter == "flat" and self.flat(group) and self.filtered <= self.policy.refills
            assert sum(self.verdicts(group).values()) >= self.policy.min_scored

    def verdicts(self, group: int) -> Counter[float]:
        rewards = (self.rewards.get((group, k)) for k in range(self.policy.group_size))
        return Counter(reward.value for reward in rewards if reward is not None and reward.value is not None)

    def flat(self, group: int) -> bool:
        return len(self.verdicts(group)) == 1

    def on_batch(self, step: int, ids: list[int], groups) -> None:
        size, limit = self.policy.groups_per_batch, self.policy.max_staleness
        assert self.wanted and step == self.next_batch == self.version
        assert len(set(ids)) == len(ids) and set(ids) <= set(self.live)
        oldest = self.live[: (self.policy.batches - step) * size]
        assert set(ids) <= set(oldest), "what is left over at the end is the youngest, not the longest"
        if len(ids) < size:
            assert self.exhausted and len(ids) == len(self.live), "a short batch before the end"
        for group in groups:
            scored = 0
            assert self.kept[group.id] == group
            for rollout in group.rollouts:
                key = (group.id, rollout.completion.member)
                assert rollout.completion == self.done[key] and rollout.reward == self.rewards[key]
                assert all(version >= step - limit for _, version in self.tokens[key]), "a token too stale to train on"
                scored += rollout.reward.value is not None
            assert scored >= self.policy.min_scored
            assert scored == sum((group.id, k) not in self.member_dropped for k in range(self.policy.group_size))
        self.live = [g for g in self.live if g not in set(ids)]
        self.next_batch += 1
        for g in self.live:
            held = [
                e.version for e in self.engines.values() if e.up for r in e.running if r.group == g and r not in self.abort_wanted
            ]
            versions = held + [v for k in range(self.policy.group_size) for _, v in self.tokens[g, k]]
            assert all(v >= self.due(g) - limit for v in versions if v is not None), "left behind too stale"
        self.wanted, self.training, self.filtered = False, ids, 0
        self.batches.append(tuple(ids))

    def check(self) -> None:
        """What must hold after every transition."""
        assert self.core.live == len(self.live)
        engines = self.core.engines
        now = sum(engine.running for engine in engines), sum(engine.slots for engine in engines), self.core.waiting
        assert self.core.slots == now
        counts = self.core.counts
        tokens = counts.tokens
        assert tokens.generated == self.generated
        assert tokens.generated == tokens.trained + sum(tokens.dropped.values()) + self.core.live_tokens
        assert tokens.trained == self.trained_tokens
        in_training = self.in_training
        assert counts.admitted == self.before.admitted + len(self.admitted)
        assert counts.admitted == counts.trained + sum(counts.dropped.values()) + len(self.live) + in_training
        dropped = Counter(self.before.dropped)
        dropped.update(self.dropped.values())
        assert counts.dropped == dict(dropped)
        assert (counts.refills, counts.unfiltered) == (self.refills, self.unfiltered)
        if not self.finished:
            self.check_work_conserving()

    @property
    def in_training(self) -> int:
        """Groups that are in a batch and not yet trained."""
        return len(self.training or ())

    def waiting(self) -> Iterator[tuple[int, int]]:
        active = {r[:2] for e in self.engines.values() for r in e.running if r not in self.abort_wanted}
        for group in self.live:
            for k in range(self.policy.group_size):
                key = (group, k)
                if key not in active and key not in self.done and key not in self.member_dropped:
                    yield key

    def check_work_conserving(self) -> None:
        waiting = list(self.waiting())
        for key in waiting:
            oldest = self.due(key[0]) - self.policy.max_staleness
            for engine in self.engines.values():
                if engine.free and engine.version is not None and engine.version >= oldest:
                    assert self.offered and not self.relieved, f"{key} waits beside a free slot"
                    assert self.core.slow or self.left_to_others(engine) >= self.to_read(waiting), f"{key} waits for nobody"

    def left_to_others(self, engine: WorldEngine) -> int:
        """Tokens that engines which are awaited can take until each has as many as this one."""
        others = [other for name in self.offered if (other := self.engines[name]).up]
        return sum(max(0, engine.load - other.load) for other in others if len(other.running) < other.slots)

    def to_read(self, waiting: list[tuple[int, int]]) -> int:
        """Tokens of all that waits."""
        return sum(self.prompt_tokens(key) + len(self.written(key)) for key in waiting)

    def prompt_tokens(self, member: tuple[int, int]) -> int:
        """Of what comes before its answer."""
        return len(self.prompts[member[0]])

    # ------------------------------------------------------------------------------------------ happenings

    def start(self) -> None:
        self.send(ev.GenerationOpened())
        for name, engine in self.engines.items():
            engine.version = 0
            self.send(ev.EngineUp(name, engine.slots, WeightVersion(0)))

    @property
    def over(self) -> bool:
        return self.finished or (self.version == self.policy.batches and self.training is None)

    def run(self, actions: int = 100_000) -> None:
        self.start()
        for _ in range(actions):
            if self.over:
                return
            self.act()
        raise AssertionError("no end in sight: a deadlock or a livelock")

    def end_all(self) -> None:
        """Run to the end, cancel, let engines end what they hold: each prompt, member and token has left by then."""
        self.run()
        if self.finished:
            assert not self.live
            assert self.admitted == set(range(len(self.source))) == set(self.trained) | set(self.dropped)
        self.send(ev.RolloutsCancelled())
        self.training = None
        counts = self.core.counts
        assert not self.live and len(self.trained) + len(self.dropped) == len(self.admitted)
        assert counts.members_admitted == counts.members_trained + sum(counts.members_dropped.values())
        running = [(name, request) for name, engine in self.engines.items() for request in engine.running.values()]
        for name, request in running:  # what engines still wrote has a place in the books too: `send` looks
            self.end(name, request, FinishReason.ABORT, tokens=1)
        assert self.core.live_tokens == 0

    def act(self) -> None:
        choices = []
        if self.asked:
            choices.append(self.offer)
        if self.to_score:
            choices.append(self.score)
        choices.extend(self.more())
        choices.extend([self.write] * 3 if any(e.running for e in self.engines.values() if e.up) else [])
        choices.append(self.trainer)
        choices.append(self.sync_one)
        self.random.choice(choices)()

    def more(self) -> list[Callable[[], None]]:
        """What else may happen."""
        return []

    def offer(self) -> None:
        count, self.asked = self.random.randint(1, self.asked) if self.odds.trickle else self.asked, 0
        prompts = tuple(self.source[self.cursor : self.cursor + count])
        self.cursor += len(prompts)
        self.exhausted = self.cursor == len(self.source)
        self.send(ev.PromptsOffered(prompts, self.exhausted))

    def score(self) -> None:
        completion = self.to_score.pop(self.random.randrange(len(self.to_score)))
        reward = self.verdict(completion)
        self.rewards[completion.group, completion.member] = reward
        self.send(ev.Scored(completion.group, completion.member, reward))

    def verdict(self, completion: Completion) -> Reward:
        bad = self.random.random() < self.odds.no_verdict
        value = float(self.random.randrange(2)) if self.odds.coarse else self.random.random()
        return Reward(None, problem="ValueError: no") if bad else Reward(value)

    def write(self) -> None:
        name = self.random.choice([n for n, e in self.engines.items() if e.up and e.running])
        engine = self.engines[name]
        if self.random.random() < self.odds.death:
            self.kill(name)
            return
        request = self.random.choice(list(engine.running.values()))
        dice = self.random.random()
        if request.id in self.abort_wanted or (request.id in self.moving and dice < 0.8):
            self.end(name, request, FinishReason.ABORT, tokens=self.random.randrange(2))
        elif dice < self.odds.error:
            self.end(name, request, FinishReason.ERROR, tokens=0)
        elif dice < self.odds.error + self.odds.wrong_answer:
            self.write_wrongly(name, request)
        else:
            self.write_well(name, request)

    def left(self, request: Request) -> int:
        return request.sampling.max_tokens - (len(self.written(request.id[:2])) - len(request.written_ids))

    def write_well(self, name: str, request: Request) -> None:
        left = self.left(request)
        tokens = self.random.randint(1, min(3, left))
        if tokens == left:
            self.end(name, request, FinishReason.LENGTH, tokens)
        elif self.random.random() < 0.3:
            self.end(name, request, FinishReason.STOP, tokens)
        else:
            self.end(name, request, None, tokens)

    def write_wrongly(self, name: str, request: Request) -> None:
        """A segment without its logprobs: refused as a whole, and the request cut."""
        version = self.named(self.engines[name].version or 0)
        self.abort_wanted.add(request.id)
        self.send(heard(name, Segment(request.id, (1, 2), (-0.5,), version, version)))

    def end(self, name: str, request: Request, finish: FinishReason | None, tokens: int) -> None:
        engine = self.engines[name]
        assert engine.version is not None
        version = self.named(engine.version)
        tokens = min(tokens, self.left(request)) if request.id not in self.abort_wanted else tokens
        ids = tuple(self.random.randrange(VOCABULARY) for _ in range(tokens))
        engine.tokens[request.id] += tokens
        if finish is not None:
            self.endings += 1
            del engine.running[request.id], engine.tokens[request.id]
            self.moving.discard(request.id)
        if request.id in self.abort_wanted:
            if finish is not None:
                self.abort_wanted.discard(request.id)
        else:
            self.tokens[request.id[:2]] += [(token, engine.version) for token in ids]
        segment = Segment(request.id, ids, tuple(-0.5 for _ in ids), version, version, finish, "a reason")
        self.send(heard(name, segment, "text"))

    def kill(self, name: str) -> None:
        engine = self.engines[name]
        self.abort_wanted -= set(engine.running)
        self.moving -= set(engine.running)
        engine.running = {}
        engine.tokens.clear()
        engine.up, engine.version = False, None
        self.offered.discard(name)
        self.send(ev.EngineDown(name, "killed"))
        engine.up, engine.held = True, False
        self.send(ev.EngineUp(name, engine.slots, None))

    def trainer(self) -> None:
        if self.training is not None:
            self.trained += self.training
            whole = [(g, k) for g in self.training for k in range(self.policy.group_size) if (g, k) not in self.member_dropped]
            self.trained_tokens += sum(len(self.tokens[key]) for key in whole)
            self.training = None
            self.version += 1
            self.send(ev.BatchTrained(self.named(self.version)))
        elif not self.wanted:
            self.wanted = True
            self.send(ev.BatchWanted())

    def sync_one(self) -> None:
        """Bring one lagging engine to the trainer's version, in the way the rollover says."""
        lagging = [n for n, e in self.engines.items() if e.up and e.version != self.version and not e.stuck]
        if not lagging:
            return
        name = self.random.choice(lagging)
        engine = self.engines[name]
        dice = self.random.random()
        if dice < 0.2:
            self.offer_weights(lagging)
        elif dice < 0.25:
            self.miss(name)
        if not engine.held:
            engine.held = True
            self.send(ev.EngineHeld(name))
        if self.rollover is ev.Rollover.ABORT:
            for request in list(engine.running.values()):
                self.end(name, request, FinishReason.ABORT, tokens=self.random.randrange(2))
        if self.rollover is ev.Rollover.DRAIN and engine.running:
            return
        engine.version = self.version
        self.send(ev.EngineLoaded(name, self.named(self.version)))
        engine.held = False
        self.offered.discard(name)
        self.send(ev.EngineReleased(name))

    def offer_weights(self, names: list[str]) -> None:
        """They are offered new weights."""
        self.offered |= set(names)
        self.send(ev.EnginesAwaited(tuple(names)))

    def miss(self, name: str) -> None:
        """The offer did not reach it."""
        self.offered.discard(name)
        self.send(ev.EnginesMissed((name,)))

    def stick(self, name: str) -> None:
        """It is offered new weights, and does not say anything ever again."""
        engine = self.engines[name]
        engine.stuck = engine.held = True
        self.offer_weights([name])
        self.send(ev.EngineHeld(name))
