"""Runs that are killed, or stopped, go on. Whole runs around doubles; tests/test_killed.py has real processes."""

from __future__ import annotations

import asyncio
import fnmatch
import json
import re
import shutil
import sqlite3
from concurrent.futures import Future
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

import rollyard
from rollyard import cli
from rollyard.bench import virtual
from rollyard.checkpoints import Checkpoints
from rollyard.config import Config
from rollyard.durable import check_whole, write_folder
from rollyard.errors import ConfigError, JournalError
from rollyard.inspect.check import check
from rollyard.journal.folder import RunFolder, take_folder
from rollyard.layers import options
from rollyard.resume import NOTHING, OPEN, check_files, check_given, config_of, remember
from rollyard.types import WeightVersion
from tests.resuming import Death, Life, live, work
from tests.rewards import share_of_a
from tests.traces import read_strictly

pytestmark = pytest.mark.filterwarnings("ignore:closing the run. Killed")

WRITES = ("life", "flush", "checkpoint folder", "checkpoint", "checkpoint pruned")


def rows_of(path: Path) -> list[tuple[int, int]]:
    """Steps in the metrics, and the life that each was done in."""
    rows = [json.loads(line) for line in (path / "run" / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row["incarnation"]) for row in rows]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Life:
    """The run that nothing happens to."""
    return live(tmp_path_factory.mktemp("whole"), work())


@pytest.fixture
def stopped(tmp_path) -> Path:
    """The folder of a run that was asked to stop after three of five steps."""
    life = live(tmp_path, work(), stop_after=3)
    assert life.report is not None and life.report.finished.cause == "enough"
    return tmp_path / "run"


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("write", WRITES)
def test_killed_between_any_two_writes_it_ends_as_if_it_never_was(tmp_path, whole, write, when):
    death = Death(f"{when} {write}", 0 if write == "life" else 2)
    lives = [live(tmp_path, work(), placement="async" if when == "after" else "separate", death=death)]
    while lives[-1].report is None or lives[-1].report.finished.cause != "all steps are done":
        lives.append(live(tmp_path, work(), death=Death(f"{when} {write}", 1) if len(lives) < 3 else None))
        assert len(lives) < 6
    last, report, plain = lives[-1], lives[-1].report, whole.report
    assert last.weights == whole.weights and last.known == whole.known
    assert [step for step, _ in rows_of(tmp_path)] == [1, 2, 3, 4, 5]
    assert report is not None and plain is not None and report.steps == plain.steps
    assert (report.reward, report.staleness) == (plain.reward, plain.staleness)
    assert (report.prompts, report.members, report.tokens.trained) == (plain.prompts, plain.members, plain.tokens.trained)
    assert report.lives.count == len(report.lives.begun) <= len(lives) and report.lives.begun[-1] == last.past.version.step


def test_twenty_prompts_eight_trained_three_waiting_four_under_way(tmp_path):
    """The other twelve once each, from what they had; nobody is asked for what is there."""
    of = work(steps=10, groups=4, staleness=3, slots=8, cap=200)
    lengths = {group: 200 if 11 <= group < 15 else 4 for group in range(20)}  # tokens

    def once(**named) -> Life:
        return live(tmp_path, of, prompts=20, length=lambda group, member: lengths[group], **named)

    first = once(placement="async", until_s=5.0)
    done = {id_ for batch in first.known for id_ in batch}
    second = once()
    left = second.past.recovered
    assert len(done) == 8 and len(left.groups) == 3 and len(left.begun) == 4, (done, len(left.groups), len(left.begun))
    assert second.past.done == done and not left.batches
    assert sorted(id_ for batch in second.known for id_ in batch) == list(range(20))
    asked = {request.id[:2]: request for request in second.asked}
    assert len(asked) == len(second.asked), "nobody is asked for the same twice"
    assert not {group.id for group in left.groups} & {group for group, _ in asked}
    for begun in left.begun:
        for part in begun.partials:
            assert asked[begun.group, part.member].written_ids == part.token_ids
        assert not {(begun.group, each.completion.member) for each in begun.rollouts} & asked.keys()
    assert read_strictly(tmp_path / "run" / "trace.json").trained == {
        step.step: {group.id for group in step.groups} for step in second.steps
    }
    report = second.report
    assert report is not None and (report.prompts.admitted, report.prompts.trained) == (20, 20)
    assert (report.lives.groups, report.lives.repeated, report.lives.lost) == (3, 0, 0)
    assert report.tokens.trained == report.tokens.generated == 2 * sum(lengths.values())


def test_what_was_stopped_goes_on_and_what_is_finished_says_so(stopped, whole, capsys):
    life = live(stopped.parent, work(), watch__view="quiet")
    assert life.past.version.step == 3 and life.weights == whole.weights
    assert rows_of(stopped.parent) == [(1, 0), (2, 0), (3, 0), (4, 1), (5, 1)]
    again = live(stopped.parent, work())
    assert again.finished == f"{stopped} has all its 5 steps; --run.steps with a larger number makes it go on"
    assert not again.steps and again.trainer is None
    assert cli.main(["resume", str(stopped), "--view", "plain"]) == 0
    assert capsys.readouterr().out.split() == again.finished.split()
    more = live(stopped.parent, work(), run__steps=6)
    assert [step.step for step in more.steps] == [6] and more.report is not None and more.report.steps == 6
    assert live(stopped.parent, work()).finished, "it has six by now"
    with pytest.raises(ConfigError, match="the run has version 6 already"):
        live(stopped.parent, work(), run__steps=5)


def test_prompts_that_are_used_up_end_a_run_for_good(tmp_path):
    assert live(tmp_path, work(), prompts=5).known == [[0, 1], [2, 3], [4]]
    assert live(tmp_path, work(), prompts=5).finished == f"{tmp_path / 'run'} has used up its prompts, in 3 steps"


def test_a_life_that_ends_in_its_start_leaves_all_as_it_was(stopped, tmp_path):
    def content() -> dict[str, bytes]:
        return {str(path): path.read_bytes() for path in stopped.rglob("*") if path.is_file() and "journal" not in path.name}

    before = content()
    (stopped / "checkpoints" / ".step-000004.draft").mkdir()

    def broken(past):
        raise RuntimeError("no engine today")

    run = rollyard.Run.resume(stopped, {"checkpoint.keep": 7}, stations=broken)
    with pytest.raises(RuntimeError, match="no engine today"):
        virtual.run(anext(run.steps()))
    assert content() == before
    life = live(tmp_path, work())
    assert life.report is not None and life.report.lives.begun == (0, 3)


def test_the_newest_whole_checkpoint_is_gone_on_from(tmp_path, whole):
    live(tmp_path, work(), stop_after=3)
    newest = tmp_path / "run" / "checkpoints" / "step-000003"
    (newest / "digest.json").write_text("{")
    with pytest.warns(RuntimeWarning, match=r"step-000003 is damaged: .*; the run goes on from version 2 instead"):
        life = live(tmp_path, work())
    assert life.past.version.step == 2 and life.weights == whole.weights
    assert [len(batch) for batch in life.past.recovered.batches] == [2], "its batch was there"
    assert sorted(path.name for path in newest.parent.iterdir()) == ["step-000004-life-1", "step-000005-life-1"]


def test_a_checkpoint_that_is_gone_is_told_and_without_any_the_run_is_not_begun_anew(tmp_path, whole):
    live(tmp_path, work(), stop_after=3)
    above = tmp_path / "run" / "checkpoints"
    shutil.rmtree(above / "step-000003")
    with pytest.warns(RuntimeWarning, match=r"step-000003 is not there any more; the run goes on from version 2 instead"):
        live(tmp_path, work(), death=Death("before checkpoint folder"))
    life = live(tmp_path, work(), stop_after=1)  # that it is gone has been told: the life before began without it
    assert life.past.version.step == 2
    before = contents(tmp_path / "run")
    for remade in (True, False):
        shutil.rmtree(above)
        if remade:
            above.mkdir()
        with pytest.raises(ConfigError, match=r"step-000003-life-2 is not there any more, and of.*put one back"):
            live(tmp_path, work())
    assert {name for name in before if not name.startswith("checkpoints")} == set(contents(tmp_path / "run"))


def test_without_a_folder_for_checkpoints_a_run_that_named_none_goes_on(tmp_path, whole):
    live(tmp_path, work(), death=Death("before checkpoint folder"))
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    assert live(tmp_path, work()).weights == whole.weights


def cut_off(folder: Path, step: int, end: int) -> None:
    """The journal as it was when the checkpoint of `step` had been named, and batches up to `end` had been trained."""
    with closing(sqlite3.connect(folder / "journal.sqlite")) as connection, connection:
        for table, column in (("checkpoints", "version_step"), ("batch_groups", "step + 1"), ("batches", "step + 1")):
            connection.execute(f"DELETE FROM {table} WHERE {column} > {step if table == 'checkpoints' else end}")
        connection.execute("UPDATE incarnations SET ended_at = NULL, cause = NULL, failed = NULL")


def findings(folder: Path) -> dict[str, str]:
    return {found.what: found.text for found in check(RunFolder(folder)) if not found.sound}


def test_a_journal_that_lost_its_end_is_told_and_checkpoints_that_it_does_not_name_stay(tmp_path, whole):
    live(tmp_path, work(), stop_after=2)
    live(tmp_path, work(), checkpoint__keep=9)
    run = tmp_path / "run"
    assert not findings(run)
    cut_off(run, 2, 3)
    lost = (
        "it has lost its end: it knows 3 steps, and beside it there are step-000004-life-1, step-000005-life-1, metrics of step 5"
    )
    assert findings(run)["journal.sqlite"] == lost
    with pytest.warns(RuntimeWarning, match=f"{lost}; a run goes on from what its journal knows"):
        life = live(tmp_path, work(), stop_after=1)
    assert life.past.version.step == 2
    above = run / "checkpoints"
    kept = sorted(path.name.split("-", 2)[2] for path in above.glob("unnamed-*"))
    assert kept == ["step-000004-life-1", "step-000005-life-1"] and all(check_whole(path) is None for path in above.iterdir())
    life = live(tmp_path, work(), checkpoint__keep=1)  # nothing is told any more, and the newest that counts is the run's own
    assert life.past.version.step == 3 and life.weights == whole.weights
    assert [path.name for path in RunFolder(run).checkpoints()] == ["step-000005-life-3"]


def test_one_newest_checkpoint_without_a_name_is_what_a_kill_leaves(tmp_path):
    live(tmp_path, work(), death=Death("before checkpoint row", 2))
    assert (tmp_path / "run" / "checkpoints" / "step-000005").is_dir() and not findings(tmp_path / "run")
    live(tmp_path, work(), stop_after=1)
    assert not list((tmp_path / "run" / "checkpoints").glob("*step-000005"))


@pytest.mark.parametrize("rows", [(1, 3), ()])
def test_steps_without_metrics_are_told(stopped, rows):
    metrics = stopped / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(lines[step - 1] for step in rows))
    if not rows:
        metrics.unlink()
    absent = "2" if rows else "1-3"
    assert findings(stopped)["metrics.jsonl"] == f"it has no rows of steps {absent}"
    with pytest.warns(RuntimeWarning, match=f"has no rows of steps {absent}: they are missing"):
        live(stopped.parent, work(), stop_after=1)
    assert rows_of(stopped.parent)[-1] == (4, 1)


def test_a_config_that_was_edited_by_hand_is_held_against_the_journal(stopped, whole):
    folder, config = RunFolder(stopped), config_of(stopped)
    for name, option, new in (("train", "lr", 0.5), ("checkpoint", "keep", 1)):
        section = getattr(config, name)
        folder.write_config(config.model_copy(update={name: section.model_copy(update={option: new})}))
        if name == "train":
            told = r"train\.lr: the run in .* has 1e-06: with 0\.5 it would be another run"
            assert re.match(told, findings(stopped)["config.toml"])
            with pytest.raises(ConfigError, match=told):
                live(stopped.parent, work())
    assert not findings(stopped) and live(stopped.parent, work()).weights == whole.weights


@pytest.mark.parametrize("content", [None, b"", b"no database" * 1000])
def test_without_a_journal_a_checkpoint_is_still_worth_something(stopped, content):
    for path in stopped.glob("journal.sqlite*"):
        path.unlink()
    if content is not None:
        (stopped / "journal.sqlite").write_bytes(content)
    with pytest.raises(JournalError, match=r"put the journal back.*Hugging Face folder: --model\.path .*/step-000003\)"):
        live(stopped.parent, work())


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("own", [False, True])
def test_a_resume_that_is_refused_changes_nothing(stopped, tmp_path, monkeypatch, own):
    """Not in the journal either: the next one would think that another life had been. `own`: the run makes its model itself."""
    folder, config = RunFolder(stopped), config_of(stopped)
    model = Path(config.model.path)
    if own:
        monkeypatch.setattr("rollyard.loop.policy_folder", lambda config, cache: model)
        folder.write_config(config.model_copy(update={"model": config.model.model_copy(update={"path": ""})}))
        with closing(sqlite3.connect(folder.journal)) as connection, connection:
            connection.execute("UPDATE incarnations SET config = json_set(config, '$.model.path', '')")
    remember(folder, config, model, ("reward",))
    (stopped / "checkpoints" / ".step-000004.draft").mkdir()
    before = contents(stopped)
    with pytest.raises(ConfigError, match="the run was given its reward in Python"):
        list(rollyard.Run.resume(stopped))
    (model / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="not the model that the run began with"):
        list(rollyard.Run.resume(stopped, reward=share_of_a))
    assert contents(stopped) == before and (stopped / "checkpoints" / ".step-000004.draft").is_dir()


def test_a_life_that_ended_in_its_start_is_not_asked_whether_the_run_is_finished(tmp_path):
    live(tmp_path, work())

    def broken(past):
        raise RuntimeError("no engine today")

    run = rollyard.Run.resume(tmp_path / "run", {"run.steps": 6}, stations=broken)
    with pytest.raises(RuntimeError, match="no engine today"):
        virtual.run(anext(run.steps()))
    assert "has all its 5 steps" in live(tmp_path, work()).finished


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"train.lr": "0.5"}, r"train\.lr: the run in .* has 1e-06: with 0\.5 it would be another run"),
        ({"run.seed": "1"}, r"run\.seed"),
        ({"run.out": "elsewhere"}, r"run\.out"),
        ({"rollout.max_staleness": "1", "place.placement": "async"}, r"rollout\.max_staleness"),
        ({"model.path": ""}, r"model\.path"),
        ({"run.stepz": "1"}, "there is no option"),
        ({"checkpoint.keep": "0"}, r"checkpoint\.keep \(command line\)"),
        ({"weights.what": "lora"}, r"weights\.what"),
    ],
)
def test_options_that_would_make_another_run_are_refused(stopped, options, told):
    before = (stopped / "config.toml").read_bytes()
    with pytest.raises(ConfigError, match=told):
        config_of(stopped, options)
    assert (stopped / "config.toml").read_bytes() == before


def test_every_option_that_may_change_is_one():
    names = [option.name for option in options()]
    assert [each for each in OPEN if not fnmatch.filter(names, each)] == []


def test_options_of_a_later_life_stay_the_runs_and_the_environment_is_not_asked(stopped, monkeypatch):
    monkeypatch.setenv("ROLLYARD_TRAIN__LR", "0.5")
    live(stopped.parent, work(), checkpoint__keep=1, engine__slots=7, train__lr=1e-6)
    config = config_of(stopped)
    assert (config.checkpoint.keep, config.engine.slots, config.train.lr) == (1, 7, 1e-6)
    assert len(list((stopped / "checkpoints").iterdir())) == 1


def test_a_folder_that_cannot_be_gone_on_with_is_told_in_one_error(stopped, tmp_path, capsys):
    with pytest.raises(ConfigError, match="there is no such folder"):
        rollyard.Run.resume(tmp_path / "nothing")
    with pytest.raises(ConfigError, match=r"it is no run's folder \(no config\.toml in it\)"):
        rollyard.Run.resume(tmp_path)
    held = take_folder(stopped)
    with pytest.raises(ConfigError, match="a run is going on in"):
        live(tmp_path, work())
    held.release()
    (stopped / "journal.sqlite").write_bytes(b"no database" * 1000)
    with pytest.raises(JournalError, match=r"journal\.sqlite"):
        live(tmp_path, work())
    take_folder(stopped).release()
    assert cli.main(["resume", str(tmp_path / "nothing")]) == 2
    assert "there is no such folder" in " ".join(capsys.readouterr().err.split())


def test_a_model_or_prompts_that_changed_are_found(tmp_path):
    folder, model, prompts = RunFolder(tmp_path), tmp_path / "model", tmp_path / "prompts.jsonl"
    config = Config.model_validate({"prompts": {"path": str(prompts)}})
    model.mkdir()
    prompts.write_text('{"prompt": "a"}\n')
    (model / "config.json").write_text("{}")
    with (model / "model.safetensors").open("wb") as file:
        file.truncate(2**25)
    remember(folder, config, model, ("reward",))
    check_files(folder, config, model)
    with (model / "model.safetensors").open("r+b") as file:
        file.seek(2**25 - 5)
        file.write(b"x")
    with pytest.raises(ConfigError, match=r"not the model that the run began with: of model\.safetensors something"):
        check_files(folder, config, model)
    prompts.write_text('{"prompt": "b"}\n')
    with pytest.raises(ConfigError, match=r"prompts\.path: .* is not what the run began with"):
        check_files(folder, config, model)
    check_given(folder, ("reward",))
    with pytest.raises(ConfigError, match=r"the run was given its reward in Python \(resume it there"):
        check_given(folder, ())
    with pytest.raises(ConfigError, match="the run was not given its environment directly"):
        check_given(folder, ("environment", "reward"))
    folder.began.unlink()
    with pytest.warns(RuntimeWarning, match=r"began\.json is not there any more"):
        check_given(folder, (), replace(NOTHING, version=WeightVersion(1)))
    check_given(folder, ())
    folder.began.write_text("{")
    with pytest.raises(ConfigError, match=r"does not say what the run began with: Invalid JSON: [^\n]*\(restore"):
        check_given(folder, ())


class Saves:
    """A learner that is given up once it has written its first checkpoint; and the books in which the next one is named."""

    def __init__(self) -> None:
        self.given_up, self.named, self.row = False, [], Future[None]()
        self.row.set_result(None)
        self.asked = asyncio.Event()

    async def save(self, folder: Path) -> Path:
        write_folder(folder, lambda draft: (draft / "weights.json").write_text("{}"))
        if not self.given_up:
            self.given_up = True
            raise asyncio.CancelledError
        return folder

    def checkpoint(self, version, folder, cursor, counters) -> Future[None]:
        self.named.append((version, folder, cursor, counters))
        self.asked.set()
        return self.row


async def test_a_checkpoint_that_was_given_up_is_not_in_the_way_of_the_next(tmp_path):
    folder, both = RunFolder(tmp_path), Saves()
    (tmp_path / "checkpoints" / "step-000004-life-1").mkdir(parents=True)  # was renamed, and never named
    checkpoints = Checkpoints(folder, both, keep=2, life=1)
    with pytest.raises(asyncio.CancelledError):
        await checkpoints.write(both, WeightVersion(4, 1), 8, {})
    await checkpoints.write(both, WeightVersion(4, 1), 8, {})
    assert both.named == [(WeightVersion(4, 1), "checkpoints/step-000004-life-1", 8, {})]
    check_whole(folder.checkpoint(4, 1))
    folder.clear()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000004-life-1"]


async def test_a_row_that_is_being_written_is_written_also_when_nobody_waits_for_it(tmp_path):
    folder, both = RunFolder(tmp_path), Saves()
    both.given_up, both.row = True, Future[None]()
    checkpoints = Checkpoints(folder, both, keep=2, life=1)
    writing = asyncio.ensure_future(checkpoints.write(both, WeightVersion(4, 1), 8, {}))
    await both.asked.wait()
    writing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writing
    written = folder.checkpoint(4, 1).stat().st_ino
    again = asyncio.ensure_future(checkpoints.write(both, WeightVersion(4, 1), 8, {}))
    await asyncio.sleep(0.01)
    assert not again.done()
    both.row.set_result(None)
    await again
    assert len(both.named) == 1 and folder.checkpoint(4, 1).stat().st_ino == written, "what has a name is left as it is"
