"""What docs/metrics.md says there is."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
ROW = re.compile(r"^\| `([^`]+)` \|", re.MULTILINE)
PLACEHOLDER = re.compile(r"[A-Z]+")  # a part of a name that stands for others


def documented() -> list[str]:
    return ROW.findall(PAGE.read_text(encoding="utf-8"))


def pattern(name: str) -> re.Pattern[str]:
    return re.compile("[^/]+".join(map(re.escape, PLACEHOLDER.split(name))))


def compare(written: Iterable[str]) -> tuple[list[str], list[str]]:
    """Names that were written and are not on the page, and names on the page that were not written."""
    names, page = set(written), documented()
    matched = {name: [each for each in page if pattern(each).fullmatch(name)] for name in names}
    missing = [each for each in page if not any(each in found for found in matched.values())]
    return sorted(name for name, found in matched.items() if len(found) != 1), missing
