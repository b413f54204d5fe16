"""Trainers of other stacks: the same losses as the reference trainer, and what is said of those that do not suit."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rollyard.config import TrainConfig
from rollyard.durable import write_folder
from rollyard.errors import CheckpointError, ConfigError, NonFinite, TrainError
from rollyard.model.stamp import WeightStamp
from rollyard.train.external import CANARY, AdaptedTrainer, TrainerSetup, go_on, load_adapter, make
from rollyard.types import Sampling, TrainBatch, TrainStats, WeightVersion
from tests.tiny import tiny_folder
from tests.train.test_trainer import Here, make_samples, split, trainer

EXAMPLE = Path(__file__).parents[2] / "examples" / "external_trainer" / "trainers.py"
V0 = WeightVersion(0)
STEPS = 10


def setup(folder: Path, **options: Any) -> TrainerSetup:
    extra = options.pop("extra", {})
    values = {"lr": 1e-3, "max_grad_norm": 0.5, "correction": "none"} | options
    return TrainerSetup(folder, TrainConfig(**values), "float32", "cpu", 9, V0, extra)


def batches(sampling: Sampling) -> list[TrainBatch]:
    """Ten different ones, of three micro-batches."""
    return [TrainBatch(step, split(make_samples(seed=step), 3), sampling) for step in range(STEPS)]


async def same_as_the_reference(folder: Path, function: str, sampling: Sampling, **options: Any) -> None:
    """Every number of ten steps, and the parameters at the end."""
    external = make(f"{EXAMPLE}:{function}", setup(folder, **options), CANARY)
    options.pop("extra", None)
    reference = trainer(folder, **({"lr": 1e-3, "max_grad_norm": 0.5} | options))
    for batch in batches(sampling):
        expected, found = await reference.train([batch]), external.train(batch)
        for name, value in ((each.name, getattr(expected, each.name)) for each in dataclasses.fields(expected) if each.compare):
            relative = 1e-3 if name == "grad_norm" else 0.0
            alike = value if value is None else pytest.approx(value, abs=1e-4, rel=relative)
            assert getattr(found, name) == alike, (batch.step, name)
    own = dict(reference._model.named_parameters())
    assert {info.name for info in external.tensors()} == set(own)
    for name, tensor in external.each():
        torch.testing.assert_close(tensor, own[name].detach(), atol=2e-4, rtol=0)
    external.close()


@pytest.mark.parametrize("aggregation", ["token", "sequence", "fixed"])
@pytest.mark.parametrize(
    "sampling", [Sampling(9), Sampling(9, 0.7, 0.9), Sampling(9, 1.3, 1.0, 5)], ids=["all", "top_p", "top_k"]
)
async def test_ten_steps_of_the_example(tmp_path: Path, aggregation: str, sampling: Sampling) -> None:
    options = {"aggregation": aggregation, "warmup_steps": 3, "weight_decay": 0.1}
    await same_as_the_reference(tiny_folder(tmp_path), "hugging_face", sampling, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"loss": "gspo", "aggregation": "sequence", "clip_high": 0.05},
        {"loss": "cispo", "correction": "none"},
        {"correction": "truncate", "correction_cap": 1.1},
        {"correction": "mask", "correction_floor": 0.8, "correction_level": "sequence", "loss": "gspo"},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
async def test_losses_and_corrections_of_the_example(tmp_path: Path, options: dict[str, Any]) -> None:
    await same_as_the_reference(tiny_folder(tmp_path), "hugging_face", Sampling(9, 0.7, 0.9), **options)


DEEPSPEED = """
import asyncio, sys
from pathlib import Path
from rollyard.types import Sampling
from tests.train.test_external import same_as_the_reference
extra = {"stage": int(sys.argv[2])}
asyncio.run(same_as_the_reference(Path(sys.argv[1]), "deepspeed", Sampling(9, 0.7, 0.9), extra=extra))
"""


@pytest.mark.slow
@pytest.mark.timeout(300)  # it compiles a kernel at its first use
@pytest.mark.parametrize("stage", [1, 3])
def test_ten_steps_of_deepspeed(tmp_path: Path, stage: int) -> None:
    """In a process of its own, which it changes as it likes."""
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("examples/external_trainer/requirements.txt is not installed: `make test-slow` does that")
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", DEEPSPEED, str(tiny_folder(tmp_path)), str(stage)]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # ninja, for its kernel
    environment = {**os.environ, "PYTHONPATH": str(root), "PATH": path}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=290, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


# ------------------------------------------------------------------------------------------ what does not suit


ADAPTERS = """
class Half:
    def tensors(self): return []
    def train(self, batch): ...
    def save(self, folder): ...
class Blind(Half):
    def each(self): return iter(())
    def close(self): ...
class Again(Blind):
    def load(self, folder): self.found = (folder / "optimizer").read_text()
def half(setup): return Half()
def again(setup): return Again()
def blind(setup): return Blind()
def nothing(setup): ...
def fails(setup): raise OSError("no such cluster")
def two(): ...
def more(setup, *, ranks): ...
"""


@pytest.fixture
def adapters(tmp_path: Path) -> str:
    (tmp_path / "adapters.py").write_text(ADAPTERS)
    return str(tmp_path / "adapters.py")


@pytest.mark.parametrize(
    ("function", "error", "told"),
    [
        (
            "absent",
            ConfigError,
            r"train.adapter: .*adapters.py has no 'absent' \(its functions: half, again, blind, nothing, fails",
        ),
        ("two", ConfigError, r"adapters.py:two takes 0 positional arguments \(it is called with one TrainerSetup\)"),
        ("more", ConfigError, r"more: missing a required.*argument: 'ranks' \(it is called with one TrainerSetup\)"),
        (
            "half",
            ConfigError,
            r"half made a Half, which has no each, close, logprobs, move, restore \(see protocols.ExternalTrainer",
        ),
        ("blind", ConfigError, r"has no logprobs, move, restore \(.*: --weights.canary false --weights.probe false\)"),
        ("nothing", ConfigError, r"made a NoneType, which has no tensors, each, train"),
        ("fails", TrainError, r"fails made no trainer: OSError: no such cluster"),
    ],
)
def test_an_adapter_that_does_not_suit(tmp_path: Path, adapters: str, function: str, error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=told):
        make(f"{adapters}:{function}", setup(tmp_path), CANARY)


def test_one_without_evidence_will_do_for_a_run_that_wants_none(tmp_path: Path, adapters: str) -> None:
    assert make(f"{adapters}:blind", setup(tmp_path)) is not None
    assert callable(load_adapter(f"{EXAMPLE}:hugging_face"))


def test_one_goes_on_if_it_can_load_what_it_saved(tmp_path: Path, adapters: str) -> None:
    given, saved = setup(tmp_path), tmp_path / "step-000002"
    saved.mkdir()
    again = make(f"{adapters}:again", given)
    with pytest.raises(TrainError, match=r"again cannot go on from .*step-000002: FileNotFoundError: .*optimizer"):
        go_on(again, "adapters.py:again", saved)
    (saved / "optimizer").write_text("moments")
    go_on(again, "adapters.py:again", saved)
    assert again.found == "moments"  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"made a Blind, which has no load: .* --model.path .*step-000002, without that state"):
        go_on(make(f"{adapters}:blind", given), "adapters.py:blind", saved)


class Scripted:
    """Gives, or raises, what it is told."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def tensors(self) -> list[Any]:
        return []

    def each(self) -> Iterator[Any]:
        return iter(())

    def train(self, batch: TrainBatch) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def save(self, folder: Path) -> None:
        (folder / "state").write_text("kept")

    def close(self) -> None: ...


BATCH = TrainBatch(0, split(make_samples(), 2), Sampling(9))
TOKENS = sum(sum(sample.mask) for sample in BATCH.samples)
GOOD = TrainStats(1, 0.5, 1.0, 1e-3, TOKENS, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0)


def adapted(answer: Any) -> tuple[AdaptedTrainer, WeightStamp]:
    stamp = WeightStamp()

    def write(folder: Path, also: Callable[[Path], None]) -> None:
        write_folder(folder, also)

    return AdaptedTrainer(Scripted(answer), "a.py:f", Here(), stamp, write, V0), stamp  # type: ignore[arg-type]


async def test_a_step_that_went_well(tmp_path: Path) -> None:
    made, stamp = adapted(GOOD)
    assert await made.train([BATCH]) == GOOD
    assert made.version == WeightVersion(1) == await made.settle() and (stamp.whole, stamp.generation) == (True, 1)
    with pytest.raises(TrainError, match="trains version 0, the parameters are version 1"):
        await made.train([BATCH])
    await made.save(tmp_path / "saved")
    assert (tmp_path / "saved" / "state").read_text() == "kept"
    with pytest.raises(CheckpointError, match="FileExistsError"):
        await made.save(tmp_path / "saved")


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (None, "train gave a NoneType, not TrainStats"),
        (dataclasses.replace(GOOD, step=2), "step 1 made version 2"),
        (dataclasses.replace(GOOD, tokens=TOKENS - 1), f"trained on {TOKENS - 1} tokens; the batch has {TOKENS}"),
        (dataclasses.replace(GOOD, loss=math.nan), "numbers that are none"),
    ],
)
async def test_what_cannot_be_is_not_believed(tmp_path: Path, answer: Any, told: str) -> None:
    """The parameters are those of another version by then: nothing of them is saved as this one."""
    made, stamp = adapted(answer)
    with pytest.raises(TrainError, match=told):
        await made.train([BATCH])
    assert made.version == V0 and not stamp.whole
    with pytest.raises(CheckpointError, match="failed half way"):
        await made.save(tmp_path / "torn")


async def test_a_step_that_failed(tmp_path: Path) -> None:
    """What says that nothing has changed is believed; after anything else the parameters are of no use."""
    made, stamp = adapted(NonFinite("loss nan"))
    with pytest.raises(NonFinite):
        await made.train([BATCH])
    assert stamp.whole and made.version == V0
    made, stamp = adapted(ValueError("no such device"))
    with pytest.raises(TrainError, match=r"a.py:f failed in step 1: ValueError: no such device; what became of its parameters"):
        await made.train([BATCH])
    assert not stamp.whole
    with pytest.raises(CheckpointError, match="failed half way"):
        await made.save(tmp_path / "torn")
