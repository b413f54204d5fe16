"""Accounts of devices: by hand, and against one that looks at every nanosecond by itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from rollyard.types import Activity, Interval
from rollyard.watch.devices import DeviceTime, Lane, PoolTime, account

A = Activity


def test_by_hand() -> None:
    """An engine writes, takes weights that come near meanwhile, waits for the trainer, and goes on."""
    engine = Lane(
        "e",
        ("engine",),
        [
            Interval(A.GENERATE, 60, 100),
            Interval(A.GENERATE, 0, 40),
            Interval(A.SYNC, 30, 42, "prepare"),
            Interval(A.SYNC, 40, 45, "pause"),
            Interval(A.SYNC, 45, 50, "load"),
            Interval(A.SYNC, 50, 52, "resume"),
        ],
    )
    trainer = Lane("t", ("trainer",), [Interval(A.SYNC, 28, 32, "publish"), Interval(A.TRAIN, 50, 80, "step")])
    driver = [Interval(A.SCORE, 41, 58), Interval(A.PROMPTS, 100, 104)]
    devices, pools = account([engine, trainer], driver, 0, 110)
    engine_waits, trainer_waits = (
        {"train": 8, "prompts": 4, "unexplained": 6},
        {
            "sync": 18,  # 32 to 50: prepare, pause, load
            "generate": 48,  # 0 to 28 and 80 to 100
            "prompts": 4,
            "unexplained": 6,
        },
    )
    assert devices == (
        DeviceTime(
            "e",
            ("engine",),
            110,
            {"generate": 80, "sync": 12},
            engine_waits,
            92 / 110,
            {cause: spent / 110 for cause, spent in engine_waits.items()},
            transfer_ns=12,
            hidden_ns=10,  # 30 to 40, behind generation
            stall_ns=12,  # 40 to 52
        ),
        DeviceTime(
            "t",
            ("trainer",),
            110,
            {"train": 30, "sync": 4},
            trainer_waits,
            34 / 110,
            {cause: spent / 110 for cause, spent in trainer_waits.items()},
        ),
    )
    assert [(pool.role, pool.devices, pool.bubble_ns) for pool in pools] == [("engine", 1, 18), ("trainer", 1, 76)]


def test_a_pool_has_a_bubble_where_all_of_it_waits() -> None:
    first = Lane("a", ("engine",), [Interval(A.SETUP, 0, 10), Interval(A.GENERATE, 10, 30)])
    second = Lane("b", ("engine",), [Interval(A.SETUP, 0, 10), Interval(A.EVAL, 20, 40)])
    _, pools = account([first, second], [], 0, 50)
    # 10 to 20: b waits for a's generation; 30 to 40: a waits for b's evaluation; then both wait.
    assert pools == (PoolTime("engine", 2, 40 / 80, {"generate": 10 / 80, "eval": 10 / 80, "unexplained": 20 / 80}, 10),)


def test_a_device_with_two_roles_is_one_device_and_in_both_pools() -> None:
    both = Lane("e+t", ("engine", "trainer"), [Interval(A.GENERATE, 0, 6), Interval(A.TRAIN, 4, 10)])
    (device,), pools = account([both], [], 0, 10)
    assert device.busy_ns == {"generate": 4, "train": 6} and not device.wait_ns
    assert [(pool.role, pool.busy_share) for pool in pools] == [("engine", 1.0), ("trainer", 1.0)]


def test_a_sleep_for_training_is_no_stall() -> None:
    """Colocated on two devices: both pause, one trains, both wake."""
    pause, resume = Interval(A.SYNC, 0, 2, "pause"), Interval(A.SYNC, 20, 22, "resume")
    trains = Lane("a", ("engine", "trainer"), [pause, Interval(A.TRAIN, 2, 18), Interval(A.SYNC, 18, 20, "load"), resume])
    waits = Lane("b", ("engine", "trainer"), [pause, resume])
    devices, _ = account([trains, waits], [], 0, 22)
    assert [device.stall_ns for device in devices] == [6, 6]
    assert devices[1].wait_ns == {"train": 16, "sync": 2}


ACTIVITIES = [activity for activity in Activity if activity not in (A.PROMPTS, A.SETUP)]
TIMES = st.tuples(st.integers(-3, 40), st.integers(0, 15))
INTERVALS = st.lists(
    st.tuples(st.sampled_from(ACTIVITIES), TIMES, st.sampled_from(["", "prepare", "pause", "resume"])).map(
        lambda made: Interval(made[0], made[1][0], made[1][0] + made[1][1], made[2] if made[0] is A.SYNC else "")
    ),
    max_size=8,
)
LANES = st.lists(
    st.tuples(st.sampled_from([("engine",), ("trainer",), ("engine", "trainer")]), INTERVALS), min_size=1, max_size=4
)
ORDER = ["train", "sync", "generate", "tools", "score", "eval", "checkpoint", "prompts", "restart", "caller", "closing"]


def lanes_of(made: Sequence[tuple[tuple[str, ...], Sequence[Interval]]]) -> list[Lane]:
    return [Lane(f"d{number}", roles, intervals) for number, (roles, intervals) in enumerate(made)]


def open_at(intervals: Sequence[Interval], time: int) -> set[str]:
    return {interval.activity.value for interval in intervals if interval.start_ns <= time < interval.end_ns}


@given(LANES, INTERVALS, st.integers(0, 20), st.integers(0, 30))
def test_it_is_what_one_sees_who_looks_all_the_time(made, driver, start, length) -> None:
    lanes, end = lanes_of(made), start + length
    devices, pools = account(lanes, driver, start, end)
    busy, wait = [Counter() for _ in lanes], [Counter() for _ in lanes]
    bubbles: Counter[str] = Counter()
    for time in range(start, end):
        going = [open_at(lane.intervals, time) for lane in lanes]
        others = set().union(*going, open_at(driver, time))
        for number, own in enumerate(going):
            first = next((activity.value for activity in Activity if activity.value in own), None)
            if first is not None:
                busy[number][first] += 1
            else:
                wait[number][next((name for name in ORDER if name in others), "unexplained")] += 1
        for role in ("engine", "trainer"):
            pool = [own for lane, own in zip(lanes, going, strict=True) if role in lane.roles]
            bubbles[role] += bool(pool) and not any(pool)
    for device, did, waited in zip(devices, busy, wait, strict=True):
        assert (device.busy_ns, device.wait_ns) == (did, waited)
        assert sum(device.busy_ns.values()) + sum(device.wait_ns.values()) == device.wall_ns == length
        assert 0 <= device.hidden_ns <= device.transfer_ns <= length and 0 <= device.stall_ns <= length
    assert {pool.role: pool.bubble_ns for pool in pools} == {pool.role: bubbles[pool.role] for pool in pools}


@given(LANES, INTERVALS, st.randoms(use_true_random=False))
def test_the_order_in_which_news_came_does_not_matter(made, driver, random) -> None:
    mixed = [(roles, random.sample(list(intervals), len(intervals))) for roles, intervals in made]
    assert account(lanes_of(made), driver, 0, 50) == account(lanes_of(mixed), driver, 0, 50)


def test_a_device_counts_while_it_is_there() -> None:
    """It came at 40 and left at 70: what it did before and after is no part of the run."""
    late = Lane("e1", ("engine",), [Interval(A.SETUP, 0, 10), Interval(A.GENERATE, 30, 50), Interval(A.GENERATE, 65, 90)], 40, 70)
    there = Lane("e0", ("engine",), [Interval(A.GENERATE, 0, 60)])
    devices, pools = account([there, late], [], 0, 100)
    assert (
        devices[1].wall_ns == 30
        and devices[1].busy_ns == {"generate": 15}
        and devices[1].wait_ns == {"generate": 10, "unexplained": 5}
    )
    assert devices[0].wall_ns == 100 and devices[0].wait_ns == {"generate": 5, "unexplained": 35}
    assert pools[0].devices == 2 and pools[0].busy_share == 75 / 130 and pools[0].bubble_ns == 35


def test_a_lane_that_stands_for_several_counts_as_many_times() -> None:
    engine = Lane("e", ("engine",), [Interval(A.GENERATE, 0, 60)])
    others = Lane("f", ("engine",), [Interval(A.GENERATE, 0, 20)], devices=3)
    devices, (pool,) = account([engine, others], [], 0, 100)
    assert [(each.device, each.devices, each.wall_ns) for each in devices] == [("e", 1, 100), ("f", 3, 100)]
    assert (pool.devices, pool.busy_share, pool.bubble_ns) == (4, (60 + 3 * 20) / 400, 40)
    assert pool.wait_share == {"generate": 3 * 40 / 400, "unexplained": (40 + 3 * 40) / 400}
