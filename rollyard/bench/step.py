"""`bench step`: whole GRPO steps of Rollyard's loop beside TRL's `GRPOTrainer`, on the same prompts, one step each in turn."""

from __future__ import annotations

import json
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import AsyncGenerator
from pathlib import Path

from rollyard.bench import memory
from rollyard.bench.peer import FOLDER, Command, Peer, PeerError, find, running
from rollyard.bench.result import Figure, Measured, Result, Side, machine
from rollyard.bench.serving import LIMIT_S
from rollyard.bench.setting import Setting
from rollyard.bench.turns import Tell, alternate
from rollyard.config import Config
from rollyard.loop import Run
from rollyard.watch.step import Step

GROUPS, SIZE, TOKENS = 8, 8, 64
LEARNING_RATE = 1e-6
WINDOW = 256  # tokens of prompt and completion at most
LOAD_S = 900.0  # seconds a peer may take to load the model
REWARD = FOLDER / "peers" / "reward.py"  # one file, called by both sides
NATIVE = frozenset({"avx512_bf16", "amx_bf16", "bf16"})  # instructions that multiply bfloat16; the last one is ARM's

PromptIds = Counter[tuple[int, ...]]


class Loop:
    """Rollyard's side: a real run, left waiting between two steps while the peer has its turn."""

    name = "rollyard"

    def __init__(self, run: Run) -> None:
        self._steps: AsyncGenerator[Step] = run.steps()
        self.prompts: list[PromptIds] = []  # [steps]

    async def warm_up(self) -> None:
        await self.run(0)

    async def run(self, number: int) -> Measured:
        started = time.perf_counter()
        step = await anext(self._steps)
        seconds = time.perf_counter() - started
        completions = [rollout.completion for group in step.groups for rollout in group.rollouts]
        self.prompts.append(Counter(tuple(group.prompt.token_ids) for group in step.groups for _ in group.rollouts))
        return Measured(
            seconds,
            (
                Figure("generation", step.phases.generate_s, "s"),
                Figure("training", step.phases.train_s, "s"),
                Figure("tokens of a completion", sum(len(done.token_ids) for done in completions) / len(completions)),
                Figure("completions", len(completions)),
                Figure("mean reward", step.reward_mean or 0.0),
                Figure("groups of equal rewards", step.flat_groups),
            ),
        )

    async def close(self) -> None:
        await self._steps.aclose()


class Trl:
    """The peer: its trainer waits for a message before each step."""

    def __init__(self, peer: Peer) -> None:
        self.name = peer.name
        self._peer = peer
        self.prompts: list[PromptIds] = []

    async def warm_up(self) -> None:
        await self.run(0)

    async def run(self, number: int) -> Measured:
        """Raises PeerError when the answer lacks something."""
        answer = await self._peer.ask("step", LIMIT_S)
        try:
            self.prompts.append(Counter(tuple(map(int, row)) for row in answer["prompts"]))
            lengths = [int(length) for length in answer["lengths"]]
            return Measured(
                float(answer["seconds"]),
                (
                    Figure("generation", float(answer["generation_s"]), "s"),
                    Figure("training", float(answer["training_s"]), "s"),
                    Figure("tokens of a completion", sum(lengths) / len(lengths)),
                    Figure("completions", len(lengths)),
                    Figure("mean reward", float(answer["reward"])),
                ),
            )
        except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            raise PeerError(f"peer {self.name} gave no such answer as was asked for: {error!r}") from error


def config_of(setting: Setting, prompts: Path, out: Path) -> Config:
    """The run of Rollyard's side. In bfloat16 the engine has a bfloat16 copy of float32 parameters.

    The trainer multiplies bfloat16 where the CPU has instructions for it, and float32, which is no less exact, elsewhere.
    """
    half = setting.dtype == "bfloat16"
    own: dict[str, object] = {
        "prompts.path": str(prompts),
        "prompts.shuffle": False,
        "reward.function": f"{REWARD}:sums",
        "rollout.groups_per_step": GROUPS,
        "rollout.group_size": SIZE,
        "rollout.max_tokens": TOKENS,
        "train.lr": LEARNING_RATE,
        "train.precision": "bfloat16" if half and multiplies_bfloat16() else "model",
        "engine.dtype": "bfloat16" if half else "model",
        "engine.window": WINDOW,
        "run.steps": setting.rounds + 2,  # the last step would be followed by a checkpoint
        "run.out": str(out),
        "watch.view": "quiet",
    }
    if setting.workload == "fixed":
        own["rollout.ignore_eos"] = True
    return setting.config(own)


def multiplies_bfloat16() -> bool:
    """Has this CPU instructions for it? Elsewhere products in bfloat16 are much slower than in float32.

    oneDNN supports bfloat16 on any CPU with AVX-512, and emulates it where the instructions are missing.
    """
    return not NATIVE.isdisjoint(machine().features)


def write_prompts(path: Path, count: int) -> None:
    """Questions of one chat message each, with their answers."""
    rng = random.Random("sums")
    lines = []
    for _ in range(count):
        a, b = rng.randrange(10, 100), rng.randrange(10, 100)
        lines.append(json.dumps({"prompt": f"What is {a} + {b}? Answer with a number.", "answer": str(a + b)}))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


async def bench(setting: Setting, tell: Tell) -> Result:
    """Seconds of a step of both sides, alternating; the first step of each is a warm-up.

    Raises:
        PeerError: the peer failed, or the sides were not given the same prompts or wrote other numbers of tokens.
    """
    return await measure(setting, find(setting.peer), tell)


async def measure(setting: Setting, command: Command, tell: Tell) -> Result:
    """`bench` against a peer that is started by `command`."""
    with tempfile.TemporaryDirectory(prefix="rollyard-bench-") as scratch:
        prompts = Path(scratch) / "prompts.jsonl"
        write_prompts(prompts, GROUPS * (setting.rounds + 2))
        loop = Loop(Run(config_of(setting, prompts, Path(scratch) / "run")))
        try:
            async with running(command) as peer:
                tell(f"{peer.name}: loading the model")
                loaded = await peer.ask("load", LOAD_S, **_asked(setting, prompts))
                theirs = Trl(peer)
                rounds = await alternate((loop, theirs), setting.rounds, tell, watched=(os.getpid(), peer.pid))
                _check(setting, loop, theirs, rounds.measured)
                sides = (
                    Side.of(loop.name, rounds.measured[0], memory.memory(os.getpid(), without=peer.pid)),
                    Side.of(theirs.name, rounds.measured[1], memory.memory(peer.pid), loaded.get("versions")),
                )
        finally:
            await loop.close()
    return setting.result("step", "s", sides, rounds)


def _asked(setting: Setting, prompts: Path) -> dict[str, object]:
    return {
        "model": str(setting.model.resolve()),
        "dtype": setting.dtype,
        "threads": setting.threads,
        "prompts": str(prompts),
        "reward": str(REWARD),
        "groups": GROUPS,
        "size": SIZE,
        "tokens": TOKENS,
        "fixed": setting.workload == "fixed",
        "learning_rate": LEARNING_RATE,
        "steps": setting.rounds + 2,
    }


def _check(setting: Setting, ours: Loop, theirs: Trl, measured: tuple[tuple[Measured, ...], ...]) -> None:
    """The same prompts in each step, all completions, and in `fixed` all at their full length. Raises PeerError."""
    for number, (mine, other) in enumerate(zip(ours.prompts, theirs.prompts, strict=True)):
        if mine != other:
            raise PeerError(f"step {number}: the sides did not have the same prompts")
    for name, rounds in ((ours.name, measured[0]), (theirs.name, measured[1])):
        for one in rounds:
            found = {figure.name: figure.value for figure in one.figures}
            if found["completions"] != GROUPS * SIZE:
                raise PeerError(f"{name} had {found['completions']:g} completions in a step instead of {GROUPS * SIZE}")
            if setting.workload == "fixed" and found["tokens of a completion"] != TOKENS:
                raise PeerError(f"{name} wrote {found['tokens of a completion']:g} tokens a completion instead of {TOKENS}")
