"""Takes the pictures of the site for the README: `make docs`, then `python docs/building/screenshots.py`.

Needs Chromium (`apt-get install chromium`) and the development tools.
"""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path

from playwright.sync_api import sync_playwright

ROOT = Path(__file__).parent.parent.parent
PICTURES = (  # name, page, width, height, colours
    ("site", "concepts/staleness", 1280, 886, "light"),
    ("site-phone", "howto/slow", 390, 844, "dark"),
)


def main() -> None:
    """Writes both."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    path = shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        raise SystemExit("there is no Chromium: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"] if os.getuid() == 0 else [])
        for name, page, width, height, colours in PICTURES:
            context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=colours)  # type: ignore[arg-type]
            opened = context.new_page()
            opened.goto(f"file://{ROOT}/site/{page}.html")
            opened.wait_for_timeout(500)
            opened.screenshot(path=ROOT / f"docs/pictures/{name}.png")
        browser.close()


if __name__ == "__main__":
    main()
