"""What a run did, in one record: `report.json`, and the same as a table (`rollyard.watch.draw.table`)."""

from __future__ import annotations

import json
import platform
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from rollyard.chaos.survival import Survived
from rollyard.durable import write_file
from rollyard.events import Drop, EngineDown, Event, Instruction, Published, Restart, Score, SegmentArrived
from rollyard.stats import Pace
from rollyard.types import Canary, DropReason, EngineStats, Handed, Sent, WeightVersion
from rollyard.watch.devices import DeviceTime, PoolTime
from rollyard.watch.forecast import Forecast
from rollyard.watch.lives import SEEN, Lives
from rollyard.watch.metrics import LengthCounts, RewardStats, has_verdict, part_names
from rollyard.watch.roofline import Operation
from rollyard.watch.step import Step
from rollyard.watch.timeline import BESIDE, PhaseSeconds

SOFTWARE: Final = ("rollyard", "torch", "transformers", "tokenizers", "safetensors", "numpy", "pydantic")
ONE_LIFE: Final = Lives()
COUNTED: Final = frozenset((SegmentArrived, Score, Drop, Published, EngineDown, Restart, *SEEN))


@dataclass(frozen=True, slots=True)
class RewardCurve:
    """Mean reward of each step's members that have a verdict; None for a step without one.

    `first` and `last` are the first and the last of the curve that are not None.
    """

    first: float | None
    last: float | None
    curve: tuple[float | None, ...]  # [steps]

    @classmethod
    def of(cls, curve: Sequence[float | None]) -> RewardCurve:
        known = [reward for reward in curve if reward is not None]
        return cls(known[0] if known else None, known[-1] if known else None, tuple(curve))


@dataclass(frozen=True, slots=True)
class EvalRewards:
    """Mean reward on held-out prompts, at the first and the last evaluation. None before there is one.

    `unscored` of the `samples` completions of all evaluations have no verdict, and are in no mean. `rewards` has the same two
    means by the name of a reward. `tokens` were sampled for all of them, besides rollouts; `phases.eval_s` is the time.
    """

    first: float | None
    last: float | None
    samples: int = 0
    unscored: int = 0
    rewards: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of a finished completion, over all that finished; percentiles by nearest rank. None when none did.

    `truncated_share` of them did not end by themselves: max_tokens or the window ended them.
    """

    mean: float | None
    p50: int | None
    p95: int | None
    max: int | None
    truncated_share: float | None

    @classmethod
    def of(cls, found: LengthCounts) -> Lengths:
        p50, p95, most = (found.percentile(percent) for percent in (50, 95, 100))
        return cls(found.mean, p50, p95, most, found.truncated_share)


@dataclass(frozen=True, slots=True)
class Counts:
    """Where prompts, or members, went. admitted == trained + sum of dropped, when the run has ended."""

    admitted: int
    trained: int
    dropped: Mapping[str, int]  # by reason


@dataclass(frozen=True, slots=True)
class TokenLedger:
    """Where the tokens went that engines wrote for rollouts: generated == trained + sum of dropped + live.

    A member that is dropped takes along what it wrote, over all its attempts; what an engine wrote for an attempt that was
    given up meanwhile is dropped for the reason of that. Only tokens that came count: what a lost engine had not sent is
    unknown. `recomputed` tokens, of prompts and completions, were computed again after a preemption or a cut, as far as
    engines say; those of evaluations are among them.
    """

    generated: int = 0
    trained: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)  # by reason
    live: int = 0  # when the report was made: 0 when the run has ended
    recomputed: int = 0


@dataclass(frozen=True, slots=True)
class Filtering:
    """Dynamic sampling: prompts whose verdicts were all equal.

    `dropped` left, `refills` others were asked in their place (fewer where no prompt was left), and `trained` were trained on as
    they were, as many having been dropped for their batch as `rollout.refills` allows.
    """

    dropped: int = 0
    refills: int = 0
    trained: int = 0


@dataclass(frozen=True, slots=True)
class Usage:
    """What devices did with their time, and what the time was needed for. See `watch.devices` and `watch.roofline`.

    `paces` are what the steps of all engines took, by how many sequences ran; empty where no engine says.
    """

    devices: tuple[DeviceTime, ...] = ()
    pools: tuple[PoolTime, ...] = ()  # by role
    operations: tuple[Operation, ...] = ()
    balance: float | None = None  # FLOPs a byte, of the machine as it was measured
    paces: tuple[Pace, ...] = ()


@dataclass(frozen=True, slots=True)
class WeightTraffic:
    """How new weights reached the engines, and the bytes copied for it over the whole run, by transport and engines.

    `handed` are the bytes and seconds of the training states that halves handed over, on the critical path; `size` is, for
    comparison, that of one copy of the weights (0 where nothing was handed over). `bytes_sent` are those that left the trainer's
    machine or were written to disk; `unchanged` is the mean share of numbers that a version had like the one before, over the
    versions of which only what changed was sent (None where there was none).
    """

    transport: str
    bytes_copied: int
    canary: Canary | None = None
    probes: Mapping[str, int] = field(default_factory=dict)  # verdicts on loads, see `rollyard.weights.probe`
    handed: tuple[Handed, ...] = ()
    size: int = 0  # bytes
    bytes_sent: int = 0
    unchanged: float | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """Why the run ended; `failed` when not as planned."""

    cause: str
    failed: bool


@dataclass(frozen=True, slots=True)
class Report:
    """What a run did.

    `phases` are seconds of the main timeline (see `rollyard.watch.timeline`). `generation_tokens` were sampled for
    rollouts, those of dropped ones included and those of evaluations not; `generation_tokens_per_s` is per second in
    which an engine held one. `slots_busy` is the mean share of decode slots doing work while engines were stepping,
    `decoder` how the embedded engine computed, and why not faster. `versions` are the weight versions published,
    [step, incarnation] each. `staleness` counts trained tokens by their lag: the version that was trained, less the one that
    wrote them. `reward` is the combined one, `rewards` has the numbers of each by its name, unweighted.

    Of a run that was resumed `steps`, `reward`, `rewards`, `eval`, `staleness`, and where prompts, members and tokens went, are
    of the whole run: of all that led to the weights that there are now. The rest is of the last life, in which `lives` has
    its place.
    """

    name: str
    model: str
    placement: str
    engine: str
    steps: int
    wall_s: float
    phases: PhaseSeconds
    generation_tokens: int
    generation_tokens_per_s: float
    reward: RewardCurve
    rewards: Mapping[str, RewardCurve]
    eval: EvalRewards
    lengths: Lengths
    slots_busy: float
    decoder: str
    prompts: Counts
    members: Counts
    weights: WeightTraffic
    versions: tuple[WeightVersion, ...]
    lost: tuple[str, ...]
    finished: Finished
    software: Mapping[str, str]
    tokens: TokenLedger = field(default_factory=TokenLedger)
    filtering: Filtering = field(default_factory=Filtering)
    staleness: Mapping[int, int] = field(default_factory=dict)
    usage: Usage = field(default_factory=Usage)
    objective: str = ""  # what was learnt from a batch: loss, correction, reference policy; empty: another job trains
    nodes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # of a cluster: where each host was, the last one last
    slow: Mapping[str, int] = field(default_factory=dict)  # engines far slower than the others: times slower than the median
    lives: Lives = ONE_LIFE
    survival: tuple[Survived, ...] = ()  # what came of faults on purpose, over all lives
    simulated: bool = False  # nothing of it happened: times are those of a model, see rollyard.plan
    forecast: Forecast | None = None  # what was expected of a step, beside what happened

    def to_json(self) -> str:
        """A JSON object, one line a field. The counts of prompts stand at the top: admitted, trained, dropped."""
        record = asdict(self)
        phases = record["phases"]
        del phases["wall_s"]
        record |= {name: phases.pop(name) for name in BESIDE}
        record |= record.pop("prompts")
        lines = (f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in record.items())
        return "{\n" + ",\n".join(lines) + "\n}\n"

    def write(self, path: Path) -> None:
        """Write `report.json` so that a reader finds a whole one or none. Raises OSError."""
        write_file(path, self.to_json().encode())


class ReportBuilder:
    """Gathers the report while the run goes on.

    Args:
        name, model, placement, engine, transport, objective: what the report calls them.
        simulated: nothing of it happens.
        judged: its rewards say something; those of most simulated runs do not.
    """

    def __init__(
        self,
        *,
        name: str,
        model: str,
        placement: str,
        engine: str,
        transport: str,
        objective: str = "",
        simulated: bool = False,
        judged: bool = True,
    ) -> None:
        self._simulated, self.judged = simulated, judged
        self._names = {"name": name, "model": model, "placement": placement, "engine": engine, "objective": objective}
        self._transport = transport
        self._bytes_copied = 0
        self._canary: Canary | None = None
        self._probes: dict[str, int] = {}
        self._handed: list[Handed] = []
        self._lost: list[str] = []
        self._size = self._bytes_sent = 0
        self._unchanged: list[float] = []
        self._nodes: Mapping[str, Sequence[str]] = {}
        self._slow: dict[str, int] = {}
        self._rewards: list[float | None] = []
        self._evaluations: list[float | None] = []
        self._held_out: dict[str, list[float]] = {}  # mean of each evaluation, by reward
        self._samples = self._unscored = self._eval_tokens = 0  # of evaluations
        self._versions: list[WeightVersion] = []
        self._parts: dict[str, list[float | None]] = {}  # mean of each step, by reward
        self._lengths = LengthCounts(Counter())
        self._staleness: Counter[int] = Counter()
        self._masked: set[tuple[int, int]] = set()  # group and member: in a batch that is trained, and not trained on
        self._lives = ONE_LIFE
        self._survival: tuple[Survived, ...] = ()
        self.generation_tokens = 0

    def totals(self) -> dict[str, Any]:
        """What `go_on` takes, of what was gathered so far; plain JSON."""
        ends = self._evaluations[:1] + self._evaluations[-1:]
        held_out = {name: means[:1] + means[-1:] for name, means in self._held_out.items()}
        staleness = {str(lag): tokens for lag, tokens in self._staleness.items()}
        counted = {"samples": self._samples, "unscored": self._unscored, "tokens": self._eval_tokens, "staleness": staleness}
        return {"evaluations": ends, "held_out": held_out, **counted}

    def go_on(self, lives: Lives, totals: Mapping[str, Any] | None, rows: Sequence[Mapping[str, Any]], steps: int) -> None:
        """Earlier lives of the run came so far.

        Args:
            lives: their number, and this one.
            totals: of theirs; None: nothing was kept.
            rows: metrics of their steps.
            steps: that they took; some may have no metrics.
        """
        self._lives = lives
        means = {int(row["step"]): row for row in rows}
        each = [means.get(step + 1, {}) for step in range(steps)]
        self._rewards = [_mean(row.get("reward_mean")) for row in each]
        named = dict.fromkeys(name for row in rows for name in row if name.startswith("reward/") and name.endswith("/mean"))
        self._parts = {name[len("reward/") : -len("/mean")]: [_mean(row.get(name)) for row in each] for name in named}
        if totals is not None:
            self._evaluations, self._held_out = list(totals["evaluations"]), dict(totals["held_out"])
            self._samples, self._unscored, self._eval_tokens = totals["samples"], totals["unscored"], totals["tokens"]
            self._staleness = Counter({int(lag): tokens for lag, tokens in totals["staleness"].items()})

    def record(self, entry: Event | Instruction) -> None:
        """Count what the conductor saw or said; most kinds are ignored. Evaluations have negative groups."""
        if type(entry) not in COUNTED:
            return
        if type(entry) is SegmentArrived:
            if entry.segment.request.group >= 0:
                self.generation_tokens += len(entry.segment.token_ids)
        elif type(entry) is Score:
            self._lengths.add(len(entry.completion.token_ids), entry.completion.finish)
        elif type(entry) is Drop:
            self._left(entry)
        elif type(entry) is Published:
            self._versions.append(entry.version)
        elif type(entry) is EngineDown:
            self._lost.append(entry.cause.partition("\n")[0])
        elif type(entry) is Restart:
            self._lost.append(f"{entry.engine} is started again")
        else:
            self._lives = self._lives.saw(entry)

    def _left(self, drop: Drop) -> None:
        """Members of a group that is filtered as a whole leave first, one by one."""
        if drop.member is None:
            self._masked = {each for each in self._masked if each[0] != drop.group}
        elif drop.reason is DropReason.FILTERED:
            self._masked.add((drop.group, drop.member))

    def add_step(self, step: Step) -> None:
        for name in part_names(step.groups):
            self._parts.setdefault(name, [None] * len(self._rewards))
        self._rewards.append(step.reward_mean)
        for name, curve in self._parts.items():
            curve.append(RewardStats.part(step.groups, name).mean)
        for rollout in (rollout for group in step.groups for rollout in group.rollouts if has_verdict(rollout)):
            done = rollout.completion
            if (done.group, done.member) in self._masked:
                self._masked.discard((done.group, done.member))
                continue
            for span in done.spans:
                self._staleness[step.step - 1 - span.version.step] += span.tokens

    def add_evaluation(
        self, mean_reward: float | None, samples: int, unscored: int, parts: Mapping[str, float], tokens: int
    ) -> None:
        self._evaluations.append(mean_reward)
        for name, mean in parts.items():
            self._held_out.setdefault(name, []).append(mean)
        self._samples += samples
        self._unscored += unscored
        self._eval_tokens += tokens

    def add_bytes_copied(self, count: int) -> None:
        """Bytes that one weight sync had to copy."""
        self._bytes_copied += count

    def add_sent(self, sent: Sent) -> None:
        self._bytes_sent += sent.bytes
        if sent.unchanged is not None:
            self._unchanged.append(sent.unchanged)

    def add_canary(self, found: Canary) -> None:
        self._canary = found

    def add_handoff(self, found: Handed, size: int) -> None:
        self._handed.append(found)
        self._size = size

    def add_engines(self, nodes: Mapping[str, Sequence[str]], slow: Mapping[str, int]) -> None:
        """Where hosts were, and which engines were slow."""
        self._nodes, self._slow = nodes, dict(slow)

    def add_survival(self, faults: Sequence[Survived]) -> None:
        """What came of faults on purpose."""
        self._survival = tuple(faults)

    def add_probe(self, verdict: str) -> None:
        self._probes[str(verdict)] = self._probes.get(verdict, 0) + 1

    @property
    def lengths(self) -> Mapping[int, int]:
        """Completions that finished, by their tokens."""
        return self._lengths.tokens

    @property
    def reward_ends(self) -> tuple[float | None, float | None]:
        """Mean reward of the first step that has one, and of the last."""
        there = (next((mean for mean in way if mean is not None), None) for way in (self._rewards, reversed(self._rewards)))
        return next(there), next(there)

    @property
    def staleness(self) -> Mapping[int, int]:
        """Tokens trained so far, by lag."""
        return dict(sorted(self._staleness.items()))

    @property
    def lost(self) -> tuple[str, ...]:
        """Engines that were lost so far, and started again."""
        return tuple(self._lost)

    @property
    def canary_s(self) -> float:
        """Seconds that the canary took; 0 without one."""
        return 0.0 if self._canary is None else self._canary.seconds

    @property
    def version(self) -> int:
        """Step of the weights that were published last, 0 before."""
        return self._versions[-1].step if self._versions else 0

    @property
    def bytes_copied(self) -> int:
        """By transports."""
        return self._bytes_copied

    def evaluated(self) -> EvalRewards:
        """So far."""

        first, last = (self._evaluations[at] if self._evaluations else None for at in (0, -1))
        by_name = {name: (means[0], means[-1]) for name, means in self._held_out.items()}
        return EvalRewards(first, last, self._samples, self._unscored, by_name, self._eval_tokens)

    def _traffic(self, copied: int) -> WeightTraffic:
        unchanged = sum(self._unchanged) / len(self._unchanged) if self._unchanged else None
        probes, handed = dict(self._probes), tuple(self._handed)
        return WeightTraffic(self._transport, copied, self._canary, probes, handed, self._size, self._bytes_sent, unchanged)

    def build(
        self,
        *,
        phases: PhaseSeconds,
        prompts: Counts,
        members: Counts,
        engines: Iterable[EngineStats],
        finished: Finished,
        tokens: TokenLedger,
        filtering: Filtering,
        usage: Usage,
    ) -> Report:
        """The report of what was gathered so far. `engines` are the totals of every engine the run had."""
        stats = tuple(engines)
        copied = self._bytes_copied + sum(engine.copied_bytes for engine in stats)
        return Report(
            **self._names,
            steps=len(self._rewards),
            wall_s=phases.wall_s,
            phases=phases,
            generation_tokens=self.generation_tokens,
            generation_tokens_per_s=self.generation_tokens / phases.generating_s if phases.generating_s else 0.0,
            reward=RewardCurve.of(self._rewards),
            rewards={name: RewardCurve.of(curve) for name, curve in self._parts.items()},
            eval=self.evaluated(),
            lengths=Lengths.of(self._lengths),
            slots_busy=slots_busy(stats),
            decoder=", ".join(dict.fromkeys(engine.decoder for engine in stats if engine.decoder)),
            prompts=prompts,
            members=members,
            weights=self._traffic(copied),
            versions=tuple(self._versions),
            lost=tuple(self._lost),
            finished=finished,
            software=software(),
            tokens=replace(tokens, recomputed=sum(engine.recomputed_tokens for engine in stats)),
            filtering=filtering,
            staleness=dict(sorted(self._staleness.items())),
            usage=usage,
            nodes={host: tuple(nodes) for host, nodes in self._nodes.items()},
            slow=self._slow,
            lives=self._lives,
            survival=self._survival,
            simulated=self._simulated,
            forecast=None,
        )


def _mean(found: object) -> float | None:
    """Of a record of metrics, where a number that is not finite is a text."""
    return None if found is None else float(str(found))


def slots_busy(engines: Iterable[EngineStats]) -> float:
    """Share of decode slots doing work over all engines, each weighted by its slots and its seconds of stepping."""
    stats = tuple(engines)
    whole = sum(engine.step_s * engine.slots for engine in stats)
    return sum(engine.busy_slot_s for engine in stats) / whole if whole else 0.0


@cache
def software() -> Mapping[str, str]:
    """Versions of what the results depend on, without importing any of it."""
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for name in SOFTWARE:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found
