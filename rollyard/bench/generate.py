"""`bench engine`: tokens per second of the embedded engine, beside a peer or beside itself with an option changed."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from rollyard import worker
from rollyard.bench import memory
from rollyard.bench.agreement import NEAR_TIE, compare, logit_gap
from rollyard.bench.peer import Command, Peer, PeerError, find, running
from rollyard.bench.result import Agreement, Figure, Measured, Result, Side
from rollyard.bench.serving import LIMIT_S, Served, Serving, Written, serve, serving
from rollyard.bench.setting import Setting
from rollyard.bench.turns import Tell, alternate
from rollyard.bench.workload import QUEUE, SHAPES, Shape, Workload, build, greedy
from rollyard.model.architecture import Architecture
from rollyard.protocols.rollouts import Engine

LOAD_S = 900.0  # seconds a peer may take to load the model
WARM_TOKENS = 4
UNSPARED = {"engine.prefill_tokens": 2**31}  # prompts are computed at full speed, whoever decodes meanwhile
STATIC_SLOTS = 16  # as many as sequences in a batch of the ragged workload for Hugging Face

Make = Callable[[int], Workload]


class Embedded:
    """Rollyard's side. `value` reads what is compared from a run: tokens a second, or seconds."""

    def __init__(self, name: str, engine: Engine, make: Make, value: Callable[[Served], float]) -> None:
        self.name = name
        self._engine, self._make, self._value = engine, make, value

    async def warm_up(self) -> None:
        await serve(self._engine, self._make(0).shortened(WARM_TOKENS))

    async def run(self, number: int) -> Measured:
        served = await serve(self._engine, self._make(number))
        return Measured(self._value(served), _figures(served))


class Generator:
    """A peer that generates."""

    def __init__(self, peer: Peer, make: Make) -> None:
        self.name = peer.name
        self._peer, self._make = peer, make

    async def warm_up(self) -> None:
        await self.write(self._make(0).shortened(WARM_TOKENS), seed=0)

    async def run(self, number: int) -> Measured:
        written = await self.write(self._make(number), seed=number)
        return Measured(written.tokens_per_s, written.figures)

    async def write(self, work: Workload, seed: int) -> Written:
        """Raises PeerError when a completion has not the length that was asked for."""
        answer = await self._peer.ask(
            "generate",
            LIMIT_S,
            prompts=work.prompts,
            lengths=work.lengths,
            temperature=work.temperature,
            batch=work.batch,
            seed=seed,
        )
        try:
            seconds, ids = float(answer["seconds"]), tuple(tuple(map(int, row)) for row in answer["ids"])
            figures = tuple(Figure(name, float(value)) for name, value in answer.get("figures", {}).items())
        except (KeyError, TypeError, ValueError) as error:
            raise PeerError(f"peer {self.name} gave no such answer as was asked for: {error!r}") from error
        if tuple(map(len, ids)) != work.lengths:
            wrong = sum(len(row) != length for row, length in zip(ids, work.lengths, strict=False))
            problem = f"{len(ids)} completions, {wrong} of them of another length than asked for"
            raise PeerError(f"peer {self.name} wrote {problem}")
        return Written(ids, seconds, figures)


async def bench(setting: Setting, tell: Tell) -> Result:
    """One workload by its name. Raises ConfigError for a name that is not known, or a peer that cannot run it."""
    itself = {"static": _static, "prefix": _prefix, "queue": _queue}
    if setting.workload in itself:
        return await itself[setting.workload](setting, tell)
    return await against_peer(setting, SHAPES[setting.workload], find(setting.peer), tell)


async def against_peer(setting: Setting, shape: Shape, command: Command, tell: Tell) -> Result:
    """Tokens per second of both, memory of both, and whether their greedy tokens agree.

    Raises:
        PeerError: the peer failed, wrote too few tokens, or other greedy tokens.
        EngineError: the same of the engine.
        TimeLimitExceeded: one of them took too long.
    """
    vocabulary = Architecture.from_folder(setting.model).vocab_size
    make = partial(build, shape, vocabulary)
    check = greedy(vocabulary)
    window = max(shape.window, max(map(len, check.prompts)) + max(check.lengths))
    config = setting.config({"model.dtype": setting.dtype, "engine.window": window})
    async with running(command) as peer, serving([config], setting.model, setting.threads) as host:
        tell(f"{peer.name}: loading the model")
        asked = {"model": str(setting.model.resolve()), "dtype": setting.dtype, "threads": setting.threads}
        loaded = await peer.ask("load", LOAD_S, **asked, window=window)
        ours, theirs = Embedded("rollyard", host.engines[0], make, _rate), Generator(peer, make)
        tell("comparing greedy tokens")
        agreed = await _agreement(setting, window, host, theirs, check)
        rounds = await alternate((ours, theirs), setting.rounds, tell, watched=(os.getpid(), peer.pid))
        sides = (
            Side.of(ours.name, rounds.measured[0], memory.memory(os.getpid(), without=peer.pid)),
            Side.of(theirs.name, rounds.measured[1], memory.memory(peer.pid), loaded.get("versions")),
        )
    return setting.result("engine", "tokens/s", sides, rounds, agreed, host.engines[0].stats().decoder)


async def _agreement(setting: Setting, window: int, host: Serving, peer: Generator, work: Workload) -> Agreement:
    """Where tokens differ, the model in float32 is the judge, whatever the sides compute in."""
    mine = (await serve(host.engines[0], work)).written
    other = await peer.write(work, seed=0)
    exact = setting.config({"model.dtype": "float32", "engine.window": window})

    async def gap(context: Sequence[int], token: int, rival: int) -> float:
        # Read anew: the engine may have given its parameters back.
        policy = await host.device.run(worker.load_policy, exact, setting.model)
        return await host.device.run(logit_gap, policy.model, context, token, rival)

    return await compare(work.prompts, mine.token_ids, other.token_ids, gap, NEAR_TIE[setting.dtype])


# ------------------------------------------------------------------------------- beside itself, changed


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to run: options of the engine, and the requests it is given."""

    name: str
    options: Mapping[str, object]
    shape: Shape


async def variants(
    setting: Setting, each: tuple[Variant, ...], unit: str, value: Callable[[Served], float], tell: Tell
) -> Result:
    """Several ways to run the embedded engine, in turn; the first is compared with the second."""
    vocabulary = Architecture.from_folder(setting.model).vocab_size
    base = {"model.dtype": setting.dtype, "engine.window": max(variant.shape.window for variant in each)}
    configs = [setting.config(base | dict(variant.options)) for variant in each]
    distinct = list(dict.fromkeys(configs))  # variants of the same options share an engine
    async with serving(distinct, setting.model, setting.threads) as host:
        contenders = [
            Embedded(variant.name, host.engines[distinct.index(config)], partial(build, variant.shape, vocabulary), value)
            for variant, config in zip(each, configs, strict=True)
        ]
        rounds = await alternate(contenders, setting.rounds, tell)
    return setting.result("engine", unit, rounds.sides(), rounds, decoder=host.engines[0].stats().decoder)


async def _static(setting: Setting, tell: Tell) -> Result:
    each = tuple(
        Variant(batching, {"engine.batching": batching, "engine.slots": STATIC_SLOTS}, SHAPES["ragged"])
        for batching in ("continuous", "static")
    )
    return await variants(setting, each, "tokens/s", _rate, tell)


async def _prefix(setting: Setting, tell: Tell) -> Result:
    each = tuple(
        Variant(name, UNSPARED | {"engine.share_prompts": share}, SHAPES["prefix"])
        for name, share in (("prompts shared", True), ("not shared", False))
    )
    return await variants(setting, each, "s", lambda served: served.first_token_s, tell)


async def _queue(setting: Setting, tell: Tell) -> Result:
    queued = (1024, 64, 256)  # the longest queue is compared with the shortest
    each = [Variant(f"{count} queued", {"engine.slots": 64}, replace(QUEUE, groups=count)) for count in queued]
    running_ = Variant("256 running", UNSPARED | {"engine.slots": 256}, replace(QUEUE, groups=256))
    return await variants(setting, (*each, running_), "tokens/s", _rate, tell)


def _rate(served: Served) -> float:
    return served.written.tokens_per_s


def _figures(served: Served) -> tuple[Figure, ...]:
    stats = served.stats
    return (
        Figure("slots busy", stats.slots_busy),
        Figure("first tokens", served.first_token_s, "s"),
        Figure("step", 1000 * stats.step_s / stats.steps, "ms"),
        Figure("outside linear layers", 1000 * (stats.step_s - stats.linear_s) / stats.steps, "ms a step"),
        Figure("scheduler share", stats.plan_s / stats.step_s),
        Figure("prompt tokens computed", stats.prefilled_tokens),
        Figure("prompt tokens shared", stats.shared_tokens),
    )
