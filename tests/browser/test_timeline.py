"""The timeline: every device, closer and farther, by button, by key and by hand."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import Open, until, window

pytestmark = pytest.mark.browser


def told(page: Page, title: str, panel: str) -> list[list[str]]:
    """What a panel shows, as a table."""
    page.get_by_role("button", name=f"{title}: as a table").click()
    rows = page.locator(f"[data-panel={panel}] table tr")
    expect(rows.first).to_be_visible()
    found = [row.locator("th, td").all_inner_texts() for row in rows.all()]
    page.get_by_role("button", name=f"{title}: as a table").click()
    return found


def lanes(page: Page) -> list[list[str]]:
    return told(page, "Devices", "timeline")


def load(page: Page) -> list[list[str]]:
    return told(page, "Slots and queue", "load")


def test_slots_and_queue_are_shown_over_the_time_of_the_lanes(open_page: Open, address: str, report: dict[str, Any]) -> None:
    page = open_page(f"{address}#timeline")
    window(page)
    expect(page.locator("[data-panel=load] canvas")).to_have_count(1)
    head, *rows = load(page)
    assert head == ["from", "until", "slots busy", "waiting requests"] and len(rows) > 2
    shares = [float(row[2].removesuffix(" %")) for row in rows]
    assert 0 < max(shares) <= 100 and min(shares) >= 0
    begin, end = window(page)
    page.keyboard.press("+")
    page.keyboard.press("+")
    page.keyboard.press("+")
    until(page, lambda: window(page)[1] - window(page)[0] < (end - begin) / 4)
    with page.expect_response("**/api/timeline?from=*"):
        page.keyboard.press("ArrowRight")
    until(page, lambda: len(load(page)) - 1 < len(rows))


def test_each_device_has_a_lane(open_page: Open, address: str, report: dict[str, Any]) -> None:
    page = open_page(f"{address}#timeline")
    window(page)
    head, *rows = lanes(page)
    assert [row[0] for row in rows] == ["driver", *(device["device"] for device in report["usage"]["devices"])]
    assert {"generate", "train", "sync"} <= set(head)
    busy = page.locator("[data-panel=roles] tbody tr").first.locator("td").all_inner_texts()
    assert busy == ["busy", *(f"{100 * pool['busy_share']:.1f} %" for pool in report["usage"]["pools"])]


def test_shares_of_the_whole_are_those_of_the_report(open_page: Open, address: str, report: dict[str, Any]) -> None:
    page = open_page(f"{address}#timeline")
    window(page)
    page.keyboard.press("0")
    with page.expect_response("**/api/timeline*"):
        page.keyboard.press("0")
    until(page, lambda: window(page)[0] == 0)
    head, *rows = lanes(page)
    for device, row in zip(report["usage"]["devices"], rows[1:], strict=True):
        for name, share in zip(head[2:], row[2:], strict=True):
            expected = 100 * device["busy_ns"].get(name, 0) / (report["wall_s"] * 1e9)
            assert abs(float(share.removesuffix(" %")) - expected) < 2.5, f"{device['device']} {name}"


def test_zoom_by_key_button_and_hand(open_page: Open, address: str, report: dict[str, Any]) -> None:
    page = open_page(f"{address}#timeline")
    assert window(page)[0] > 0, "a long setup is left out"
    expect(page.locator(".window")).to_contain_text("without the setup (")
    page.keyboard.press("0")
    until(page, lambda: window(page)[0] == 0)
    expect(page.locator(".window")).not_to_contain_text("setup")
    whole = window(page)
    assert abs(whole[1] - report["wall_s"]) < 0.05 * report["wall_s"]
    with page.expect_response("**/api/timeline?from=*") as asked:
        page.keyboard.press("+")
    assert asked.value.ok
    closer = window(page)
    assert whole[0] < closer[0] < closer[1] < whole[1]
    page.keyboard.press("ArrowRight")
    later = window(page)
    assert later[0] > closer[0] and abs((later[1] - later[0]) - (closer[1] - closer[0])) < 1e-6
    page.get_by_role("button", name="Zoom out (−)").click()
    page.get_by_role("button", name="Zoom out (−)").click()
    assert window(page) == whole
    canvas = page.locator("[data-panel=timeline] canvas")
    canvas.hover()
    page.keyboard.down("Control")
    page.mouse.wheel(0, -300)
    page.keyboard.up("Control")
    until(page, lambda: window(page)[0] > 0)
    by_wheel = window(page)
    assert by_wheel[1] - by_wheel[0] < whole[1] - whole[0]
