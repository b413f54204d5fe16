"""The documentation site, read from its folder without a server: `make docs` builds it."""

from __future__ import annotations

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, Request

from tests.sources import ROOT

pytestmark = pytest.mark.browser

SITE = ROOT / "site"
SOME = ("index", "concepts/placements", "comparison", "reference/options", "reference/types", "examples")


def page_of(browser: Browser, said: list[str], width: int, scheme: str) -> Page:
    page = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme).new_page()  # type: ignore[arg-type]

    def console(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            said.append(message.text)

    def asked(request: Request) -> None:
        if not request.url.startswith(("file:", "data:", "blob:")):
            said.append(request.url)

    page.on("console", console)
    page.on("request", asked)
    return page


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_pages_fit_and_ask_for_nothing_from_elsewhere(browser: Browser, width: int, scheme: str) -> None:
    said: list[str] = []
    page = page_of(browser, said, width, scheme)
    for name in SOME:
        page.goto(f"file://{SITE}/{name}.html")
        assert page.evaluate("document.documentElement.scrollWidth") <= width, name
        broken = "[...document.images].filter(image => image.complete && !image.naturalWidth).map(image => image.src)"
        assert page.evaluate(broken) == [], name
    assert said == []


def test_search_finds_an_option_by_its_name(browser: Browser) -> None:
    said: list[str] = []
    page = page_of(browser, said, 1280, "light")
    page.goto(f"file://{SITE}/index.html")
    page.fill("input.md-search__input", "max_staleness")
    page.wait_for_selector(".md-search-result__link[href*='reference/options']", state="attached", timeout=10_000)
    assert said == []
