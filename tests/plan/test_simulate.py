"""The simulator against the real loop, and what else a simulated run has to keep."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from rollyard import driver
from rollyard.errors import ConfigError
from rollyard.events import BatchTrained, Train
from rollyard.layers import resolve_tree
from rollyard.plan.check import check_scenario
from rollyard.plan.scenario import Scenario
from rollyard.plan.simulate import simulate
from rollyard.watch.metrics import LengthCounts
from rollyard.watch.report import RewardCurve
from rollyard.watch.trace import read_trace, write_trace
from tests.plan import sides
from tests.plan.compared import compare
from tests.plan.sides import Case, same
from tests.traces import read_strictly

KINDS = ("prompt", "request", "verdict", "step", "version")
AT_A_LOAD = ((0.84, 0), (1.37, 1), (1.9, 2), (2.43, 0), (2.96, 1))
CASES = (
    Case("colocated", judge_s=0.1),
    Case("separate", refusals=25, retries=3),
    Case("async", "drain", losses=((0.8, 1),), changes=((1, 2), (2, -1)), seed=3),
    Case("async", "abort", judge_s=0.3, options=(("rollout.oversample", 2),), groups=2),
    Case("async", "keep", refusals=25, retries=3, prompts=20),
    Case("async", "abort", refusals=40, retries=3, restarts=2, steps=5, losses=AT_A_LOAD, seed=4),
    Case("async", "keep", canary=True, probe_s=0.031, sent_bytes=7, steps=6, options=(("weights.probe_every", 2),)),
    Case("async", "drain", probe_s=0.27, sent_bytes=7, losses=((0.8, 1), (1.9, 2)), steps=6, changes=((2, 1),)),
    Case("separate", canary=True, probe_s=0.11, refusals=0, engines=2),
    Case("colocated", canary=True, probe_s=0.031, sleep_s=0.17, wake_s=0.21, held_out=3),
    Case("swap", probe_s=0.031),
    Case("async", "abort", canary=True, probe_s=0.21, slots=1, groups=4, size=4, staleness=0, changes=((1, 1), (3, -1))),
    Case("async", "keep", canary=True, engines=4, slots=1, groups=1, seed=204750, steps=5, changes=((3, 1), (4, 1)), retries=3),
    Case("swap", judge_s=0.1, held_out=5),
    Case("separate", cap=14, options=(("advantage.overlong", "mask"),)),
    Case("async", "abort", held_out=9, losses=((0.4, 1), (2.1, 0)), options=(("eval.every", 2),)),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.placement}-{case.rollover}-{CASES.index(case)}")
def test_the_simulator_does_what_the_loop_does(case: Case, tmp_path: Path) -> None:
    same_traces(*same(case, tmp_path), tmp_path)


def same_traces(one: sides.Side, other: sides.Side, path: Path) -> None:
    """What each says of its prompts, and what the conductor said. Raises AssertionError."""
    assert one.report is not None and other.simulated is not None
    if one.report.finished.failed:
        return
    write_trace(path / "trace.json", other.simulated.traced)
    traces = [read_strictly(path / "run" / "trace.json"), read_strictly(path / "trace.json")]
    trained = trained_in(other)
    assert [trace.trained for trace in traces] == [trained, trained]
    left, right = (sorted(each for each in trace.slices if each.kind in KINDS) for trace in traces)
    assert [each[:4] for each in left] == [each[:4] for each in right]
    assert held(path / "run" / "trace.json") == pytest.approx(held(path / "trace.json"), abs=0.05)
    moments = [(each.start_ns, each.end_ns) for each in left], [(each.start_ns, each.end_ns) for each in right]
    assert all(abs(a - b) < 10_000 for pair in zip(*moments, strict=True) for a, b in zip(*pair, strict=True))


def held(trace: Path) -> tuple[float, float]:
    """Means: the share of slots that were busy, and a twentieth of the requests that waited."""
    slots = read_trace(trace).slots
    whole = sum(each.end_ns - each.start_ns for each in slots)
    return tuple(sum(each[at] * (each.end_ns - each.start_ns) for each in slots) / whole / of for at, of in ((2, 1), (3, 20)))


def trained_in(side: sides.Side) -> dict[int, set[int]]:
    """Prompts of each batch that there is a new version of."""
    said = [entry for _, events, instructions in side.steps for entry in (*events, *instructions)]
    taken = {each.step + 1: {group.id for group in each.groups} for each in said if isinstance(each, Train)}
    return {each.version.step: taken[each.version.step] for each in said if isinstance(each, BatchTrained)}


@st.composite
def cases(draw: st.DrawFn) -> Case:
    placement = draw(st.sampled_from(("colocated", "separate", "async", "swap")))
    apart, overlaps = placement in ("separate", "async"), placement == "async"
    engines, staleness, groups = draw(st.integers(1, 4)), draw(st.integers(0, 3)), draw(st.integers(1, 4))
    options: dict[str, object] = {
        "checkpoint.every": draw(st.integers(0, 2)),
        "eval.every": draw(st.integers(0, 2)),
        "rollout.order": draw(st.sampled_from(("admission", "longest"))),
        "rollout.filter": draw(st.sampled_from(("none", "flat"))),
    }
    if overlaps and staleness:
        spare = options["rollout.oversample"] = draw(st.integers(0, staleness * groups))
        options["rollout.on_stale"] = "wait" if spare else draw(st.sampled_from(("wait", "drop")))
    if apart and engines > 1:
        options["rollout.moves"] = draw(st.integers(0, 2))
    if apart:
        options["weights.probe_every"] = draw(st.integers(0, 2))
    refusals = draw(st.sampled_from((0, 0, 20)))
    losses = () if not apart else tuple(draw(st.lists(st.tuples(st.floats(0.01, 8), st.integers(0, 3)), max_size=3)))
    changes = st.tuples(st.integers(1, 4), st.sampled_from((1, -1, 2)))
    return Case(
        placement,
        draw(st.sampled_from(("drain", "abort", "keep"))),
        seed=draw(st.integers(0, 2**32)),
        engines=engines,
        slots=draw(st.integers(1, 5)),
        steps=draw(st.integers(1, 5)),
        groups=groups,
        size=draw(st.integers(2, 4)),
        staleness=staleness,
        prompts=draw(st.sampled_from((10_000, 9))),
        judge_s=draw(st.sampled_from((0.0, 0.02, 0.4))),
        workers=draw(st.integers(1, 4)),
        retries=draw(st.integers(0, 3)),
        refusals=refusals,
        losses=losses,
        changes=tuple(draw(st.lists(changes, max_size=2, unique_by=lambda change: change[0]))) if apart else (),
        restarts=draw(st.integers(0, 2)),
        held_out=draw(st.sampled_from((0, 0, 5))),
        canary=not refusals and not losses and draw(st.booleans()),
        probe_s=draw(st.sampled_from((0.0, 0.0, 0.013, 0.21))),
        sleep_s=draw(st.sampled_from((0.0, 0.17))),
        wake_s=draw(st.sampled_from((0.0, 0.19))),
        sent_bytes=draw(st.sampled_from((0, 1000))),
        options=tuple(options.items()),
    )


# The same cases each time: what happens at one moment has no order in the loop, and now and then a drawn case has that. Shrinking
# takes minutes.
SAME = settings(deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), phases=[Phase.generate])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the real run: what it is told to tell people
@settings(SAME, max_examples=10)
@given(case=cases())
def test_whatever_happens(case: Case, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("case")
    same_traces(*same(case, path), path)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@settings(SAME, max_examples=60)
@given(case=cases())
def test_whatever_happens_very_often(case: Case, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("case")
    same_traces(*same(case, path), path)


def test_another_simulator_would_be_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison can fail: here the loop's news are taken one by one."""
    monkeypatch.setattr(driver, "TOGETHER", 1)
    one = sides.real(CASES[0], tmp_path)
    monkeypatch.undo()
    with pytest.raises(AssertionError, match="step "):
        compare(one, sides.simulated(CASES[0], tmp_path))


def scenario(placement: str, **changes: object) -> Scenario:
    """A small model that generates slowly, on five devices."""
    options: dict[str, object] = {"place.placement": placement, "engine.slots": 4, "costs.step_s": 0.02, "run.steps": 6}
    if placement in ("separate", "async"):
        options |= {"place.generate": 3, "place.train": 2}
    if placement in ("async", "swap"):
        options["rollout.max_staleness"] = 1
    options |= {name.replace("__", "."): value for name, value in changes.items()}
    return resolve_tree(Scenario, check_scenario, environment={}, overrides=SIZES | options).config


SIZES = {
    "model.path": "smollm2-135m",
    "model.dtype": "bfloat16",
    "place.generate": 1,
    "rollout.groups_per_step": 8,
    "rollout.group_size": 4,
    "rollout.max_tokens": 256,
}


@pytest.mark.parametrize("placement", ["colocated", "separate", "async", "swap"])
def test_it_is_the_same_each_time_to_the_byte(placement: str) -> None:
    first, again = (simulate(scenario(placement)) for _ in "ab")
    assert first.report.to_json() == again.report.to_json()
    assert first.metrics == again.metrics and first.traced == again.traced
    report = first.report
    assert not report.finished.failed and len(first.steps_s) == 6
    assert report.prompts.admitted == report.prompts.trained + sum(report.prompts.dropped.values())
    assert report.tokens.generated == report.tokens.trained + sum(report.tokens.dropped.values()) + report.tokens.live
    sent = report.weights.bytes_sent
    assert (sent > 0) == (placement in ("separate", "async")) and sent % max(len(report.versions), 1) == 0
    assert simulate(scenario(placement, run__seed=1)).report.wall_s != report.wall_s


def test_what_is_not_modelled_is_absent_and_never_zero() -> None:
    """Rewards, and what would be learnt. That every completion gets a verdict is modelled."""
    found = simulate(scenario("async", prompts__held_out=3), followed=True)
    report = found.report
    assert report.reward == RewardCurve(None, None, (None,) * 6) and not report.rewards
    assert (report.eval.first, report.eval.last) == (None, None) and report.eval.samples == 6
    for row in found.metrics:
        names = [name for name in row if name.startswith(("reward", "train/")) and row[name] is not None]
        assert names == ["train/tokens"]
        assert (row["flat_groups"], row["flat_share"], row["unscored"]) == (None, None, 0)
    assert sum(report.staleness.values()) == sum(int(str(row["train/tokens"])) for row in found.metrics)
    followed = found.traced.followed
    assert followed.verdicts and {verdict.value for verdict in followed.verdicts} == {None}
    assert {life.reward for life in followed.lives} == {None}
    lengths = LengthCounts(Counter(found.lengths))
    assert (lengths.mean, lengths.percentile(95)) == (report.lengths.mean, report.lengths.p95)


def test_nodes_fail_and_engines_come_back() -> None:
    calm = simulate(scenario("async")).report
    often = calm.wall_s / 3600 / 4
    failures = {"failures__node_hours": often, "failures__restart_s": 1.0, "place__restarts": 100, "cluster__node": 1}
    failures |= {"rollout__retries": 100, "weights__transport": "broadcast"}
    found = simulate(scenario("async", **failures))
    torn = found.report
    failed, nodes, expected = [float(word.strip(",")) for word in found.failures.split() if word[0].isdigit()][:3]
    assert (
        nodes == 3
        and 3 < failed < len(torn.lost) + 1
        and expected == pytest.approx(nodes * torn.wall_s / calm.wall_s * 4, rel=0.01)
    )
    assert not torn.finished.failed and len(torn.lost) > 3
    assert torn.wall_s > calm.wall_s and torn.members.trained == calm.members.trained
    assert torn.tokens.recomputed > calm.tokens.recomputed


def test_engines_come_and_leave() -> None:
    found = simulate(scenario("async", failures__joins=("2:+2", "4:-1"), failures__restart_s=1.0)).report
    devices = {device.device: device for device in found.usage.devices}
    assert [name for name in devices if name.startswith("engine")] == [f"engine-{number}" for number in range(5)]
    assert devices["engine-3"].busy_ns["generate"] > 0
    assert devices["engine-4"].wall_ns < devices["engine-3"].wall_ns < devices["engine-0"].wall_ns


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="takes the trainer with it"):
        scenario("colocated", failures__node_hours=1.0)
    with pytest.raises(ConfigError, match="a weight sync takes"):
        simulate(scenario("async", weights__limit_s=1e-6))
