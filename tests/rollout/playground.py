"""The hostile world with environments in it: members play episodes, some of which fail, give up or are cut."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rollyard import events as ev
from rollyard.turns import Asked, EpisodeEnded, Play, Stream, Tell
from rollyard.types import Asking, Completion, FinishReason, Request, Reward, Turn
from tests.rollout.world import World

Key = tuple[int, int]


class Playground(World):
    """The referee keeps what each environment was told, and holds the core to it."""

    def __init__(self, *args, **named) -> None:
        super().__init__(*args, **named)
        self.playing: set[Key] = set()  # their environments are at work
        self.wanted_turns: dict[Key, tuple[Asking, int]] = {}  # and the tokens of the member before that
        self.turns: dict[Key, list[Turn]] = {}
        self.heard: dict[Key, int] = {}  # tokens of the turn that is being written
        self.own: dict[Key, Reward | None] = {}  # what environments said in the end
        self.gave_up: set[Key] = set()
        self.prompts = {prompt.id: prompt.token_ids for prompt in self.source}

    def take(self, output) -> None:
        match output:
            case Play(prompt, member):
                key = (prompt.id, member)
                assert key not in self.turns and prompt.id in self.live
                self.turns[key] = []
                self.playing.add(key)
            case Stream(group, member, after, token_ids):
                key = (group, member)
                assert self.wanted_turns[key][0].streams and after == self.heard[key], "each token is heard of once"
                assert list(token_ids) == self.written(key)[after:]
                self.heard[key] += len(token_ids)
            case Tell(group, member, reply):
                self.on_tell((group, member), reply)
            case ev.Score(_, completion, verdict):
                key = (completion.group, completion.member)
                assert key not in self.playing and list(completion.turns) == self.turns[key]
                assert sum(turn.tokens for turn in completion.turns) == len(completion.token_ids)
                assert completion.finish == (self.turns[key][-1].finish if self.turns[key] else FinishReason.ERROR)
                self.own.setdefault(key, verdict)
                assert verdict == self.own[key]
                super().take(output)
            case _:
                super().take(output)

    def on_tell(self, key: Key, reply) -> None:
        asking, before = self.wanted_turns.pop(key)
        assert list(reply.token_ids) == [token for token, _ in self.tokens[key]][before:]
        room = self.policy.window - len(asking.prompt_ids)
        if room < 1:
            assert reply.finish is FinishReason.CONTEXT and not reply.token_ids
        elif len(self.turns[key]) >= self.policy.turns:
            assert reply.finish is FinishReason.LENGTH and not reply.token_ids
        elif len(reply.token_ids) == min(room, asking.max_tokens):
            assert reply.finish in (FinishReason.STOP, FinishReason.CONTEXT if room < asking.max_tokens else FinishReason.LENGTH)
        else:
            assert reply.finish is FinishReason.STOP
        self.turns[key].append(Turn(asking.prompt_ids, len(reply.token_ids), reply.finish))
        self.playing.add(key)

    def on_generate(self, name: str, request: Request) -> None:
        key = request.id[:2]
        asking, _ = self.wanted_turns[key]
        assert request.prompt_ids == asking.prompt_ids and request.sampling.stop == asking.stop
        assert request.id not in self.seen, "a name for one request only"
        self.seen.add(request.id)
        super().on_generate(name, request)

    @property
    def seen(self) -> set:
        return self.__dict__.setdefault("_seen", set())

    def on_drop(self, group: int, member: int | None, reason: str) -> None:
        super().on_drop(group, member, reason)
        if member is not None:
            self.playing.discard((group, member))
            self.wanted_turns.pop((group, member), None)
            if (group, member) in self.gave_up:
                assert reason == "failed"

    def prompt_tokens(self, member: Key) -> int:
        return len(self.wanted_turns[member][0].prompt_ids)

    def written(self, member: Key) -> list[int]:
        return super().written(member)[self.wanted_turns[member][1] :] if member in self.wanted_turns else []

    def most(self, request: Request) -> int:
        return self.wanted_turns[request.id[:2]][0].max_tokens

    def waiting(self) -> Iterator[Key]:
        return (key for key in super().waiting() if key in self.wanted_turns)

    def check(self) -> None:
        held = {request[:2] for engine in self.engines.values() for request in engine.running if request not in self.abort_wanted}
        assert not held & self.playing, "a member between turns holds no slot"
        super().check()

    # ------------------------------------------------------------------------------------------ happenings

    def more(self) -> list[Callable[[], None]]:
        found: list[Callable[[], None]] = [self.environment] * 3 if self.playing else []
        if self.wanted_turns and self.random.random() < self.odds.error:
            found.append(self.give_up)
        if self.member_dropped and self.random.random() < self.odds.error:
            found.append(self.come_late)
        return found

    def environment(self) -> None:
        key = self.random.choice(sorted(self.playing))
        if self.random.random() < 0.4:
            self.end_episode(key)
        else:
            self.ask(key)

    def end_episode(self, key: Key) -> None:
        self.playing.discard(key)
        dice = self.random.random()
        verdict = None if dice < 0.3 else Reward(None, problem="ZeroDivisionError") if dice < 0.4 else Reward(dice)
        self.own[key] = verdict
        self.send(EpisodeEnded(*key, verdict, "a transcript"))

    def ask(self, key: Key) -> None:
        """After what it saw and wrote, with a tool's answer; or after something else; or after too much."""
        self.playing.discard(key)
        said, turns = [token for token, _ in self.tokens[key]], self.turns[key]
        before = turns[-1].prompt_ids + tuple(said[len(said) - turns[-1].tokens :]) if turns else self.prompts[key[0]]
        dice = self.random.random()
        prompt = (7, 8) if dice < 0.1 else (1,) * self.policy.window if dice < 0.2 else (*before, 9)
        asking = Asking(prompt, self.random.randint(1, 4), ("x",) * (dice > 0.5), self.random.random() < 0.5)
        self.heard[key] = 0
        self.wanted_turns[key] = asking, len(said)
        self.send(Asked(*key, asking))

    def give_up(self) -> None:
        """An environment ends although it has asked."""
        key = self.random.choice(sorted(self.wanted_turns))
        self.gave_up.add(key)
        for engine in self.engines.values():
            self.abort_wanted |= {request for request in engine.running if request[:2] == key}
        self.send(EpisodeEnded(*key, None, ""))
        assert key in self.member_dropped

    def come_late(self) -> None:
        """News of an episode whose member was dropped."""
        key = self.random.choice(sorted(self.member_dropped))
        if key not in self.done:
            self.send(self.random.choice([Asked(*key, Asking((1,), 1)), EpisodeEnded(*key, Reward(1.0), "")]))

    def verdict(self, completion: Completion) -> Reward:
        own = self.own[completion.group, completion.member]
        return own if own is not None else super().verdict(completion)
