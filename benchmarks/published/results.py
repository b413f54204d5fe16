"""What was simulated of each row, seed by seed: results.json, and what follows from it. Nothing is simulated here."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Final

from rows import TABLES, WITHIN, Row, Table

from rollyard.plan.scenario import CostsConfig

FILE: Final = Path(__file__).parent / "results.json"
DOUBT: Final = 2  # standard errors
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
    """A mean step of a simulated run, or of several; seconds. `training_s`: training goes on, logprob passes included."""

    step_s: float
    training_s: float
    logprob_s: float
    switch_s: float  # from training to generating and back, where devices do both
    microbatches: float  # that a device works on in a step, in whole ones
    tokens_per_s: float  # prompts and completions
    steps: float  # that it is the mean of

    @property
    def generation_s(self) -> float:
        """Nothing trains."""
        return self.step_s - self.training_s

    @property
    def decoding_s(self) -> float:
        """The same without the switch."""
        return self.generation_s - self.switch_s


def mean(found: Sequence[Found]) -> Found:
    """Of runs that differ in their seed."""
    return Found(*(fmean(getattr(each, field.name) for each in found) for field in fields(Found)))


@dataclass(frozen=True, slots=True)
class Results:
    """Of a table: constants by the name that rows share, and of each row's file what was found with seeds 1, 2, ..."""

    constants: Mapping[str, Constants]
    found: Mapping[str, tuple[Found, ...]]


def load() -> dict[str, Results]:
    """By the name of the table."""
    return {
        name: Results(
            {rows: Constants(**constants) for rows, constants in results["constants"].items()},
            {file: tuple(Found(**each) for each in seeds) for file, seeds in results["found"].items()},
        )
        for name, results in json.loads(FILE.read_text(encoding="utf-8")).items()
    }


def keep(results: Mapping[str, Results]) -> None:
    tables = {table.name: asdict(results[table.name]) for table in TABLES if table.name in results}
    FILE.write_text(json.dumps(tables, indent=1) + "\n", encoding="utf-8")


@dataclass(frozen=True, slots=True)
class Compared:
    """A row and what was simulated.

    Ratios are to the step of the row's other, 0 without one. `doubt_s` and `doubt` are standard errors, of the mean step in
    seconds and of the ratio's error as a share.
    """

    row: Row
    found: Found
    doubt_s: float
    ratio: float
    published: float
    doubt: float

    @property
    def error(self) -> float:
        """Of the ratio, as a share of what was published."""
        return self.ratio / self.published - 1

    @property
    def holds(self) -> bool:
        return abs(self.error) <= WITHIN

    @property
    def doubtful(self) -> bool:
        """On which side of it the ratio is hangs on the seeds."""
        return abs(abs(self.error) - WITHIN) < DOUBT * self.doubt


def compare(table: Table, results: Results) -> list[Compared]:
    """All rows of a table."""
    by_file = {row.file: row for row in table.rows}
    compared = []
    for row in table.rows:
        seeds = results.found[row.file]
        found, doubt_s = mean(seeds), _standard_error([each.step_s for each in seeds])
        ratio = published = doubt = 0.0
        if row.against:
            others = results.found[row.against]
            other_s = mean(others).step_s
            ratio, published = found.step_s / other_s, row.step_s / by_file[row.against].step_s
            # Seed by seed, as both sides have the same prompts with a seed.
            apart = [one.step_s - ratio * other.step_s for one, other in zip(seeds, others, strict=True)]
            doubt = _standard_error(apart) / other_s / published
        compared.append(Compared(row, found, doubt_s, ratio, published, doubt))
    return compared


def _standard_error(values: Sequence[float]) -> float:
    return float(stdev(values) / len(values) ** 0.5)
