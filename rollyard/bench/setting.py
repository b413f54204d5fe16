"""What one benchmark is to measure, and the `Result` that its rounds make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rollyard.bench.result import Agreement, Result, Side, Spread, machine, ratios, versions
from rollyard.bench.turns import Rounds
from rollyard.config import Config
from rollyard.layers import resolve


@dataclass(frozen=True, slots=True)
class Setting:
    """The user's choice. `options` are dotted options of the config given beside it; they win over the benchmark's own."""

    model: Path
    workload: str
    peer: str
    dtype: str  # "float32" or "bfloat16"
    rounds: int
    threads: int
    options: Mapping[str, object] = field(default_factory=dict)

    def config(self, own: Mapping[str, object]) -> Config:
        """The config of Rollyard's side. Raises ConfigError.

        Args:
            own: dotted options that belong to the benchmark.
        """
        base: dict[str, object] = {
            "model.path": str(self.model),
            "place.threads": self.threads,
            "place.device": "cpu",  # where the peers run too
        }
        if "prompts.path" not in own:
            base["prompts.task"] = "arithmetic"  # a config must name prompts; the benchmark brings its own
        return resolve(overrides={**base, **own, **self.options}).config

    def result(
        self,
        bench: str,
        unit: str,
        sides: Sequence[Side],
        rounds: Rounds,
        agreement: Agreement | None = None,
        decoder: str = "",
    ) -> Result:
        """The first side is compared with the second. `decoder`: how the embedded engine computed."""
        each = ratios(unit, sides[0].values, sides[1].values)
        return Result(
            bench=bench,
            workload=self.workload,
            model=self.model.resolve().name,
            dtype=self.dtype,
            threads=self.threads,
            unit=unit,
            sides=tuple(sides),
            ratios=each,
            ratio=Spread.of(each),
            loads=rounds.loads,
            machine=machine(),
            versions=versions() | ({"decoder": decoder} if decoder else {}),
            agreement=agreement,
            options=dict(self.options),
        )
