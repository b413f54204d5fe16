"""Takes the pictures of docs/dashboard.md: the dashboard of a run in a real browser, on a desk and a phone, by day and by night.

    rollyard run --preset sort --place.placement async --place.generate 2 --rollout.max_staleness 2 --rollout.filter flat \
        --run.steps 36
    python docs/make_screenshots.py runs/sort docs/pictures

Needs Chromium (`apt-get install chromium`) and the development tools.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

MOST = 200_000  # bytes of a picture
DESK, PHONE = {"width": 1280, "height": 838}, {"width": 390, "height": 844}
ROLLOUTS = "rollouts?sort=tokens&order=desc"
# Name, address, size of the window, colours.
PICTURES: tuple[tuple[str, str, dict[str, int], str], ...] = (
    ("overview", "overview", DESK, "light"),
    ("overview-dark", "overview", DESK, "dark"),
    ("timeline", "timeline", DESK | {"height": 560}, "light"),
    ("rollout", ROLLOUTS, DESK | {"height": 760}, "light"),
    ("rollout-dark", ROLLOUTS, DESK | {"height": 760}, "dark"),
    ("overview-phone", "overview", PHONE, "light"),
    ("overview-phone-dark", "overview", PHONE, "dark"),
    ("rollout-phone", ROLLOUTS, PHONE, "light"),
    ("rollout-phone-dark", ROLLOUTS, PHONE, "dark"),
)


@contextmanager
def dashboard(run: Path) -> Iterator[str]:
    """Its address."""
    words = [sys.executable, "-m", "rollyard", "inspect", str(run), "--web", "--json"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            yield str(json.loads(server.stdout.readline())["address"])
        finally:
            server.send_signal(signal.SIGINT)


def take(browser: Browser, address: str, picture: Path, view: str, size: dict[str, int], colours: str) -> None:
    with browser.new_context(viewport=size, color_scheme=colours) as context:  # type: ignore[arg-type]
        page = context.new_page()
        page.goto(f"{address}#{view}")
        page.wait_for_load_state("networkidle")
        if view == ROLLOUTS:
            page.locator(".rows tbody tr").nth(3).click()
            page.locator(".detail .t[data-at]").nth(4).hover()
        page.wait_for_timeout(500)  # charts are drawn a moment after their numbers came
        page.screenshot(path=picture)
    if picture.stat().st_size > MOST:
        raise SystemExit(f"{picture} has more than {MOST:,} bytes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of a run")
    parser.add_argument("folder", type=Path, help="where the pictures go")
    arguments = parser.parse_args()
    chromium = shutil.which("chromium") or parser.error("there is no chromium")
    with dashboard(arguments.run) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"] if os.getuid() == 0 else [])
        for name, view, size, colours in PICTURES:
            take(browser, address, arguments.folder / f"dashboard-{name}.png", view, size, colours)
        browser.close()


if __name__ == "__main__":
    main()
