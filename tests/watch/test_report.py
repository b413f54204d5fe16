import json
from dataclasses import replace
from pathlib import Path

import pytest

from rollyard.errors import JournalError
from rollyard.events import Drop, FetchPrompts, Published, Score, SegmentArrived
from rollyard.stats import Pace
from rollyard.types import DropReason, EngineStats, RequestId, Segment, Sent, WeightVersion
from rollyard.watch.devices import DeviceTime, PoolTime
from rollyard.watch.read import read_report
from rollyard.watch.report import (
    Counts,
    Filtering,
    Finished,
    Report,
    ReportBuilder,
    TokenLedger,
    Usage,
    slots_busy,
)
from rollyard.watch.roofline import Operation
from rollyard.watch.timeline import PhaseSeconds
from tests.watch.records import STEP, V0, group

PHASES = PhaseSeconds(10.0, 4.0, 0.0, 0.5, 3.0, 0.25, 1.0, 0.25, 0.75, 0.25, 4.0, 1.5, 1.0)


def builder() -> ReportBuilder:
    return ReportBuilder(name="sort", model="tiny", placement="colocated", engine="embedded", transport="in_place")


def finish(report: ReportBuilder) -> Report:
    return report.build(
        phases=PHASES,
        prompts=Counts(6, 3, {"failed": 2, "context": 1}),
        members=Counts(12, 6, {"failed": 4, "context": 2}),
        engines=[EngineStats(step_s=2.0, busy_slot_s=6.0, slots=4, recomputed_tokens=5, decoder="native")],
        finished=Finished("1 step done", failed=False),
        tokens=TokenLedger(40, 20, {"failed": 20}, 0),
        filtering=Filtering(4, 3, 2),
        usage=Usage(
            (DeviceTime("e0", ("engine", "trainer"), 100, {"train": 60}, {"generate": 40}, 0.6, {"generate": 0.4}, 3, 2, 1),),
            (PoolTime("engine", 1, 0.6, {"generate": 0.4}, 40),),
            (Operation("rollout", "decode", 100, 50, 2.0, "memory", 0.5, 0.25),),
            4.0,
            (Pace(8, False, 2, 11, 0, 90, 0.5, 0.25),),
        ),
    )


def whole() -> Report:
    report = builder()
    report.record(Published(V0))
    report.record(FetchPrompts(3))
    report.record(SegmentArrived("e", Segment(RequestId(0, 0), (1, 2, 3), (0.0,) * 3, V0, V0)))
    report.record(SegmentArrived("e", Segment(RequestId(-1, 0), (1, 2), (0.0,) * 2, V0, V0)))  # an evaluation
    report.record(SegmentArrived("e", Segment(RequestId(1, 0), (4,), (0.0,), V0, V0)))
    for rollout in STEP.groups[0].rollouts + STEP.groups[1].rollouts:  # 2, 4, 6 and 8 tokens
        report.record(Score(STEP.groups[0].prompt, rollout.completion))
    report.add_evaluation(0.25, 4, 1, {"right": 0.5}, 40)
    report.add_step(replace(STEP, groups=(group(0, (1, None)),)))
    report.add_step(STEP)
    report.record(Published(WeightVersion(1)))
    report.add_bytes_copied(100)
    report.add_bytes_copied(20)
    report.add_engines({"engine-0": ("10.0.0.2", "10.0.0.4"), "trainer-0": ("10.0.0.3",)}, {"engine-1": 7})
    report.add_sent(Sent(10, 0.5))
    report.add_sent(Sent(10))
    report.add_sent(Sent(10, 1.0))
    report.add_evaluation(0.75, 4, 2, {"right": 0.625, "late": 1.0}, 60)
    return finish(report)


# what the JSON holds of the phases and of the usage above
SPENT = {
    "generate_s": 4.0,
    "tools_s": 0.0,
    "score_s": 0.5,
    "train_s": 3.0,
    "sync_s": 0.25,
    "eval_s": 1.0,
    "checkpoint_s": 0.25,
    "setup_s": 0.75,
    "unaccounted_s": 0.25,
}
USAGE = {
    "devices": [
        {
            "device": "e0",
            "roles": ["engine", "trainer"],
            "wall_ns": 100,
            "busy_ns": {"train": 60},
            "wait_ns": {"generate": 40},
            "busy_share": 0.6,
            "wait_share": {"generate": 0.4},
            "transfer_ns": 3,
            "hidden_ns": 2,
            "stall_ns": 1,
            "devices": 1,
        }
    ],
    "pools": [{"role": "engine", "devices": 1, "busy_share": 0.6, "wait_share": {"generate": 0.4}, "bubble_ns": 40}],
    "operations": [
        {
            "phase": "rollout",
            "operation": "decode",
            "flops": 100,
            "bytes": 50,
            "flops_per_byte": 2.0,
            "bound": "memory",
            "seconds": 0.5,
            "share": 0.25,
        }
    ],
    "balance": 4.0,
    "paces": [
        {
            "running": 8,
            "prefill": False,
            "steps": 2,
            "sequences": 11,
            "prefilled": 0,
            "context": 90,
            "seconds": 0.5,
            "thread_s": 0.25,
            "process_s": 0.0,
        }
    ],
}


HELD_OUT = {"right": [0.5, 0.625], "late": [1.0, 1.0]}


def test_the_json_has_the_fields_and_values_it_promises() -> None:
    record = json.loads(whole().to_json())
    software = record.pop("software")
    assert record == {
        "name": "sort",
        "model": "tiny",
        "placement": "colocated",
        "engine": "embedded",
        "steps": 2,
        "wall_s": 10.0,
        "phases": SPENT,
        "generating_s": 4.0,
        "scoring_s": 1.5,
        "scoring_hidden_s": 1.0,
        **dict.fromkeys(("driver_s", "driver_generating_s"), 0.0),
        "generation_tokens": 4,
        "generation_tokens_per_s": 1.0,
        "reward": {"first": 0.375, "last": 0.375, "curve": [None, 0.375]},
        "rewards": {"x": {"first": 0.25, "last": 0.25, "curve": [None, 0.25]}},
        "eval": {"first": 0.25, "last": 0.75, "samples": 8, "unscored": 3, "rewards": HELD_OUT, "tokens": 100},
        "lengths": {"mean": 5.0, "p50": 4, "p95": 8, "max": 8, "truncated_share": 0.0},
        "slots_busy": 0.75,
        "decoder": "native",
        "admitted": 6,
        "trained": 3,
        "dropped": {"failed": 2, "context": 1},
        "members": {"admitted": 12, "trained": 6, "dropped": {"failed": 4, "context": 2}},
        "weights": {
            "transport": "in_place",
            "bytes_copied": 120,
            "canary": None,
            "probes": {},
            "handed": [],
            "size": 0,
            "bytes_sent": 30,
            "unchanged": 0.75,
        },
        "versions": [[0, 0], [1, 0]],
        "lost": [],
        "finished": {"cause": "1 step done", "failed": False},
        "tokens": {"generated": 40, "trained": 20, "dropped": {"failed": 20}, "live": 0, "recomputed": 5},
        "filtering": {"dropped": 4, "refills": 3, "trained": 2},
        "staleness": {"0": 13},  # of the last step's 2 + 4 + 6 + 1 tokens with a verdict; the step before had none
        "usage": USAGE,
        "objective": "",
        "nodes": {"engine-0": ["10.0.0.2", "10.0.0.4"], "trainer-0": ["10.0.0.3"]},
        "slow": {"engine-1": 7},
        "lives": {"count": 1, "begun": [0], "repeated": 0, "groups": 0, "members": 0, "tokens": 0, "lost": 0},
        "survival": [],
        "simulated": False,
        "forecast": None,
    }
    assert {"python", "torch", "transformers", "numpy", "rollyard"} <= software.keys()


def test_a_run_that_did_nothing_has_a_report_too() -> None:
    report = finish(builder())
    assert (report.steps, report.reward.first, report.eval.last, report.lengths.max) == (0, None, None, None)
    assert json.loads(report.to_json())["reward"] == {"first": None, "last": None, "curve": []}


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text("an earlier one")
    whole().write(path)
    assert read_report(path) == whole()
    assert [file.name for file in tmp_path.iterdir()] == ["report.json"]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"wall_s": 1}', pytest.param("[" * 99_999, id="deep")])
def test_what_is_no_report_is_an_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "report.json"
    path.write_text(text)
    with pytest.raises(JournalError, match=r"report\.json: not a report"):
        read_report(path)


def test_a_write_that_fails_leaves_the_earlier_report(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text("an earlier one")
    (tmp_path / ".report.json.draft").mkdir()
    with pytest.raises(OSError, match="draft"):
        whole().write(path)
    assert path.read_text() == "an earlier one"


def test_busy_slots_are_weighted_by_slots_and_time() -> None:
    small = EngineStats(step_s=1.0, busy_slot_s=2.0, slots=2)  # all of 2 slot-seconds
    large = EngineStats(step_s=3.0, busy_slot_s=3.0, slots=6)  # 3 of 18
    assert slots_busy([small, large]) == 5 / 20
    assert slots_busy([]) == 0.0


def test_what_is_masked_is_not_trained_however_old() -> None:
    """Of two groups with two members of 1 and 2 tokens one is masked; a third group is filtered as a whole."""
    report = builder()
    for group_id, member in ((0, 1), (9, 0), (9, 1), (9, None)):
        report.record(Drop(group_id, member, DropReason.FILTERED, "cut"))
    report.add_step(replace(STEP, groups=(group(0, (1, 0.5), (2, 1.0)), group(1, (1, 0.0), (2, 1.0)))))
    report.add_step(replace(STEP, groups=(group(9, (4, 1.0)),)))  # another run's: the name is free again
    assert finish(report).staleness == {0: 1 + 1 + 2 + 4}
