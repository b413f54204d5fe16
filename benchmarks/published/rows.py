"""What was published of whole steps, and the scenario that stands for each row."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

SCENARIOS: Final = Path(__file__).parent / "scenarios"
WITHIN: Final = 0.15  # of a published ratio
RESPONSES: Final = 8_192  # of a step of T1
PROMPT_TOKENS: Final = 128  # that its scenarios give a prompt


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a table; times in seconds, 0 where it is not published.

    Args:
        file: of its scenario, without the ending.
        fitted: rows with the same name share their constants.
        calibrates: constants are fitted to it.
        against: the row that its step is set against.
        generation_s: in which nothing trains. training_s: the rest.
        tokens_per_s: of prompts and completions.
    """

    table: str
    file: str
    label: str
    fitted: str
    step_s: float
    calibrates: bool = False
    against: str = ""
    generation_s: float = 0.0
    training_s: float = 0.0
    logprob_s: float = 0.0
    tokens_per_s: float = 0.0

    @property
    def path(self) -> Path:
        return SCENARIOS / f"{self.file}.toml"

    @property
    def mean_tokens(self) -> int:
        """Of a completion of T1, as the row's own tokens/s and step have it."""
        return round(self.tokens_per_s * self.step_s / RESPONSES) - PROMPT_TOKENS


def _dora(gpus: int, mode: str, label: str, minutes: float, exposed: float, tokens_per_s: float, **more: str | bool) -> Row:
    """
    Args:
        exposed: share of a step in which nothing trains, 0 where it is not published.
    """
    step_s, base = 60 * minutes, "" if mode == "synchronous" else f"t1-{gpus}-synchronous"
    rest_s = step_s * (1 - exposed) if exposed else 0.0
    against = str(more.get("against", base))
    calibrates = bool(more.get("calibrates", False))
    return Row(
        "T1",
        f"t1-{gpus}-{mode}",
        f"{gpus} H800, {label}",
        "t1",
        step_s,
        calibrates,
        against,
        step_s * exposed,
        rest_s,
        0.0,
        tokens_per_s,
    )


def _nemo(file: str, label: str, step_s: float, against: str = "", *, calibrates: bool = False) -> Row:
    model = "v3" if "v3" in file else "235b" if "235b" in file else "30b"
    return Row("T2", f"t2-{file}", label, f"t2-{model}", step_s, calibrates, against and f"t2-{against}")


ROWS: Final = (
    _dora(64, "synchronous", "synchronous", 22.91, 0.65, 14_143, calibrates=True),
    _dora(64, "one-off", "one-step-off", 22.94, 0.33, 14_141),
    _dora(64, "partial", "partial rollout", 17.38, 0.46, 19_872),
    _dora(64, "multi", "multi-version streaming", 14.67, 0.12, 23_327),
    _dora(128, "synchronous", "synchronous", 20.23, 0.73, 16_070, against="t1-64-synchronous"),
    _dora(128, "one-off", "one-step-off", 14.0, 0.0, 23_200),
    _dora(128, "partial", "partial rollout", 13.95, 0.0, 30_750),
    _dora(128, "multi", "multi-version streaming", 10.46, 0.24, 34_135),
    _nemo("v3-256-on", "DeepSeek-V3, 256 H100, on policy", 134, calibrates=True),
    _nemo("v3-512-on", "DeepSeek-V3, 512 H100, on policy", 111, "v3-256-on"),
    _nemo("v3-512-1-off", "DeepSeek-V3, 256 + 256 H100, 1 off", 64.1, "v3-512-on"),
    _nemo("235b-128-on", "Qwen3-235B-A22B, 128 H100, on policy", 395, calibrates=True),
    _nemo("235b-256-on", "Qwen3-235B-A22B, 256 H100, on policy", 312, "235b-128-on"),
    _nemo("235b-256-1-off", "Qwen3-235B-A22B, 128 + 128 H100, 1 off", 231, "235b-256-on"),
    _nemo("30b-32-on", "Qwen3-30B-A3B, 32 H100, on policy", 192, calibrates=True),
    _nemo("30b-32-1-off", "Qwen3-30B-A3B, 16 + 16 H100, 1 off", 152, "30b-32-on"),
    _nemo("30b-192-8-off", "Qwen3-30B-A3B, 128 + 64 H100, 8 off", 34.5, "30b-32-on"),
    _nemo("gb200-30b-16-on", "Qwen3-30B-A3B, 16 GB200, on policy", 221, calibrates=True),
    _nemo("gb200-30b-16-1-off", "Qwen3-30B-A3B, 8 + 8 GB200, 1 off", 301, "gb200-30b-16-on"),
    _nemo("gb200-v3-128-on", "DeepSeek-V3, 128 GB200, on policy", 108, calibrates=True),
    _nemo("gb200-v3-256-on", "DeepSeek-V3, 256 GB200, on policy", 98.7, "gb200-v3-128-on"),
    _nemo("gb200-v3-256-1-off", "DeepSeek-V3, 128 + 128 GB200, 1 off", 61.7, "gb200-v3-256-on"),
    Row("T3", "t3-rlinf", "RLinf", "t3", 346.3, False, "", 266.1, 61.1, 17.8),
    Row("T3", "t3-verl", "veRL", "t3", 363.6, False, "", 260.9, 66.5, 17.5),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Table:
    """Rows that share a table of the page.

    Args:
        name: of its results and on the command line. title: of its line in the counts.
        seeds: how many runs a row is the mean of, two at least; theirs are 1, 2, ...
        own_lengths: each row has the mean length that its own tokens/s come to, not that of its scenario.
    """

    name: str
    title: str
    rows: tuple[Row, ...]
    seeds: int
    own_lengths: bool = False


def _of(name: str) -> tuple[Row, ...]:
    return tuple(row for row in ROWS if row.table == name)


TABLES: Final = (
    Table("T1", "T1, 2,400 tokens in all rows", _of("T1"), 5),
    Table("T1-lengths", "T1, lengths of each row", _of("T1"), 5, own_lengths=True),
    Table("T2", "T2", _of("T2"), 8),
    Table("T3", "T3", _of("T3"), 8),
)
