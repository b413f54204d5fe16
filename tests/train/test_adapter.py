"""An adapter that is trained, against PEFT and transformers on the same batch; what its checkpoint holds."""

from __future__ import annotations

from pathlib import Path

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from rollyard.config import LoraConfig, TrainConfig
from rollyard.errors import TrainError
from rollyard.model import adapter
from rollyard.model.folder import load, save, tensors
from rollyard.train.learn import policy_logprobs
from rollyard.train.reference import Reference
from rollyard.train.rows import Rows, families
from rollyard.train.trainer import ReferenceTrainer
from rollyard.types import Sample, Sampling, TrainBatch, WeightVersion
from tests.tiny import tiny_folder
from tests.train.test_trainer import Here, make_samples, split

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
LORA = LoraConfig(rank=4, alpha=8)
FIELDS = {"lr": 1e-2, "max_grad_norm": 1e6, "clip_low": 0.2, "clip_high": 0.3, "correction": "none"}


def trainer(folder: Path, dtype: torch.dtype = torch.float32, lora: LoraConfig = LORA, **config: object) -> ReferenceTrainer:
    model = load(folder, dtype)
    adapter.add(model, lora, seed=3)
    return ReferenceTrainer(model, Here(), TrainConfig.model_validate(FIELDS | config), 9, folder, WeightVersion(0))


def loss_by_peft(model: torch.nn.Module, samples: list[Sample]) -> torch.Tensor:
    """The clipped objective, mean over tokens, sequence by sequence, every term written out."""
    total, loss = sum(sum(sample.mask) for sample in samples), torch.zeros(())
    for sample in samples:
        logprobs = model(torch.tensor([sample.token_ids])).logits[0].log_softmax(-1)
        for at, trained in enumerate(sample.mask):
            if trained:
                ratio = torch.exp(logprobs[at - 1, sample.token_ids[at]] - sample.logprobs[at])
                advantage = sample.advantages[at]
                loss = loss - torch.min(ratio * advantage, ratio.clip(0.8, 1.3) * advantage) / total
    return loss


async def test_the_reference_is_the_adapter_that_the_run_began_with(tmp_path: Path) -> None:
    """None at first, so the model under it: transformers' logprobs, also once the adapter has an effect. Or one of a folder."""
    folder, samples = tiny_folder(tmp_path), make_samples(6)
    rows = Rows.of(families(samples), torch.device("cpu"))
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        every = {id(each): plain(torch.tensor([each.token_ids])).logits[0].log_softmax(-1) for each in samples}
    order = [each for members in families(samples) for each in members]
    expected = [every[id(each)][t - 1, each.token_ids[t]] for each in order for t in range(len(each.mask)) if each.mask[t]]
    ours = trainer(folder)
    await ours.train([TrainBatch(0, split(samples, 2), Sampling(9))])
    before = {name: each.detach().clone() for name, each in ours._model.trained().items()}
    first = Reference.of(ours._model, folder, lambda: pytest.fail("nothing is copied"))
    found = first.logprobs(rows, Sampling(9), torch.float32)
    torch.testing.assert_close(found, torch.stack(expected), rtol=0, atol=1e-5)
    trained = policy_logprobs(ours._model, rows, Sampling(9), torch.float32)
    assert (trained - found).abs().max() > 1e-3
    assert all(torch.equal(each, before[name]) and each.requires_grad for name, each in ours._model.trained().items())
    await ours.save(tmp_path / "later")
    later = Reference.of(ours._model, tmp_path / "later", lambda: pytest.fail("nothing is copied"))
    await ours.train([TrainBatch(1, split(samples, 2), Sampling(9))])
    torch.testing.assert_close(later.logprobs(rows, Sampling(9), torch.float32), trained, rtol=0, atol=1e-6)


@pytest.mark.parametrize("targets", [("all-linear",), ("q_proj", "v_proj")])
async def test_losses_and_gradients_are_those_of_peft(tmp_path: Path, targets: tuple[str, ...]) -> None:
    """Of three steps: B has an effect from the second on, so A has a gradient then. Both sides take the same steps."""
    folder, samples = tiny_folder(tmp_path), make_samples()
    ours = trainer(folder, lora=LoraConfig.model_validate({"rank": 4, "alpha": 8, "targets": targets}))
    save(ours._model, tmp_path / "first", folder)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    other = peft.PeftModel.from_pretrained(base, tmp_path / "first", is_trainable=True)
    own = [parameter for parameter in other.parameters() if parameter.requires_grad]
    optimizer, gradients = torch.optim.AdamW(own, 1e-2, (0.9, 0.99), 1e-8, 0.0), dict[str, torch.Tensor]()
    step = ours._optimizer.step

    def noting() -> None:
        gradients.update({name: each.grad.clone() for name, each in ours._model.trained().items() if each.grad is not None})
        step()

    ours._optimizer.step = noting
    for number in range(3):
        stats = await ours.train([TrainBatch(number, split(samples, 3), Sampling(9))])
        optimizer.zero_grad()
        loss = loss_by_peft(other, samples)
        loss.backward()
        assert stats.loss == pytest.approx(loss.item(), abs=1e-5)
        expected = {name.replace(".default.", "."): each.grad for name, each in other.named_parameters()}
        assert len(gradients) == len(own) == len(ours._model.trained())
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected[adapter.PREFIX + name], rtol=0, atol=1e-5)
        optimizer.step()
    assert any(gradients[name].abs().max() > 1e-4 for name in gradients if adapter.A in name)


async def test_the_base_stays_and_has_no_state(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path)
    ours, plain = trainer(folder, torch.bfloat16, weight_decay=0.1), load(folder, torch.bfloat16)
    await ours.train([TrainBatch(0, split(make_samples(), 2), Sampling(9))])
    assert all(torch.equal(tensor, adapter.base(ours._model)[name]) for name, tensor in tensors(plain).items())
    named = {name.split("/", 1)[1] for name in ours.state() if name.startswith("exp_avg/")}
    assert named == ours._model.trained().keys() == ours.state().keys() & named
    assert {tensor.dtype for name, tensor in ours.state().items() if not name.startswith("random")} == {torch.float32}
    assert not any(parameter.grad is not None for parameter in ours._model.parameters())


async def test_a_checkpoint_is_peft_s_and_goes_on_as_if_nothing_had_been(tmp_path: Path) -> None:
    folder, samples = tiny_folder(tmp_path), make_samples()
    batches = [TrainBatch(number, split(samples, 2), Sampling(9)) for number in range(4)]
    ours = trainer(folder)
    for batch in batches[:2]:
        await ours.train([batch])
    await ours.save(tmp_path / "checkpoint")
    names = {path.name for path in (tmp_path / "checkpoint").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "trainer.safetensors", "tokenizer.json"} <= names
    assert "model.safetensors" not in names

    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    other = peft.PeftModel.from_pretrained(base, tmp_path / "checkpoint")
    expected = {name.replace(".default.", "."): each for name, each in other.named_parameters() if ".lora_" in name}
    assert all(torch.equal(each, expected[adapter.PREFIX + name]) for name, each in ours._model.trained().items())

    again = trainer(folder)
    adapter.read(again._model, tmp_path / "checkpoint")
    await again.load_state(tmp_path / "checkpoint")
    for batch in batches[2:]:
        assert await ours.train([batch]) == await again.train([batch])
    assert all(torch.equal(each, tensors(again._model)[name]) for name, each in tensors(ours._model).items())


async def test_the_state_of_another_adapter_is_refused(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path)
    await trainer(folder).save(tmp_path / "checkpoint")
    with pytest.raises(TrainError, match="belongs to another model"):
        await trainer(folder, lora=LoraConfig(rank=8, alpha=8)).load_state(tmp_path / "checkpoint")
