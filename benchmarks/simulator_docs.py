"""The figures of docs/simulator.md, as the code gives them: `python benchmarks/simulator_docs.py` writes them into the page."""

from __future__ import annotations

import argparse
import io
import json
import shlex
from contextlib import redirect_stdout
from pathlib import Path

from rollyard.cli import main as rollyard

PAGE = Path(__file__).parents[1] / "docs" / "simulator.md"
COMMAND = "rollyard simulate --preset cluster"
HEAD = "| | options besides | step (s, mean) | tokens/s | engines busy | trainers busy | bound by |"
ROWS = {
    "colocated": "--placement colocated --max-staleness 0",
    "separate, half of them train": "--placement separate --max-staleness 0",
    "async, half of them train (the preset)": "",
    "async, 16 train": "--place.train 16",
    "async, 8 train": "--place.train 8",
    "async, half train, staleness 2": "--max-staleness 2",
    "async, 16 train, staleness 2": "--max-staleness 2 --place.train 16",
}


def said(command: str) -> str:
    """What a command of ours prints. Raises RuntimeError when it fails."""
    with redirect_stdout(io.StringIO()) as printed:
        code = rollyard(shlex.split(command)[1:])
    if code:
        raise RuntimeError(f"{command} ended with {code}")
    return printed.getvalue()


def block() -> str:
    """What the preset of a cluster prints, below the command."""
    return f"$ {COMMAND}\n{said(COMMAND)}"


def row(name: str) -> str:
    """Of the table of 64 devices."""
    found = json.loads(said(f"{COMMAND} --gpus 64 {ROWS[name]} --json"))
    busy = [f"{found['busy'][role]:.0%}" for role in ("engine", "trainer")]
    options = f"`{ROWS[name]}`" if ROWS[name] else ""
    cells = [name, options, f"{found['step_s']['mean']:.1f}", f"{found['trained_tokens_per_s']:,.0f}", *busy, found["bound"]]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    page = PAGE.read_text(encoding="utf-8")
    begin = page.index(f"$ {COMMAND}\n")
    page = page[:begin] + block() + page[page.index("```", begin) :]
    begin = page.index(HEAD)
    rows = "\n".join((HEAD, "| --- | --- | --- | --- | --- | --- | --- |", *map(row, ROWS)))
    page = page[:begin] + rows + page[page.index("\n\n", begin) :]
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
