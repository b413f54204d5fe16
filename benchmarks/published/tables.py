"""Published steps of whole systems beside what the simulator says of them: results.json and the tables of docs/published.md.

    python benchmarks/published/tables.py [T1|T1-lengths|T2|T3] ...   simulates these, and writes both
    python benchmarks/published/tables.py --page                      writes the page alone, from results.json

Two constants are fitted, and only to the rows that are marked in rows.py: a factor on all that decoding takes, and what a
micro-batch of training takes besides its arithmetic. All others are in the scenarios, as `rollyard simulate` takes them. Every
row is the mean of as many runs as its table has seeds, those that are fitted to as well.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Final

from rollyard.layers import resolve_tree
from rollyard.plan.check import check_scenario
from rollyard.plan.costs import costs_of
from rollyard.plan.learning import TrainingCosts
from rollyard.plan.scenario import Scenario
from rollyard.plan.simulate import simulate
from rollyard.plan.trace import lengths_of

sys.path.insert(0, str(Path(__file__).parent))
from page import PAGE, render
from results import FILE, Constants, Found, Results, keep, load, mean
from rows import TABLES, Row, Table

ROUNDS: Final = 2  # of the fit: generation is not quite proportional to its factor
BATCHES: Final = 4  # in which micro-batches are counted


def scenario_of(table: Table, row: Row, constants: Constants, seed: int) -> Scenario:
    overrides = constants.options() | {"run.seed": seed}
    if table.own_lengths:
        overrides["workload.mean_tokens"] = row.mean_tokens
    return resolve_tree(Scenario, check_scenario, file=row.path, environment={}, overrides=overrides).config


def run(scenario: Scenario) -> Found:
    """Without the steps in which a pipeline fills, and those in which no prompts come any more."""
    simulated, lag = simulate(scenario), scenario.rollout.max_staleness
    rows = simulated.metrics[1 + lag : len(simulated.metrics) - lag]
    step_s = _mean(rows, "seconds")
    training_s = _mean(rows, "phase/train_s")
    costs, rollout = costs_of(scenario), scenario.rollout
    sequence = _mean(rows, "completion_tokens_mean") + scenario.workload.prompt_tokens
    batch = sequence * rollout.groups_per_step * rollout.group_size
    switch_s = 0.0 if scenario.place.apart else costs.sleep_s + costs.wake_s
    passes = scenario.costs.logprob_passes
    logprob_s = training_s * passes / (passes + 3 + scenario.recomputes)  # of forward passes that all take as long
    counted = microbatches(scenario, costs.training)
    return Found(step_s, training_s, logprob_s, switch_s, counted, batch / step_s, len(rows))


def seeds(table: Table, row: Row, constants: Constants) -> tuple[Found, ...]:
    """Of a row, one run each."""
    found = tuple(run(scenario_of(table, row, constants, seed)) for seed in range(1, table.seeds + 1))
    print(f"{table.name}, {row.label}: {', '.join(f'{each.step_s:,.1f}' for each in found)} s", flush=True)
    return found


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


def fit(table: Table, rows: Sequence[Row]) -> Constants:
    """Both constants where two numbers are published: parts of one row's step, or the steps of two rows. With the step of one row
    alone decoding is as it is stated, and training takes the rest. With none nothing is fitted.
    """
    constants = Constants()
    for _ in range(ROUNDS if rows else 0):
        constants = _closer(rows, [mean(seeds(table, row, constants)) for row in rows], constants)
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


def simulated(table: Table) -> Results:
    """Fitted first, then all rows."""
    names = dict.fromkeys(row.fitted for row in table.rows)
    constants = {name: fit(table, [row for row in table.rows if row.fitted == name and row.calibrates]) for name in names}
    return Results(constants, {row.file: seeds(table, row, constants[row.fitted]) for row in table.rows})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=", ".join(table.name for table in TABLES))
    parser.add_argument("--page", action="store_true", help="simulate nothing")
    asked = parser.parse_args()
    by_name = {table.name: table for table in TABLES}
    if unknown := [name for name in asked.tables if name not in by_name]:
        parser.error(f"there is no table {unknown[0]!r}; they are {', '.join(by_name)}")
    results = load() if FILE.exists() else {}
    for name in () if asked.page else asked.tables or by_name:
        results[name] = simulated(by_name[name])
        keep(results)
    if missing := sorted(set(by_name) - set(results)):
        parser.exit(1, f"the page needs all tables: simulate {' '.join(missing)} as well\n")
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8"), results), encoding="utf-8")


if __name__ == "__main__":
    main()
