"""On a phone, by night, with the keyboard alone, and whatever a policy wrote."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import PHONE, Open
from tests.browser.serving import dashboard
from tests.inspect.runs import write_run

pytestmark = pytest.mark.browser

VIEWS = ("overview", "timeline", "rollouts", "rollouts?open=3.1", "groups", "groups?open=3", "config")
USED = "button:visible, a:visible, input:visible, select:visible"
DARK, LIGHT = "rgb(11, 15, 20)", "rgb(244, 246, 248)"


@pytest.mark.parametrize("view", VIEWS)
def test_nothing_is_wider_than_a_phone(open_page: Open, address: str, view: str) -> None:
    page = open_page(f"{address}#{view}", size=PHONE, has_touch=True)
    expect(page.locator("#run-state")).to_have_text("finished")
    page.wait_for_load_state("networkidle")
    assert page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]
    for each in page.locator(USED).all():
        box = each.bounding_box()
        assert box is None or box["x"] + box["width"] <= PHONE["width"], each.inner_text()


def test_dark_as_the_system_and_by_the_switch(open_page: Open, address: str) -> None:
    page = open_page(address, color_scheme="dark")
    background = "getComputedStyle(document.body).backgroundColor"
    assert page.evaluate(background) == DARK
    switch = page.get_by_role("button", name="Colours")
    expect(switch).to_have_accessible_name("Colours: auto")
    switch.click()
    expect(switch).to_have_accessible_name("Colours: light")
    assert page.evaluate(background) == LIGHT
    page.reload()
    assert page.evaluate(background) == LIGHT, "the choice is kept"
    page.keyboard.press("t")
    assert page.evaluate(background) == DARK


def test_contrast(open_page: Open, address: str) -> None:
    """Of text on what is behind it, by the formula of WCAG 2: at least 4.5."""
    for scheme in ("light", "dark"):
        page = open_page(f"{address}#rollouts?open=3.1", color_scheme=scheme)
        expect(page.locator(".detail .t[data-at]").first).to_be_visible()
        worst = page.evaluate(CONTRAST)
        assert worst[0] >= 4.5, worst


CONTRAST = """() => {
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((c) => c / 255).map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, at) => sum + c * [0.2126, 0.7152, 0.0722][at], 0);
  const behind = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const found = parse(getComputedStyle(at).backgroundColor);
      if (found.length === 3 || found[3] === 1) return found;
    }
    return [255, 255, 255];
  };
  let worst = [99, ""];
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    if (!own || !element.checkVisibility() || element.disabled || element.closest("canvas, option, noscript, .skip")) continue;
    const [one, other] = [light(parse(getComputedStyle(element).color)), light(behind(element))].sort((a, b) => b - a);
    const ratio = (one + 0.05) / (other + 0.05);
    if (ratio < worst[0]) worst = [ratio, element.outerHTML.slice(0, 120)];
  }
  return worst;
}"""


def test_everything_that_can_be_used_has_a_name(open_page: Open, address: str) -> None:
    for view in ("overview", "timeline", "rollouts?open=3.1", "groups?open=3", "config"):
        page = open_page(f"{address}#{view}")
        expect(page.locator("#run-state")).to_have_text("finished")
        page.wait_for_load_state("networkidle")
        for each in page.locator(f"{USED}, [role=img]:visible, [tabindex='0']:visible").all():
            expect(each).to_have_accessible_name(re.compile(r"\w{2}"))


def test_help_and_skip_link(open_page: Open, address: str) -> None:
    page = open_page(address)
    page.keyboard.press("?")
    dialog = page.get_by_role("dialog", name="Keyboard")
    expect(dialog).to_be_visible()
    expect(dialog).to_contain_text("next and previous rollout")
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()


@pytest.fixture
def hostile(tmp_path: Path) -> Iterator[str]:
    """Two lives by hand, with what a policy may write."""
    folder = write_run(tmp_path / "run").path
    with dashboard(folder) as where:
        yield where


def test_what_was_written_is_text(open_page: Open, hostile: str) -> None:
    page = open_page(f"{hostile}#rollouts?search=owned&open=0.1")
    row = page.locator(".rows tbody tr")
    expect(row).to_have_count(1)
    expect(row).to_contain_text("[red]no[/]")
    expect(page.locator(".detail")).to_contain_text("Tokens are shown by their numbers")
