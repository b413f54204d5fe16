"""Either job killed at any moment, again and again: nothing is lost, nothing is taken twice."""

from __future__ import annotations

import asyncio
import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import rollyard
from rollyard.bench import virtual
from rollyard.events import Rollover
from rollyard.exchange.agreed import agree
from rollyard.exchange.folder import Folder, Job
from rollyard.exchange.waiting import Waiting
from rollyard.journal.reader import JournalReader
from rollyard.watch.report import Finished
from tests.exchange.lives import AGREED, Reaper, config, generate, stations, train

STEPS = 5

lives = st.lists(st.one_of(st.tuples(st.integers(0, 40), st.none()), st.tuples(st.none(), st.floats(0, 2.0))), max_size=4)


@pytest.mark.filterwarnings("ignore:closing the run. Killed")
@settings(max_examples=25, deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(
    staleness=st.integers(0, 2),
    rollover=st.sampled_from([Rollover.DRAIN, Rollover.KEEP]),
    generation=lives,
    training=lives,
)
def test_nothing_is_lost_and_nothing_is_taken_twice(staleness, rollover, generation, training):
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as scratch:
        virtual.run(both(Path(scratch), staleness, rollover, generation, training, Reaper(patch)))


async def both(scratch, staleness, rollover, generation, training, reaper) -> None:
    config_, again = config(scratch, STEPS, staleness, rollover), []

    async def generations() -> None:
        for moments, seconds in [*generation, (None, None)]:
            asked, recovered = set[int](), set[int]()
            ended = await reaper.live("generation", generate(config_, asked, recovered), moments, seconds)
            again.extend(asked & recovered)
        assert ended

    async def trainings() -> None:
        for moments, seconds in [*training, (None, None)]:
            ended = await reaper.live("training", train(config_, reaper), moments, seconds)
        assert ended

    async with asyncio.timeout(300):
        await asyncio.gather(generations(), trainings())
    shared = Folder(scratch / "shared")
    lineage = json.loads((shared.weights(STEPS) / "lineage.json").read_text())
    batches = shared.batches()
    assert lineage == [list(batches[step]) for step in range(STEPS)], "each batch once, in order"
    trained = [id_ for ids in lineage for id_ in ids]
    assert len(trained) == len(set(trained)) == 2 * STEPS
    assert not again, "what was finished was written again"
    if staleness == 0:
        assert sorted(trained) == list(range(2 * STEPS)), "no prompt was lost"
    assert shared.groups().isdisjoint(trained[: 2 * (STEPS - 1)])


async def test_a_stop_does_not_wait_for_the_other_job(tmp_path: Path) -> None:
    """The batch stays, to be trained without this job; nothing says that the run is done."""
    config_, shared = config(tmp_path, 4, 0, Rollover.DRAIN), Folder(tmp_path / "shared")
    shared.make()
    agree(shared, Job.TRAINING, AGREED)
    shared.draft(0).mkdir()
    shared.commit_weights(0, None)
    run = rollyard.Run(config_, stations=lambda past: stations(config_, set(), set()))
    steps = run.steps()
    going = asyncio.ensure_future(anext(steps, None))
    await Waiting(shared, Job.GENERATION, 10).until(lambda: shared.batch(0), "a batch")
    run.stop("enough")
    assert await asyncio.wait_for(going, 10) is None
    await steps.aclose()
    assert run.report is not None and run.report.finished == Finished("enough", failed=False)
    assert shared.done() is None and shared.batch(0) is not None and not shared.seats[Job.GENERATION].look()[0]
    again = rollyard.Run.resume(tmp_path / "run", stations=lambda past: stations(config_, set(), set()))
    going = asyncio.ensure_future(anext(again.steps(), None))
    await asyncio.sleep(0.5)  # it waits for the version that its batch will make, as when it is started again
    again.stop("enough")
    assert await asyncio.wait_for(going, 10) is None and again.report is not None
    with JournalReader(tmp_path / "run" / "journal.sqlite") as journal:
        assert [life.cause for life in journal.incarnations()] == ["enough", "enough"]
