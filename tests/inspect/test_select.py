"""Lists by hand: what of the run in tests.inspect.runs is found, and in which order."""

from __future__ import annotations

import pytest

from rollyard.errors import ConfigError
from rollyard.inspect.select import RolloutRow, Wanted, groups, rollouts
from rollyard.inspect.source import Lives, Source
from rollyard.inspect.steps import steps
from rollyard.journal.folder import RunFolder
from tests.inspect.runs import write_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return write_run(tmp_path_factory.mktemp("inspect") / "run")


SURVIVED = Lives()


def found(run: RunFolder, lives: Lives = SURVIVED, **wanted: object) -> list[tuple[int, int]]:
    with Source(run, lives) as source:
        return [(row.group, row.member) for row in rollouts(source, Wanted(**wanted)).rows]


EVERY = [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (3, 1), (4, 0), (4, 1)]


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ({}, EVERY),
        ({"sort": "reward", "limit": 3}, [(0, 1), (1, 0), (2, 0)]),
        ({"sort": "reward", "down": True, "limit": 3}, [(0, 0), (3, 0), (1, 1)]),
        ({"sort": "tokens", "down": True, "limit": 4}, [(2, 1), (1, 1), (1, 0), (4, 1)]),
        ({"sort": "tokens", "limit": 2}, [(0, 0), (0, 1)]),
        ({"sort": "lag", "down": True, "limit": 2}, [(1, 0), (2, 0)]),  # both one version behind; 0.x and 1.1 and 2.1 are not
        ({"sort": "finished", "down": True, "limit": 1}, [(4, 0)]),
        ({"dropped": "stale"}, [(3, 0), (3, 1)]),
        ({"dropped": "any"}, [(3, 0), (3, 1), (4, 0)]),
        ({"dropped": "filtered"}, []),
        ({"step": 2}, [(1, 0), (1, 1)]),
        ({"finish": "length"}, [(1, 0), (1, 1), (2, 1)]),
        ({"text": "TEXT 2.1"}, [(2, 1)]),
        ({"text": "Prompt 4"}, [(4, 0), (4, 1)]),
        ({"text": "%"}, []),
        ({"group": 3}, [(3, 0), (3, 1)]),
        ({"sort": "id", "down": True, "limit": 3}, [(4, 0), (4, 1), (3, 0)]),
        ({"sort": "step", "limit": 3, "offset": 1}, [(0, 1), (1, 0), (1, 1)]),
        ({"offset": 9}, [(4, 1)]),
        ({"offset": 10}, []),
        ({"least": 0.5, "most": 0.75}, [(1, 1), (2, 0), (2, 1)]),
        ({"most": 0.0}, [(0, 1)]),
        ({"step": 2, "sort": "reward", "finish": "length", "limit": 1}, [(1, 0)]),
    ],
)
def test_rollouts_are_filtered_and_sorted(run: RunFolder, wanted: dict[str, object], expected: list[tuple[int, int]]) -> None:
    assert found(run, **wanted) == expected


def test_a_life_by_itself_and_each_of_them(run: RunFolder) -> None:
    assert found(run, Lives(0)) == EVERY[:8]
    assert found(run, Lives(1)) == [(2, 0), (2, 1), (4, 0), (4, 1)]
    assert found(run, Lives(each=True), group=2) == [(2, 0), (2, 0), (2, 1), (2, 1)]
    with pytest.raises(ConfigError, match="no life 2"):
        Source(run, Lives(2))


def test_a_rollout_is_told_in_full(run: RunFolder) -> None:
    with Source(run) as source:
        listed = rollouts(source, Wanted(limit=4))
        late = rollouts(source, Wanted(group=4)).rows
    assert listed.found == 10 and listed.rows[2] == RolloutRow(
        life=0,
        group=1,
        member=0,
        reward=0.25,
        tokens=4,
        finish="length",
        versions=(0, 1),
        lag=1,
        step=2,
        trained=True,
        dropped=None,
        cause=None,
        prompt="prompt 1",
        completion="text 1.0",
    )
    assert [(row.finish, row.tokens, row.reward, row.step) for row in late] == [("context", 2, None, None), (None, 3, None, None)]


def test_a_step_that_a_later_life_went_back_behind_has_trained_nothing(run: RunFolder) -> None:
    """It is there in the life that trained it."""
    with Source(run) as source:
        assert [(row.step, row.life) for row in steps(source, -1).rows] == [(1, 0), (2, 0), (3, 1)]
    with Source(run, Lives(0)) as source:
        assert [(row.step, row.life) for row in steps(source, -1).rows] == [(1, 0), (2, 0), (3, 0)]
    with Source(run, Lives(each=True)) as source:
        assert [(row.step, row.life) for row in steps(source, -1).rows] == [(1, 0), (2, 0), (3, 0), (3, 1)]


def test_groups_are_summed_up(run: RunFolder) -> None:
    with Source(run) as source:
        listed = groups(source, Wanted(sort="reward")).rows
        assert [(row.group, row.mean) for row in listed] == [(0, 0.5), (1, 0.5), (2, 0.5), (3, 0.9), (4, None)]
        assert [row.group for row in groups(source, Wanted(sort="tokens", down=True, limit=2)).rows] == [1, 2]
        assert [row.group for row in groups(source, Wanted(sort="lag", down=True, limit=1)).rows] == [1]
        assert [row.group for row in groups(source, Wanted(dropped="any")).rows] == [3]
        assert [row.group for row in groups(source, Wanted(least=0.6)).rows] == [3]
        assert [row.group for row in groups(source, Wanted(sort="admitted", down=True, limit=2, offset=1)).rows] == [2, 3]
        assert groups(source, Wanted(most=0.6, limit=1)).found == groups(source, Wanted(most=0.6, offset=7)).found == 3
        assert [row.group for row in groups(source, Wanted(text="PROMPT 2")).rows] == [2]
        two, last = listed[1], listed[-1]
    assert (two.members, two.judged, two.worst, two.best, two.tokens, two.lag, two.step) == (2, 2, 0.25, 0.75, 10, 1, 2)
    assert (last.members, last.judged, last.step, last.dropped) == (1, 0, None, None)


def test_a_step_says_what_wrote_it_and_how_far_that_lay_behind(run: RunFolder) -> None:
    with Source(run) as source:
        told = steps(source, 2)
    two, three = told.rows
    assert told.found == 3 and told.broken == 1
    assert (two.groups, two.members, two.judged, two.reward_mean, two.tokens, two.versions) == (1, 2, 2, 0.5, 10, (0, 1))
    assert two.lag_mean == pytest.approx(0.2) and two.lag_max == 1  # 2 of 10 tokens by one version
    assert (three.life, three.dropped, three.loss, three.seconds) == (1, 1, 0.125, None)
    assert (three.tokens, three.versions, three.lag_mean) == (10, (1, 2), 0.2)


def test_a_metric_of_the_life_that_is_meant_counts(run: RunFolder) -> None:
    with Source(run, Lives(0)) as source:
        assert steps(source, 1).rows[0].dropped == 0
