"""100,000 rollouts: the page asks for what it shows, and is there at once. Among them is what would be markup elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import Open
from tests.browser.many import BATCH, GROUPS, HOSTILE, MARKUP, MEMBERS, ROLLOUTS, write_many
from tests.browser.serving import dashboard

pytestmark = pytest.mark.browser

MOST_S = 10.0  # for what takes tenths of a second on a machine that does nothing else


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with dashboard(write_many(tmp_path_factory.mktemp("many") / "run")) as where:
        yield where


def test_pages_of_all(open_page: Open, many: str) -> None:
    begun = time.monotonic()
    page = open_page(f"{many}#rollouts")
    pages = page.locator(".pages")
    expect(pages).to_contain_text(f"1–50 of {ROLLOUTS:,}", timeout=MOST_S * 1000)
    assert time.monotonic() - begun < MOST_S
    pages.get_by_role("button", name="Last page").click()
    expect(pages).to_contain_text(f"{ROLLOUTS - 49:,}–{ROLLOUTS:,} of {ROLLOUTS:,}", timeout=MOST_S * 1000)
    expect(page.locator(".rows tbody tr")).to_have_count(50)
    expect(page.locator(".rows tbody tr").last).to_have_attribute("data-id", f"{GROUPS - 1}.{MEMBERS - 1}")
    page.get_by_label("Dropped").select_option("stale")
    expect(pages).to_contain_text(f"1–50 of {BATCH * MEMBERS}", timeout=MOST_S * 1000)
    page.get_by_label("Dropped").select_option("")
    page.get_by_label("Search").fill("sum of 4321 ")
    expect(pages).to_contain_text(f"1–{MEMBERS} of {MEMBERS}", timeout=MOST_S * 1000)
    assert page.evaluate("document.querySelectorAll('*').length") < 2000, "what is not shown is not there"


def test_groups_of_all(open_page: Open, many: str) -> None:
    page = open_page(f"{many}#groups?sort=reward&order=desc")
    expect(page.locator(".pages")).to_contain_text(f"1–50 of {GROUPS:,}", timeout=MOST_S * 1000)
    page.keyboard.press("j")
    expect(page.get_by_role("table", name="Members").locator("tbody tr")).to_have_count(MEMBERS, timeout=MOST_S * 1000)


def test_the_overview_of_all(open_page: Open, many: str) -> None:
    page = open_page(many)
    expect(page.locator("[data-figure=trained] .value")).to_have_text(f"{GROUPS - BATCH:,}", timeout=MOST_S * 1000)
    expect(page.locator("[data-panel=drops] tr")).to_contain_text("stale")
    expect(page.locator("[data-panel=drops] td").first).to_have_text(str(BATCH))
    expect(page.locator("[data-panel=lengths] [role=img]")).to_have_attribute(
        "aria-label", f"Histogram of tokens of {ROLLOUTS:,} completions", timeout=MOST_S * 1000
    )


def test_markup_in_a_run_is_text(open_page: Open, many: str) -> None:
    """Of its name, a prompt, a column, a completion."""
    page = open_page(f"{many}#rollouts?group={HOSTILE}&open={HOSTILE}.3")
    expect(page.locator("#run-name")).to_have_text(MARKUP)
    detail = page.locator(".detail")
    expect(detail.locator("pre").first).to_have_text(MARKUP)
    expect(detail.locator("dd").last).to_have_text(MARKUP)
    expect(page.locator(".rows tbody tr").nth(3)).to_contain_text("<b>bold</b>&amp;")
    page.goto(f"{many}#groups?open={HOSTILE}")
    expect(page.get_by_role("table", name="Members")).to_contain_text("<b>bold</b>&amp;")
    assert page.locator("b, img, script").count() == 1 and page.evaluate("document.scripts.length") == 1
    assert "owned" in page.title() and page.title() != "owned", "its name is a part of the title, as it is"
