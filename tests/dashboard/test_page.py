"""The files of the page: nothing of them is fetched from elsewhere, and nothing in them makes markup of texts."""

from __future__ import annotations

import hashlib
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from rollyard.dashboard.app import STATIC

OWN = sorted(path for path in STATIC.rglob("*") if path.suffix in (".js", ".css", ".html", ".svg") and "vendor" not in path.parts)
VENDOR = STATIC / "vendor" / "echarts"
NEVER = (
    "innerHTML",
    "outerHTML",
    "insertAdjacentHTML",
    "document.write",
    "DOMParser",
    "eval(",
    "new Function",
    "srcdoc",
    "cssText",
)


class Marked(HTMLParser):
    """What a strict policy refuses: handlers and styles in attributes, scripts and styles in the page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.inside = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.inside = tag if tag in ("script", "style") else ""
        self.found += [f"{tag} {name}" for name, _ in attrs if name == "style" or name.startswith("on")]
        self.found += [
            f"{tag} {value}" for name, value in attrs if name in ("src", "href") and re.match(r"[a-z]*:|//", value or "")
        ]

    def handle_data(self, data: str) -> None:
        if self.inside and data.strip():
            self.found.append(f"{self.inside}: {data.strip()}")


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.name)
def test_own_files(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= 500
    assert [word for word in NEVER if word in text] == []
    assert re.findall(r"https?://(?!www\.w3\.org/2000/svg)|@import|url\(", text) == [], "it leads elsewhere"


def test_nothing_of_the_page_is_refused_by_its_policy() -> None:
    page = Marked()
    page.feed((STATIC / "index.html").read_text())
    assert page.found == []


def test_modules_import_what_is_there() -> None:
    for path in STATIC.glob("js/*.js"):
        for name in re.findall(r'^import .* from "(.+)";', path.read_text(), re.MULTILINE):
            assert (path.parent / name).is_file(), f"{path.name} imports {name}"


def test_the_library_is_the_one_that_is_named() -> None:
    named = re.search(r"^sha256 (\w+)$", (VENDOR / "README.md").read_text(), re.MULTILINE)
    assert named and hashlib.sha256((VENDOR / "echarts.esm.min.js").read_bytes()).hexdigest() == named[1]
    assert {"LICENSE", "NOTICE", "LICENSE-d3"} <= {path.name for path in VENDOR.iterdir()}
