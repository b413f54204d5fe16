"""Rollouts, groups and options: pages, filters, search, keys, and one of them with all that is known of it."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from rollyard.types import DropReason, FinishReason
from tests.browser.conftest import Open, three

pytestmark = pytest.mark.browser

ONE = """
    SELECT c.text, c.tokens, v.value, v.parts, p.text FROM completions c
    JOIN verdicts v USING (incarnation, group_id, member) JOIN prompts p USING (incarnation, group_id)
    WHERE group_id = 3 AND member = 1"""


def ids(page: Page) -> list[str]:
    return page.locator("table.rows tbody tr").evaluate_all("rows => rows.map((row) => row.dataset.id)")


def query(folder: Path, sql: str) -> list[tuple[Any, ...]]:
    with sqlite3.connect(f"file:{folder / 'journal.sqlite'}?mode=ro", uri=True) as connection:
        found = connection.execute(sql).fetchall()
    connection.close()
    return found


def test_pages(open_page: Open, address: str, report: dict[str, Any]) -> None:
    page = open_page(f"{address}#rollouts")
    whole = report["members"]["admitted"]
    pages = page.get_by_role("navigation", name="Pages")
    expect(pages).to_contain_text(f"1–50 of {whole}")
    first = ids(page)
    assert len(first) == 50
    pages.get_by_role("button", name="Next page").click()
    expect(pages).to_contain_text(f"51–100 of {whole}")
    assert not set(first) & set(ids(page))
    pages.get_by_role("button", name="Last page").click()
    expect(pages).to_contain_text(f"of {whole}")
    expect(pages.get_by_role("button", name="Next page")).to_be_disabled()
    page.go_back()
    expect(pages).to_contain_text(f"51–100 of {whole}")


def test_sort_filter_and_search(open_page: Open, address: str, tiny: Path) -> None:
    page = open_page(f"{address}#rollouts")
    page.get_by_role("columnheader", name="tokens").get_by_role("button").click()
    expect(page.get_by_role("columnheader", name="tokens")).to_have_attribute("aria-sort", "descending")
    longest = query(tiny, "SELECT max(tokens) FROM completions")[0][0]
    expect(page.locator("tbody .c-tokens").first).to_have_text(str(longest))
    page.get_by_label("Ended by").select_option("length")
    cut = query(tiny, "SELECT count(*) FROM completions WHERE finish = 'length'")[0][0]
    expect(page.locator(".pages")).to_contain_text(f"of {cut}")
    page.get_by_label("Ended by").select_option("")
    page.get_by_role("spinbutton", name="Step").fill("2")
    of_step = query(tiny, "SELECT count(*) FROM batch_groups JOIN completions USING (incarnation, group_id) WHERE step = 1")[0][0]
    expect(page.locator(".pages")).to_contain_text(f"of {of_step}")
    page.get_by_role("spinbutton", name="Step").fill("")
    word = query(tiny, "SELECT text FROM prompts ORDER BY group_id LIMIT 1")[0][0]
    page.keyboard.press("Escape")
    page.keyboard.press("/")
    page.keyboard.type(word)
    found = query(tiny, f"SELECT count(*) FROM rollouts WHERE instr(prompt, '{word}') OR instr(completion, '{word}')")[0][0]
    expect(page.locator(".pages")).to_contain_text(f"of {found}")
    page.get_by_label("Reward from").fill("2")
    expect(page.locator(".listing .empty")).to_have_text("Nothing is like that.")


def test_one_rollout(open_page: Open, address: str, tiny: Path) -> None:
    page = open_page(f"{address}#rollouts?open=3.1")
    detail = page.locator(".detail")
    expect(detail.get_by_role("heading", name="Rollout 3.1")).to_be_visible()
    text, tokens, reward, parts, prompt = query(tiny, ONE)[0]
    expect(detail.locator("pre").first).to_have_text(prompt)
    words = detail.locator(".t[data-at]")
    expect(words).to_have_count(tokens)
    assert "".join(words.all_inner_texts()).startswith(text)
    facts = dict(zip(detail.locator("dt").all_inner_texts(), detail.locator("dd").all_inner_texts(), strict=True))
    assert facts["reward"] == three(reward) and facts["tokens"] == str(tokens)
    for name, value in json.loads(parts).items():
        assert facts[f"reward: {name}"] == three(value)
    detail.get_by_role("group", name="Completion, token by token").focus()
    page.keyboard.press("ArrowRight")
    expect(detail.locator(".token")).to_contain_text(f"token 1 of {tokens}")
    expect(detail.locator(".token")).to_contain_text("logprob −")
    assert words.first.evaluate("word => getComputedStyle(word).backgroundColor") != "rgba(0, 0, 0, 0)", "a surprise has a colour"
    detail.get_by_role("button", name="text", exact=True).click()
    assert words.first.evaluate("word => getComputedStyle(word).backgroundColor") == "rgba(0, 0, 0, 0)"
    detail.get_by_role("link", name="Group 3").click()
    expect(detail.get_by_role("heading", name="Group 3")).to_be_visible()
    expect(detail.get_by_role("table", name="Members").locator("tbody tr")).to_have_count(4)


def test_keys_go_through_rollouts(open_page: Open, address: str) -> None:
    page = open_page(address)
    page.keyboard.press("3")
    expect(page.locator(".rows tbody tr")).to_have_count(50)
    heading = page.locator(".detail h2")
    page.keyboard.press("j")
    expect(heading).to_have_text("Rollout 0.0")
    page.keyboard.press("ArrowDown")
    expect(heading).to_have_text("Rollout 0.1")
    page.keyboard.press("k")
    expect(heading).to_have_text("Rollout 0.0")
    page.keyboard.press("]")
    expect(page.locator(".pages")).to_contain_text("51–100")
    page.keyboard.press("[")
    expect(page.locator(".pages")).to_contain_text("1–50")
    page.locator(".rows tbody tr").last.click()
    expect(heading).to_have_text("Rollout 12.1")
    page.keyboard.press("j")
    expect(heading).to_have_text("Rollout 12.2")
    expect(page.locator(".pages")).to_contain_text("51–100")
    page.keyboard.press("Escape")
    expect(page.locator(".detail")).to_be_hidden()
    page.keyboard.press("5")
    expect(page).to_have_url(f"{address}#config")


def test_choices_are_all_there_are(open_page: Open, address: str) -> None:
    page = open_page(f"{address}#rollouts")
    values = "options => options.map((option) => option.value)"
    assert page.get_by_label("Dropped").locator("option").evaluate_all(values) == ["", "any", *DropReason]
    assert page.get_by_label("Ended by").locator("option").evaluate_all(values) == ["", *FinishReason]


def test_groups(open_page: Open, address: str, report: dict[str, Any]) -> None:
    page = open_page(f"{address}#groups")
    expect(page.locator(".pages")).to_contain_text(f"of {report['admitted']}")
    page.locator(".rows tbody tr").first.click()
    page.get_by_role("table", name="Members").get_by_role("link").first.click()
    expect(page.locator(".detail h2")).to_have_text("Rollout 0.0")


def test_options(open_page: Open, address: str) -> None:
    page = open_page(f"{address}#config")
    row = page.locator("[data-option='place.placement']")
    expect(row.locator("td").nth(1)).to_have_text("async")
    expect(row.locator("td").nth(2)).to_have_text("config.toml")
    page.get_by_label("Search").fill("placement")
    expect(row).to_be_visible()
    expect(page.locator("[data-option='run.steps']")).to_have_count(0)
    page.get_by_label("Search").fill("")
    expect(page.locator("[data-option='train.loss']")).to_have_count(0)
    expect(page.locator("[data-option='run.steps'] td").nth(1)).to_have_text("4")
    page.get_by_label("Search").fill("train.loss")
    expect(page.get_by_role("status").filter(has_text="option")).to_contain_text("more with their defaults")
    page.get_by_label("only what is no default").uncheck()
    expect(page.locator("[data-option='train.loss']")).to_be_visible()
