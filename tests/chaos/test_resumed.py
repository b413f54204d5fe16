"""The run itself is killed: between any two writes, at every kind of event, life after life. What it ends with is the same."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from rollyard.chaos.faults import Fault
from tests.chaos.lives import Life, Where, moments, points, uninterrupted
from tests.chaos.world import Shape

pytestmark = pytest.mark.timeout(240)  # tens of lives each; a busy machine may be slow
SHAPES = {
    "colocated": Shape("colocated", bound=True, engines=1, slots=8),
    "separate": Shape("separate", bound=True),
    "async": Shape("async", overtaking="never"),
    "swap": Shape("swap", overtaking="never"),
}


TRIED = (("async", "run"), ("swap", "run"), ("async", "trainer"))  # each at every kind of event


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_between_any_two_writes(name: str, tmp_path: Path) -> None:
    shape = SHAPES[name]
    for point, times in points(shape).items():
        where = Where(point, Random(f"{name} {point}").randint(1, times))
        folder = made(tmp_path, point)
        assert Life(shape, folder, at=where.kill()).killed(), where
        as_if_nothing_had_happened(Life(shape, folder, again=True).live(), str(where))


@pytest.mark.parametrize("name", [name for name, victim in TRIED if victim == "run"])
def test_at_every_kind_of_event(name: str, tmp_path: Path) -> None:
    shape = SHAPES[name]
    for moment in moments(shape, Random(f"{name} run")):
        fault = Fault(what="kill", which="run", event=moment.kind, count=moment.count)
        folder = made(tmp_path, moment.kind)
        assert Life(shape, folder, [fault]).killed(), fault
        as_if_nothing_had_happened(Life(shape, folder, [fault], again=True).live(), f"{fault}")


@pytest.mark.filterwarnings("ignore:version .* is not saved")
def test_a_trainer_at_every_kind_of_event(tmp_path: Path) -> None:
    """The run ends with it, and goes on in its next life."""
    shape = SHAPES["async"]
    for moment in moments(shape, Random("trainer")):
        fault = Fault(what="kill", which="trainer", event=moment.kind, count=moment.count)
        folder = made(tmp_path, moment.kind)
        first = Life(shape, folder, [fault]).live()
        assert moment.kinds <= first.met, fault
        if first.failed:
            assert "trainer-0" in first.failed, (fault, first.failed)
            as_if_nothing_had_happened(Life(shape, folder, [fault], again=True).live(), f"{fault}")
        else:
            assert first.weights == uninterrupted(shape).weights  # it was not needed any more


@pytest.mark.filterwarnings("ignore:version .* is not saved")
@pytest.mark.parametrize("kind", ["Scored", "HandOver"])
def test_a_half_in_the_midst_of_it(kind: str, tmp_path: Path) -> None:
    """Of two that take turns: it is called by its engine or its trainer, and the run ends with it and goes on."""
    shape = SHAPES["swap"]
    for number, which in enumerate(("engine", "trainer", "half engine-1")):
        fault, folder = Fault(what="kill", which=which, event=kind, count=1 + number), made(tmp_path, which)
        first = Life(shape, folder, [fault]).live()
        assert first.struck and first.struck[0].startswith("half "), (fault, first.survival)
        assert first.failed, fault
        as_if_nothing_had_happened(Life(shape, folder, [fault], again=True).live(), f"{fault}")


@pytest.mark.parametrize("kind", ["GroupsRecovered", "Reuse"])
def test_in_its_second_life(kind: str, tmp_path: Path) -> None:
    """As it takes over what the first one left."""
    shape, fault = SHAPES["async"], Fault(what="kill", which="run", event=kind)
    assert Life(shape, tmp_path, at=Where("after flush", 3).kill()).killed()
    assert Life(shape, tmp_path, [fault], again=True).killed()
    life = Life(shape, tmp_path, [fault], again=True).live()
    as_if_nothing_had_happened(life, kind)
    assert [(each.life, each.outcome[:7]) for each in life.survival] == [(1, "resumed")]


@pytest.mark.parametrize("seed", range(12))
def test_life_after_life(seed: int, tmp_path: Path) -> None:
    """Killed at random points, with engines and reward workers that are killed and stalled meanwhile."""
    random = Random(seed)
    name = random.choice(sorted(SHAPES))
    shape, again = SHAPES[name], False
    places = [point for point in points(shape) if "flush" in point or "checkpoint" in point]
    for _ in range(4):
        where = Where(random.choice(places), random.randint(1, 3))
        if not Life(shape, tmp_path, some_stalls(random, shape), again, where.kill()).killed():
            break  # it came to its end before
        again = True
    as_if_nothing_had_happened(Life(shape, tmp_path, again=again).live(), f"seed {seed}")


def some_stalls(random: Random, shape: Shape) -> list[Fault]:
    """Of what can stand still without a loss."""
    which = ["engine", "trainer", "reward"] if shape.placement != "colocated" else ["reward"]
    return [
        Fault(what="stall", which=random.choice(which), after_s=random.uniform(0.1, 8), for_s=random.uniform(0.1, 3))
        for _ in range(random.randint(0, 3))
    ]


def made(above: Path, name: str) -> Path:
    folder = above / name.replace(" ", "-")
    folder.mkdir()
    return folder


def as_if_nothing_had_happened(life: Life, told: str) -> None:
    assert not life.failed, (told, life.failed)
    if life.report is not None:
        assert not life.report.prompts.dropped, told
        assert life.report.prompts.trained == life.shape.steps * life.shape.groups, told
    assert life.weights == uninterrupted(life.shape).weights, told
