"""A run that goes on: the page shows it as it happens, says when it has ended, and when nobody answers any more."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.browser import held
from tests.browser.conftest import Open, three, until, window
from tests.browser.serving import LIMIT_S, command, dashboard, environment

pytestmark = [pytest.mark.browser, pytest.mark.timeout(150)]

STEPS = 40
AWAY = "ERR_"  # what a browser says of a server that is gone


@contextmanager
def going(out: Path, *options: object) -> Iterator[subprocess.Popen[str]]:
    """A run that takes its time until `out.go` is there."""
    reward = ("--reward", f"{held.__file__}:slow", "--reward.workers", 2)
    words = command("run", "--preset", "tiny", "--run.steps", STEPS, "--out", out, "--view", "plain", *reward, *options)
    variables = environment() | {held.FILE: str(out.with_suffix(".go"))}
    with subprocess.Popen(words, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
        try:
            yield run
        finally:
            if run.poll() is None:
                run.send_signal(signal.SIGINT)
            try:
                run.communicate(timeout=LIMIT_S)
            finally:
                run.kill()


def said(run: subprocess.Popen[str], what: str) -> str:
    """The first line that has this."""
    assert run.stdout is not None
    lines = list[str]()
    for line in run.stdout:
        lines.append(line)
        if what in line:
            return line
    raise AssertionError("".join(lines))


def steps(page: Page) -> int:
    found = re.match(r"step (\d+) of", page.locator("#run-steps").inner_text())
    assert found
    return int(found[1])


def beyond(page: Page, step: int) -> None:
    """Wait until there are more steps."""
    until(page, lambda: steps(page) > step, LIMIT_S)


def test_a_run_as_it_happens(open_page: Open, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with going(out) as run:
        said(run, "step  2/")
        with dashboard(out) as address:
            page = open_page(address)
            expect(page.locator("#run-state")).to_contain_text("running", timeout=LIMIT_S * 1000)
            expect(page.locator("#connection")).to_have_text("live")
            begun = steps(page)
            beyond(page, begun + 1)
            assert begun >= 2
            expect(page.locator("#run-eta")).to_contain_text("left")
            expect(page.locator("[data-panel=engines] tbody tr")).to_contain_text("engine")
            expect(page.locator("[data-panel=load] canvas")).to_have_count(1, timeout=LIMIT_S * 1000)
            expect(page.locator("[data-panel=timeline] canvas")).to_have_count(1)
            expect(page.locator("[data-figure=queue] .dim")).to_contain_text("under way")
            page.get_by_role("button", name="Reward: as a table").click()
            rows = page.locator("[data-panel=reward] tbody tr")
            many = rows.count()
            beyond(page, steps(page))
            assert rows.count() > many, "a chart has the step, too"
            end = window(page)[1]
            until(page, lambda: window(page)[1] > end)
            page.goto(f"{address}#rollouts")
            expect(page.locator(".pages")).to_contain_text(" of ")
            whole = page.locator(".pages .figure").inner_text()
            expect(page.locator(".pages .figure")).not_to_have_text(whole, timeout=LIMIT_S * 1000)
            page.goto(f"{address}#overview")
            out.with_suffix(".go").touch()
            expect(page.locator("#run-state")).to_have_text("finished", timeout=LIMIT_S * 1000)
            expect(page.locator("#connection")).to_have_text("the run has ended")
            report = json.loads((out / "report.json").read_text())
            expect(page.locator("#run-steps")).to_have_text(f"step {STEPS} of {STEPS}")
            expect(page.locator("[data-figure=reward] .value")).to_have_text(three(report["reward"]["last"]))
            expect(page.locator("[data-figure=trained] .value")).to_have_text(f"{report['trained']:,}")
            page.get_by_role("button", name="Reward: as a table").click()
            expect(rows).to_have_count(STEPS)
            page.goto(f"{address}#timeline")
            roles = page.locator("[data-panel=roles] thead th")  # both are the same device, and have the same numbers
            expect(roles).to_have_text(["", "engine + trainer (1 device)"], timeout=LIMIT_S * 1000)
            page.close()


def test_a_run_that_was_killed_has_a_timeline_and_its_next_life_goes_on_with_it(open_page: Open, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with going(out) as run:
        said(run, "step 10/")
        run.kill()
    with dashboard(out) as address:
        page = open_page(f"{address}#timeline")
        expect(page.locator("#run-state")).to_have_text("killed")
        for panel in ("timeline", "load"):
            expect(page.locator(f"[data-panel={panel}] canvas")).to_have_count(1)
        one = page.request.get(f"{address}api/timeline").json()
        page.close()
    assert one["lives"] == [] and len(one["marks"]) > 2 and max(slots[2] for slots in one["slots"]) > 0
    out.with_suffix(".go").touch()
    words, variables = command("resume", out), environment() | {held.FILE: str(out.with_suffix(".go"))}
    subprocess.run(words, env=variables, check=True, capture_output=True, timeout=3 * LIMIT_S)
    with dashboard(out) as address:
        page = open_page(f"{address}#timeline")
        expect(page.locator("#run-state")).to_have_text("finished")
        expect(page.locator("[data-panel=load] canvas")).to_have_count(1)
        both = page.request.get(f"{address}api/timeline").json()
        page.close()
    ((life, at),) = both["lives"]
    assert life == 2 and both["marks"][: len(one["marks"])] == one["marks"] and both["marks"][-1][0] == STEPS
    assert one["marks"][-1][1] < at < both["whole_ns"] and any(slots[0] > at for slots in both["slots"])


def free_port() -> int:
    with socket.socket() as line:
        line.bind(("127.0.0.1", 0))
        return int(line.getsockname()[1])


def test_a_server_that_goes_and_comes_back(open_page: Open, tmp_path: Path) -> None:
    out, port = tmp_path / "run", free_port()
    with going(out) as run:
        said(run, "step  1/")
        with dashboard(out, port) as address:
            page = open_page(address, expected=AWAY)
            expect(page.locator("#connection")).to_have_text("live", timeout=LIMIT_S * 1000)
        expect(page.locator("#connection")).to_have_text("no server", timeout=LIMIT_S * 1000)
        expect(page.get_by_role("alert")).to_contain_text("The server does not answer. What is shown is of ")
        before = steps(page)
        with dashboard(out, port):
            expect(page.locator("#connection")).to_have_text("live", timeout=LIMIT_S * 1000)
            expect(page.get_by_role("alert")).to_be_hidden()
            beyond(page, before)


def test_the_dashboard_of_run(open_page: Open, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with going(out, "--dashboard") as run:
        address = said(run, "dashboard: ").split()[1]
        page = open_page(address, expected=AWAY)
        said(run, "step  1/")
        beyond(page, 0)
        expect(page.locator("#connection")).to_have_text("live")
