"""A folder that somebody spoilt: one line says which file, and what is wrong with it; what is not ours is left alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rollyard.config import Config
from rollyard.durable import WHOLE
from rollyard.errors import ConfigError, ExchangeError
from rollyard.exchange.agreed import agree
from rollyard.exchange.folder import Folder, Job, check_place
from rollyard.exchange.generation import Generation
from rollyard.journal.folder import folder_of
from rollyard.loop import Run
from rollyard.training import Training
from rollyard.types import WeightVersion
from tests.exchange.test_folder import group
from tests.exchange.test_training import trained

READ: dict[str, Callable[[Folder], object]] = {
    "groups/7.json": lambda folder: folder.group(7),
    "batches/000003.json": lambda folder: folder.batches(),
    "done.json": lambda folder: folder.done(),
    "offered.json": lambda folder: folder.offered(),
    "stats/000003.json": lambda folder: folder.stats(3),
    "agreed/training.json": lambda folder: agree(folder, Job.TRAINING, {}),
    "agreed/generation.json": lambda folder: agree(folder, Job.TRAINING, {}),
}


@pytest.mark.parametrize("name", READ)
@pytest.mark.parametrize(("content", "problem"), [("[{", "is damaged: "), ("7", "does not hold what belongs there: ")])
def test_a_file_that_somebody_spoilt_is_named(folder: Folder, name: str, content: str, problem: str) -> None:
    (folder.path / name).write_text(content)
    with pytest.raises(ExchangeError) as caught:
        READ[name](folder)
    assert str(caught.value).startswith(f"{folder.path / name} {problem}") and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("groups/7.json", '[{"prompt": 3}]', "0.prompt: "),
        ("batches/000003.json", '{"step": 3}', "groups: Field required"),
        ("done.json", "{}", "version: Field required"),
        ("offered.json", '{"version": "x"}', "version: Input should be a valid integer"),
    ],
)
def test_and_so_is_what_is_wrong_in_it(folder: Folder, name: str, content: str, problem: str) -> None:
    (folder.path / name).write_text(content)
    with pytest.raises(ExchangeError, match=rf"{name} does not hold what belongs there: {problem}") as caught:
        READ[name](folder)
    assert "\n" not in str(caught.value)


def test_other_names_are_left_alone(folder: Folder) -> None:
    folder.write_group(group(12))
    folder.write_batch(3, (12,))
    strays = [f"groups/{name}" for name in ("12 (copy).json", "012.json", "1²2.json", "13.json.bak")]
    strays += ["batches/3.json", "batches/000003 (copy).json", "dropped/1e3.json", "weights/.keep", "groups/.12.json.swp"]
    for name in strays:
        (folder.path / name).write_text("")
    (folder.path / "weights" / ".git").mkdir()
    (folder.path / "weights" / "..000003.draft.draft-17").mkdir()
    (folder.path / "stats" / ".000003.json.draft").write_text("")
    for job in Job:
        folder.clear(job)
    assert folder.groups() == {12} and folder.batches() == {3: (12,)} and folder.dropped() == set()
    assert all((folder.path / name).exists() for name in (*strays, "weights/.git"))
    assert not (folder.path / "weights" / "..000003.draft.draft-17").exists()
    assert not (folder.path / "stats" / ".000003.json.draft").exists()


def test_a_folder_of_somebody_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for look in (check_place, lambda path: Folder(path).make()):
        with pytest.raises(ConfigError, match=r"exchange\.folder: .* holds something else than an exchange"):
            look(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    (tmp_path / "empty").mkdir()
    for name in ("empty", "new/deep"):
        check_place(tmp_path / name)
        Folder(tmp_path / name).make()
        check_place(tmp_path / name)


@pytest.mark.parametrize("where", ["{}/file", "{}/file/below", "/proc/nope"])
def test_where_no_folder_can_be_nothing_is_begun(made: Callable[[str], Config], tmp_path: Path, where: str) -> None:
    (tmp_path / "file").write_text("")
    config_ = made("spare")
    config_ = config_.model_copy(update={"exchange": config_.exchange.model_copy(update={"folder": where.format(tmp_path)})})
    with pytest.raises(ConfigError, match=r"exchange\.folder: .*(is no folder|cannot be made: )"):
        Run(config_)
    with pytest.raises(ConfigError, match=r"exchange\.folder"):
        Training(config_)
    assert not folder_of(config_).path.exists()


def test_a_lock_that_cannot_be_made(folder: Folder) -> None:
    (folder.path / "training.lock").mkdir()
    with pytest.raises(ExchangeError, match=r"training\.lock cannot be held: Is a directory"):
        folder.seats[Job.TRAINING].take(Job.TRAINING)


def test_a_version_counts_once_it_is_whole(folder: Folder) -> None:
    folder.draft(3).mkdir()
    folder.commit_weights(3, None)
    for stray in ("999999", "000004", "3", "000003 (copy)"):
        (folder.path / "weights" / stray).mkdir()
    assert folder.versions() == [3] and folder.newest() == 3


async def test_a_damaged_version_is_named_and_training_goes_on_from_the_one_before(
    made: Callable[[str], Config], tmp_path: Path
) -> None:
    config_ = made("shared")
    config_ = config_.model_copy(update={"checkpoint": config_.checkpoint.model_copy(update={"keep": 2})})
    first, shared = await trained(config_), Folder(tmp_path / "shared")
    newest = shared.weights(2)
    for name, content, problem in (
        ("model.safetensors", b"x" * 9, r"model\.safetensors has 9 bytes, and had [0-9,]+"),
        ("trainer.safetensors", b"", r"trainer\.safetensors has 0 bytes, and had [0-9,]+"),
        ("trainer.json", None, r"trainer\.json cannot be read: No such file"),
        ("trainer.safetensors", b"\xff", r"trainer\.safetensors cannot be read: "),
        ("manifest.json", b"[", r"manifest\.json is damaged: "),
        (WHOLE, b"{", r"whole\.json is damaged: "),
    ):
        before = (newest / name).read_bytes()
        if content is None:
            (newest / name).unlink()
        else:
            (newest / name).write_bytes(content * len(before) if len(content) == 1 and name != WHOLE else content)
        told: list[str] = []
        with pytest.raises(ExchangeError, match=rf"{newest} is damaged: .*{problem}.*\(delete this folder") as caught:
            async for _ in Training(config_, told.append):
                pass
        assert "\n" not in str(caught.value) and not told, "who called tells it, once"
        generation = Generation(shared.path, 60)
        generation.open({})
        with pytest.raises(ExchangeError, match="is damaged"):
            await generation.begin(2)
        generation.folder.seats[Job.GENERATION].leave("damaged")
        (newest / name).write_bytes(before)
    weights = (newest / "model.safetensors").read_bytes()
    newest.rename(tmp_path / "away")
    assert await trained(config_) == first[1:] and (newest / "model.safetensors").read_bytes() == weights


async def test_a_generation_job_waits_for_a_version_that_was_lost(folder: Folder) -> None:
    for step in (0, 1):
        folder.draft(step).mkdir()
        folder.commit_weights(step, None)
    folder.write_batch(2, (5,))
    generation = Generation(folder.path, 0.1)
    generation.open({})
    with pytest.raises(ExchangeError, match="waiting for the training job: version 2, "):
        await generation.begin(4)
    folder.write_group(group(5))
    folder.draft(2).mkdir()
    folder.commit_weights(2, None)
    assert await generation.begin(4) == WeightVersion(2)


async def test_what_was_trained_stays_known(made: Callable[[str], Config], tmp_path: Path) -> None:
    found, shared = await trained(made("shared")), Folder(tmp_path / "shared")  # which keeps one version
    assert shared.versions() == [0, 2] and [shared.stats(step) for step in (1, 2)] == found
