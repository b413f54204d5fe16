"""The training job with a real, tiny model: killed wherever it writes, it comes to the same weights, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from rollyard.config import Config
from rollyard.errors import ConfigError, ExchangeError
from rollyard.exchange import files, folder
from rollyard.exchange.folder import Folder, Job
from rollyard.model.folder import WEIGHTS
from rollyard.train.state import TENSORS
from rollyard.train.trainer import ReferenceTrainer
from rollyard.training import Training
from rollyard.types import TrainStats
from tests.exchange.conftest import STEPS


class Killed(Exception):
    """The process is no more."""


async def trained(config_: Config) -> list[TrainStats]:
    steps = Training(config_).steps()
    try:
        return [stats async for stats in steps]
    finally:
        await steps.aclose()


def content(config_: Config) -> tuple[dict[str, bytes], TrainStats]:
    """Parameters, moments and random state of the last version."""
    shared = Folder(Path(config_.exchange.folder))
    last = shared.weights(STEPS)
    tensors = load_file(last / WEIGHTS) | load_file(last / TENSORS)
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}, shared.stats(STEPS)


async def test_killed_wherever_it_writes(made: Callable[[str], Config], monkeypatch: pytest.MonkeyPatch) -> None:
    left = [10**6]

    def moment() -> None:
        left[0] -= 1
        if left[0] < 0:
            raise Killed

    def around(where: object, name: str) -> None:
        call = getattr(where, name)

        def called(*args: object, **named: object) -> object:
            moment()
            found = call(*args, **named)
            moment()
            return found

        monkeypatch.setattr(where, name, called)

    for where, name in ((folder, "write_whole"), (folder, "seal"), (folder, "commit_folder"), (folder, "remove_folder")):
        around(where, name)
    for where, name in ((ReferenceTrainer, "_save"), (ReferenceTrainer, "_step"), (Folder, "remove_group")):
        around(where, name)
    monkeypatch.setattr("rollyard.weights.evidence.record", _between(moment))
    whole = made("whole")
    left[0] = 10**6
    first = await trained(whole)
    assert [stats.step for stats in first] == [1, 2] and first[0].loss != first[1].loss
    moments = 10**6 - left[0]
    assert moments > 30
    for killed_at in range(0, moments, 3):
        config_ = made(f"killed-{killed_at}")
        left[0] = killed_at
        with pytest.raises(Killed):
            await trained(config_)
        left[0] = 10**6
        await trained(config_)
        assert content(config_) == content(whole), f"killed at moment {killed_at}"
        shared = Folder(Path(config_.exchange.folder))
        assert len(shared.versions()) <= 2 and shared.groups() == set() and shared.done() == STEPS
        assert not list((shared.path / "weights").glob(".*"))


def _between(moment: Callable[[], None]) -> Callable[..., None]:
    from rollyard.weights.record import record

    def called(*args: object) -> None:
        moment()
        record(*args)  # type: ignore[arg-type]
        moment()

    return called


async def test_it_waits_no_longer_than_it_may(made: Callable[[str], Config], tmp_path: Path) -> None:
    config_ = made("short")
    (tmp_path / "short" / "batches" / "000001.json").unlink()
    limited = config_.model_copy(update={"exchange": config_.exchange.model_copy(update={"limit_s": 0.2})})
    with pytest.raises(ExchangeError, match=r"waiting for the generation job: batch 1, 0.2 s are over \(it is not running\)"):
        await trained(limited)
    assert Folder(tmp_path / "short").newest() == 1


async def test_a_limit_that_nobody_could_hold_it_to_is_refused(made: Callable[[str], Config]) -> None:
    """Its one trainer is in its own process; of several each has one."""
    config_ = made("limited")
    limited = config_.model_copy(update={"train": config_.train.model_copy(update={"limit_s": 60.0})})
    with pytest.raises(ConfigError, match=r"train\.limit_s: the trainer is in this process"):
        Training(limited)
    Training(limited.model_copy(update={"place": config_.place.model_copy(update={"train": 2})}))


async def test_it_ends_where_the_prompts_do(made: Callable[[str], Config], tmp_path: Path) -> None:
    config_ = made("early")
    shared = Folder(tmp_path / "early")
    (shared.path / "batches" / "000001.json").unlink()
    shared.write_done(1, "the prompts are used up")
    assert [stats.step for stats in await trained(config_)] == [1]


async def test_a_second_one_is_refused(made: Callable[[str], Config], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(files, "GRACE_S", 0.05)
    config_ = made("taken")
    Folder(tmp_path / "taken").seats[Job.TRAINING].take(Job.TRAINING)
    with pytest.raises(ConfigError, match="a training job holds it already"):
        await trained(config_)


def test_without_a_folder_there_is_no_training_job(made: Callable[[str], Config]) -> None:
    config_ = made("none")
    alone = config_.model_copy(update={"exchange": config_.exchange.model_copy(update={"folder": ""})})
    with pytest.raises(ConfigError, match=r"exchange.folder"):
        Training(alone)


async def test_the_value_head_goes_on_too_and_so_does_the_reference(made: Callable[[str], Config]) -> None:
    """Ended after the first step and begun again: what is trained token by token comes to the same, bit for bit. The policy is
    kept near the one that it began with, not near the version that it goes on from."""

    def valued(plain: Config) -> Config:
        advantage, train = plain.advantage.model_copy(update={"kind": "gae"}), plain.train.model_copy(update={"kl": 0.1})
        return plain.model_copy(update={"advantage": advantage, "train": train})

    whole, again = valued(made("whole")), valued(made("again"))
    await trained(whole)
    first = await trained(again.model_copy(update={"run": again.run.model_copy(update={"steps": 1})}))
    second = await trained(again)
    assert [stats.step for stats in (*first, *second)] == [1, 2] and second[0].value_loss is not None
    assert first[0].kl == pytest.approx(0.0, abs=1e-9) and (second[0].kl or 0.0) > 1e-4
    assert content(again) == content(whole)
