"""Commands in the pages: which there are, which are run here, and what the others say of themselves.

A block of commands is one whose language is `sh`. A command is run, in the order of its page, unless a mark says otherwise: a
comment at its end, or on a line of its own, which then holds for the rest of its block.

    # not run: needs GPUs
    # run by make test-vllm                      in the order of its page too, after what stands before it, in another lane
    # run by tests/serve/test_examples.py        that test names its options and examples
    # run by .ci/run                             which does it, or what needs it
    # takes 3 minutes, run by hand on 2026-11-30

`python -m tests.docs.commands --by-hand [PAGE]` runs those that are marked so, and what stands before them on their pages.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from tests.sources import ROOT

PAGES = ("README.md", "CONTRIBUTING.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")))
FENCE = re.compile(r"^ *```(?P<language>[^\n]*)\n(?P<body>.*?)^ *```$", re.MULTILINE | re.DOTALL)
MARK = re.compile(
    r"[#;] (?:(?P<why>not run: .+)|takes (?P<time>\d+ (?:second|minute|hour)s?), run by hand on (?P<day>\d{4}-\d\d-\d\d)"
    r"|run by (?P<by>make test-[a-z]+|\.ci/run|tests/[a-z_/]+\.py))"
)
TOOLS = (
    "rollyard (?:run|train|resume|explain|engines|inspect|simulate|plan|bench|serve)|"
    "make|python3?|pip|ray|kubectl|curl|source|git|docker|sbatch"
)
PROGRAMS = re.compile(rf'^\s*(?:[A-Z_]+=(?:"[^"]*"|\S+) )*(?:\S*bin/)?(?:{TOOLS}) ', re.MULTILINE)
INSIDE = re.compile(r" *(?:[-*+]|\d+\.|!!!|\?\?\?\+?|===) ")  # what follows and is indented belongs to it
SHOWN = ("", "text", "toml", "json", "yaml", "python", "sql")  # languages of blocks that are not commands
GIVEN = (  # run once for all pages that say so
    "rollyard run --preset tiny --overwrite",
    "rollyard plan --model llama-8b --gpus 64xH100 --group-size 8 --prompts-per-step 64 --max-tokens 8192 --mean-tokens 2000 \\\n"
    "    --price 2.5 --out plan.toml",
)
HOUR_S = 3600.0
KEPT = (".venv", "models", "benchmarks/.venvs")  # from page to page, by hand
LINKED = ("examples", "benchmarks", "docs", "models", "rollyard", "tests")  # what commands find beside them in a clone


@dataclass(frozen=True, slots=True)
class Command:
    """One, with all of its lines. At most one of `why`, `time` and `by` is there; with none it is run by the test."""

    page: str
    line: int
    text: str
    why: str = ""
    time: str = ""
    day: date | None = None
    by: str = ""

    @property
    def here(self) -> bool:
        """It is run in the slow lane."""
        return not (self.why or self.time or self.by)

    @property
    def bare(self) -> str:
        """Without what is remarked at its end."""
        return self.text.partition("  #")[0].rstrip()


def blocks(page: str) -> Iterator[tuple[int, str, str]]:
    """Line, language and text of each block of code."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for found in FENCE.finditer(text):
        yield text.count("\n", 0, found.start()) + 2, found["language"].strip(), found["body"]


def commands(page: str) -> list[Command]:
    """In the order of the page."""
    return [command for line, language, body in blocks(page) if language == "sh" for command in _of(page, line, body)]


def _of(page: str, line: int, body: str) -> Iterator[Command]:
    above: re.Match[str] | None = None
    lines = body.splitlines()
    at = 0
    while at < len(lines):
        first, text = at, lines[at]
        at += 1
        if not text.strip():
            continue
        if text.lstrip().startswith("#"):
            above = MARK.search(text) or above
        else:
            here = re.search(r"<<-?'?(\w+)'?", text)
            while at < len(lines) and (lines[at - 1].endswith("\\") or (here and lines[at - 1].strip() != here[1])):
                text += f"\n{lines[at]}"
                at += 1
            said = lines[first] if here else lines[at - 1]
            yield _command(page, line + first, text, MARK.search(said) or above)


def _command(page: str, line: int, text: str, mark: re.Match[str] | None) -> Command:
    if mark is None:
        return Command(page, line, text)
    day = date.fromisoformat(mark["day"]) if mark["day"] else None
    return Command(page, line, text, mark["why"] or "", mark["time"] or "", day, mark["by"] or "")


def untagged(page: str) -> Iterator[str]:
    """Blocks that look like commands, and do not say that they are."""
    for line, language, body in blocks(page):
        if language not in (*SHOWN, "sh"):
            yield f"{page}:{line} is in {language!r}, which is none of {SHOWN} and sh"
        elif language in ("", "text") and PROGRAMS.search(body):
            yield f"{page}:{line} has commands and is not marked as sh"
    for line in indented((ROOT / page).read_text(encoding="utf-8")):
        yield f"{page}:{line} is a block by its indentation, which says no language: write it between ```"


def indented(text: str) -> Iterator[int]:
    """Lines on which a block of code begins that is one by its indentation alone: not in a list, a note or a fence."""
    without = FENCE.sub(lambda found: "\n" * found[0].count("\n"), text)
    above, blank = "", True  # the last line that is not indented; whether the last line is empty
    for number, line in enumerate(without.splitlines(), 1):
        code = line.startswith(("    ", "\t")) and line.strip()
        if code and blank and not INSIDE.match(above):
            yield number
        if line[:1].strip():
            above = line
        blank = not line.strip()


def room(folder: Path) -> None:
    """What a clone has, beside which commands may write."""
    for name in LINKED:
        if (ROOT / name).exists():
            (folder / name).symlink_to(ROOT / name)


def run(chosen: Sequence[Command], folder: Path, limit_s: float) -> tuple[int, str]:
    """One after the other, by one shell, as a reader would paste them: the exit code, and what was said.

    Nothing that they started in the background outlives it. Raises subprocess.TimeoutExpired.
    """
    script = "\n".join(["set -euo pipefail", *(f"echo '+ {each.page}:{each.line}' >&2\n{each.text}" for each in chosen)])
    tools = folder.parent / f"{folder.name}-bin"
    tools.mkdir(exist_ok=True)
    for name, ask in (("rollyard", f'exec {sys.executable} -m rollyard "$@"'), ("python", f'exec {sys.executable} "$@"')):
        (tools / name).write_text(f"#!/bin/sh\n{ask}\n")
        (tools / name).chmod(0o755)
    path = os.pathsep.join([str(tools), os.environ["PATH"]])
    environment = {
        **os.environ,
        "PATH": path,
        "PYTHONPATH": str(folder if (folder / "rollyard").is_dir() else ROOT),
        "COLUMNS": "120",
        "WANDB_MODE": "offline",  # whoever has a key keeps it to himself
    }
    said = folder.parent / f"{folder.name}.log"
    with said.open("w") as file:
        shell = subprocess.Popen(
            ["bash", "-c", script], cwd=folder, env=environment, stdout=file, stderr=file, start_new_session=True
        )
        try:
            code = shell.wait(limit_s)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(shell.pid, signal.SIGKILL)
            shell.wait()
    return code, said.read_text(errors="replace")[-5000:]


def main() -> int:
    """Runs what the test leaves to people, and says what came of each page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--by-hand", action="store_true", required=True)
    parser.add_argument("pages", nargs="*", default=PAGES)
    failed = 0
    clone = Path(tempfile.mkdtemp()) / "clone"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    for page in parser.parse_args().pages:
        chosen = [command for command in commands(page) if command.here or command.time]
        if not any(command.time for command in chosen):
            continue
        subprocess.run(["git", "clean", "-xdfq", *(f"--exclude={name}" for name in KEPT)], cwd=clone, check=True)
        begun = time.monotonic()
        code, said = run(chosen, clone, HOUR_S)
        told = "done" if code == 0 else f"FAILED\n{said}"
        sys.stdout.write(f"{page}, {time.monotonic() - begun:.0f} s: {told}\n")
        sys.stdout.flush()
        failed += code != 0
    return failed


if __name__ == "__main__":
    sys.exit(main())
