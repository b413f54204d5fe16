"""A browser, and a run that it looks at."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Error, Page, Request, expect, sync_playwright

from tests.browser.serving import dashboard, run

WIDE, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}

Open = Callable[..., Page]


def until(page: Page, condition: Callable[[], bool], limit_s: float = 10.0) -> None:
    """Wait for it. The page's policy lets nobody evaluate texts in it, which is how Playwright would wait."""
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "it did not come about in time"
        page.wait_for_timeout(50)


def window(page: Page) -> tuple[float, float]:
    """Seconds that the timeline shows."""
    shown = page.locator(".window")
    expect(shown).to_have_attribute("data-until", re.compile(r"\d"))
    return float(shown.get_attribute("data-from") or "nan"), float(shown.get_attribute("data-until") or "nan")


def three(value: float) -> str:
    """Three digits, as the terminal has them."""
    return f"{value:.3f}"


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    assert path, "there is no Chromium: apt-get install chromium"
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"] if os.getuid() == 0 else [])
        yield started
        started.close()


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Open]:
    """Opens an address. What the browser complains about, or cannot load, fails the test; so does whatever leads elsewhere.

    `expected` is part of complaints that are meant.
    """
    said: list[str] = []
    meant: list[str] = []
    pages: list[Page] = []

    def opened(address: str, *, expected: str = "", size: dict[str, int] = WIDE, **options: Any) -> Page:
        page = browser.new_context(viewport=size, **options).new_page()
        pages.append(page)
        meant.extend([expected] if expected else [])
        page.set_default_timeout(10_000)

        def console(message: ConsoleMessage) -> None:
            if message.type in ("error", "warning"):
                said.append(f"{message.type}: {message.text} {message.location}")

        def error(problem: Error) -> None:
            said.append(f"uncaught: {problem}")

        def asked(request: Request) -> None:
            if not request.url.startswith((address.split("#")[0], "data:")):
                said.append(f"elsewhere: {request.url}")

        page.on("console", console)
        page.on("pageerror", error)
        page.on("request", asked)
        page.goto(address)
        return page

    yield opened
    for page in pages:
        page.context.close()
    assert [line for line in said if not any(part in line for part in meant)] == []


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the tiny preset that is over: two pools of devices, and a forecast to compare with."""
    out = tmp_path_factory.mktemp("browser") / "tiny"
    expected = {"source": "a test", "step_s": 0.5, "generate_s": 0.25, "train_s": 0.125}
    forecast = [word for name, value in expected.items() for word in (f"--forecast.{name}", value)]
    return run(out, "--place.placement", "async", "--rollout.max_staleness", "1", *forecast)


@pytest.fixture(scope="session")
def report(tiny: Path) -> dict[str, Any]:
    return json.loads((tiny / "report.json").read_text())


@pytest.fixture(scope="session")
def address(tiny: Path) -> Iterator[str]:
    with dashboard(tiny) as where:
        yield where
