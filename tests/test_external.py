"""Whole runs with a trainer of another stack, in a process of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import rollyard
from rollyard.config import Config
from rollyard.errors import ConfigError, TrainError
from rollyard.model.folder import load
from tests.rewards import share_of_a
from tests.small import ENGINE, HOST, children, config

EXAMPLE = Path(__file__).parents[1] / "examples" / "external_trainer" / "trainers.py"
TRAINER = f"{EXAMPLE}:hugging_face"


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Config]:
    """Config of a small run with an external trainer; `changes` are options."""
    own = {"run.steps": 2, "place.placement": "separate", "rollout.groups_per_step": 2, "train.adapter": TRAINER}
    return lambda **changes: config(tmp_path / "run", **own | {name.replace("__", "."): each for name, each in changes.items()})


@pytest.mark.parametrize(
    "transport", ["shared_memory", *(pytest.param(name, marks=pytest.mark.slow) for name in ("broadcast", "checkpoint"))]
)
def test_a_run_over_each_transport(make: Callable[..., Config], transport: str, tmp_path: Path) -> None:
    run = rollyard.Run(make(weights__transport=transport, train__lr=1e-2), reward=share_of_a)
    for step in run:
        spans = [span for group in step.groups for rollout in group.rollouts for span in rollout.completion.spans]
        assert {span.version.step for span in spans} == {step.step - 1}
        assert step.train.logprob_gap_max < 1e-4  # the engine's logprobs are the external trainer's
    report = run.report
    assert report is not None and not report.finished.failed and report.steps == 2
    assert report.weights.canary is not None and report.weights.canary.unseen == ()
    assert report.weights.probes.get("verified", 0) > 0 and "contradicted" not in report.weights.probes
    (saved,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert (saved / "optimizer.pt").is_file() and load(saved)
    assert not children(ENGINE) and not children(HOST)


@pytest.mark.slow
def test_generation_goes_on_while_it_trains(make: Callable[..., Config]) -> None:
    lags, run = set(), rollyard.Run(make(rollout__max_staleness=1, run__steps=4, place__placement="async"))
    for step in run:
        spans = [span for group in step.groups for rollout in group.rollouts for span in rollout.completion.spans]
        lags |= {step.step - 1 - span.version.step for span in spans}
    assert run.report is not None and not run.report.finished.failed and lags == {0, 1}


WRONG = """
import runpy
from rollyard.types import TensorInfo
Base = runpy.run_path(EXAMPLE)["HuggingFaceTrainer"]
class Renamed(Base):
    def tensors(self):
        first, *others = super().tensors()
        return [TensorInfo("transformer.wte.weight", first.shape, first.dtype), *others]
class Stale(Base):
    def each(self):
        self.first = getattr(self, "first", None) or {name: tensor.clone() for name, tensor in super().each()}
        for name, tensor in super().each():
            yield name, self.first[name] if "down_proj" in name else tensor
class Permuted(Base):
    def each(self):
        for name, tensor in super().each():
            yield name, tensor.flip(0) if "q_proj" in name else tensor
class Blind(Base):
    logprobs = None
"""


@pytest.fixture
def wrong(tmp_path: Path) -> str:
    (tmp_path / "wrong.py").write_text(WRONG.replace("EXAMPLE", repr(str(EXAMPLE))))
    return str(tmp_path / "wrong.py")


@pytest.mark.parametrize(
    ("made", "told"),
    [
        pytest.param("Renamed", "only on one side: model.embed_tokens.weight, transformer.wte.weight", marks=pytest.mark.slow),
        pytest.param("Permuted", "publishes something else than it computes with", marks=pytest.mark.slow),
        pytest.param("Stale", r"down_proj.weight had stayed as it was", marks=pytest.mark.slow),
        pytest.param("Blind", r"has no logprobs .*--weights.canary false", marks=pytest.mark.slow),
    ],
)
def test_what_is_wrong_with_it_is_named(make: Callable[..., Config], wrong: str, made: str, told: str) -> None:
    with pytest.raises((rollyard.RollyardError, ConfigError, TrainError), match=told):
        for _ in rollyard.Run(make(train__adapter=f"{wrong}:{made}")):
            pass
    assert not children(ENGINE) and not children(HOST)


@pytest.mark.slow
def test_a_run_that_proves_nothing_says_so(make: Callable[..., Config], wrong: str) -> None:
    run = rollyard.Run(make(train__adapter=f"{wrong}:Blind", weights__canary=False, weights__probe=False))
    assert len(list(run)) == 2
    assert run.report is not None and run.report.weights.canary is None and not run.report.weights.probes


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"place__placement": "colocated"}, "engines decode with the parameters of our own trainer"),
        ({"place__train": 2}, "an external trainer is one for the run, and 2 are asked for"),
        ({"weights__what": "lora"}, "weights.what: what an external trainer publishes are whole tensors"),
        ({"train__extra": "[3]"}, "train.extra: .* is no object"),
        ({"train__adapter": "", "train__extra": "{}"}, "there is no adapter to be given it"),
        ({"train__adapter": "absent.py:make"}, "train.adapter: there is no file absent.py"),
        ({"train__adapter": "trainer"}, "names no function"),
    ],
)
def test_refused_at_once(make: Callable[..., Config], changes: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        rollyard.Run(make(**changes))
