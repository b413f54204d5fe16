"""The trainer against a plain padded implementation over transformers."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.generation.logits_process import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from rollyard.config import TrainConfig
from rollyard.errors import CheckpointError, NonFinite, StaleWeights, TrainError
from rollyard.model.folder import load
from rollyard.train.trainer import ReferenceTrainer
from rollyard.types import Sample, Sampling, TrainBatch, TrainStats, WeightVersion
from rollyard.watch.spans import SpanLog
from tests.tiny import tiny_folder


class Here:
    """A device that computes in the calling thread."""

    spans = SpanLog()

    async def run(self, call, *args):
        return call(*args)


def make_samples(count: int = 12, vocab: int = 40, seed: int = 0) -> list[Sample]:
    numbers = random.Random(seed)
    samples = []
    for member in range(count):
        prompt, sampled = numbers.randint(1, 6), numbers.randint(1, 9)
        ids = tuple(numbers.randrange(vocab) for _ in range(prompt + sampled))
        advantage = numbers.gauss(0, 1)
        samples.append(
            Sample(
                group=member // 4,
                member=member % 4,
                token_ids=ids,
                mask=(False,) * prompt + (True,) * sampled,
                logprobs=(0.0,) * prompt + tuple(-math.log(vocab) + numbers.gauss(0, 0.4) for _ in range(sampled)),
                advantages=(0.0,) * prompt + (advantage,) * sampled,
                spans=(),
            )
        )
    return samples


def split(samples: list[Sample], parts: int) -> tuple[tuple[Sample, ...], ...]:
    return tuple(tuple(samples[i::parts]) for i in range(parts))


def trainer(folder, life: int = 0, **config) -> ReferenceTrainer:
    values = {"lr": 1e-2, "max_grad_norm": 1e6, "correction": "none"} | config
    return ReferenceTrainer(load(folder), Here(), TrainConfig(**values), 9, folder, WeightVersion(0), life=life)


def parameters(trainer: ReferenceTrainer) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in trainer._model.named_parameters()}


def plain_loss(folder, samples, aggregation: str, temperature: float, low: float, high: float, max_tokens: int):
    """Sequence by sequence with transformers, every term written out."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    total_tokens = sum(sum(s.mask) for s in samples)
    loss = torch.zeros(())
    for s in samples:
        logits = model(torch.tensor([s.token_ids])).logits[0]
        count = sum(s.mask)
        for t in range(len(s.token_ids)):
            if not s.mask[t]:
                continue
            new = torch.log_softmax(logits[t - 1] / temperature, -1)[s.token_ids[t]]
            ratio = torch.exp(new - s.logprobs[t])
            term = -torch.min(ratio * s.advantages[t], torch.clip(ratio, 1 - low, 1 + high) * s.advantages[t])
            scale = {"token": total_tokens, "sequence": count * len(samples), "fixed": len(samples) * max_tokens}[aggregation]
            loss = loss + term / scale
    return loss, model


@pytest.mark.parametrize("aggregation", ["token", "sequence", "fixed"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_loss_and_gradients_equal_the_plain_version(tmp_path, aggregation, temperature):
    folder = tiny_folder(tmp_path)
    samples = make_samples()
    loss, plain = plain_loss(folder, samples, aggregation, temperature, 0.2, 0.3, 9)
    loss.backward()
    ours = trainer(folder, aggregation=aggregation, clip_low=0.2, clip_high=0.3)
    gradients = {}
    ours._optimizer.step = lambda: gradients.update({n: p.grad.clone() for n, p in ours._model.named_parameters()})
    stats = await ours.train([TrainBatch(0, split(samples, 3), Sampling(9, temperature))])
    assert stats.loss == pytest.approx(loss.item(), abs=1e-5)
    assert stats.tokens == sum(sum(s.mask) for s in samples)
    expected = dict(plain.named_parameters())
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name].grad, rtol=1e-3, atol=1e-5)
    norm = torch.sqrt(sum((p.grad**2).sum() for p in plain.parameters()))
    assert stats.grad_norm == pytest.approx(norm.item(), rel=1e-4)


@pytest.mark.parametrize("aggregation", ["token", "sequence", "fixed"])
async def test_micro_batches_change_nothing(tmp_path, aggregation):
    folder = tiny_folder(tmp_path)
    samples = make_samples(13)
    results = []
    for parts in (1, 2, 5):
        ours = trainer(folder, aggregation=aggregation)
        gradients = {}
        ours._optimizer.step = lambda ours=ours, found=gradients: found.update(
            {n: p.grad.clone() for n, p in ours._model.named_parameters()}
        )
        stats = await ours.train([TrainBatch(0, split(samples, parts), Sampling(9))])
        results.append((gradients, stats))
    for gradients, stats in results[1:]:
        assert stats.loss == pytest.approx(results[0][1].loss, abs=1e-6)
        assert stats.entropy == pytest.approx(results[0][1].entropy, abs=1e-5)
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, results[0][0][name], rtol=0, atol=1e-6)


@pytest.fixture(scope="module")
def one_folder(tmp_path_factory):
    return tiny_folder(tmp_path_factory.mktemp("model"))


def gradients_of(folder, micro_batches, **config) -> tuple[dict[str, torch.Tensor], TrainStats]:
    ours, found = trainer(folder, **config), {}
    ours._optimizer.step = lambda: found.update({n: p.grad.clone() for n, p in ours._model.named_parameters()})
    return found, ours._train(TrainBatch(0, micro_batches, Sampling(9)))


# Prompts of few different tokens, so that groups meet equal prompts, one another's and those of one token.
PROMPTS = st.lists(st.integers(2, 3), min_size=1, max_size=3).map(tuple)
MEMBERS = st.tuples(PROMPTS, st.lists(st.integers(1, 7), min_size=1, max_size=4))


@settings(max_examples=12)
@given(st.lists(st.tuples(st.integers(0, 2), MEMBERS), min_size=1, max_size=4), st.integers(0, 99))
def test_shared_prompts_equal_the_plain_version(one_folder, groups, seed):
    """Ragged groups, groups of one, equal prompts of different groups, different prompts in one group."""
    numbers = random.Random(seed)
    samples = []
    for group, (prompt, lengths) in groups:
        for sampled in lengths:
            zeros, advantage = (0.0,) * len(prompt), numbers.gauss(0, 1)
            ids = prompt + tuple(numbers.randrange(2, 40) for _ in range(sampled))  # transformers never teaches its pad, 0
            logprobs = zeros + tuple(-3.6 + numbers.gauss(0, 0.4) for _ in range(sampled))
            mask = (False,) * len(prompt) + (True,) * sampled
            samples.append(Sample(group, len(samples), ids, mask, logprobs, zeros + (advantage,) * sampled, ()))
    loss, plain = plain_loss(one_folder, samples, "token", 1.0, 0.2, 0.2, 9)
    loss.backward()
    gradients, stats = gradients_of(one_folder, (tuple(samples),))
    assert stats.loss == pytest.approx(loss.item(), abs=1e-5)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-3, atol=2e-5)


async def test_a_prompt_is_computed_once(one_folder):
    """A prompt of 6 with completions of 3, 3 and 1: 6 + 2 + 2 + 0 tokens, not 8 + 8 + 6."""
    prompt, ours, seen = (5, 6, 7, 8, 9, 10), trainer(one_folder), []
    ours._model.model.embed_tokens.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0].tolist()))
    samples = [
        Sample(0, i, prompt + own, (False,) * 6 + (True,) * len(own), (0.0,) * (6 + len(own)), (1.0,) * (6 + len(own)), ())
        for i, own in enumerate(((11, 12, 13), (14, 15, 16), (17,)))
    ]
    await ours.train([TrainBatch(0, (tuple(samples),), Sampling(9))])
    assert seen == [[*prompt, 11, 12, 14, 15]]


async def test_pieces_change_nothing(one_folder, monkeypatch):
    whole, stats = gradients_of(one_folder, (tuple(make_samples(13)),))
    monkeypatch.setattr("rollyard.train.trainer.CACHED_TOKENS", 10)
    cut, cut_stats = gradients_of(one_folder, (tuple(make_samples(13)),))
    assert cut_stats.loss == pytest.approx(stats.loss, abs=1e-6)
    for name, gradient in cut.items():
        torch.testing.assert_close(gradient, whole[name], rtol=0, atol=1e-6)


async def test_bfloat16_products_stay_near_float32_and_train(one_folder):
    """Gradients point the same way; parameters, gradients and moments stay float32; a repeated batch is learnt."""
    batch = (tuple(make_samples()),)
    exact, exact_stats = gradients_of(one_folder, batch)
    short, stats = gradients_of(one_folder, batch, precision="bfloat16")
    assert stats.loss == pytest.approx(exact_stats.loss, abs=0.01)
    assert stats.grad_norm == pytest.approx(exact_stats.grad_norm, rel=0.02)
    for name, gradient in short.items():
        assert gradient.dtype == torch.float32 and not torch.equal(gradient, exact[name])
        assert torch.cosine_similarity(gradient.flatten(), exact[name].flatten(), 0) > 0.99, name
    ours = trainer(one_folder, precision="bfloat16", lr=1e-3)
    losses = [(await ours.train([TrainBatch(step, batch, Sampling(9))])).loss for step in range(8)]
    assert losses[-1] < losses[0] - 0.05
    assert {value.dtype for state in ours._optimizer.state.values() for value in state.values()} == {torch.float32}
    assert {value.dtype for value in ours._model.parameters()} == {torch.float32}


async def test_metrics_by_hand(tmp_path):
    """Behaviour logprobs shifted by known amounts from the model's own: ratios e^0.5 and e^-0.5."""
    folder = tiny_folder(tmp_path)
    ids = (3, 4, 5, 6)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        every = torch.log_softmax(plain(torch.tensor([ids])).logits[0], -1)
    own = [every[t - 1, ids[t]].item() for t in (2, 3)]
    entropy = [-(every[t - 1].exp() * every[t - 1]).sum().item() for t in (2, 3)]
    sample = Sample(0, 0, ids, (False, False, True, True), (0.0, 0.0, own[0] - 0.5, own[1] + 0.5), (0.0, 0.0, 1.0, -1.0), ())
    stats = await trainer(folder).train([TrainBatch(0, ((sample,),), Sampling(9))])
    up, down = math.exp(0.5), math.exp(-0.5)
    assert stats.ratio_mean == pytest.approx((up + down) / 2, abs=1e-4)
    assert stats.clipped_share == 1.0  # up above 1.2 with advantage 1, down below 0.8 with advantage -1
    assert stats.loss == pytest.approx((-1.2 + 0.8) / 2, abs=1e-4)
    assert (stats.logprob_gap_mean, stats.logprob_gap_max) == pytest.approx((0.5, 0.5), abs=1e-4)
    assert stats.entropy == pytest.approx(sum(entropy) / 2, abs=1e-4)


async def test_a_step_equals_torch_adamw_with_warm_up_and_clipping(tmp_path):
    folder = tiny_folder(tmp_path)
    samples = make_samples()
    loss, plain = plain_loss(folder, samples, "token", 1.0, 0.2, 0.2, 9)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    torch.optim.AdamW(plain.parameters(), 1e-2 / 4, (0.9, 0.99), 1e-4, 0.01).step()
    ours = trainer(folder, warmup_steps=4, max_grad_norm=0.1, weight_decay=0.01, eps=1e-4)
    stats = await ours.train([TrainBatch(0, split(samples, 2), Sampling(9))])
    assert stats.learning_rate == pytest.approx(2.5e-3) and ours.version == WeightVersion(1)
    expected = dict(plain.named_parameters())
    for name, value in parameters(ours).items():
        torch.testing.assert_close(value, expected[name].detach(), rtol=1e-3, atol=2e-5)


async def test_top_k_and_top_p_equal_the_plain_version(tmp_path):
    """Tokens drawn with transformers' own filters: the trainer's kept sets are those, so no token is missed."""
    folder, drawn = tiny_folder(tmp_path), torch.Generator().manual_seed(0)
    sampling = Sampling(9, temperature=0.7, top_p=0.8, top_k=12)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    filters = LogitsProcessorList([TemperatureLogitsWarper(0.7), TopKLogitsWarper(12), TopPLogitsWarper(0.8)])
    loss, samples, total = torch.zeros(()), [], 0
    for member, advantage in enumerate((1.5, -0.5, -1.0)):
        ids = [5 + member, 9]
        while len(ids) < 5 + member:
            with torch.no_grad():
                shares = filters(None, plain(torch.tensor([ids])).logits[:, -1]).softmax(-1)
            ids.append(torch.multinomial(shares, 1, generator=drawn).item())
        filtered = filters(None, plain(torch.tensor([ids])).logits[0]).log_softmax(-1)
        new = [filtered[t - 1, ids[t]] for t in range(2, len(ids))]
        loss = loss - sum(torch.exp(value - value.detach()) for value in new) * advantage  # behaviour = now: ratio 1
        total += len(new)
        mask = (False, False, *(True for _ in new))
        logprobs = (0.0, 0.0, *(value.item() for value in new))
        samples.append(Sample(0, member, tuple(ids), mask, logprobs, tuple(advantage * flag for flag in mask), ()))
    (loss / total).backward()
    ours = trainer(folder)
    gradients = {}
    ours._optimizer.step = lambda: gradients.update({n: p.grad.clone() for n, p in ours._model.named_parameters()})
    stats = await ours.train([TrainBatch(0, split(samples, 2), sampling)])
    assert (stats.kept_set_misses, stats.clipped_share) == (0.0, 0.0)
    assert stats.ratio_mean == pytest.approx(1.0, abs=1e-5) and stats.logprob_gap_max < 1e-5
    expected = dict(plain.named_parameters())
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name].grad, rtol=1e-3, atol=1e-5)


async def test_a_token_outside_the_trainers_kept_set_is_counted(tmp_path):
    """With top_k 1 the kept set is the likeliest token; the unlikeliest one was drawn: two remain, half the tokens miss."""
    folder = tiny_folder(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        best = plain(torch.tensor([[7]])).logits[0, -1].argmax().item()
        logits = plain(torch.tensor([[7, best]])).logits[0, -1]
    worst = logits.argmin().item()
    own = torch.log_softmax(torch.stack([logits.max(), logits.min()]), 0)[1].item()
    sample = Sample(0, 0, (7, best, worst), (False, True, True), (0.0, 0.0, own), (0.0, 1.0, 1.0), ())
    stats = await trainer(folder).train([TrainBatch(0, ((sample,),), Sampling(9, top_k=1))])
    assert stats.kept_set_misses == 0.5 and stats.logprob_gap_max < 1e-4


async def test_advantages_of_zero_are_a_step_like_any_other(tmp_path):
    """No gradient: only weight decay, 1 - lr x decay = 0.999, moves the parameters."""
    ours = trainer(tiny_folder(tmp_path), weight_decay=0.1)
    before, generation = parameters(ours), ours._model.stamp.generation
    samples = [dataclasses.replace(sample, advantages=(0.0,) * len(sample.mask)) for sample in make_samples(4)]
    stats = await ours.train([TrainBatch(0, split(samples, 2), Sampling(9))])
    assert (stats.loss, stats.grad_norm) == (0.0, 0.0) and stats.tokens > 0
    assert ours.version == WeightVersion(1) and ours._model.stamp.generation == generation + 1
    for name, value in parameters(ours).items():
        torch.testing.assert_close(value, before[name] * 0.999)


async def test_non_finite_leaves_everything_as_it_was(tmp_path):
    ours = trainer(tiny_folder(tmp_path))
    before, generation = parameters(ours), ours._model.stamp.generation
    bad = make_samples(1)[0]
    values = tuple(math.inf if flag else 0.0 for flag in bad.mask)
    bad = Sample(bad.group, bad.member, bad.token_ids, bad.mask, bad.logprobs, values, ())
    with pytest.raises(NonFinite, match=r"^step 1: "):
        await ours.train([TrainBatch(0, ((bad,),), Sampling(9))])
    assert ours.version == WeightVersion(0) and ours._model.stamp.generation == generation
    assert all(torch.equal(value, before[name]) for name, value in parameters(ours).items())
    assert all(value.grad is None for value in ours._model.parameters())
    await ours.train([TrainBatch(0, split(make_samples(), 2), Sampling(9))])
    assert ours.version == WeightVersion(1)


async def test_an_empty_batch_counts_as_a_step_and_changes_nothing(tmp_path):
    ours = trainer(tiny_folder(tmp_path))
    before = parameters(ours)
    stats = await ours.train([TrainBatch(0, (), Sampling(9))])
    assert (stats.tokens, stats.loss, stats.grad_norm) == (0, 0.0, 0.0) and ours.version == WeightVersion(1)
    assert all(torch.equal(value, before[name]) for name, value in parameters(ours).items())


async def test_a_batch_for_another_version_is_refused(tmp_path):
    with pytest.raises(TrainError, match="trains version 3"):
        await trainer(tiny_folder(tmp_path)).train([TrainBatch(3, split(make_samples(), 1), Sampling(9))])


async def test_a_failure_inside_the_optimizer_stops_every_forward_pass(tmp_path):
    ours = trainer(tiny_folder(tmp_path))

    def broken():
        raise RuntimeError("out of memory")

    ours._optimizer.step = broken
    with pytest.raises(RuntimeError):
        await ours.train([TrainBatch(0, split(make_samples(), 1), Sampling(9))])
    with pytest.raises(StaleWeights):
        ours._model.stamp.check(ours._model.stamp.generation)
    with pytest.raises(CheckpointError, match="half way"):
        await ours.save(tmp_path / "torn")
    assert not (tmp_path / "torn").exists()


async def test_a_saved_trainer_goes_on_as_if_nothing_had_happened(tmp_path):
    folder = tiny_folder(tmp_path)
    whole = trainer(folder)
    for step in range(3):
        if step == 2:
            await whole.save(tmp_path / "saved")
        await whole.train([TrainBatch(step, split(make_samples(seed=step), 2), Sampling(9))])
    resumed = trainer(tmp_path / "saved", life=3)
    await resumed.load_state(tmp_path / "saved")
    assert resumed.version == WeightVersion(2)
    await resumed.train([TrainBatch(2, split(make_samples(seed=2), 2), Sampling(9))])
    assert resumed.version == WeightVersion(3, 3), "it says which life made it, and so does its checkpoint"
    await resumed.save(tmp_path / "again")
    later = trainer(tmp_path / "again")
    await later.load_state(tmp_path / "again")
    assert later.version == WeightVersion(3, 3)
    assert all(torch.equal(value, parameters(whole)[name]) for name, value in parameters(resumed).items())
    AutoModelForCausalLM.from_pretrained(tmp_path / "saved")


async def test_a_state_before_the_first_step_is_one_too(tmp_path):
    folder = tiny_folder(tmp_path)
    await trainer(folder).save(tmp_path / "saved")
    whole, resumed = trainer(folder), trainer(tmp_path / "saved")
    await resumed.load_state(tmp_path / "saved")
    for ours in (whole, resumed):
        await ours.train([TrainBatch(0, split(make_samples(), 2), Sampling(9))])
    assert all(torch.equal(value, parameters(whole)[name]) for name, value in parameters(resumed).items())


async def test_a_state_that_does_not_fit_is_refused(tmp_path):
    ours, wider = trainer(tiny_folder(tmp_path)), trainer(tiny_folder(tmp_path / "wider", width=96))
    await wider.train([TrainBatch(0, split(make_samples(), 1), Sampling(9))])
    await wider.save(tmp_path / "saved")
    with pytest.raises(TrainError, match="belongs to another model"):
        await ours.load_state(tmp_path / "saved")
    with pytest.raises(TrainError, match="holds no state"):
        await ours.load_state(tmp_path / "nothing")
    await ours.save(tmp_path / "gpu")
    tensors = load_file(tmp_path / "gpu" / "trainer.safetensors")
    save_file(tensors | {"random/cuda": tensors["random/cpu"].clone()}, tmp_path / "gpu" / "trainer.safetensors")
    with pytest.raises(TrainError, match="was written on another kind of device"):
        await ours.load_state(tmp_path / "gpu")
    (tmp_path / "saved" / "trainer.safetensors").write_bytes(b"")
    with pytest.raises(TrainError, match=r"holds no state of a trainer: .*/trainer\.safetensors cannot be read: [^()]*$"):
        await ours.load_state(tmp_path / "saved")
    (tmp_path / "saved" / "trainer.json").write_text("[]")
    with pytest.raises(TrainError, match=r"holds no state of a trainer: trainer\.json names no version$"):
        await ours.load_state(tmp_path / "saved")
    assert ours.version == WeightVersion(0)
