"""What may be asked, by whom, and what is answered to anything else."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollyard.dashboard.app import STATIC, make_app
from rollyard.dashboard.secure import HEADERS
from rollyard.dashboard.shown import Shown
from rollyard.journal.folder import RunFolder
from tests.dashboard.runs import HERE, asking
from tests.inspect.runs import write_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return write_run(tmp_path_factory.mktemp("asked") / "run")


@pytest.mark.parametrize(
    ("path", "where"),
    [
        ("/api/groups?limit=0", "limit"),
        ("/api/groups?limit=1001", "limit"),
        ("/api/groups?limit=ten", "limit"),
        ("/api/groups?offset=-1", "offset"),
        ("/api/groups?offset=9223372036854775808", "offset"),
        ("/api/groups?sort=reward;DROP", "sort"),
        ("/api/groups?sort=finished", "sort"),
        ("/api/groups?order=up", "order"),
        ("/api/groups?step=0", "step"),
        ("/api/groups?min_reward=nan", "min_reward"),
        ("/api/groups?max_reward=inf", "max_reward"),
        ("/api/groups?reason=none", "reason"),
        ("/api/groups?finish=stop", "finish"),
        ("/api/groups?" + "search=" + "x" * 1001, "search"),
        ("/api/rollouts?finish=never", "finish"),
        ("/api/rollouts?group=1.5", "group"),
        ("/api/rollouts?unknown=1", "unknown"),
        ("/api/groups/-1", "group"),
        ("/api/groups/x", "group"),
        ("/api/rollouts/1/9223372036854775808", "member"),
        ("/api/timeline?from=5&to=5", "/api/timeline"),
        ("/api/timeline?width=0", "width"),
        ("/api/timeline?width=1e9", "width"),
        ("/api/steps?after=-1", "after"),
        ("/api/live?after=x", "after"),
    ],
)
async def test_what_does_not_fit_is_one_clear_error(folder: RunFolder, path: str, where: str) -> None:
    async with asking(folder) as client:
        answer = await client.get(path)
    told = answer.json()
    assert answer.status_code == 422 and set(told) == {"problem", "where", "remedy"}
    assert told["where"].partition(".")[0] == where and "does not fit" in told["problem"] and told["remedy"]
    assert len(answer.content) < 1000


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("/api/groups/99", "groups 0 to 4 were admitted"),
        ("/api/rollouts/99/0", "groups 0 to 4 were admitted"),
        ("/api/rollouts/1/7", "it has 0, 1"),
        ("/api/nothing", "docs/dashboard.md"),
        ("/static/../app.py", "docs/dashboard.md"),
        ("/static/%2e%2e/app.py", "docs/dashboard.md"),
    ],
)
async def test_what_is_not_there_is_said(folder: RunFolder, path: str, told: str) -> None:
    async with asking(folder) as client:
        answer = await client.get(path)
    assert answer.status_code == 404 and told in answer.json()["remedy"]


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
async def test_nothing_can_be_changed(folder: RunFolder, method: str) -> None:
    async with asking(folder) as client:
        for path in ("/api/overview", "/api/groups/1", "/", "/metrics"):
            assert (await client.request(method, path)).status_code == 405


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "127.0.0.2", "", "localhost.evil.example:80"])
async def test_a_name_that_leads_here_from_elsewhere_is_refused(folder: RunFolder, host: str) -> None:
    async with asking(folder) as client:
        for path in ("/", "/api/overview", "/api/live", "/metrics", "/static/style.css", "/healthz"):
            assert (await client.get(path, headers={"Host": host})).status_code == 400, path
        for own in ("127.0.0.1:1", "localhost:8080", "localhost"):
            assert (await client.get("/healthz", headers={"Host": own})).status_code == 200


async def test_every_answer_says_what_the_browser_may_do(folder: RunFolder) -> None:
    async with asking(folder) as client:
        for path in ("/", "/static/style.css", "/api/overview", "/api/live", "/metrics", "/api/groups?limit=0", "/nothing"):
            answer = await client.get(path)
            assert {name: answer.headers[name] for name in HEADERS} == HEADERS, path
            assert "access-control-allow-origin" not in answer.headers
        assert "unsafe" not in HEADERS["Content-Security-Policy"]
        refused = await client.get("/api/overview", headers={"Host": "evil.example"})
        assert refused.headers["Content-Security-Policy"] == HEADERS["Content-Security-Policy"]


async def test_what_a_run_wrote_is_never_answered_as_a_page(folder: RunFolder) -> None:
    async with asking(folder) as client:
        found = [await client.get(f"/api/{path}") for path in ("rollouts", "rollouts/0/1", "groups/0")]
    assert {answer.headers["content-type"] for answer in found} == {"application/json"}
    assert "\\u001b]0;owned" in found[0].text and "\x1b" not in found[0].text


def test_the_page_asks_nobody_else() -> None:
    """No address of another machine in what is ours of it; what is shipped with it has such in comments only."""
    own = [path for path in STATIC.rglob("*") if path.is_file() and "vendor" not in path.parts]
    for path in own:
        text = path.read_text().replace("http://www.w3.org/", "")
        assert "http://" not in text and "https://" not in text and "<script>" not in text and "style=" not in text, path


NAMES = [
    "offset",
    "limit",
    "sort",
    "order",
    "step",
    "min_reward",
    "max_reward",
    "reason",
    "search",
    "finish",
    "from",
    "to",
    "width",
    "after",
]
VALUES = st.one_of(
    st.text(max_size=30), st.integers().map(str), st.floats().map(str), st.sampled_from(["id", "asc", "any", "stop"])
)
PATHS = ("groups", "rollouts", "timeline", "steps", "groups/1", "rollouts/1/1", "overview", "config", "histograms")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)
@given(path=st.sampled_from(PATHS), asked=st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=4))
async def test_whatever_is_asked_is_answered_or_refused(folder: RunFolder, path: str, asked: dict[str, str]) -> None:
    sent = {name: value.encode("utf-8", "replace") for name, value in asked.items()}
    async with asking(folder) as client:
        answer = await client.get(f"/api/{path}", params=sent)
    assert answer.status_code in (200, 422), (answer.status_code, answer.text)
    assert answer.headers["content-type"] == "application/json" and answer.json() is not None


@pytest.mark.parametrize("broken", ["journal.sqlite", "metrics.jsonl", "report.json", "trace.json", "config.toml"])
async def test_of_a_damaged_file_is_told_and_the_rest_is_shown(tmp_path: Path, broken: str) -> None:
    run = write_run(tmp_path / "run")
    for name in ("report.json", "trace.json"):
        (run.path / name).write_text("{}")
    (run.path / broken).write_bytes(b"\x00\xffnone of it")
    async with asking(run) as client:
        told = (await client.get("/api/overview")).json()
        assert told["steps"] == (0 if broken == "metrics.jsonl" else 3) and told["state"] in ("killed", "failed")
        lists = [(await client.get(f"/api/{path}")) for path in ("groups", "rollouts", "groups/1", "histograms")]
        assert {answer.status_code for answer in lists} == ({503} if broken == "journal.sqlite" else {200})
        assert broken != "journal.sqlite" or all("--check" in answer.json()["remedy"] for answer in lists)
        assert (await client.get("/api/timeline")).status_code == 200
        run.timeline.write_bytes(b"\x00\xffnone of it")
        answer = await client.get("/api/timeline")
        assert answer.status_code == 503 and "not a timeline" in answer.json()["problem"]
        assert (await client.get("/api/config")).status_code == 200


async def test_nobody_keeps_more_pages_open_than_there_is_room_for(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollyard.dashboard.app.PAGES", 0)
    transport = httpx.ASGITransport(make_app(Shown(folder)))
    async with httpx.AsyncClient(transport=transport, base_url=HERE) as client:
        assert (await client.get("/api/live")).status_code == 503
