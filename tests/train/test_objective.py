"""Losses, corrections, a reference and several steps in the trainer: against transformers and a plain torch loop."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rollyard.config import TrainConfig
from rollyard.errors import CheckpointError, NonFinite, TrainError
from rollyard.model.folder import load
from rollyard.train.loss import Denominators, Known, policy_loss
from rollyard.train.reference import Reference
from rollyard.train.trainer import ReferenceTrainer
from rollyard.types import Sample, Sampling, TrainBatch, TrainStats, WeightVersion
from tests.tiny import tiny_folder
from tests.train.test_trainer import Here, make_samples, parameters, split

SAMPLING = Sampling(9, 0.8)
USUAL = {"lr": 1e-2, "max_grad_norm": 1e6, "correction": "none", "eps": 1e-4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("model"), layers=1)


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another policy, to be a reference."""
    return tiny_folder(tmp_path_factory.mktemp("first"), layers=1, seed=3)


def trainer(folder: Path, first: Path | None = None, *, values: bool = False, **config: Any) -> ReferenceTrainer:
    reference = Reference(load(first)) if first is not None else None
    made = TrainConfig(**USUAL | config)
    return ReferenceTrainer(load(folder), Here(), made, 9, folder, WeightVersion(0), reference=reference, values=values)


class Plain:
    """transformers' model and torch's AdamW; rows one at a time, losses whole."""

    def __init__(self, folder: Path, first: Path | None, config: TrainConfig) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.model.get_input_embeddings().padding_idx = None
        self.first = None if first is None else AutoModelForCausalLM.from_pretrained(first, dtype=torch.float32)
        self.config = config
        self.optimizer = torch.optim.AdamW(self.model.parameters(), config.lr, config.betas, config.eps, 0.0)

    def logprobs(self, model: Any, samples: list[Sample]) -> torch.Tensor:
        rows = []
        for each in samples:
            every = torch.log_softmax(model(torch.tensor([each.token_ids])).logits[0] / SAMPLING.temperature, -1)
            rows += [every[t - 1, each.token_ids[t]] for t in range(len(each.mask)) if each.mask[t]]
        return torch.stack(rows)

    def steps(self, minibatches: list[list[Sample]]) -> list[float]:
        config, losses = self.config, []
        with torch.no_grad():
            proximal = [self.logprobs(self.model, samples) for samples in minibatches]
        for samples, before in zip(minibatches, proximal, strict=True):
            denominators = Denominators.of(samples)
            then, advantages, weights = [], [], []
            for each in samples:
                count = denominators.weight(sum(each.mask), config, 9)
                then += [value for value, on in zip(each.logprobs, each.mask, strict=True) if on]
                advantages += [value for value, on in zip(each.advantages, each.mask, strict=True) if on]
                weights += [count] * sum(each.mask)
            with torch.no_grad():
                reference = None if self.first is None else self.logprobs(self.first, samples)
            trained = [sum(each.mask) for each in samples]
            known = Known(*map(torch.tensor, (then, advantages, weights)), trained, before, reference)
            self.optimizer.zero_grad()
            loss = policy_loss(self.logprobs(self.model, samples), known, config)
            loss.backward()
            self.optimizer.step()
            losses.append(loss.item())
        return losses


CASES = [
    {"loss": "gspo", "aggregation": "sequence", "clip_low": 0.1, "clip_high": 0.1},
    {"loss": "cispo"},
    {"correction": "truncate", "correction_cap": 1.2},
    {"correction": "mask", "correction_floor": 0.7, "correction_cap": 1.4},
    {"correction": "mask", "correction_level": "sequence", "correction_floor": 0.3, "correction_cap": 3.0},
    {"loss": "gspo", "correction": "truncate"},
    {"kl": 0.3, "kl_kind": "k1"},
    {"kl": 0.3, "kl_kind": "k2", "loss": "cispo"},
    {"kl": 0.3, "kl_kind": "k3", "correction": "truncate"},
]


@pytest.mark.parametrize("minibatches", [1, 3])
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
async def test_a_batch_equals_the_plain_loop(folder: Path, first: Path, case: dict[str, Any], minibatches: int) -> None:
    """Groups 0, 1 and 2 of four rows each, in two micro-batches that cut them: one step, or one on each group."""
    samples, with_first = make_samples(12), first if "kl" in case else None
    ours = trainer(folder, with_first, minibatches=minibatches, **case)
    plain = Plain(folder, with_first, TrainConfig(**USUAL | case))
    stats = await ours.train([TrainBatch(0, split(samples, 2), SAMPLING)])
    groups = [[each for each in samples if each.group == group] for group in range(3)]
    losses = plain.steps([samples] if minibatches == 1 else groups)
    assert stats.loss == pytest.approx(sum(losses) / len(losses), abs=2e-5)
    assert stats.tokens == sum(sum(each.mask) for each in samples)
    assert ours.version == WeightVersion(1) and ours._model.stamp.generation == 2  # read, and one change
    expected = dict(plain.model.named_parameters())
    for name, value in parameters(ours).items():
        torch.testing.assert_close(value, expected[name].detach(), rtol=0, atol=2e-4)


def numbers(stats: TrainStats) -> dict[str, float]:
    """All but how long it took."""
    return {each.name: value for each in fields(stats) if each.compare and (value := getattr(stats, each.name)) is not None}


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
async def test_micro_batches_and_pieces_change_nothing(
    folder: Path, first: Path, case: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    found, samples = [], make_samples(13)
    for parts, piece in ((1, 1200), (4, 1200), (2, 10)):
        monkeypatch.setattr("rollyard.train.trainer.CACHED_TOKENS", piece)
        monkeypatch.setattr("rollyard.model.head.CHUNK_LOGITS", 7 * 40 if piece == 10 else 24 << 20)
        ours = trainer(folder, first if "kl" in case else None, minibatches=2, **case)
        found.append((await ours.train([TrainBatch(0, split(samples, parts), SAMPLING)]), parameters(ours)))
    (stats, values), *others = found
    for other, own in others:
        assert numbers(other) == pytest.approx(numbers(stats), abs=1e-4)
        for name, value in own.items():
            torch.testing.assert_close(value, values[name], rtol=0, atol=1e-5)


async def test_percentiles_are_exact_over_all_tokens(folder: Path) -> None:
    """By nearest rank, however the tokens were split; the model's own logprobs from transformers."""
    samples = make_samples(40)
    plain = Plain(folder, None, TrainConfig(**USUAL))
    with torch.no_grad():
        new = plain.logprobs(plain.model, samples)
    then = torch.tensor([value for each in samples for value, on in zip(each.logprobs, each.mask, strict=True) if on])
    ranked = sorted((new - then).exp().tolist())
    count = len(ranked)
    stats = await trainer(folder).train([TrainBatch(0, split(samples, 7), SAMPLING)])
    assert stats.ratio_p1 == pytest.approx(ranked[math.ceil(0.01 * count) - 1], rel=1e-4)
    assert stats.ratio_p99 == pytest.approx(ranked[math.ceil(0.99 * count) - 1], rel=1e-4)
    assert stats.ratio_mean == pytest.approx(sum(ranked) / count, rel=1e-4)
    assert (stats.kl, stats.value_loss, stats.truncated_share) == (None, None, 0.0)


async def test_the_reference_stays_what_it_was(folder: Path) -> None:
    """A policy that is its own reference: 0 nats away at first, farther with each step, and never trained."""
    ours, batch = trainer(folder, folder, kl=0.01, lr=1e-3), split(make_samples(), 2)
    assert ours._reference is not None
    before = {name: value.clone() for name, value in ours._reference.model.named_parameters()}
    found = [(await ours.train([TrainBatch(step, batch, SAMPLING)])).kl for step in range(3)]
    assert found[0] == pytest.approx(0.0, abs=1e-9) and found[2] > found[1] > 1e-6
    assert all(torch.equal(value, before[name]) for name, value in ours._reference.model.named_parameters())
    assert all(value.grad is None for value in ours._reference.model.parameters())


# --------------------------------------------------------------------------------------------- what is seldom met


async def test_all_rows_masked_teach_nothing_and_are_told(folder: Path) -> None:
    samples = [replace(each, logprobs=tuple(-9.0 * on for on in each.mask)) for each in make_samples(4)]
    ours = trainer(folder, correction="mask")
    before = parameters(ours)
    stats = await ours.train([TrainBatch(0, split(samples, 2), SAMPLING)])
    assert (stats.loss, stats.grad_norm, stats.truncated_share) == (0.0, 0.0, 1.0)
    assert all(torch.equal(value, before[name]) for name, value in parameters(ours).items())


@pytest.mark.parametrize("case", [{"loss": "gspo"}, {"correction": "mask", "correction_level": "sequence"}, {"kl": 0.1}])
async def test_a_batch_without_a_trained_token_and_a_row_with_one(folder: Path, case: dict[str, Any]) -> None:
    ours = trainer(folder, folder if "kl" in case else None, minibatches=2, **case)
    none = Sample(0, 0, (5, 6), (False, False), (0.0, 0.0), (0.0, 0.0), ())
    stats = await ours.train([TrainBatch(0, ((none,),), SAMPLING)])
    assert (stats.tokens, stats.loss, stats.ratio_p1, stats.ratio_p99) == (0, 0.0, 1.0, 1.0)
    one = Sample(1, 0, (5, 6), (False, True), (0.0, -3.0), (0.0, 1.0), ())
    stats = await ours.train([TrainBatch(1, ((none, one),), SAMPLING)])
    assert stats.tokens == 1 and stats.ratio_p1 == stats.ratio_p99 == pytest.approx(stats.ratio_mean)
    assert ours.version == WeightVersion(2)


@pytest.mark.parametrize("loss", ["ppo", "gspo", "cispo"])
async def test_a_ratio_that_overflows_ends_no_run(folder: Path, loss: str) -> None:
    samples = [replace(each, logprobs=tuple(-120.0 * on for on in each.mask)) for each in make_samples(4)]
    ours = trainer(folder, loss=loss)
    stats = await ours.train([TrainBatch(0, split(samples, 2), SAMPLING)])
    assert all(map(math.isfinite, numbers(stats).values()))
    assert stats.truncated_share == 1.0 and stats.logprob_gap_max > 100
    assert all(value.isfinite().all() for value in ours._model.parameters())


# --------------------------------------------------------------------------------------------------- minibatches


def spoilt(samples: list[Sample], group: int) -> list[Sample]:
    bad = [replace(each, advantages=tuple(math.inf if on else 0.0 for on in each.mask)) for each in samples]
    return [worse if each.group == group else each for each, worse in zip(samples, bad, strict=True)]


async def test_fewer_groups_are_fewer_steps(folder: Path) -> None:
    """Three groups, eight steps asked for: three. A group whose rows teach nothing is none."""
    ours, samples = trainer(folder, minibatches=8), make_samples(12)
    await ours.train([TrainBatch(0, split(samples, 2), SAMPLING)])
    assert {float(state["step"]) for state in ours._optimizer.state.values()} == {3.0}
    quiet = [replace(each, mask=(False,) * len(each.mask)) if each.group == 1 else each for each in samples]
    await ours.train([TrainBatch(1, split(quiet, 2), SAMPLING)])
    assert {float(state["step"]) for state in ours._optimizer.state.values()} == {5.0}


async def test_no_number_in_the_first_step_leaves_everything_as_it_was(folder: Path) -> None:
    ours, samples = trainer(folder, minibatches=3), make_samples(12)
    before = parameters(ours)
    with pytest.raises(NonFinite, match=r"^step 1, minibatch 1 of 3: .*; the parameters are as before$"):
        await ours.train([TrainBatch(0, split(spoilt(samples, 0), 2), SAMPLING)])
    assert all(torch.equal(value, before[name]) for name, value in parameters(ours).items())
    assert (await ours.train([TrainBatch(0, split(samples, 2), SAMPLING)])).step == 1


async def test_no_number_in_a_later_step_is_a_torn_policy(folder: Path, tmp_path: Path) -> None:
    """Steps were taken: what is there is no version, and is neither saved nor trained."""
    ours, samples = trainer(folder, minibatches=3), make_samples(12)
    with pytest.raises(TrainError, match=r"^step 1, minibatch 3 of 3: .*steps before it were taken.*no version") as met:
        await ours.train([TrainBatch(0, split(spoilt(samples, 2), 2), SAMPLING)])
    assert not isinstance(met.value, NonFinite) and not ours._model.stamp.whole and ours.version == WeightVersion(0)
    with pytest.raises(CheckpointError, match="failed half way"):
        await ours.save(tmp_path / "torn")


# --------------------------------------------------------------------------------------------------- a value head


def valued(samples: list[Sample], values: list[tuple[float, ...]], returns: float) -> list[Sample]:
    """With what was expected, and the same return at every trained token."""
    found = []
    for each, own in zip(samples, values, strict=True):
        left = iter(own)
        expected = tuple(next(left) if on else 0.0 for on in each.mask)
        found.append(replace(each, values=expected, returns=tuple(returns * on for on in each.mask)))
    return found


async def test_values_come_for_every_trained_token_in_the_order_of_the_samples(folder: Path) -> None:
    """Zeros before the first step. With weights of one, they are the sums of transformers' hidden states."""
    ours, samples = trainer(folder, values=True), make_samples(7)
    silent = replace(samples[2], mask=(False,) * len(samples[2].mask))
    batch = TrainBatch(0, ((*samples[:2], silent), tuple(samples[3:])), SAMPLING)
    (found,) = await ours.values([batch])
    assert found == tuple((0.0,) * sum(each.mask) for each in batch.samples) and found[2] == ()
    assert ours._head is not None
    ours._head.parameters["value_head.weight"].data.fill_(1.0)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    (found,) = await ours.values([batch])
    for each, own in zip(batch.samples, found, strict=True):
        hidden = plain.model(torch.tensor([each.token_ids])).last_hidden_state[0].sum(-1)
        assert own == pytest.approx([hidden[t - 1].item() for t in range(len(each.mask)) if each.mask[t]], abs=1e-4)
    with pytest.raises(TrainError, match="no value head"):
        await trainer(folder).values([batch])
    with pytest.raises(TrainError, match="no values and returns"):
        await ours.train([batch])


async def test_the_value_loss_by_hand(folder: Path) -> None:
    """Value 0 now. Old 0, return 1: 1/2. Old 0.5, clip 0.2: the value counts as 0.3 where that is farther from its return:
    return -1 gives (1.3^2) / 2, return 1 gives 1/2 as (0.7)^2 is less than 1."""
    ids, mask = (3, 4, 5, 6), (False, True, True, True)
    sample = Sample(0, 0, ids, mask, (0.0,) * 4, (0.0,) * 4, (), values=(0.0, 0.0, 0.5, 0.5), returns=(0.0, 1.0, -1.0, 1.0))
    stats = await trainer(folder, values=True).train([TrainBatch(0, ((sample,),), SAMPLING)])
    assert stats.value_loss == pytest.approx((0.5 + 1.3**2 / 2 + 0.5) / 3, abs=1e-6)


async def test_a_head_learns_and_the_policy_learns_the_same_without_it(folder: Path) -> None:
    """Its loss falls; what the policy learns is to the bit what it learns without a head; with value_body it is not."""
    alone, ours = trainer(folder), trainer(folder, values=True, value_lr=0.05)
    body = trainer(folder, values=True, value_body=0.5)
    losses = []
    for step in range(6):
        batch = TrainBatch(step, split(make_samples(), 2), SAMPLING)
        (values,) = await ours.values([batch])
        order = valued(list(batch.samples), list(values), 1.0)
        learnt = TrainBatch(step, (tuple(order[:6]), tuple(order[6:])), SAMPLING)
        await alone.train([batch])
        losses.append((await ours.train([learnt])).value_loss or 0.0)
        await body.train([learnt])
    assert losses[-1] < losses[0] / 2
    expected = parameters(alone)
    assert all(torch.equal(value, expected[name]) for name, value in parameters(ours).items())
    assert any(not torch.equal(value, expected[name]) for name, value in parameters(body).items())
    assert set(parameters(ours)) == set(expected)  # engines get what they always got


async def test_a_head_goes_with_the_state(folder: Path, tmp_path: Path) -> None:
    """Saved and read; handed over; and a checkpoint without one is told."""

    def batch(step: int) -> TrainBatch:
        samples = make_samples(seed=step)
        order = valued(samples, [(0.1,) * sum(each.mask) for each in samples], 1.0)
        return TrainBatch(step, (tuple(order),), SAMPLING)

    ours = trainer(folder, values=True)
    await ours.train([batch(0)])
    await ours.save(tmp_path / "saved")
    resumed, other = trainer(tmp_path / "saved", values=True), trainer(folder, values=True)
    await resumed.load_state(tmp_path / "saved")
    with other._model.stamp.writing(), torch.no_grad():
        for name, tensor in ours.state().items():
            other.state()[name].copy_(tensor)
    await other.become(WeightVersion(1))
    expected = await ours.train([batch(1)])
    for each in (resumed, other):
        assert await each.train([batch(1)]) == expected
        assert all(torch.equal(tensor, each.state()[name]) for name, tensor in ours.state().items())
    await trainer(folder).save(tmp_path / "without")
    with pytest.raises(TrainError, match=r"no value_head\.weight and no value_head\.bias: it had no value head"):
        await ours.load_state(tmp_path / "without")
