"""The hostile world with engines that answer wrongly, fail, stand still, and decode with other weights than they say.

The referee knows of every token whether its writer had the right weights then, which the core does not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from rollyard import events as ev
from rollyard.fitness import Condemn, EngineProbed, EngineUnfit, Unwrite
from rollyard.types import FinishReason, Request, RequestId, Segment, Verdict, WeightVersion
from tests.rollout.world import Odds, World, heard


@dataclass
class Sick(Odds):
    """Shares of further actions."""

    lie: float = 0.0
    forget: float = 0.0  # its weights
    stall: float = 0.0
    probe: float = 0.2
    loose: bool = False  # a probe may find nothing out


class Ward(World):
    def __init__(self, *args, **named) -> None:
        super().__init__(*args, **named)
        self.ill: Sick = self.odds
        self.wrong: dict[tuple[int, int], list[str]] = {}  # of each member's tokens: who wrote it with other weights, or nobody
        self.forgot: set[str] = set()  # engines that decode with other weights just now
        self.condemned: dict[str, str] = {}
        self.lies: Counter[str] = Counter()  # wrong answers since an engine came up
        self.rights: Counter[str] = Counter()
        self.failed: dict[str, set[int]] = {}  # prompts, since the last right answer
        self.expected: str = ""  # who may be condemned by the message under way
        self.unwritten = self.condemnations = self.distrusted = 0

    # -------------------------------------------------------------------------------------------- referee

    def send(self, message: ev.Event | ev.Signal) -> None:
        self.expected = getattr(message, "engine", "")
        if isinstance(message, ev.SegmentArrived):
            self.note(message)
        super().send(message)
        if isinstance(message, EngineProbed) and message.verdict is Verdict.CONTRADICTED:
            name = message.engine
            assert name in self.condemned
            for group in self.live:
                for k in range(self.policy.group_size):
                    assert (group, k) in self.member_dropped or name not in self.wrong.get((group, k), ()), "it is still believed"
        for name in self.engines.keys() - self.condemned.keys():
            assert self.lies[name] - self.rights[name] / 10 < self.policy.faults, "it goes on for ever"
            assert len(self.failed.get(name, ())) < self.policy.failures

    def note(self, message: ev.SegmentArrived) -> None:
        key, engine = message.segment.request[:2], message.engine
        row = self.wrong.setdefault(key, [])
        row += [engine if engine in self.forgot else ""] * (len(self.tokens.get(key, ())) - len(row))
        if message.segment.finish in (FinishReason.STOP, FinishReason.LENGTH):
            self.rights[engine] += 1
            self.failed.get(engine, set()).clear()
        elif message.segment.finish is FinishReason.ERROR:
            self.failed.setdefault(engine, set()).add(key[0])

    def take(self, output: ev.Instruction | ev.Signal) -> None:
        match output:
            case Condemn(name, cause):
                assert name == self.expected and name not in self.condemned and self.engines[name].up
                assert "wrong answers" not in cause or self.lies[name] >= self.policy.faults
                assert "in a row" not in cause or len(self.failed[name]) >= self.policy.failures
                self.condemnations += 1
                self.condemned[name] = cause
                engine = self.engines[name]
                self.abort_wanted -= set(engine.running)
                self.moving -= set(engine.running)
                engine.running, engine.up, engine.version = {}, False, None
            case Unwrite(group, member, tokens):
                key = group, member
                assert len(self.tokens[key]) > tokens and key not in self.done and key not in self.member_dropped
                self.unwritten += len(self.tokens[key]) - tokens
                del self.tokens[key][tokens:], self.wrong[key][tokens:]
            case ev.Drop(_, _, "distrusted"):
                self.distrusted += 1
                super().take(output)
            case _:
                super().take(output)

    # ------------------------------------------------------------------------------------------ happenings

    def more(self) -> list[Callable[[], None]]:
        ill = self.ill
        shares = [(ill.lie, self.lie), (ill.forget, self.forget), (ill.stall, self.stall), (ill.probe, self.probe)]
        found = [action for share, action in shares if self.random.random() < share]
        return found + ([self.come_back] if self.condemned else [])

    def some(self, busy: bool = False) -> str | None:
        names = [name for name, engine in self.engines.items() if engine.up and (engine.running or not busy)]
        return self.random.choice(names) if names else None

    def forget(self) -> None:
        name = self.some()
        if name is not None and self.engines[name].version is not None:
            self.forgot.add(name)

    def stall(self) -> None:
        if name := self.some(busy=True):
            self.send(EngineUnfit(name, "it wrote nothing for 9 s"))
            assert name in self.condemned

    def probe(self) -> None:
        name = self.some()
        if name is None or self.engines[name].version is None:
            return
        verdict = Verdict.CONTRADICTED if name in self.forgot else Verdict.VERIFIED
        if self.ill.loose and self.random.randrange(2):
            verdict = Verdict.UNDECIDABLE
        self.send(EngineProbed(name, verdict, "other weights"))

    def lie(self) -> None:
        """One of the answers that cannot be."""
        name = self.some(busy=True)
        if name is None:
            return
        engine = self.engines[name]
        request = self.random.choice(list(engine.running.values()))
        if request.id in self.abort_wanted or request.id in self.moving:
            return
        version = WeightVersion(engine.version or 0)
        honest = Segment(request.id, (1,), (-0.5,), version, version)
        lies = [
            replace(honest, logprobs=()),
            replace(honest, logprobs=(0.5,)),
            replace(honest, logprobs=(float("-inf"),)),
            replace(honest, token_ids=(99,)),
            replace(honest, token_ids=(-1,)),
            replace(honest, token_ids=(1,) * 500, logprobs=(-0.5,) * 500),
            replace(honest, version=WeightVersion(version.step, 7)),
            replace(honest, request=RequestId(request.id.group, request.id.member, 500)),
        ]
        lie = self.random.choice(lies)
        self.lies[name] += 1
        if lie.request == request.id:
            self.abort_wanted.add(request.id)
        self.send(heard(name, lie))

    def write_wrongly(self, name: str, request: Request) -> None:
        self.lies[name] += 1
        super().write_wrongly(name, request)

    def kill(self, name: str) -> None:
        self.forget_all(name)
        super().kill(name)

    def come_back(self) -> None:
        """What it still had said comes late; then it is lost, and started again."""
        name = self.random.choice(list(self.condemned))
        if self.random.randrange(2):
            version = WeightVersion(0)
            self.send(heard(name, Segment(RequestId(0, 0, 77), (1,), (-0.5,), version, version)))
        del self.condemned[name]
        self.kill(name)

    def forget_all(self, name: str) -> None:
        self.forgot.discard(name)
        self.absolve(name)
        self.lies[name] = self.rights[name] = 0
        self.failed.pop(name, None)

    def sync_one(self) -> None:
        """New weights make good what it forgot; what it wrote till then is not known to be wrong."""
        before = {name: engine.version for name, engine in self.engines.items()}
        super().sync_one()
        for name, engine in self.engines.items():
            if engine.up and engine.version != before[name] and name in self.forgot:
                self.forgot.discard(name)
                self.absolve(name)

    def absolve(self, name: str) -> None:
        """Nobody can find out any more: only what is written from now on counts."""
        for row in self.wrong.values():
            row[:] = ["" if writer == name else writer for writer in row]
