import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollyard.watch.timeline import Interval, Phase, PhaseSeconds, Timeline

SECOND = 1_000_000_000


class Clock:
    """Stands still unless told to go on."""

    def __init__(self) -> None:
        self.now = 12_345

    def __call__(self) -> int:
        return self.now

    def go(self, seconds: float) -> None:
        self.now += round(seconds * SECOND)


def test_each_phase_gets_its_time_and_the_rest_is_unaccounted() -> None:
    clock = Clock()
    timeline = Timeline(clock)
    clock.go(0.5)
    for phase, seconds in ((Phase.SETUP, 1), (Phase.GENERATE, 2), (Phase.TRAIN, 3), (Phase.SYNC, 4), (Phase.GENERATE, 8)):
        with timeline.phase(phase):
            clock.go(seconds)
    assert timeline.seconds() == PhaseSeconds(
        wall_s=18.5, setup_s=1, generate_s=10, train_s=3, sync_s=4, unaccounted_s=0.5, generating_s=10
    )


def test_generation_that_training_hides_is_told_beside_the_phases() -> None:
    clock = Clock()
    timeline = Timeline(clock)
    with timeline.phase(Phase.GENERATE):
        clock.go(1)
        with timeline.phase(Phase.TRAIN):
            clock.go(6)
    seconds = timeline.seconds()
    assert seconds == PhaseSeconds(wall_s=7, generate_s=1, train_s=6, generating_s=7)
    assert sum(seconds.parts().values()) == seconds.wall_s


def test_what_goes_on_has_the_name_of_its_part() -> None:
    timeline = Timeline(Clock())
    assert timeline.activity == ""
    with timeline.phase(Phase.SYNC, "canary"):
        assert timeline.activity == "sync (canary)"
        with timeline.phase(Phase.SYNC):
            assert timeline.activity == "sync (canary)"
        with timeline.phase(Phase.TRAIN):
            assert timeline.activity == "train"
        timeline.open(Phase.SYNC)
    assert timeline.activity == "sync", "the rest goes on without it"


def test_scoring_counts_only_where_generation_does_not_hide_it() -> None:
    clock = Clock()
    timeline = Timeline(clock)
    timeline.open(Phase.GENERATE)
    clock.go(1)
    timeline.open(Phase.SCORE)
    clock.go(2)  # hidden
    timeline.close(Phase.GENERATE)
    assert timeline.current is Phase.SCORE
    clock.go(4)  # waited for
    timeline.close(Phase.SCORE)
    assert timeline.seconds() == PhaseSeconds(wall_s=7, generate_s=3, score_s=4, generating_s=3, scoring_s=6, scoring_hidden_s=2)
    assert timeline.intervals == (
        Interval(Phase.GENERATE, 0, 3 * SECOND),
        Interval(Phase.SCORE, 1 * SECOND, 7 * SECOND),
    )


def test_a_phase_opened_twice_ends_with_its_last_close() -> None:
    clock = Clock()
    timeline = Timeline(clock)
    with timeline.phase(Phase.SCORE):
        clock.go(1)
        with timeline.phase(Phase.SCORE):
            clock.go(1)
        clock.go(1)
    clock.go(1)
    assert timeline.seconds() == PhaseSeconds(wall_s=4, score_s=3, unaccounted_s=1, scoring_s=3)
    assert timeline.intervals == (Interval(Phase.SCORE, 0, 3 * SECOND),)


def test_setup_gives_way_to_what_it_contains() -> None:
    clock = Clock()
    timeline = Timeline(clock)
    with timeline.phase(Phase.SETUP):
        clock.go(1)
        with timeline.phase(Phase.SYNC):
            clock.go(2)
        clock.go(4)
    assert timeline.seconds() == PhaseSeconds(wall_s=7, setup_s=5, sync_s=2)


def test_a_phase_ends_when_its_block_raises() -> None:
    timeline = Timeline(Clock())
    with pytest.raises(KeyError), timeline.phase(Phase.TRAIN):
        raise KeyError
    assert timeline.current is None
    with pytest.raises(ValueError, match="train is not open"):
        timeline.close(Phase.TRAIN)


def test_the_accounts_of_a_step_are_a_difference() -> None:
    clock = Clock()
    timeline = Timeline(clock)
    with timeline.phase(Phase.TRAIN):
        clock.go(1)
        before = timeline.seconds()
        clock.go(2)
    clock.go(0.25)
    assert timeline.seconds().since(before) == PhaseSeconds(wall_s=2.25, train_s=2, unaccounted_s=0.25)


def test_parts_add_up_to_the_wall() -> None:
    seconds = PhaseSeconds(45.0, 1, 2, 3, 4, 5, 6, 7, 8, 9)
    assert seconds.parts() == {
        "generate": 1,
        "tools": 2,
        "score": 3,
        "train": 4,
        "sync": 5,
        "eval": 6,
        "checkpoint": 7,
        "setup": 8,
        "unaccounted": 9,
    }


MOVES = st.lists(st.tuples(st.sampled_from(Phase), st.integers(0, 5)), max_size=40)


@given(MOVES)
def test_nothing_is_lost_or_counted_twice(moves: list[tuple[Phase, int]]) -> None:
    """Against a sweep over whole seconds: each second belongs to the first open phase of the written-down order."""
    order = ["train", "sync", "checkpoint", "eval", "generate", "tools", "score", "setup"]
    clock = Clock()
    timeline = Timeline(clock)
    open_now: set[str] = set()
    expected = dict.fromkeys([*order, "unaccounted"], 0)
    for phase, seconds in moves:
        if phase.value in open_now:
            timeline.close(phase)
            open_now.remove(phase.value)
        else:
            timeline.open(phase)
            open_now.add(phase.value)
        clock.go(seconds)
        owner = next((name for name in order if name in open_now), "unaccounted")
        expected[owner] += seconds
    measured = timeline.seconds()
    assert measured.parts() == expected
    assert measured.wall_s == sum(seconds for _, seconds in moves)


def test_intervals_beyond_a_bound_are_joined_over_the_shortest_gaps():
    from rollyard.watch.spans import coarser

    found = [Interval(Phase.SCORE, at, at + 10) for at in (0, 1_000, 20_000, 21_000)] + [Interval(Phase.SYNC, 500, 600)]
    assert coarser(found, 5, lambda one: one.phase) == found
    joined = [Interval(Phase.SCORE, 0, 1_010), Interval(Phase.SCORE, 20_000, 21_010), Interval(Phase.SYNC, 500, 600)]
    assert coarser(found, 4, lambda one: one.phase) == coarser(found, 3, lambda one: one.phase) == joined
    assert coarser(found, 2, lambda one: one.phase) == [Interval(Phase.SCORE, 0, 21_010), Interval(Phase.SYNC, 500, 600)]


def test_very_many_intervals_are_not_kept_one_by_one(monkeypatch):
    from rollyard.watch import timeline as module

    monkeypatch.setattr(module, "MOST", 10)
    clock = iter(range(0, 10**9, 1000))
    timeline = Timeline(lambda: next(clock))
    for _ in range(1000):
        with timeline.phase(Phase.SCORE):
            pass
    assert len(timeline.intervals) <= 10 and timeline.intervals[0].start_ns < 10_000
    assert timeline.seconds().score_s == pytest.approx(1000 * 1e-6, rel=1e-6)
