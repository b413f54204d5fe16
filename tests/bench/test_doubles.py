"""Stations that only take time, on a virtual clock."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollyard.bench import virtual
from rollyard.bench.doubles import DoubleHandoff, DoublePublisher, DoubleTrainer, Endless, Meter, now, stations
from rollyard.bench.theory import Work
from rollyard.types import FinishReason, Request, RequestId, Sampling, TrainBatch, WeightVersion

WORK = Work(2.0, steps=4, groups=2, size=2)


def test_a_trainer_takes_its_time_and_goes_on_from_what_it_became(tmp_path: Path):
    async def main() -> None:
        meter = Meter()
        trainer = DoubleTrainer(1.5, meter)
        stats = await trainer.train([TrainBatch(0, (), Sampling(1))])
        assert (now(), meter.trained_s, trainer.version, stats.step) == (1.5, 1.5, WeightVersion(1), 1)
        await trainer.become(WeightVersion(7))
        await trainer.train([TrainBatch(7, (), Sampling(1))])
        assert trainer.version == WeightVersion(8) and meter.trained_s == 3.0
        await trainer.save(tmp_path / "saved")
        assert (tmp_path / "saved").is_dir()

    virtual.run(main())


def test_weights_and_states_take_theirs():
    async def main() -> None:
        publisher, handoff = DoublePublisher(copy_s=0.5, transfer_s=0.25), DoubleHandoff(2.0)
        manifest = await publisher.publish(WeightVersion(1), ("a",))
        assert now() == 0.5 and manifest.version == WeightVersion(1) and manifest.bytes_copied > 0
        assert await publisher.again(("a",)) == manifest and now() == 0.5
        await publisher.deliver()
        assert now() == 0.75
        handed = await handoff.take(await handoff.give(WeightVersion(1), "b"))
        assert now() == 2.75 and handed.seconds == 2.0 and handed.bytes > manifest.bytes_copied

    virtual.run(main())


@pytest.mark.parametrize(
    ("placement", "engines", "slots", "step_s"),
    [
        ("separate", 4, 16, WORK.training_s),
        ("async", 4, 16, WORK.training_s),
        ("colocated", 5, 16, WORK.training_s / 5),
        ("swap", 2, 40, WORK.training_s / 2.5),
    ],
)
def test_every_placement_has_all_devices(placement: str, engines: int, slots: int, step_s: float):
    async def main() -> None:
        meter = Meter()
        made = stations(placement, WORK, meter)
        assert [engine.slots for engine in made.engines.values()] == [slots] * engines
        assert set(made.trainers) == (set(made.engines) if placement == "swap" else {None}) and set(made.publishers) == set(
            made.engines
        )
        for trainer in made.trainers.values():
            began = now()
            await trainer.train([TrainBatch(0, (), Sampling(1))])
            assert now() - began == pytest.approx(step_s)

    virtual.run(main())


def test_a_cut_completion_is_read_again_and_keeps_its_length():
    async def main() -> None:
        meter = Meter()
        made = stations("async", WORK, meter)
        await made.start()
        engine = next(iter(made.engines.values()))
        await engine.prepare(await made.publishers[engine.id].publish(WeightVersion(0), (engine.id,)))
        await engine.load(WeightVersion(0))
        length = WORK.length(5, 1)
        engine.generate([Request(RequestId(5, 1, 1), (1,) * 3, Sampling(99), 0, written_ids=(1,) * (length - 1))])
        async for segments in engine.segments():
            assert len(segments[-1].token_ids) == 1 and segments[-1].finish is FinishReason.STOP
            break
        assert meter.read_again == 3 + length - 1
        await engine.close()

    virtual.run(main())


def test_prompts_have_no_end():
    source = Endless()
    assert [prompt.id for prompt in source.take(3)[0]] == [0, 1, 2]
    prompts, exhausted = source.take(2)
    assert [prompt.id for prompt in prompts] == [3, 4] and not exhausted and source.cursor == 5
