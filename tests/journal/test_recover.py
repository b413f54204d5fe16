"""What the next life of a run takes over, by hand. Random histories are in test_many_lives."""

import itertools
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from rollyard.errors import JournalError
from rollyard.events import Admit, BatchTrained, Drop, Event, Finish, Generate, Instruction, Keep, Score, Scored, Train
from rollyard.fitness import Unwrite
from rollyard.journal.journal import Journal
from rollyard.journal.reader import JournalReader
from rollyard.journal.recover import Past, read_past
from rollyard.lives import GroupsRecovered, Reuse, Wrote
from rollyard.types import (
    Begun,
    Completion,
    DropReason,
    FinishReason,
    Group,
    Partial,
    Prompt,
    Request,
    RequestId,
    Reward,
    Rollout,
    Sampling,
    Segment,
    VersionSpan,
    WeightVersion,
)
from tests.journal.records import RUN

V0, V1, V2 = WeightVersion(0), WeightVersion(1), WeightVersion(2)


def prompt(group: int) -> Prompt:
    messages = ({"role": "user", "content": f"{group}?"},)
    return Prompt(group, group % 7, (group + 1, 2), f"prompt {group}", {"answer": str(group)}, messages)


def rollout(group: int, member: int, version: WeightVersion = V0, value: float | None = 1.0) -> Rollout:
    spans = (VersionSpan(version, version, 2),)
    done = Completion(group, member, (group, member), (-0.5, -0.25), spans, FinishReason.STOP, f"{group}.{member}")
    return Rollout(done, Reward(value, {"match": 1.0}))


def group_of(id_: int, version: WeightVersion = V0) -> Group:
    return Group(prompt(id_), (rollout(id_, 0, version), rollout(id_, 1, version, 0.0)))


def complete(group: Group) -> Iterable[Event | Instruction]:
    """It is admitted, written, judged."""
    yield Admit(group.prompt)
    for each in group.rollouts:
        yield Score(group.prompt, each.completion)
        yield Scored(group.id, each.completion.member, each.reward)
    yield Keep(group)


def wrote(group: int, member: int, ids: tuple[int, ...], version: WeightVersion = V0, attempt: int = 0) -> Wrote:
    return Wrote(Segment(RequestId(group, member, attempt), ids, (-0.5,) * len(ids), version, version))


def partial(member: int, ids: tuple[int, ...], *spans: tuple[WeightVersion, int]) -> Partial:
    covered = tuple(VersionSpan(version, version, tokens) for version, tokens in spans)
    return Partial(member, ids, (-0.5,) * len(ids), covered)


class Life:
    """One life of a run, as the journal is told of it."""

    def __init__(self, path: Path, begun: WeightVersion = V0, clock: Callable[[], float] = time.time) -> None:
        self.path, self.journal = path, Journal(path, RUN, clock=clock)
        self.journal.record_beginning(begun)

    def step(self, *entries: Event | Instruction) -> None:
        self.journal.record_step(entries)

    def train(self, step: int, *ids: int, life: int = 0) -> None:
        self.step(Train(step, tuple(group_of(id_) for id_ in ids)))
        self.step(BatchTrained(WeightVersion(step + 1, life)))

    def checkpoint(self, version: WeightVersion) -> None:
        self.journal.commit_checkpoint(version, f"checkpoints/{version.step}", 0, {"trained": version.step}).result(60)

    def kill(self) -> None:
        self.journal.flush()
        self.journal.abandon()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.sqlite"


def past(path: Path, *broken: str) -> Past:
    return read_past(path, lambda folder: folder not in broken)


def test_twenty_prompts_of_which_eight_are_trained_three_wait_and_four_are_on_their_way(path: Path) -> None:
    life = Life(path)
    for id_ in range(11):
        life.step(*complete(group_of(id_)))
    life.train(0, 0, 1, 2, 3)
    life.train(1, 4, 5, 6, 7)
    life.checkpoint(V2)
    for id_ in range(11, 15):
        life.step(Admit(prompt(id_)))
    life.step(wrote(11, 0, (7, 8)), wrote(11, 1, (5,)))
    life.step(wrote(11, 0, (9,), V2))
    life.step(Score(prompt(12), rollout(12, 1, V2).completion))
    life.step(Score(prompt(13), rollout(13, 0).completion), Scored(13, 0, Reward(1.0, {"match": 1.0})))
    life.kill()
    found = past(path)
    assert (found.version, found.checkpoint, found.counters, found.lives) == (V2, "checkpoints/2", {"trained": 2}, 1)
    assert found.done == frozenset(range(8))
    assert found.recovered.batches == () and found.recovered.groups == tuple(map(group_of, (8, 9, 10)))
    assert found.recovered.begun == (
        Begun(11, partials=(partial(0, (7, 8, 9), (V0, 2), (V2, 1)), partial(1, (5,), (V0, 1)))),
        Begun(12, completions=(rollout(12, 1, V2).completion,)),
        Begun(13, rollouts=(rollout(13, 0),)),
    )


def test_batches_after_the_checkpoint_are_taken_again_in_order(path: Path) -> None:
    life = Life(path)
    for id_ in (0, 2, 3, 5):
        life.step(*complete(group_of(id_)))
    life.train(0, 0)
    life.checkpoint(V1)
    life.train(1, 3)
    life.step(Train(2, (group_of(2),)))
    life.kill()
    found = past(path)
    assert found.version == V1 and found.done == {0, 2, 3}
    assert found.recovered.batches == ((group_of(3),), (group_of(2),))
    assert found.recovered.groups == (group_of(5),)
    assert past(path, "checkpoints/1").recovered.batches == ((group_of(0),), (group_of(3),), (group_of(2),))


def test_what_a_second_life_recorded_says_how_things_stand(path: Path) -> None:
    life = Life(path)
    for id_ in range(4):
        life.step(*complete(group_of(id_)))
    life.train(0, 0)
    life.checkpoint(V1)
    life.train(1, 1)
    life.step(Admit(prompt(4)), wrote(4, 0, (7, 8)))
    life.kill()
    life = Life(path, V1)
    life.step(Admit(prompt(1)), Keep(group_of(1), recovered=True))
    life.step(Admit(prompt(2)), Keep(group_of(2), recovered=True))
    life.step(Admit(prompt(3)))  # what was written of it is too old by now
    life.step(Admit(prompt(4)), Reuse(Begun(4, partials=(partial(0, (7, 8), (V0, 2)),))))
    life.step(wrote(4, 0, (9,), V1))
    life.kill()
    found = past(path)
    assert (found.version, found.lives, found.done) == (V1, 2, {0, 1})
    assert found.recovered.batches == ((group_of(1),),)
    assert found.recovered.groups == (group_of(2),)
    assert found.recovered.begun == (Begun(4, partials=(partial(0, (7, 8, 9), (V0, 2), (V1, 1)),)),)


def test_drops_are_for_good_unless_the_run_was_stopped(path: Path) -> None:
    life = Life(path)
    life.step(*complete(group_of(0)))
    life.step(Admit(prompt(1)), wrote(1, 0, (4,)))
    life.step(Admit(prompt(2)), wrote(2, 0, (4,)), Drop(2, 0, DropReason.FAILED), Drop(2, 1, DropReason.FAILED))
    life.step(Drop(2, None, DropReason.FAILED))
    life.step(Admit(prompt(3)), wrote(3, 0, (4,)), wrote(3, 1, (5,)), Drop(3, 0, DropReason.FAILED))  # tried again
    stopped = DropReason.STOPPED
    life.step(*(Drop(id_, member, stopped) for id_ in (0, 1) for member in (0, 1, None)))
    life.step(Drop(3, 1, stopped), Drop(3, None, stopped))
    life.journal.close()
    found = past(path)
    assert found.version == V0 and found.done == {2}
    assert found.recovered.groups == (group_of(0),)
    assert found.recovered.begun == (
        Begun(1, partials=(partial(0, (4,), (V0, 1)),)),
        Begun(3, partials=(partial(1, (5,), (V0, 1)),)),
    )


def test_tokens_that_a_member_does_not_go_on_from_are_not_found_again(path: Path) -> None:
    def asks(member: int, written: tuple[int, ...]) -> Generate:
        return Generate("a", Request(RequestId(0, member, 1), prompt(0).token_ids, Sampling(9), 1, written))

    life = Life(path)
    life.step(Admit(prompt(0)), wrote(0, 0, (1, 2, 3)), wrote(0, 1, (4, 5)))
    life.journal.flush()
    life.step(wrote(0, 0, (4,)), asks(0, (1, 2)), asks(1, ()))
    life.step(wrote(0, 0, (6,), V1, attempt=1))
    life.kill()
    assert past(path).recovered.begun == (Begun(0, partials=(partial(0, (1, 2, 6), (V0, 2), (V1, 1)),)),)


def test_a_member_that_was_dropped_from_a_complete_group_stays_so(path: Path) -> None:
    life = Life(path)
    life.step(Admit(prompt(0)), Score(prompt(0), rollout(0, 1).completion), Scored(0, 1, rollout(0, 1).reward))
    life.step(Drop(0, 0, DropReason.FAILED))
    life.kill()
    assert past(path).recovered.groups == (replace(group_of(0), rollouts=(rollout(0, 1),)),)


def test_a_member_that_is_scored_again_is_recorded_once(path: Path) -> None:
    """`Reuse` names it, and `Score` follows."""
    done = rollout(0, 1).completion
    life = Life(path)
    life.step(Admit(prompt(0)), Reuse(Begun(0, completions=(done,))), Score(prompt(0), done))
    life.kill()
    assert past(path).recovered.begun == (Begun(0, completions=(done,)),)


@pytest.mark.parametrize("each_s", [1.0, 0.0, -100.0], ids=["goes on", "stands still", "goes back"])
def test_groups_that_were_filtered_since_the_last_batch_are_counted(path: Path, each_s: float) -> None:
    """The bound on them goes on. What comes with the batch itself may count: that is a bound that is kept all the same."""
    life = Life(path, clock=itertools.count(1e9, each_s).__next__)
    for id_ in (0, 1, 2, 3):
        life.step(*complete(group_of(id_)))
    filtered = (*(Drop(0, member, DropReason.FILTERED) for member in (0, 1, None)),)
    life.step(*filtered)
    life.step(Train(0, (group_of(1),)))
    life.step(*(replace(drop, group=2) for drop in filtered))
    life.kill()
    assert past(path).recovered.filtered == 1


def test_batches_beyond_one_that_cannot_be_taken_again_are_groups(path: Path) -> None:
    life = Life(path)
    for id_ in range(3):
        life.step(*complete(group_of(id_)))
        life.train(id_, id_)
    life.kill()
    life = Life(path)
    life.step(Admit(prompt(1)), Keep(Group(prompt(1), ()), recovered=True))  # begun anew
    life.kill()
    found = past(path)
    assert found.done == {0} and found.recovered.batches == ((group_of(0),),)
    assert found.recovered.groups == (group_of(2),)


def test_a_prompt_is_in_one_batch_whatever_batches_earlier_lives_took(path: Path) -> None:
    life = Life(path)
    for id_ in range(3):
        life.step(*complete(group_of(id_)))
    life.train(0, 0)
    life.train(1, 1)
    life.kill()
    life = Life(path)
    for id_ in (2, 1):
        life.step(Admit(prompt(id_)), Keep(group_of(id_), recovered=True))
    life.train(0, 1, life=1)
    life.kill()
    found = past(path)
    assert found.recovered.batches == ((group_of(1),),) and found.done == {1}
    assert found.recovered.groups == (group_of(0), group_of(2))


def test_what_weights_were_trained_on_is_what_their_own_life_took(path: Path) -> None:
    """The checkpoint of a life that went on from elsewhere: its folder could not be read for a while."""
    life = Life(path)
    for id_ in range(3):
        life.step(*complete(group_of(id_)))
    life.train(0, 0)
    life.checkpoint(V1)
    life.train(1, 1)
    life.checkpoint(V2)
    life.kill()
    life = Life(path, V1)
    for id_ in (2, 1):
        life.step(Admit(prompt(id_)), Keep(group_of(id_), recovered=True))
    life.train(1, 2, life=1)
    life.kill()
    assert past(path, "checkpoints/2").done == {0, 2}
    found = past(path)
    assert found.version == V2 and found.done == {0, 1}
    assert found.recovered.groups == (group_of(2),)


def test_the_checkpoint_committed_last_is_the_newest_however_many_steps_it_has(path: Path) -> None:
    life = Life(path)
    for id_ in range(2):
        life.step(*complete(group_of(id_)))
        life.train(id_, id_)
    life.checkpoint(V2)
    life.kill()
    life = Life(path)
    life.step(Admit(prompt(0)), Keep(group_of(0), recovered=True))
    life.train(0, 0, life=1)
    life.checkpoint(WeightVersion(1, 1))
    life.kill()
    assert past(path).version == WeightVersion(1, 1)


def test_a_life_that_ended_before_it_began_anything_changes_nothing(path: Path) -> None:
    life = Life(path)
    life.step(*complete(group_of(0)))
    life.train(0, 0)
    life.checkpoint(V1)
    life.kill()
    before = past(path)
    for _ in range(2):
        Journal(path, RUN).abandon()
    assert past(path) == replace(before, lives=3)


def test_a_run_that_is_done_leaves_nothing(path: Path) -> None:
    life = Life(path)
    for id_ in range(2):
        life.step(*complete(group_of(id_)))
    life.train(0, 0)
    life.train(1, 1)
    life.checkpoint(V2)
    life.step(Finish("2 steps are done"))
    life.journal.close()
    found = past(path)
    assert (found.version, found.done, found.recovered) == (V2, {0, 1}, GroupsRecovered(()))


def test_a_checkpoint_without_the_batches_that_made_it_is_an_error(path: Path) -> None:
    life = Life(path)
    life.checkpoint(V1)
    life.kill()
    with pytest.raises(JournalError, match=r"journal\.sqlite: a checkpoint has version 1, and there is no batch of step 0"):
        past(path)


def test_views_over_all_lives_show_each_prompt_once_and_what_the_weights_were_trained_on(path: Path) -> None:
    life = Life(path)
    for id_ in range(4):
        life.step(*complete(group_of(id_)))
    life.train(0, 0)
    life.checkpoint(V1)
    life.train(1, 1)
    life.train(2, 2)
    life.step(Drop(3, None, DropReason.OVERSAMPLED))
    life.kill()
    sql = "SELECT group_id, incarnation, trained_step, dropped FROM lineage ORDER BY 1"
    with JournalReader(path) as reader:
        assert list(reader.query(sql)) == [(0, 0, 0, None), (1, 0, 1, None), (2, 0, 2, None), (3, 0, None, "oversampled")]
    life = Life(path, V1)
    for id_ in (1, 2):
        life.step(Admit(prompt(id_)), Keep(group_of(id_), recovered=True))
    life.train(1, 1, life=1)
    life.kill()
    with JournalReader(path) as reader:
        assert list(reader.query(sql)) == [(0, 0, 0, None), (1, 1, 1, None), (2, 1, None, None), (3, 0, None, "oversampled")]
        assert list(reader.query("SELECT step, incarnation FROM lineage_batches ORDER BY 1")) == [(0, 0), (1, 1)]
        sql = "SELECT group_id, member, reward, trained_step FROM lineage_rollouts WHERE group_id < 2 ORDER BY 1, 2"
        assert list(reader.query(sql)) == [(0, 0, 1.0, 0), (0, 1, 0.0, 0), (1, 0, 1.0, 1), (1, 1, 0.0, 1)]


def test_what_was_not_believed_is_not_used_again(tmp_path: Path) -> None:
    """A completion whose verdict had come, of a group that is complete without it and of one that is not; and some tokens."""
    life = Life(tmp_path / "journal.sqlite")
    for id_ in (0, 1):
        first, second = group_of(id_).rollouts
        life.step(Admit(prompt(id_)), Score(prompt(id_), first.completion), Scored(id_, 0, first.reward))
        life.step(Drop(id_, 0, DropReason.DISTRUSTED, "engine a is not believed"))
        if id_ == 0:
            life.step(Score(prompt(id_), second.completion), Scored(id_, 1, second.reward))
    life.step(wrote(1, 1, (7, 8, 9)))
    life.kill()
    assert read_past(life.path, lambda folder: True).recovered == GroupsRecovered(
        (replace(group_of(0), rollouts=group_of(0).rollouts[1:]),), begun=(Begun(1, partials=(partial(1, (7, 8, 9), (V0, 3)),)),)
    )
    again = Life(tmp_path / "other.sqlite")
    again.step(Admit(prompt(1)), wrote(1, 1, (7, 8, 9)))
    again.journal.flush()
    again.step(Unwrite(1, 1, 1))
    again.kill()
    assert read_past(again.path, lambda folder: True).recovered.begun == (Begun(1, partials=(partial(1, (7,), (V0, 1)),)),)
