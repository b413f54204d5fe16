"""Published steps of whole systems beside what the simulator says of them: prints the tables of docs/published.md.

    python benchmarks/published/tables.py [T1|T2|T3] ...

Two constants are fitted, and only to the rows that are marked in rows.py: a factor on all that decoding takes, and what a
micro-batch of training takes besides its arithmetic. All others are in the scenarios, as `rollyard simulate` takes them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from rollyard.layers import resolve_tree
from rollyard.plan.check import check_scenario
from rollyard.plan.costs import costs_of
from rollyard.plan.learning import TrainingCosts
from rollyard.plan.scenario import CostsConfig, Scenario
from rollyard.plan.simulate import simulate
from rollyard.plan.trace import lengths_of

sys.path.insert(0, str(Path(__file__).parent))
from rows import ROWS, WITHIN, Row

ROUNDS: Final = 2  # of the fit: generation is not quite proportional to its factor
BATCHES: Final = 4  # in which micro-batches are counted
TABLES: Final = ("T1", "T2", "T3")
RATES: Final = ("decode_bandwidth", "decode_flops", "prefill_flops")  # shares of what hardware states
SECONDS: Final = ("step_s", "tensor_parallel_s", "nodes_s")


@dataclass(frozen=True, slots=True)
class Constants:
    """Fitted: a factor on what decoding takes, and seconds of a micro-batch besides."""

    decoding: float = 1.0
    microbatch_s: float = 0.0

    def options(self) -> dict[str, Any]:
        usual = CostsConfig()
        slower = {f"costs.{name}": getattr(usual, name) / self.decoding for name in RATES}
        longer = {f"costs.{name}": getattr(usual, name) * self.decoding for name in SECONDS}
        return slower | longer | {"costs.microbatch_s": self.microbatch_s}


@dataclass(frozen=True, slots=True)
class Found:
    """A mean step of a simulated run; seconds. `training_s`: training goes on, logprob passes included."""

    step_s: float
    training_s: float
    logprob_s: float
    switch_s: float  # from training to generating and back, where devices do both
    microbatches: float  # that a device works on in a step, in whole ones
    tokens_per_s: float  # prompts and completions

    @property
    def generation_s(self) -> float:
        """Nothing trains."""
        return self.step_s - self.training_s

    @property
    def decoding_s(self) -> float:
        """The same without the switch."""
        return self.generation_s - self.switch_s


def scenario_of(row: Row, constants: Constants, steps: int = 0) -> Scenario:
    """Of a row; `steps` 0: as many as its file says."""
    overrides = constants.options() | ({"run.steps": steps} if steps else {})
    return resolve_tree(Scenario, check_scenario, file=row.path, environment={}, overrides=overrides).config


def run(row: Row, constants: Constants, steps: int = 0) -> Found:
    """Without the steps in which a pipeline fills, and those in which no prompts come any more."""
    scenario = scenario_of(row, constants, steps)
    simulated, lag = simulate(scenario), scenario.rollout.max_staleness
    rows = simulated.metrics[1 + lag : len(simulated.metrics) - lag] or simulated.metrics
    step_s = _mean(rows, "seconds")
    training_s = _mean(rows, "phase/train_s")
    costs, rollout = costs_of(scenario), scenario.rollout
    sequence = _mean(rows, "completion_tokens_mean") + scenario.workload.prompt_tokens
    batch = sequence * rollout.groups_per_step * rollout.group_size
    switch_s = 0.0 if scenario.place.apart else costs.sleep_s + costs.wake_s
    passes = scenario.costs.logprob_passes
    logprob_s = training_s * passes / (passes + 3 + scenario.costs.recompute)  # of forward passes that all take as long
    return Found(step_s, training_s, logprob_s, switch_s, microbatches(scenario, costs.training), batch / step_s)


def microbatches(scenario: Scenario, training: TrainingCosts) -> float:
    """Of a step: what a second of each more would make the first batches longer by."""
    lengths, rollout, size = lengths_of(scenario), scenario.rollout, scenario.rollout.groups_per_step
    more = {each: replace(training, costs=training.costs.model_copy(update={"microbatch_s": each})) for each in (0.0, 1.0)}
    members, found = range(rollout.group_size), []
    for begin in range(0, BATCHES * size, size):
        completions = {
            group: [min(lengths.completion(group, member, 0), rollout.max_tokens) for member in members]
            for group in range(begin, begin + size)
        }
        groups = [(lengths.prompt(group), completions[group]) for group in completions]
        found.append(more[1.0].batch_s(groups) - more[0.0].batch_s(groups))
    return fmean(found)


def _mean(rows: Sequence[Mapping[str, object]], name: str) -> float:
    return fmean(float(str(row[name])) for row in rows)


def fit(rows: Sequence[Row], steps: int = 0) -> Constants:
    """Both constants where two numbers are published: parts of one row's step, or the steps of two rows. With the step of one row
    alone decoding is as it is stated, and training takes the rest. With none nothing is fitted.
    """
    constants = Constants()
    for _ in range(ROUNDS if rows else 0):
        constants = _closer(rows, [run(row, constants, steps) for row in rows], constants)
    return constants


def _closer(rows: Sequence[Row], found: Sequence[Found], now: Constants) -> Constants:
    """Solves `decoding * factor + switch + training + microbatches * seconds = published`, for what is to change."""
    first, one = rows[0], found[0]
    if first.generation_s:
        more = (first.training_s - one.training_s) / one.microbatches
        factor = (first.generation_s - one.switch_s) / one.decoding_s
        return Constants(now.decoding * factor, max(0.0, now.microbatch_s + more))
    left = [row.step_s - each.training_s - each.switch_s for row, each in zip(rows, found, strict=True)]
    if len(rows) == 1:
        return Constants(now.decoding, max(0.0, now.microbatch_s + (left[0] - one.decoding_s) / one.microbatches))
    other = found[1]
    determinant = one.decoding_s * other.microbatches - other.decoding_s * one.microbatches
    factor = (left[0] * other.microbatches - left[1] * one.microbatches) / determinant
    more = (one.decoding_s * left[1] - other.decoding_s * left[0]) / determinant
    return Constants(now.decoding * factor, max(0.0, now.microbatch_s + more))


def fitted(rows: Sequence[Row], steps: int = 0) -> dict[str, Constants]:
    """By the name that rows share."""
    names = dict.fromkeys(row.fitted for row in rows)
    return {name: fit([row for row in rows if row.fitted == name and row.calibrates], steps) for name in names}


@dataclass(frozen=True, slots=True)
class Compared:
    """A row and what was simulated; ratios are to the row's other, 0 without one."""

    row: Row
    found: Found
    ratio: float
    published: float

    @property
    def holds(self) -> bool:
        return abs(self.ratio / self.published - 1) <= WITHIN


def compare(rows: Sequence[Row], constants: Mapping[str, Constants], steps: int = 0) -> list[Compared]:
    """All of a table."""
    found = {row.file: run(row, constants[row.fitted], steps) for row in rows}
    by_file = {row.file: row for row in rows}
    compared = []
    for row in rows:
        other = by_file.get(row.against)
        ratio = found[row.file].step_s / found[other.file].step_s if other else 0.0
        compared.append(Compared(row, found[row.file], ratio, row.step_s / other.step_s if other else 0.0))
    return compared


def table(compared: Sequence[Compared]) -> Iterator[str]:
    """As Markdown: steps, and their ratios."""
    yield "| row | step s | published | error | step against | published | error |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    labels = {each.row.file: each.row.label for each in compared}
    for each in compared:
        row, step_s = each.row, each.found.step_s
        cells = [
            row.label + (" (fitted)" if row.calibrates else ""),
            f"{step_s:,.1f}",
            f"{row.step_s:,.1f}",
            _error(step_s, row.step_s),
        ]
        if row.against:
            cells += [f"{each.ratio:.2f} of {labels[row.against]}", f"{each.published:.2f}", _error(each.ratio, each.published)]
        else:
            cells += ["", "", ""]
        yield f"| {' | '.join(cells)} |"


def parts(compared: Sequence[Compared]) -> Iterator[str]:
    """What else is published, as Markdown; nothing where there is nothing else."""
    names = {
        "generation_s": "nothing trains, s",
        "training_s": "training, s",
        "logprob_s": "logprob pass, s",
        "tokens_per_s": "tokens/s",
    }
    shown = {name: title for name, title in names.items() if any(getattr(each.row, name) for each in compared)}
    if not shown:
        return
    yield f"| row | {' | '.join(f'{title} | published | error' for title in shown.values())} |"
    yield f"| {' | '.join(['---'] * (1 + 3 * len(shown)))} |"
    for each in compared:
        cells = [each.row.label]
        for name in shown:
            published, found = getattr(each.row, name), getattr(each.found, name)
            if name == "training_s" and each.row.logprob_s:  # which is published apart
                found -= each.found.logprob_s
            digits = ",.0f" if name == "tokens_per_s" else ",.1f"
            known = (format(published, digits), _error(found, published)) if published else ("", "")
            cells += [format(found, digits), *known]
        yield f"| {' | '.join(cells)} |"


def _error(found: float, published: float) -> str:
    return f"{found / published - 1:+.0%}"


def constants_table(constants: Mapping[str, Constants]) -> Iterator[str]:
    """As Markdown; by the beginning of the names of scenarios."""
    yield "| scenarios | decoding takes | a micro-batch takes besides |"
    yield "| --- | --- | --- |"
    for name, each in constants.items():
        yield f"| `{name}` | x {each.decoding:.3f} | {each.microbatch_s:.3f} s |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", metavar="TABLE", default=TABLES, help=f"of {', '.join(TABLES)}; all by default")
    for name in parser.parse_args().tables:
        if name not in TABLES:
            parser.error(f"there is no table {name!r}; they are {', '.join(TABLES)}")
        rows = [row for row in ROWS if row.table == name]
        constants = fitted(rows)
        compared = compare(rows, constants)
        print(f"{name}", "", *constants_table(constants), "", *table(compared), "", *parts(compared), "", sep="\n")
        if judged := [each for each in compared if each.row.against]:
            held = sum(each.holds for each in judged)
            print(f"{held} of {len(judged)} ratios within {WITHIN:.0%}.", "", sep="\n", flush=True)


if __name__ == "__main__":
    main()
