"""The shared folder by itself: whole files only, one writer a side, one config."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rollyard.config import Config
from rollyard.errors import ConfigError, ExchangeError
from rollyard.events import Finish
from rollyard.exchange import files
from rollyard.exchange.agreed import agree, agreed
from rollyard.exchange.folder import Folder, Job
from rollyard.exchange.generation import Generation
from rollyard.exchange.waiting import Waiting, coarse
from rollyard.journal.folder import check_folder
from rollyard.layers import resolve
from rollyard.model.architecture import Architecture
from rollyard.types import (
    Completion,
    DropReason,
    FinishReason,
    Group,
    Prompt,
    Reward,
    Rollout,
    TrainStats,
    Turn,
    VersionSpan,
    WeightVersion,
)
from rollyard.warmup import architecture
from tests.tiny import tiny_folder

SPANS = (VersionSpan(WeightVersion(2), WeightVersion(1), 2), VersionSpan(WeightVersion(3), WeightVersion(1), 1))
ODD = 0.1 + 0.2  # a number with all its digits


def group(id_: int = 7) -> Group:
    """With whatever is hard to write down: half a character, no number, no verdict."""
    done = Completion(id_, 0, (5, 6, 0), (-ODD, -1e-300, 0.0), SPANS, FinishReason.STOP, "a\ud800\nb")
    turns = (
        Turn((3, 4), 2, FinishReason.STOP),
        Turn((3, 4, 5, 6, 9), 1, FinishReason.LENGTH),
        Turn((8,), 0, FinishReason.CONTEXT),
    )
    mute = Completion(id_, 1, (5, 6, 0), (-1.0, -2.0, -3.0), SPANS, FinishReason.LENGTH, "é", turns)
    prompt = Prompt(id_, 3, (1, 2), "p\udcff", {"answer": "x", "parts": [1, {"a": None}]})
    return Group(prompt, (Rollout(done, Reward(ODD, {"a": float("inf")})), Rollout(mute, Reward(None, problem="no"))))


def test_what_is_written_comes_back_to_the_last_bit(folder: Folder) -> None:
    folder.write_group(group())
    assert folder.group(7) == group() and folder.groups() == {7}
    folder.write_batch(3, (9, 7))
    assert folder.batch(3) == (9, 7) and folder.batch(4) is None and folder.batches() == {3: (9, 7)}
    folder.write_drop(8, DropReason.FAILED, "no verdict")
    assert folder.dropped() == {8}
    stats = TrainStats(4, ODD, float("inf"), 1e-6, 9, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0)
    folder.draft(4).mkdir()
    folder.commit_weights(4, stats)
    assert folder.newest() == 4 and folder.stats(4) == stats


@pytest.mark.parametrize("broken", ["fsync", "replace"])
def test_a_torn_write_leaves_what_was_there(folder: Folder, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    folder.write_batch(3, (1, 2))

    def fails(*_: object) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os if broken == "fsync" else Path, broken, fails)
        with pytest.raises(ExchangeError, match=r"000003.json cannot be written: no space"):
            folder.write_batch(3, (5, 6))
    assert folder.batch(3) == (1, 2) and folder.batches() == {3: (1, 2)}
    assert not list((folder.path / "batches").glob(".*"))
    (folder.path / "batches" / ".000003.json.draft").write_text("{")  # of a job that was killed
    folder.clear(Job.GENERATION)
    assert not list((folder.path / "batches").glob(".*"))


def test_what_is_not_whole_is_not_there(folder: Folder) -> None:
    folder.draft(1).mkdir()
    (folder.path / "weights" / ".000000.old").mkdir()
    (folder.path / "groups" / ".7.json.draft").write_text("{")
    assert folder.newest() is None and folder.groups() == set()
    folder.clear(Job.TRAINING)
    assert not list((folder.path / "weights").iterdir())
    assert (folder.path / "groups" / ".7.json.draft").exists(), "that is for the other job to delete"


def test_only_what_nobody_needs_is_deleted(folder: Folder) -> None:
    """Versions 0 to 4, of which the newest two stay and 1, which is on offer; batches up to 2 are in both."""
    for step in range(5):
        folder.draft(step).mkdir()
        folder.commit_weights(step, None)
        folder.write_batch(step, (2 * step, 2 * step + 1))
    for id_ in range(12):
        folder.write_group(group(id_))
    folder.write_offered(1)
    folder.prune(2, begun=0)
    assert folder.versions() == [0, 1, 3, 4] and folder.groups() == set(range(6, 12))
    for id_ in (0, 4):
        folder.write_group(group(id_))
    folder.prune(2, begun=0, trained=(2,))
    assert folder.groups() == {0, *range(6, 12)}
    folder.prune(1, begun=4)
    assert folder.versions() == [1, 4]
    assert folder.groups() == {8, 9, 10, 11} and len(folder.batches()) == 5


def test_a_second_job_of_a_kind_is_refused(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "GRACE_S", 0.05)
    folder.seats[Job.TRAINING].take(Job.TRAINING)
    with pytest.raises(ConfigError, match=rf"a training job holds it already: process {os.getpid()} on "):
        Folder(folder.path).seats[Job.TRAINING].take(Job.TRAINING)
    Folder(folder.path).seats[Job.GENERATION].take(Job.GENERATION)
    folder.seats[Job.TRAINING].leave("lunch")
    assert folder.seats[Job.TRAINING].look() == (False, "ended: lunch")
    Folder(folder.path).seats[Job.TRAINING].take(Job.TRAINING)


def test_a_killed_job_leaves_its_seat(folder: Folder) -> None:
    code = (
        "import sys, time; from pathlib import Path; from rollyard.exchange.files import Seat;"
        "Seat(Path(sys.argv[1])).take('training'); print('there', flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", code, str(folder.path / "training.lock")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "there\n"
        held, said = folder.seats[Job.TRAINING].look()
        assert held and said.startswith(f"process {other.pid} on ")
        other.send_signal(signal.SIGKILL)
        other.wait()
    assert not folder.seats[Job.TRAINING].look()[0]
    folder.seats[Job.TRAINING].take(Job.TRAINING)


def config(**changes: object) -> Config:
    return resolve(preset="tiny", environment={}, overrides={name.replace("__", "."): v for name, v in changes.items()}).config


def own(config_: Config, job: Job) -> dict[str, object]:
    return agreed(config_, architecture(config_), job)


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"run__seed": 5}, "run.seed"),
        ({"rollout__temperature": 0.5}, "rollout.temperature"),
        ({"rollout__groups_per_step": 3}, "rollout.groups_per_step"),
        ({"rollout__stop": "a,b"}, "rollout.stop"),
        ({"advantage__overlong": "mask"}, "advantage.overlong"),
        ({"place__placement": "async", "rollout__max_staleness": 2}, "rollout.max_staleness"),
        ({"place__placement": "separate", "engine__kind": "vllm"}, "engine.kind (our own)"),
        ({"warmup__width": 96}, "warmup.width"),
        ({"warmup__steps": 99}, "warmup.steps"),
        ({"model__dtype": "bfloat16"}, "model.dtype"),
        ({"prompts__task": "reverse"}, "prompts.task"),
    ],
)
@pytest.mark.parametrize("job", Job)
def test_a_folder_of_another_config_is_refused(folder: Folder, changes: dict[str, object], where: str, job: Job) -> None:
    agree(folder, Job.GENERATION, own(config(), Job.GENERATION))
    agree(folder, job, own(config(), job))
    with pytest.raises(ConfigError) as caught:
        agree(folder, job, own(config(**changes), job))
    assert caught.value.where == where and "here and" in caught.value.problem


def test_models_are_compared_by_what_they_are(folder: Folder, tmp_path: Path) -> None:
    def of(name: str, **shape: int) -> dict[str, object]:
        path = tiny_folder(tmp_path / name, **shape)
        return agreed(config(model__path=str(path)), Architecture.from_folder(path), Job.GENERATION)

    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir(), (tmp_path / "c").mkdir()
    agree(folder, Job.GENERATION, of("a"))
    agree(folder, Job.GENERATION, of("b"))
    with pytest.raises(ConfigError, match=r"model.path \(layers\): 3 here and 2 in"):
        agree(folder, Job.GENERATION, of("c", layers=3))
    with pytest.raises(ConfigError, match=r"model.path: '' here and 'a folder' in"):
        agree(folder, Job.TRAINING, own(config(), Job.TRAINING))


def test_what_is_each_jobs_own_may_differ(folder: Folder) -> None:
    agree(folder, Job.GENERATION, own(config(prompts__held_out=3), Job.GENERATION))
    agree(folder, Job.TRAINING, own(config(train__lr=0.5, run__steps=9), Job.TRAINING))
    with pytest.raises(ConfigError, match=r"prompts.held_out: 4 here and 3 in"):
        agree(folder, Job.GENERATION, own(config(prompts__held_out=4), Job.GENERATION))


async def test_a_wait_says_for_whom_and_ends(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollyard.exchange.waiting.TELL_S", 0.0)
    waiting = Waiting(folder, Job.GENERATION, 0.2)
    told = []

    def look() -> None:
        told.append(waiting.text)

    with pytest.raises(ExchangeError, match=r"waiting for the training job: version 3, 0.2 s are over \(it is not running\)"):
        await waiting.until(look, "version 3")
    assert "waiting for the training job: version 3, since 0 s (it is not running)" in told and waiting.text == ""
    folder.seats[Job.TRAINING].take(Job.TRAINING)
    with pytest.raises(ExchangeError, match=r"version 3, 0.2 s are over$"):
        await waiting.until(look, "version 3")


def test_times_are_coarse() -> None:
    assert [coarse(seconds) for seconds in (4.9, 44, 61, 599, 600, 7300, 90_000)] == [
        "0 s", "40 s", "60 s", "590 s", "10 min", "121 min", "25 h",
    ]  # fmt: skip


async def test_a_training_job_that_ended_sooner_is_not_waited_for(folder: Folder) -> None:
    own = {"run.seed": 0}
    agree(folder, Job.TRAINING, own)
    folder.draft(0).mkdir()
    folder.commit_weights(0, None)
    folder.write_group(group(1))
    generation = Generation(folder.path, limit_s=60)
    generation.open(own)
    assert await generation.begin(steps=2) == WeightVersion(0)
    folder.write_done(0, "all steps are done")
    with pytest.raises(ExchangeError, match=r"has ended with version 0: its run\.steps is less"):
        await asyncio.wait_for(generation.learn(0, [group(1)]), 5)
    await generation.close(Finish("broken", failed=True))


@pytest.mark.parametrize(("out", "shared"), [("run", "run"), ("run", "run/shared"), ("both/run", "both")])
def test_a_run_that_may_replace_what_is_shared_is_refused(tmp_path: Path, out: str, shared: str) -> None:
    config_ = config(
        **{"place.placement": "separate", "run.out": str(tmp_path / out), "exchange.folder": f"{tmp_path}/./{shared}"}
    )
    with pytest.raises(ConfigError, match="lie in each other"):
        check_folder(config_)
