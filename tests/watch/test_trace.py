from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollyard.errors import JournalError
from rollyard.types import Activity, Interval
from rollyard.watch.devices import Lane
from rollyard.watch.trace import FEW, Mark, Traced, bounded, read_trace, write_trace

A = Activity


def lane(name: str, *begins: int, role: str = "engine", devices: int = 1) -> Lane:
    return Lane(name, (role,), [Interval(A.GENERATE, begin, begin + 5_000, "") for begin in begins], devices=devices)


def timeline(*lanes: Lane) -> Traced:
    return Traced(lanes, (Mark(1, 40_000), Mark(2, 80_000)), 0, 100_000)


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    came = lane("engine-1", 10_000)._replace(since_ns=8_000, until_ns=20_000, roles=("engine", "trainer"))
    synced = Lane("trainer", ("trainer",), [Interval(A.SYNC, 1_000, 2_500, "load"), Interval(A.TRAIN, 3_000, 9_000)], devices=8)
    written = timeline(lane("driver", role="driver"), lane("engine-0", 0, 7_000), came, synced)
    write_trace(tmp_path / "trace.json", written)
    read = read_trace(tmp_path / "trace.json")
    for one, other in zip(read.lanes, written.lanes, strict=True):
        assert one._replace(intervals=sorted(one.intervals)) == other._replace(intervals=sorted(other.intervals))
    assert (read.marks, read.start_ns, read.end_ns, read.devices) == (written.marks, 0, 100_000, 10)


def test_steps_are_instants_of_the_whole_trace(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.json", timeline(lane("engine-0", 0)))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    steps = [(event["name"], event["s"], event["ts"]) for event in events if event["ph"] == "i"]
    assert steps == [("step 1", "g", 40.0), ("step 2", "g", 80.0)]


def test_few_devices_have_a_lane_each_also_where_they_are_alike() -> None:
    two = timeline(lane("engine-0", 0), lane("engine-1", 0))
    assert bounded(two) == two


def test_of_many_devices_those_that_did_the_same_are_one() -> None:
    many = timeline(
        *(lane(f"trainer-{i}", 0, 50_000, role="trainer") for i in range(FEW)), lane("engine-0", 0), lane("engine-1", 1)
    )
    assert [(each.device, each.devices) for each in bounded(many).lanes] == [
        (f"trainer-0 to trainer-{FEW - 1} ({FEW}, all alike)", FEW),
        ("engine-0", 1),
        ("engine-1", 1),
    ]


def test_a_trace_has_an_end_however_many_devices_there_are() -> None:
    engines = [lane(f"engine-{i}", i, i + 10_000, i + 20_000) for i in range(1000)]
    found = bounded(timeline(lane("driver", 0, role="driver"), *engines, lane("trainer", 1, role="trainer", devices=512)), 400)
    assert sum(len(each.intervals) for each in found.lanes) <= 400
    assert found.devices == 1512 and found.lanes[0].device == "driver" and found.lanes[-1].device == "trainer"
    assert found.lanes[2].device == "engine-8 to engine-15 (8, the first of them)"
    assert found.lanes[2].intervals == engines[8].intervals


@pytest.mark.parametrize("content", ["", "[]", '{"traceEvents": []}', '{"traceEvents": [1], "otherData": {"end_us": 1}}'])
def test_what_is_no_trace_is_said(tmp_path: Path, content: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(content)
    with pytest.raises(JournalError, match=r"trace\.json: not a trace of this version"):
        read_trace(path)
