"""Constants of the cost model from a run that is over: `rollyard simulate --calibrate RUN`.

What is fitted is work, not what came of it: on a CPU processor time, which hardly depends on what else the machine does, and
elsewhere the time of devices. How long that takes in another placement is for the simulator to say: who works at once, who
has to share a processor, who waits for whom.

A CPU has no data sheet that says what it reaches with such matrices. So its FLOPs are what the run reached at its best; the
other parts are shares of that. Its caches are taken to be fast enough.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import ceil, floor
from pathlib import Path
from statistics import median
from typing import Any, Final

from rollyard.errors import ConfigError
from rollyard.plan.costs import Costs, formats_of, priced, shape_for
from rollyard.plan.finished import WHERE, FinishedRun, read_finished
from rollyard.plan.fit import Fit, least_squares, middle
from rollyard.plan.hardware import CPU, HARDWARE
from rollyard.plan.measured import device_of
from rollyard.plan.scenario import CostsConfig, Scenario
from rollyard.stats import Pace

UNIT: Final = 1e9  # FLOP/s that a CPU's rates are first told in
ERROR: Final = 1.05  # times: the peak, as far as a fit can tell
NEVER_BOUND: Final = 100.0  # bytes/s a FLOP/s: memory that nothing waits for
USUAL: Final = 1e9  # bytes/s from process to process, where a run does not tell
IN_TURNS: Final = ("colocated", "separate")  # placements in which nobody trains while somebody generates
PEAK: Final = ("decode_bandwidth", "decode_flops", "prefill_flops", "train_flops", "link")
# A machine that only computes, at its peak: what a run took over that is what is fitted.
NOTHING: Final[Mapping[str, Any]] = {
    **{name: 0.0 for name in CostsConfig.model_fields if name.endswith("_s")},
    **dict.fromkeys(PEAK, 1.0),
    **{"recompute": False, "logprob_passes": 0},
}


@dataclass(frozen=True, slots=True)
class Fitted:
    """One constant. `residual`: the root mean square of what it leaves, as a share of what was measured; None: it is a median."""

    option: str
    value: float | bool | str
    on: str  # what it was fitted to
    residual: float | None = None


@dataclass(frozen=True, slots=True)
class Calibration:
    """What a run says of the costs."""

    run: FinishedRun
    fitted: tuple[Fitted, ...]
    quiet: float  # share of its time in which who wanted a processor had one; 1 where that is not known

    def options(self) -> dict[str, float | bool | str]:
        """By dotted name."""
        return {each.option: each.value for each in self.fitted}

    def scenario(self, config: Scenario) -> Scenario:
        """The same with these constants."""
        return with_values(config, self.options())

    def to_toml(self) -> str:
        """Sections of a scenario's file, with what each constant was fitted to."""
        sections: dict[str, list[str]] = {}
        for each in self.fitted:
            section, _, name = each.option.partition(".")
            left = "" if each.residual is None else f"; residual {each.residual:.1%}"
            sections.setdefault(section, []).append(f"{name} = {_toml(each.value)}  # {each.on}{left}")
        head = f"# fitted to {self.run.report.name} ({self.run.report.placement}, {self.run.report.steps} steps)\n"
        return head + "\n".join(f"[{name}]\n" + "\n".join(lines) + "\n" for name, lines in sections.items())


def _toml(value: float | bool | str) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else f"{value:.6g}"


def with_values(scenario: Scenario, options: dict[str, float | bool | str]) -> Scenario:
    """Raises pydantic's ValidationError for a value that an option does not take."""
    record = scenario.model_dump()
    for name, value in options.items():
        section, _, option = name.partition(".")
        record[section][option] = value
    return Scenario.model_validate(record)


def calibrate(path: Path, hardware: str = "", *, simulated: bool = False) -> Calibration:
    """Fit the constants to the run in this folder.

    Args:
        hardware: what it ran on: cpu, or a kind of device of the table; empty: as its options say, which is cpu or not told.
        simulated: it is a simulated run, of which no more can be found than what it was given.

    Raises:
        ConfigError: it is not the folder of a run that came to its end, says too little, or ran on other hardware; no such
            hardware is known; it was simulated, and that is not said.
        JournalError: what is in the folder cannot be read, or is another version's.
    """
    run = read_finished(path)
    hardware = ran_on(run, hardware, simulated)
    fitting = _Fitting(run, hardware)
    return Calibration(run, tuple(fitting.all()), fitting.quiet)


def ran_on(run: FinishedRun, asked: str, simulated: bool) -> str:
    """What it ran on, if that is what is asked for. Raises ConfigError."""
    if run.journal is None and not simulated:
        problem = "the run was simulated, and says no more than the constants that it was given"
        raise ConfigError(problem, where=WHERE, remedy="give the folder of a real run")
    device = run.config.place.device
    if isinstance(run.config, Scenario):
        kinds = [run.config.cluster.hardware]
    elif device == "auto":
        return asked or CPU
    else:
        kinds = [CPU] if device == "cpu" else list(HARDWARE)
    if not asked and len(kinds) == 1:
        return kinds[0]
    if asked not in kinds:
        problem = f"the run was on {device if len(kinds) > 1 else kinds[0]}" + (f", and {asked} is asked for" if asked else "")
        raise ConfigError(problem, where=WHERE, remedy=f"give --cluster.hardware {', or '.join(kinds)}, or another run")
    return asked


class _Fitting:
    """One run's constants, part by part: a later part stands on what an earlier one found."""

    def __init__(self, run: FinishedRun, hardware: str) -> None:
        self._run, self._hardware = run, hardware
        self._cpu = hardware == CPU
        record = run.config.model_dump()
        self._scenario = Scenario.model_validate({**record, "costs": {**record.get("costs", {}), **NOTHING}})
        self._shape = shape_for(self._scenario)
        options: dict[str, float | bool | str] = {"cluster.hardware": hardware}
        if self._cpu:
            options |= {"cluster.flops": UNIT, "cluster.bandwidth": UNIT * NEVER_BOUND, "cluster.cores": 0}
        self._scenario = with_values(self._scenario, options)
        self._peak = self._priced({})
        self._members = run.config.rollout.groups_per_step * run.config.rollout.group_size
        self.quiet = self._quietness()

    def _priced(self, options: dict[str, float | bool | str]) -> Costs:
        scenario = with_values(self._scenario, options)
        return priced(scenario, self._shape, device_of(scenario.cluster, formats_of(scenario)))

    def _quietness(self) -> float:
        """Share of its time in which who wanted a processor had one, where processor time was measured: 1 on an idle machine."""
        if not self._cpu:
            return 1.0
        paces = self._run.report.usage.paces
        shares = [sum(pace.thread_s for pace in paces) / (sum(pace.seconds for pace in paces) or 1.0)]
        trained, took = self._run.column("train/thread_s"), self._run.seconds("step")
        shares += [median(trained) / took] if trained and took else []
        return min(max(shares), 1.0) or 1.0

    def all(self) -> Iterable[Fitted]:
        yield Fitted("cluster.hardware", self._hardware, "given")
        decode, train, rates = self._lines()
        best = min(slope for slope in rates.values() if slope) if self._cpu else 1.0
        if self._cpu:
            yield Fitted("cluster.flops", UNIT / best, "the best rate of decoding, prefill and training")
            yield Fitted("cluster.bandwidth", UNIT / best * NEVER_BOUND, "its caches are taken to be fast enough")
            yield Fitted("cluster.cores", float(os.cpu_count() or 1), "of this machine, which the run is taken to have had")
        shares = {name: min(best / slope, 1.0) if slope else 1.0 for name, slope in rates.items()}  # see ERROR
        steps = sum(pace.steps for pace in self._run.report.usage.paces)
        yield Fitted("costs.step_s", decode.fixed, f"{steps} engine steps, by sequences running", decode.residual)
        yield self._process()
        yield Fitted("costs.decode_flops", shares["decode_flops"], "the same", decode.residual)
        yield Fitted("costs.decode_bandwidth", 1.0 if self._cpu else shares["decode_flops"], "the same")
        yield Fitted("costs.prefill_flops", shares["prefill_flops"], "of them, those that read prompts besides")
        yield Fitted("costs.recompute", False, "as train.recompute has it")
        yield Fitted("costs.train_flops", shares["train_flops"], f"{self._run.report.steps - 1} training steps", train.residual)
        yield Fitted("costs.minibatch_s", train.fixed / self._run.config.train.minibatches, "the same", train.residual)
        yield from self._of_driver()
        yield from self._of_sync()

    def _lines(self) -> tuple[Fit, Fit, dict[str, float]]:
        """Of decoding and of training, and the slopes by the name of the rate.

        What took no longer the more there was is not free: its line is that of the best rate, or it would be counted twice,
        once as what is fixed and once at that rate.
        """
        decode, train = self._decode(), self._train()
        rates = {"decode_flops": decode.slope, "prefill_flops": self._prefill(decode), "train_flops": train.slope}
        self._check(rates)
        best = min(slope for slope in rates.values() if slope) if self._cpu else 1.0
        decode = decode if decode.slope else self._decode(best)
        train = train if train.slope else self._train(best)
        return decode, train, rates | {"decode_flops": decode.slope, "train_flops": train.slope}

    def _check(self, rates: Mapping[str, float]) -> None:
        """Raises ConfigError where nothing follows from what was computed, or it is faster than its devices."""
        if not any(rates.values()):
            problem = "nothing in the run took longer the more there was to compute"
            raise ConfigError(problem, where=WHERE, remedy="give a run with a larger model, or with lengths that differ more")
        fastest = min((name for name in rates if rates[name]), key=lambda name: rates[name])
        if not self._cpu and rates[fastest] * ERROR < 1:
            problem = f"the run did {1 / rates[fastest]:.3g} times what {self._hardware} can at its peak ({fastest})"
            raise ConfigError(problem, where="cluster.hardware", remedy="name what it ran on")

    # ------------------------------------------------------------------------------------------- computing

    def _took(self, pace: Pace) -> float:
        return (pace.thread_s if self._cpu and pace.thread_s else pace.seconds) / pace.steps

    def _decode(self, least: float = 0.0) -> Fit:
        """Seconds of a step over what its tokens would take at the peak."""
        paces = [pace for pace in self._run.report.usage.paces if not pace.prefill and pace.sequences]
        if not paces:
            raise ConfigError("no step of an engine only decoded", where=WHERE, remedy="give a run with longer completions")
        x, y = [self._at_peak(pace) for pace in paces], [self._took(pace) for pace in paces]
        return least_squares(x, y, [pace.steps for pace in paces], least)

    def _process(self) -> Fitted:
        paces = [pace for pace in self._run.report.usage.paces if pace.process_s] if self._cpu else []
        if not paces:
            return Fitted("costs.process_s", 0.0, "not in this run")
        steps = sum(pace.steps for pace in paces)
        besides = sum(pace.process_s - pace.thread_s for pace in paces)
        return Fitted("costs.process_s", max(besides, 0.0) / steps, f"{steps} engine steps: what their process did besides")

    def _at_peak(self, pace: Pace) -> float:
        running, context = max(pace.sequences / pace.steps, 1.0), pace.context / pace.steps
        fewer, more = (self._peak.engine.step(count).at(context) for count in (floor(running), ceil(running)))
        return fewer + (more - fewer) * (running - floor(running))

    def _prefill(self, decode: Fit) -> float:
        """Times as long as at the peak; as decoding where no step read prompts."""
        paces = [pace for pace in self._run.report.usage.paces if pace.prefill]
        ideal = sum(self._peak.engine.prefill_s(pace.prefilled, 0) for pace in paces)
        taken = sum((self._took(pace) - decode.fixed - decode.slope * self._at_peak(pace)) * pace.steps for pace in paces)
        return taken / ideal if ideal and taken > 0 else decode.slope

    def _train(self, least: float = 0.0) -> Fit:
        """Seconds of a batch over what it would take at the peak."""
        run = self._run
        seconds = run.column("train/thread_s") if self._cpu else []
        if not seconds:
            steps = sorted((span.start, span.end) for span in run.spans if span.what == "step")
            lengths = [end - start for start, end in steps]
            seconds = lengths[1:] if len(lengths) == run.report.steps else [run.seconds("step")] * (run.report.steps - 1)
        ideal = [self._peak.batch_s(batch) for batch in run.batches]
        return middle(ideal, seconds, least)

    # ---------------------------------------------------------------------------------- driver and weight sync

    def _of_driver(self) -> Iterable[Fitted]:
        run, members, quiet = self._run, self._members, self.quiet
        request = run.driver_s("prompts") * quiet / members
        told = f"{members} completions a step, in the middle"
        driver, generating = median(run.column("driver_s")), median(run.column("driver_generating_s"))
        if run.config.place.placement in IN_TURNS:
            batch, on = max(driver - generating, 0.0), "processor time of the driver while nobody generates, in the middle"
        else:
            packed = max(run.driver_s("train") - run.seconds("step"), 0.0) if self._cpu else 0.0
            batch = (packed + median(run.column("phase/unaccounted_s"))) * quiet
            generating, on = max(driver - batch, 0.0), "what training has beside its step, and what nothing has, in the middle"
        yield Fitted("costs.batch_s", batch, on)
        yield Fitted("costs.request_s", request, f"handing out requests of {told}")
        message = max(generating - request * members, 0.0) / members
        yield Fitted("costs.message_s", message, f"processor time of the driver, {told}")
        if run.verdict_s is not None and not self._cpu:
            yield Fitted("costs.score_s", run.verdict_s, "from the end of a completion to its verdict, in the middle")
        elif self._cpu:
            yield Fitted("costs.score_s", 0.0, "functions judge in the driver, whose time they are part of")

    def _of_sync(self) -> Iterable[Fitted]:
        run, quiet = self._run, self.quiet
        evidence = run.seconds("evidence") * quiet
        probe = run.seconds("probe") * quiet
        options: dict[str, float | bool | str] = {"costs.evidence_s": evidence, "costs.probe_s": probe}
        yield Fitted("costs.evidence_s", evidence, "what the trainer computes for the probe, in the middle")
        yield Fitted("costs.probe_s", probe, "a probe, in the middle")
        for fitted in self._links() if self._cpu else ():
            yield fitted
            options[fitted.option] = fitted.value
        options["costs.link"] = 1.0
        whole = run.driver_s("sync") * quiet
        costs, parts = self._priced(options), probe
        placement = run.config.place.placement
        if placement == "colocated":
            asleep = (run.seconds("sleep") + run.seconds("wake")) * quiet
            yield Fitted("costs.sleep_s", asleep / 2, "engines went to sleep and woke, in the middle")
            parts += asleep
        elif placement == "swap":
            parts = costs.handoff_s  # the probe is beside it
        elif placement == "async":  # beside generation and training: how long it takes says little of what it would take alone
            whole = 0.0
        left = whole - parts - costs.copy_s - costs.transfer_s - costs.load_s
        yield Fitted("costs.link", 1.0, "the rate is what was reached")
        yield Fitted("costs.barrier_s", max(left, 0.0), "what a weight sync takes besides, in the middle")

    def _links(self) -> Iterable[Fitted]:
        """Bytes/s between processes."""
        weights = self._run.report.weights
        if weights.handed:
            rate = median(handed.bytes / handed.seconds for handed in weights.handed if handed.seconds) / self.quiet
            on = f"{len(weights.handed)} handoffs, in the middle"
        elif (published := self._run.seconds("publish") * self.quiet) and weights.bytes_sent:
            rate, on = weights.bytes_sent / len(self._run.report.versions) / published, "weights that were sent, in the middle"
        else:
            rate, on = USUAL, "not in this run: assumed"
        for name in ("link", "host", "nic"):
            yield Fitted(f"cluster.{name}", rate, on)
