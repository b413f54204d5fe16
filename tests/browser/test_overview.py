"""What the page shows at first is what the report says."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import Open, three

pytestmark = pytest.mark.browser

PANELS = {
    "timeline": "Devices",
    "load": "Slots and queue",
    "reward": "Reward",
    "tokens": "Tokens per second",
    "phases": "Phases",
    "phase-seconds": "Where the time went",
    "lengths": "Lengths",
    "staleness": "Staleness",
    "rewards": "Rewards",
    "drops": "Drops",
    "forecast": "Forecast and what happened",
}


def figure(page: Page, name: str) -> str:
    return page.locator(f"[data-figure={name}] .value").inner_text()


def beside(page: Page, name: str) -> str:
    return page.locator(f"[data-figure={name}] .dim").inner_text()


def table(page: Page, panel: str) -> list[list[str]]:
    """The numbers of a chart: its head, and its rows."""
    place = page.locator(f"[data-panel={panel}]")
    switch = place.get_by_role("button", name="as a table")
    switch.click()
    rows = place.locator("table tr")
    expect(rows.first).to_be_visible()
    found = [row.locator("th, td").all_inner_texts() for row in rows.all()]
    switch.click()
    expect(place.locator("canvas").first).to_be_visible()
    return found


def seconds(value: float) -> str:
    """Of one to 3,600."""
    if value < 59.95:
        return f"{value:#.3g} s"
    return f"{round(value) // 60} min {round(value) % 60:02} s"


def test_everything_is_there(open_page: Open, address: str, report: dict[str, Any]) -> None:
    page = open_page(address)
    for name, title in PANELS.items():
        place = page.locator(f"[data-panel={name}]")
        expect(place).to_be_visible()
        expect(place.get_by_role("heading", name=title, exact=True)).to_be_visible()
    for name in ("timeline", "load", "reward", "tokens", "phases", "lengths", "staleness", "rewards"):
        chart = page.locator(f"[data-panel={name}] [role=img]")
        expect(chart.locator("canvas")).to_have_count(1)
        assert chart.get_attribute("aria-label"), "a chart says in words what it shows"
    assert page.title() == "tiny · overview · Rollyard"
    assert page.get_by_role("navigation", name="Views").get_by_role("link").all_inner_texts() == [
        "Overview", "Timeline", "Rollouts", "Groups", "Config",
    ]  # fmt: skip
    expect(page.locator("#run-state")).to_have_text("finished")
    kind = [report["model"], report["placement"], report["engine"], report["weights"]["transport"]]
    expect(page.locator("#run-kind")).to_have_text(" · ".join(kind))
    expect(page.locator("#connection")).to_have_text("the run has ended")


def test_numbers_are_those_of_the_report(open_page: Open, address: str, report: dict[str, Any]) -> None:
    page = open_page(address)
    expect(page.locator("#run-steps")).to_have_text(f"step {report['steps']} of {report['steps']}")
    assert figure(page, "reward") == three(report["reward"]["last"])
    assert beside(page, "reward") == f"from {three(report['reward']['first'])}"
    assert figure(page, "eval") == three(report["eval"]["last"])
    assert beside(page, "eval") == f"from {three(report['eval']['first'])}"
    assert figure(page, "speed") == f"{report['generation_tokens_per_s']:,.0f} tok/s"
    assert figure(page, "tokens") == f"{report['generation_tokens']:,}"
    assert figure(page, "slots") == f"{100 * report['slots_busy']:.1f} %"
    assert figure(page, "trained") == str(report["trained"])
    dropped = sum(report["dropped"].values())
    assert beside(page, "trained") == f"{dropped} dropped"
    assert figure(page, "wall") == seconds(report["wall_s"])


def test_charts_are_those_of_the_report(open_page: Open, address: str, report: dict[str, Any]) -> None:
    page = open_page(address)
    rewards = table(page, "reward")
    assert [row[1] for row in rewards[1:]] == [three(mean) for mean in report["reward"]["curve"]]
    stale = {int(lag): int(tokens.replace(",", "")) for lag, tokens, _ in table(page, "staleness")[1:]}
    assert stale == {int(lag): tokens for lag, tokens in report["staleness"].items()}
    lengths = [(bar, int(many.replace(",", ""))) for bar, many, _ in table(page, "lengths")[1:]]
    assert sum(many for _, many in lengths) == report["members"]["admitted"]
    assert lengths[-1][0] == str(report["lengths"]["max"])
    mean = sum(int(bar) * many for bar, many in lengths) / sum(many for _, many in lengths)
    assert abs(mean - report["lengths"]["mean"]) < 1e-9
    speed = table(page, "tokens")
    assert sum(int(row[2].replace(",", "")) for row in speed[1:]) == report["generation_tokens"]
    shares = table(page, "phases")
    for row in shares[1:]:
        assert abs(sum(float(each.removesuffix(" %")) for each in row[2:]) - 100) <= 0.05 * len(row)


def test_phases_drops_and_forecast(open_page: Open, address: str, report: dict[str, Any]) -> None:
    page = open_page(address)
    rows = page.locator("[data-panel=phase-seconds] tr")
    expect(rows.first).to_be_visible()
    named = dict(zip(rows.locator("th").all_inner_texts(), rows.locator("td:nth-child(3)").all_inner_texts(), strict=True))
    spent = {name.removesuffix("_s"): seconds for name, seconds in report["phases"].items() if seconds}
    assert named == {name: f"{100 * seconds / report['wall_s']:.1f} %" for name, seconds in spent.items()}
    expect(page.locator("[data-panel=drops]")).to_contain_text("No prompt was dropped.")
    forecast = page.locator("[data-panel=forecast] tbody tr")
    shown = {cells[0]: cells[3] for cells in (row.locator("td").all_inner_texts() for row in forecast.all())}
    expected = {row["name"]: row["ratio"] for row in report["forecast"]["rows"] if row["forecast"] or row["measured"]}
    assert shown == {
        name.replace("_per_s", "/s").removesuffix("_s").replace("_", " "): "–" if ratio is None else f"{ratio:.2f}"
        for name, ratio in expected.items()
    }
    expect(page.locator("[data-panel=forecast]")).to_contain_text("The forecast is of a test.")
