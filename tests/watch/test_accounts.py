from __future__ import annotations

import json
from pathlib import Path

from rollyard.types import Activity
from rollyard.watch.accounts import Accounts
from rollyard.watch.spans import SpanLog
from rollyard.watch.timeline import Phase, Timeline


class Clock:
    now = 1_000

    def __call__(self) -> int:
        return self.now


def run(clock: Clock) -> Accounts:
    """Setup for 100, an engine that shares its device with a trainer, and another engine."""
    timeline = Timeline(clock)
    accounts = Accounts(timeline)
    shared, own = SpanLog(clock), SpanLog(clock)
    accounts.watch("engine-0", "engine", shared)
    accounts.watch("engine-1", "engine", own)
    accounts.watch("trainer-0", "trainer", shared)
    shared.add(Activity.SYNC, 1_050, 1_060, "load")  # in setup, and told of
    clock.now = 1_100
    accounts.built()
    shared.add(Activity.GENERATE, 1_100, 1_150)
    accounts.collect()
    shared.add(Activity.GENERATE, 1_150, 1_200)  # goes on
    own.add(Activity.GENERATE, 1_100, 1_300)
    shared.add(Activity.TRAIN, 1_300, 1_400, "step")
    clock.now = 1_200
    with timeline.phase(Phase.SCORE), timeline.spans.doing(Activity.PROMPTS):
        clock.now = 1_450
    clock.now = 1_500
    timeline.seconds()
    return accounts


def test_stations_with_the_same_spans_share_a_device() -> None:
    devices, pools = run(Clock()).close()
    assert [(device.device, device.roles) for device in devices] == [
        ("engine-0+trainer-0", ("engine", "trainer")),
        ("engine-1", ("engine",)),
    ]
    assert devices[0].busy_ns == {"train": 100, "generate": 100, "sync": 10, "setup": 90}
    assert devices[0].wait_ns == {"generate": 100, "score": 50, "unexplained": 50}
    assert devices[1].busy_ns == {"generate": 200, "setup": 100}
    assert devices[1].wait_ns == {"train": 100, "score": 50, "unexplained": 50}
    assert all(device.wall_ns == 500 for device in devices)
    assert {pool.role: pool.devices for pool in pools} == {"engine": 2, "trainer": 1}


def test_a_part_of_an_activity_has_its_seconds() -> None:
    accounts = run(Clock())
    accounts.collect()
    assert accounts.seconds(Activity.TRAIN, "step") == 100e-9
    assert accounts.seconds(Activity.TRAIN, "optimizer") == 0.0


def test_the_trace_shows_each_device_and_its_overlaps(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    run(Clock()).write_trace(path)
    events = json.loads(path.read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {0: "driver", 1: "engine-0+trainer-0", 2: "engine-1"}
    shown = {(names[e["pid"]], e["name"], e["cat"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"}
    assert shown == {
        ("driver", "score", "score", 0.2, 0.25),
        ("driver", "prompts", "prompts", 0.2, 0.25),
        ("engine-0+trainer-0", "setup", "setup", 0.0, 0.1),
        ("engine-0+trainer-0", "load", "sync", 0.05, 0.01),
        ("engine-0+trainer-0", "generate", "generate", 0.1, 0.1),  # in one piece, though it came in two
        ("engine-0+trainer-0", "step", "train", 0.3, 0.1),
        ("engine-1", "setup", "setup", 0.0, 0.1),
        ("engine-1", "generate", "generate", 0.1, 0.2),
    }
    lines = {(event["pid"], event["tid"]) for event in events if event["ph"] == "X"}
    assert lines == {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    assert [file.name for file in tmp_path.iterdir()] == ["trace.json"]


def test_an_engine_that_is_started_again_keeps_its_device() -> None:
    clock = Clock()
    timeline = Timeline(clock)
    accounts = Accounts(timeline)
    for start in (1_000, 1_050):
        spans = SpanLog(clock)
        accounts.watch("engine-0", "engine", spans)
        spans.add(Activity.GENERATE, start, start + 20)
    accounts.built()
    clock.now = 1_100
    timeline.seconds()
    (device,), _ = accounts.close()
    assert (device.device, device.busy_ns, device.wait_ns) == ("engine-0", {"generate": 40}, {"unexplained": 60})


def test_a_run_that_was_never_built_was_all_setup() -> None:
    clock = Clock()
    timeline = Timeline(clock)
    accounts = Accounts(timeline)
    accounts.watch("engine-0", "engine", SpanLog(clock))
    clock.now = 1_070
    timeline.seconds()
    (device,), _ = accounts.close()
    assert (device.busy_ns, device.wait_ns, device.busy_share) == ({"setup": 70}, {}, 0.0)
