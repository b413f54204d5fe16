"""A run that is over: every number is that of its report, and what stands in its journal."""

from __future__ import annotations

import asyncio
import json
from collections import Counter

import pytest
from prometheus_client.parser import text_string_to_metric_families

from rollyard.inspect.source import Source
from rollyard.journal.folder import RunFolder
from rollyard.types import Activity
from rollyard.watch.trace import DRIVER
from tests.dashboard.runs import EVIL, GROUPS, SIZE, answers, asking, contents, run_of, through

STEPS = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    run = run_of(tmp_path_factory.mktemp("finished"), STEPS, step_s=0.01)
    through(run)
    return run.folder


async def test_the_overview_has_the_numbers_of_the_report(folder: RunFolder) -> None:
    report = json.loads(folder.report.read_text())
    async with asking(folder) as client:
        told = await answers(client, "overview")
    same = ("model", "placement", "engine", "objective", "steps", "wall_s", "slots_busy", "decoder", "admitted", "trained")
    assert {name: told[name] for name in same} == {name: report[name] for name in same}
    assert told["run"] == report["name"] and told["transport"] == report["weights"]["transport"]
    assert {f"{name}_s": seconds for name, seconds in told["phases"].items()} == report["phases"]
    assert sum(told["phases"].values()) == pytest.approx(told["wall_s"])
    canary = report["weights"]["canary"]
    assert told["canary_s"] == (0.0 if canary is None else canary["seconds"])
    assert all(report[name] == seconds for name, seconds in told["beside"].items()) and len(told["beside"]) == 5
    for name, mine in (("", told["reward"]), *told["rewards"].items()):
        theirs = report["rewards"][name] if name else report["reward"]
        known = [value for value in theirs["curve"] if value is not None]
        assert (mine["first"], mine["last"]) == (theirs["first"], theirs["last"])
        assert mine["mean"] == pytest.approx(sum(known) / len(known)) and known
    assert set(told["rewards"]) == set(report["rewards"]) == {"match", "form"}
    assert told["eval"] == {name: report["eval"][name] for name in ("first", "last", "samples", "unscored")}
    assert (told["tokens"], told["tokens_per_s"]) == (report["generation_tokens"], report["generation_tokens_per_s"])
    assert told["lengths"] == report["lengths"] and told["dropped"] == report["dropped"] and told["members"] == report["members"]
    assert told["members"]["dropped"] and told["staleness"] == report["staleness"] and told["pools"] == report["usage"]["pools"]
    for pool in told["pools"]:
        assert sum(told["work"][pool["role"]].values()) == pytest.approx(pool["busy_share"])
    assert (told["state"], told["cause"], told["planned"], told["live"]) == ("finished", "all steps are done", STEPS, 0)
    assert told["unreadable"] == {} and [life["failed"] for life in told["lives"]] == [False] and told["forecast"] == []


async def test_steps_are_the_lines_of_the_metrics(folder: RunFolder) -> None:
    lines = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    async with asking(folder) as client:
        told = await answers(client, "steps")
        rest = await answers(client, "steps", after=4)
        none = await answers(client, "steps", after=STEPS)
    assert [dict(zip(told["columns"], row, strict=True)) for row in told["rows"]] == lines
    assert rest["rows"] == told["rows"][4:] and none == {"columns": [], "rows": []}


async def test_histograms_count_each_member_once(folder: RunFolder) -> None:
    report = json.loads(folder.report.read_text())
    async with asking(folder) as client:
        told = await answers(client, "histograms")
    with Source(folder) as source:
        lengths, rewards = source.row("SELECT count(*) FROM completions"), source.row("SELECT count(value) FROM verdicts")
        of_each = dict(source.rows("SELECT value, count(*) FROM verdicts WHERE value IS NOT NULL GROUP BY 1"))
    assert (sum(told["lengths"]["counts"]),) == lengths and (sum(told["rewards"]["counts"]),) == rewards
    assert told["lengths"]["edges"][0] == report["lengths"]["max"] == 16.0  # all have 16 tokens
    edges = told["rewards"]["edges"]
    for value, count in of_each.items():  # each in a bar of its own, in the midst of it
        (at,) = [at for at, edge in enumerate(edges[:-1]) if edge <= value < edges[at + 1]]
        assert told["rewards"]["counts"][at] == count and (edges[at] + edges[at + 1]) / 2 == pytest.approx(value)
    lags = dict(zip(map(str, told["staleness"]["lags"]), told["staleness"]["tokens"], strict=True))
    assert lags == report["staleness"]


async def test_lists_are_paged_sorted_and_filtered(folder: RunFolder) -> None:
    async with asking(folder) as client:
        whole = await answers(client, "rollouts", limit=1000)
        pages = [await answers(client, "rollouts", limit=30, offset=offset) for offset in range(0, whole["total"], 30)]
        best = await answers(client, "rollouts", sort="reward", order="desc", min_reward=0.5, max_reward=0.75)
        failed = await answers(client, "rollouts", reason="failed")
        groups = await answers(client, "groups", sort="reward", limit=5)
        second = await answers(client, "groups", step=2)
        found = await answers(client, "groups", search="PROMPT 3")
        beyond = await answers(client, "groups", offset=10_000)
    assert [row for page in pages for row in page["rows"]] == whole["rows"] and len(whole["rows"]) == whole["total"]
    assert [row["reward"] for row in best["rows"]] == sorted((row["reward"] for row in best["rows"]), reverse=True)
    counted = Counter(row["reward"] for row in whole["rows"])
    assert best["total"] == counted[0.5] + counted[0.75] > 0
    assert failed["total"] == sum(row["dropped"] == "failed" for row in whole["rows"]) > 0
    means = [row["mean"] for row in groups["rows"]]
    assert means == sorted(means) and second["total"] == GROUPS and {row["step"] for row in second["rows"]} == {2}
    assert all("prompt 3" in row["prompt"] for row in found["rows"]) and found["total"] == 1
    with Source(folder) as source:
        assert (beyond["rows"], beyond["total"]) == ([], *source.row("SELECT count(*) FROM prompts"))


async def test_a_group_and_its_members_with_all_that_is_known(folder: RunFolder) -> None:
    async with asking(folder) as client:
        group = await answers(client, "groups/1")
        members = [await answers(client, f"rollouts/1/{row['member']}") for row in group["members"]]
    assert group["text"] == "prompt 1" and group["columns"] == {"answer": EVIL} and len(members) == SIZE
    assert [token["id"] for token in group["tokens"]] == [3, 3] and group["tokens"][0]["text"] is None
    for row, member in zip(group["members"], members, strict=True):
        assert member["row"] == row and member["prompt"] == "prompt 1" and "config.toml" not in member["no_texts"] != ""
        if row["dropped"]:
            continue
        assert member["text"] == f"{EVIL} of 16" and [token["logprob"] for token in member["tokens"]] == [-0.5] * 16
        assert sum(span[-1] for span in member["spans"]) == 16 and member["reward"] == row["reward"]
        assert member["rewards"] == ({} if row["reward"] is None else {"match": row["reward"], "form": 0.5})
        assert bool(member["problem"]) == (row["reward"] is None)


async def test_the_timeline_has_each_device_and_all_that_it_did(folder: RunFolder) -> None:
    trace = json.loads(folder.trace.read_text())
    async with asking(folder) as client:
        told = await answers(client, "timeline")
        half = await answers(client, "timeline", **{"from": told["whole_ns"] // 2, "to": told["whole_ns"], "width": 50})
        late = await answers(client, "timeline", **{"from": told["whole_ns"] + 5})
    assert told["lanes"][0]["name"] == DRIVER
    names = {event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"}
    assert {lane["name"] for lane in told["lanes"]} == {DRIVER, "trainer", "engine-0", "engine-1"} < names
    (trainer,) = [lane for lane in told["lanes"] if lane["role"] == "trainer"]
    steps = [event for event in trace["traceEvents"] if event["ph"] == "X" and event["name"] == "step"]
    noted = sorted((round(event["ts"] * 1e3), round((event["ts"] + event["dur"]) * 1e3)) for event in steps)
    assert sorted((begin, end) for begin, end, kind, what in trainer["spans"] if what == "step") == noted and len(noted) == STEPS
    assert [step for step, _ in told["marks"]] == list(range(1, STEPS + 1))
    assert told["whole_ns"] == round(trace["otherData"]["end_us"] * 1e3) == told["end_ns"]
    for lane in (*told["lanes"], *half["lanes"]):
        for begin, end, kind, _ in lane["spans"]:
            assert 0 <= begin < end <= told["whole_ns"] and Activity(kind)
    assert all(span[0] >= half["start_ns"] for lane in half["lanes"] for span in lane["spans"])
    assert late["lanes"] == [] and late["start_ns"] == late["end_ns"]


async def test_options_say_where_they_are_from(folder: RunFolder) -> None:
    async with asking(folder) as client:
        told = {option["name"]: option for option in await answers(client, "config")}
    assert (told["run.steps"]["value"], told["run.steps"]["from"]) == (STEPS, "config.toml")
    assert (told["train.lr"]["from"], told["train.lr"]["value"]) == ("default", told["train.lr"]["default"])
    assert all(option["description"] for option in told.values())


async def test_prometheus_is_told_the_same(folder: RunFolder) -> None:
    report = json.loads(folder.report.read_text())
    async with asking(folder) as client:
        answer = await client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    told = {
        (sample.name.removeprefix("rollyard_"), *(label for name, label in sample.labels.items() if name != "run")): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }
    expected = {
        ("step",): report["steps"],
        ("weight_version",): report["versions"][-1][0],
        ("lives",): 1,
        ("prompts_trained",): report["trained"],
        ("requests_waiting",): 0,
        ("groups_live",): 0,
        ("run_state", "finished"): 1,
        ("run_state", "killed"): 0,
        ("phase_seconds_total", "train"): report["phases"]["train_s"],
        **{("devices_busy_ratio", pool["role"]): pool["busy_share"] for pool in report["usage"]["pools"]},
    }
    assert {name: told[name] for name in expected} == pytest.approx(expected) and ("eta_seconds",) not in told


async def test_whoever_looks_leaves_no_trace(folder: RunFolder) -> None:
    before = contents(folder.path)
    async with asking(folder) as client:
        paths = (
            "overview",
            "steps",
            "histograms",
            "timeline",
            "groups",
            "groups/1",
            "rollouts",
            "rollouts/1/0",
            "config",
            "live",
        )
        found = [await client.get(f"/api/{path}") for path in paths]
    assert [answer.status_code for answer in found] == [200] * len(paths)
    assert contents(folder.path) == before


async def test_the_stream_of_a_run_that_is_over_says_so_and_ends(folder: RunFolder) -> None:
    async with asking(folder) as client:
        told = await asyncio.wait_for(client.get("/api/live"), 10)
    assert told.headers["content-type"].startswith("text/event-stream")
    assert told.text.split("\n")[:2] == ["event: end", 'data: {"state":"finished","cause":"all steps are done"}']


async def test_what_has_been_answered_is_not_read_again(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    async with asking(folder) as client:
        first = [(await client.get(path)).text for path in ("/api/rollouts", "/api/overview")]

        def no(*_: object, **__: object) -> None:
            raise AssertionError("it is read again")

        monkeypatch.setattr(Source, "__init__", no)
        assert [(await client.get(path)).text for path in ("/api/rollouts", "/api/overview")] == first
