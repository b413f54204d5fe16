"""Keeps what a run does: the journal, the metrics, the report, the picture in the terminal."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, ParamSpec

from rollyard.chaos.survival import Survived
from rollyard.config import ForecastConfig
from rollyard.errors import JournalError
from rollyard.events import Event, Finish, Instruction, Score, Scored, Train
from rollyard.journal.record import Record
from rollyard.model.architecture import Architecture
from rollyard.model.machine import Machine
from rollyard.protocols.devices import Sink, Tracked
from rollyard.types import Activity, Canary, EngineStats, Group, Handed, Sent, TrainBatch, TrainStats, WeightVersion
from rollyard.watch.accounts import Accounts
from rollyard.watch.aside import Aside
from rollyard.watch.eta import Eta
from rollyard.watch.forecast import StepMeans, busy, compare, counted
from rollyard.watch.keeper import Keeper
from rollyard.watch.live import ASKED, LOOKED, NEWS, Glance, Live, Look
from rollyard.watch.lives import Lives
from rollyard.watch.paces import together
from rollyard.watch.report import Counts, Filtering, Finished, Report, ReportBuilder, TokenLedger, Usage
from rollyard.watch.roofline import Work
from rollyard.watch.snapshot import Snapshot
from rollyard.watch.step import Step
from rollyard.watch.terminal import View
from rollyard.watch.timeline import PhaseSeconds, Timeline
from rollyard.watch.tracked import summary

NO_FORECAST: Final = ForecastConfig()
UNNAMED: Final = Tracked("", Path(), "", {})

P = ParamSpec("P")


class Recorder:
    """One run's books.

    Args:
        journal: the durable record; `Unkept` where none is.
        builder: gathers the report.
        sinks: where metrics go.
        view: what the terminal shows.
        timeline: the phase accounting.
        batch: completions of one step, for the picture.
        forecast: what is expected of a step.
        run: what sinks are told of it.
        kept: the file with the timeline of all lives; None: none is kept.
    """

    def __init__(
        self,
        journal: Record,
        builder: ReportBuilder,
        sinks: Sequence[Sink],
        view: View,
        timeline: Timeline,
        batch: int,
        forecast: ForecastConfig = NO_FORECAST,
        run: Tracked = UNNAMED,
        kept: Path | None = None,
    ) -> None:
        self._journal = journal
        self._builder = builder
        self._sinks, self._run = sinks, run
        self._view = view
        self._timeline = timeline
        self._batch = batch
        self._forecast, self._means = forecast, StepMeans()
        self._eta = Eta(forecast.step_s)
        self.accounts = Accounts(timeline)
        self._keeper = None if kept is None else Keeper(kept, self.accounts)
        self._work: Work | None = None
        self._machine: Machine | None = None
        self._judged = 0
        self._first = WeightVersion(0)  # where this life of the run begins
        self._rewards: list[float | None] = []
        self._curve: list[float | None] = []  # those of earlier lives first
        self._evaluations: list[float | None] = []
        self._evaluated: Sequence[int] | None = None  # version
        self._before = PhaseSeconds()
        self._tokens_before = 0
        self._dropped_before: Mapping[str, int] = {}
        self._unchanged: float | None = None
        self._broken = False  # it was told that the journal cannot be written
        self.finish = Finish("never finished", failed=True)

    def resume(self, version: WeightVersion, dropped: Mapping[str, int]) -> None:
        """Earlier lives of the run came so far, and had dropped so many prompts by reason."""
        self._first, self._dropped_before = version, dict(dropped)

    def totals(self) -> dict[str, Any]:
        """What `go_on` takes: what the run came to so far, as far as its metrics do not say it. Plain JSON."""
        return self._builder.totals() | {"evaluated": self._evaluated}

    def go_on(self, lives: Lives, totals: Mapping[str, Any] | None, rows: Sequence[Mapping[str, Any]]) -> None:
        """The report is to say what the whole run came to.

        Args:
            lives: so far, this one included.
            totals: of the checkpoint that this life begins with.
            rows: metrics of the steps before it.
        """
        self._builder.go_on(lives, totals, rows, self._first.step)
        self._eta.go_on(rows)
        self._curve = [_reward(row) for row in rows]
        self._run = replace(self._run, earlier=rows)
        self._evaluated = None if totals is None else totals["evaluated"]
        self._evaluations = [] if totals is None else list(totals["evaluations"])

    def begin(self) -> None:
        """The setup is over: the first step begins."""
        self.accounts.built()
        self._before = self._timeline.seconds()
        self._journal.record_beginning(self._first)
        self.flush()
        for sink in self._sinks:
            sink.open(replace(self._run, begins=self._first.step))
        if self._keeper is not None:
            self._keeper.begin()

    def works(self, architecture: Architecture, item: int, machine: Machine | None, adapter: int = 0) -> None:
        """What is run, and where.

        Args:
            item: bytes of a number of the weights.
            machine: one device, where it was measured.
            adapter: numbers of the adapter that is trained, 0 where all weights are.
        """
        self._work, self._machine = Work(architecture, item, adapter), machine

    def trains(self, shards: Sequence[TrainBatch]) -> None:
        """An optimizer step is taken on this."""
        if self._work is not None:
            self._work.trained(shards)

    def record(self, entries: Sequence[Event | Instruction]) -> None:
        """Keep what the conductor saw and said in one step. Raises JournalError, once."""
        record = self._builder.record
        self.accounts.requests.hear(entries, self._timeline.spans.now())
        for entry in entries:
            record(entry)
            if type(entry) is Scored:
                self._judged += 1
            elif type(entry) is Score and self._work is not None:
                self._work.completed(entry.prompt, entry.completion)
            elif type(entry) is Train:
                self._judged = 0
            elif type(entry) is Finish:
                self.finish = entry
        self._write(self._journal.record_step, entries)

    def flush(self) -> None:
        """Let the journal write what is due. Raises JournalError, once."""
        self._write(self._journal.tick)

    def _write(self, write: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        """That the journal cannot be written is told once. What it could not write is tried again with whatever comes later."""
        try:
            write(*args, **kwargs)
        except JournalError:
            if not self._broken:
                self._broken = True
                raise

    def step(self, version: WeightVersion, groups: tuple[Group, ...], train: TrainStats, dropped: Mapping[str, int]) -> Step:
        """One more step is done. `dropped` are the prompts dropped since the start of the run, by reason."""
        now = self._timeline.seconds()
        tokens = self._builder.generation_tokens
        fresh = dict(Counter(dropped) - Counter(self._dropped_before))
        seconds, written = now.since(self._before), tokens - self._tokens_before
        step = Step(version.step, version, groups, train, seconds, written, fresh, self._unchanged, self._builder.judged)
        self._before, self._tokens_before, self._dropped_before = now, tokens, dict(dropped)
        self._rewards.append(step.reward_mean)
        self._curve.append(step.reward_mean)
        self._means.add(seconds, train.tokens)
        self._eta.add(seconds)
        self.accounts.stepped(step.step)
        self._builder.add_step(step)
        for sink in self._sinks:
            sink.write(step.to_metrics())
        return step

    def copied(self, count: int) -> None:
        """Bytes that a weight sync had to copy."""
        self._builder.add_bytes_copied(count)

    def sent(self, sent: Sent) -> None:
        """What travelled for a version."""
        self._unchanged = sent.unchanged
        self._builder.add_sent(sent)

    def handed(self, found: Handed, size: int) -> None:
        """One half took over the training state of the other. `size`: bytes of one copy of the weights."""
        self._builder.add_handoff(found, size)

    def survived(self, faults: Sequence[Survived]) -> None:
        """What came of faults on purpose."""
        self._builder.add_survival(faults)

    def placed(self, nodes: Mapping[str, Sequence[str]], slow: Mapping[str, int]) -> None:
        """Addresses of the nodes where each host was, by its name; how many times slower engines were that were slow."""
        self._builder.add_engines(nodes, slow)

    def proved(self, found: Canary) -> None:
        """What the canary found."""
        self._builder.add_canary(found)

    def probed(self, verdict: str) -> None:
        """What the probe of one load found."""
        self._builder.add_probe(verdict)

    def checkpoint(self, version: WeightVersion, folder: str, cursor: int, counters: Mapping[str, object]) -> Future[None]:
        """Begin to name a checkpoint that is complete on disk, see `Journal.commit_checkpoint`."""
        return self._journal.commit_checkpoint(version, folder, cursor, counters)

    def evaluated(
        self,
        version: WeightVersion,
        mean_reward: float | None,
        samples: int,
        unscored: int,
        parts: Mapping[str, float],
        tokens: int,
    ) -> None:
        """Held-out prompts were judged. `parts`: the means of the rewards by name. `tokens`: sampled for it."""
        if not self._builder.judged:
            mean_reward, parts = None, {}
        self._evaluations.append(mean_reward)
        self._eta.evaluated(self._timeline.seconds().eval_s)
        self._evaluated = version
        self._builder.add_evaluation(mean_reward, samples, unscored, parts, tokens)
        self._journal.record_evaluation(version, mean_reward, samples, unscored)
        told = {"step": version.step, "eval/reward_mean": mean_reward, "eval/samples": samples, "eval/unscored": unscored}
        for sink in self._sinks:
            sink.evaluated(told | {f"eval/reward/{name}/mean": mean for name, mean in parts.items()})

    def picture(self, activity: str, waiting: str, slots_busy: float | None) -> None:
        """Show how things stand, and keep it.

        Args:
            activity: what is going on; when empty, what the timeline says.
            waiting: for another job, in words.
        """
        self.accounts.collect()
        for sink in self._aside:
            sink.hear()
        self._view.update(self._snapshot(activity, waiting, slots_busy))
        if self._keeper is not None:
            self._keeper.keep()

    def _snapshot(self, activity: str, waiting: str, slots_busy: float | None) -> Snapshot:
        phases, judged = self._timeline.seconds(), min(self._judged, self._batch)
        return Snapshot(
            step=self._first.step + len(self._rewards),
            phases=phases,
            rewards=self._curve,
            activity=activity or waiting or self._timeline.activity,
            waiting=waiting,
            judged=judged,
            wanted=self._batch,
            eval_first=self._evaluations[0] if self._evaluations else None,
            eval_last=self._evaluations[-1] if self._evaluations else None,
            evaluations=len(self._evaluations),
            tokens=self._builder.generation_tokens,
            slots_busy=slots_busy,
            dropped=sum(self._dropped_before.values()),
            before=self._first.step,
            left=self._eta.at(phases.since(self._before), judged / self._batch),
        )

    def look(self, glance: Glance, known: str) -> bytes:
        """A `Look` as a line of JSON: how things stand, and what devices did since it was asked last.

        Args:
            known: what the asker knows, an `Asked` as JSON. Raises ValueError for something else.
        """
        asked = ASKED.validate_json(known or "{}")
        shown, builder = self._snapshot(glance.activity, glance.waiting, glance.slots_busy), self._builder
        first, last = builder.reward_ends
        live = Live(
            step=shown.step,
            planned=glance.planned,
            activity=shown.activity,
            waiting=shown.waiting,
            wall_s=shown.phases.wall_s,
            phases=shown.phases.parts(),
            beside=shown.phases.beside(),
            reward_first=first,
            reward_last=last,
            eval=builder.evaluated(),
            tokens=shown.tokens,
            tokens_per_s=shown.tokens_per_s,
            slots_busy=shown.slots_busy,
            engines=glance.engines,
            states=glance.states,
            queue=glance.queue,
            live=glance.live,
            judged=shown.judged,
            wanted=shown.wanted,
            prompts=glance.prompts,
            members=glance.members,
            staleness=builder.staleness,
            version=max(builder.version, self._first.step),
            eta_s=shown.eta_s(glance.planned),
            lost=builder.lost,
            canary_s=builder.canary_s,
        )
        return LOOKED.dump_json(Look(live, self.accounts.tell(asked, NEWS)))

    def close(
        self, prompts: Counts, members: Counts, tokens: TokenLedger, filtering: Filtering, engines: Iterable[EngineStats]
    ) -> Report:
        """The report. Raises JournalError when the last rows cannot be written; the report is complete all the same."""
        finished = Finished(self.finish.cause, self.finish.failed)
        phases, stats = self._timeline.seconds(), tuple(engines)
        report = self._builder.build(
            phases=phases,
            prompts=prompts,
            members=members,
            engines=stats,
            finished=finished,
            tokens=tokens,
            filtering=filtering,
            usage=self._usage(stats),
        )
        if self._forecast.step_s:
            report = replace(report, forecast=compare(self._forecast, self._means.steps, self._measured(report.slots_busy)))
        self._view.finish(report)
        self._view.close()
        for sink in self._sinks:
            sink.close(summary(report), finished.failed)
        return report

    def _measured(self, slots: float) -> Mapping[str, float]:
        """What stands beside a forecast; nothing before a step."""
        if not self._means.steps:
            return {}
        return {**self._means.means(), **busy(counted(self.accounts.traced())[1], slots)}

    async def leave_trace(self, path: Path) -> None:
        """What was done in this life, and the end of what is kept of all. Raises OSError."""
        if self._keeper is not None:
            await self._keeper.close(path)

    async def left(self) -> None:
        """Wait, for a limited time, until sinks have written what they were told."""
        await asyncio.gather(*(sink.closed() for sink in self._aside))

    @property
    def _aside(self) -> Iterator[Aside]:
        return (sink for sink in self._sinks if isinstance(sink, Aside))

    def _usage(self, engines: Sequence[EngineStats]) -> Usage:
        devices, pools = self.accounts.close()
        paces = together(engine.paces for engine in engines)
        if self._work is None:
            return Usage(devices, pools, paces=paces)
        seconds = {what: self.accounts.seconds(Activity.TRAIN, what) for what in ("step", "optimizer")}
        seconds["sync"] = sum(device.busy_ns.get(Activity.SYNC.value, 0) for device in devices) / 1e9
        copied = self._builder.bytes_copied + sum(engine.copied_bytes for engine in engines)
        whole_s = sum(device.wall_ns for device in devices) / 1e9
        operations = self._work.table(engines, seconds, copied, whole_s, self._machine)
        return Usage(devices, pools, operations, None if self._machine is None else self._machine.balance, paces)

    def close_journal(self) -> None:
        """Raises JournalError, unless that was told before."""
        self._write(self._journal.close)


def _reward(row: Mapping[str, Any]) -> float | None:
    """Of a step's metrics."""
    mean = row.get("reward_mean")
    return mean if isinstance(mean, float | int) else None
