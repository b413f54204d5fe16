"""`bench placements`: one workload under all four placements, with stations that only take time, and with the tiny model.

With doubles every placement does the same work on the same devices, on a virtual clock, so that what is seen is the
placement. Beside each figure stands what it should be: a bound, or a schedule made of the lengths alone (`theory`).
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from rollyard.bench import theory, virtual
from rollyard.bench.doubles import WINDOW, Meter, now, stations
from rollyard.bench.real import Real, measure_real
from rollyard.bench.result import Load, Machine, machine, versions
from rollyard.bench.theory import Work
from rollyard.bench.turns import Tell
from rollyard.config import Config
from rollyard.events import Rollover
from rollyard.layers import resolve
from rollyard.loop import Run

RATIOS = {"3:1": 3.0, "1:1": 1.0, "1:3": 1 / 3}  # generation:training work
LEAST = {"3:1": 0.95, "1:1": 0.9, "1:3": 0.95}  # share of the bound that async is to reach
APART = 0.05  # of what theory says of separate
ROLLOVERS = {"async": (Rollover.DRAIN, Rollover.ABORT, Rollover.KEEP)}  # elsewhere nothing is in flight when weights change
SHAPE = {  # of a model that is never made; what a config needs to be checked
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "max_position_embeddings": WINDOW,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 0,
    "hidden_act": "silu",
}


@dataclass(frozen=True, slots=True)
class Choice:
    """What the user may choose."""

    steps: int = Work.steps
    staleness: int = Work.staleness  # of async
    longest: int = Work.cap  # tokens of a completion at most
    doubles: bool = True
    real: bool = True

    def work(self, ratio: float) -> Work:
        return Work(ratio, steps=self.steps, staleness=self.staleness, cap=self.longest)

    @property
    def changed(self) -> dict[str, object]:
        """What is not the default."""
        return {name: value for name, value in asdict(self).items() if value != getattr(STANDARD, name)}


STANDARD = Choice()


@dataclass(frozen=True, slots=True)
class Expected:
    """What theory says, beside what was measured. `share` is measured steps a second over these."""

    formula: str
    steps_per_s: float
    share: float
    least: float | None = None  # what the share is to be
    most: float | None = None

    @property
    def reached(self) -> bool | None:
        """None where nothing is asked for."""
        if self.least is None:
            return None
        return self.least <= self.share <= (self.most or self.share)


@dataclass(frozen=True, slots=True)
class Doubled:
    """One placement with doubles, over the whole run: the first fill and the last tail are in it.

    `generating` and `training` are shares of the time of the devices that do it: those of their pool, or all of them where
    they do both. `slots` is the share of decode slots in use.
    """

    ratio: str
    placement: str
    rollover: str
    steps_per_s: float
    tokens_per_s: float
    generating: float
    slots: float
    training: float
    staleness: Mapping[int, int]  # trained tokens by the versions they lag behind
    read_again: int  # tokens, of completions that were cut
    expected: tuple[Expected, ...]  # the first is what the placement is held to


@dataclass(frozen=True, slots=True)
class Placements:
    """The whole benchmark."""

    bench: str
    work: Mapping[str, object]  # of the doubles, but for the ratio
    doubles: tuple[Doubled, ...]
    real: tuple[Real, ...]
    doubles_s: float  # of real time
    load: Load
    machine: Machine
    versions: Mapping[str, str]
    options: Mapping[str, object]  # that are not the default


async def bench(choice: Choice, tell: Tell) -> Placements:
    """Raises ConfigError, and RunFailed for a run that did not end as planned."""
    before, began = os.getloadavg()[0], time.perf_counter()
    doubles = []
    if choice.doubles:
        for ratio in RATIOS:
            for placement, rollover in cases():
                one = await asyncio.to_thread(doubled, ratio, placement, rollover, choice.work(RATIOS[ratio]))
                tell(f"{ratio} {placement} {rollover}: {one.steps_per_s:.4g} steps/s, {one.expected[0].share:.1%} of theory")
                doubles.append(one)
    doubles_s = time.perf_counter() - began
    real = await measure_real(choice.staleness, tell) if choice.real else ()
    return Placements(
        bench="placements",
        work=choice.work(1.0).settings(),
        doubles=tuple(doubles),
        real=real,
        doubles_s=doubles_s,
        load=Load(before, os.getloadavg()[0]),
        machine=machine(),
        versions=versions(),
        options=choice.changed,
    )


def cases() -> Iterator[tuple[str, Rollover]]:
    """Placements, and what happens to requests in flight."""
    for placement in ("colocated", "separate", "async", "swap"):
        for rollover in ROLLOVERS.get(placement, (Rollover.DRAIN,)):
            yield placement, rollover


# ------------------------------------------------------------------------------------------------ with doubles


def doubled(ratio: str, placement: str, rollover: Rollover, work: Work) -> Doubled:
    """One run on a virtual clock. Raises RunFailed."""
    return virtual.run(_doubled(ratio, placement, rollover, work))


async def _doubled(ratio: str, placement: str, rollover: Rollover, work: Work) -> Doubled:
    meter, lags, end = Meter(), Counter[int](), 0.0
    with tempfile.TemporaryDirectory(prefix="rollyard-bench-") as scratch:
        run = Run(config_of(placement, rollover, work, Path(scratch)), stations=lambda past: stations(placement, work, meter))
        async for step in run:
            end = now()  # of the training step
            for span in (span for group in step.groups for done in group.rollouts for span in done.completion.spans):
                lags[step.step - 1 - span.version.step] += span.tokens
    stats, devices = [engine.stats() for engine in meter.engines], len(meter.engines)
    return Doubled(
        ratio=ratio,
        placement=placement,
        rollover=str(rollover) if placement in ROLLOVERS else "",
        steps_per_s=work.steps / end,
        tokens_per_s=lags.total() / end,
        generating=sum(each.step_s for each in stats) / devices / end,
        slots=sum(each.busy_slot_s for each in stats) / sum(each.slots for each in stats) / end,
        training=meter.trained_s / end / meter.trainers,
        staleness=dict(sorted(lags.items())),
        read_again=meter.read_again,
        expected=tuple(_expected(ratio, placement, rollover, work, end)),
    )


def config_of(placement: str, rollover: Rollover, work: Work, scratch: Path) -> Config:
    """The run's config. Weights are not proved: doubles have none."""
    model = scratch / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(SHAPE), encoding="utf-8")
    staleness = {"async": work.staleness, "swap": 1}
    options: dict[str, object] = {
        "model.path": str(model),
        "prompts.task": "sort",  # a config must name prompts; doubles bring their own
        "place.placement": placement,
        "place.device": "cpu",
        "rollout.groups_per_step": work.groups,
        "rollout.group_size": work.size,
        "rollout.max_tokens": work.cap,
        "rollout.max_staleness": staleness.get(placement, 0),
        "weights.rollover": rollover,
        "weights.canary": False,
        "weights.probe": False,
        "run.steps": work.steps,
        "run.out": str(scratch / "run"),
        "watch.view": "quiet",
    }
    return resolve(environment={}, overrides=options).config


def _expected(ratio: str, placement: str, rollover: Rollover, work: Work, end: float) -> Iterator[Expected]:
    def against(formula: str, seconds: float, least: float | None = None, most: float | None = None) -> Expected:
        return Expected(formula, work.steps / seconds, seconds / end, least, most)

    match placement:
        case "colocated":
            yield against("each batch alone on all slots + training on all devices", theory.colocated(work))
        case "separate":
            yield against("each batch alone on all slots + training + sync", theory.separate(work), 1 - APART, 1 + APART)
        case "swap":
            yield against("half by half, each begins when it can", theory.swap(work))
            yield against("max(half's generation, half's training) + handoff", theory.swap_in_turn(work))
        case _:
            least = None if rollover is Rollover.DRAIN else LEAST[ratio]
            yield against("max(generation work / slots, training work)", work.bound_s * work.steps, least)
            if theory.stale_s(work) > work.bound_s:
                yield against("(longest + training + sync) / (S + 1)", theory.stale_s(work) * work.steps)
