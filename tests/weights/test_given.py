"""Weights that a caller gives: what is taken, and what is refused before anything changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM, PreTrainedModel

from rollyard.errors import ConfigError
from rollyard.model.folder import load, tensors
from rollyard.model.transformer import CausalLM
from rollyard.weights.given import GivenWeights, merged_weights
from tests.tiny import tiny_folder

State = dict[str, Tensor]
EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


def folder_of(tmp_path: Path, *, tied: bool) -> Path:
    return tiny_folder(tmp_path, tied=tied)


def theirs(folder: Path) -> PreTrainedModel:
    """The same model in transformers, after a step or two."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def same(policy: CausalLM, model: PreTrainedModel) -> bool:
    state = model.state_dict()
    return all(torch.equal(state[name], tensor) for name, tensor in tensors(policy).items())


@pytest.mark.parametrize("tied", [True, False])
def test_a_module_is_taken_also_in_wrappers(tmp_path: Path, tied: bool) -> None:
    folder = folder_of(tmp_path, tied=tied)
    model, policy = theirs(folder), load(folder)
    before = policy.stamp.generation
    GivenWeights(policy, folder).take(model)
    assert same(policy, model) and policy.stamp.generation == before + 1
    for wrapped in (nn.DataParallel(theirs(folder)), torch.compile(theirs(folder), backend="eager")):
        GivenWeights(policy, folder).take(wrapped)
        assert same(policy, getattr(wrapped, "module", None) or wrapped._orig_mod)


def test_tensors_may_lie_with_or_without_a_tied_head(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, tied=True)
    model, policy = theirs(folder), load(folder)
    for state in (dict(model.named_parameters()), model.state_dict(), tensors(load(folder)), load(folder)):
        GivenWeights(policy, folder).take(state)


def nothing(state: State) -> None:
    state.clear()


def one_missing(state: State) -> None:
    del state[NORM]


def one_more(state: State) -> None:
    state["model.extra"] = torch.zeros(1)


def another_shape(state: State) -> None:
    state[NORM] = torch.zeros(3)


def another_format(state: State) -> None:
    state[NORM] = state[NORM].bfloat16()


def no_number(state: State) -> None:
    state[NORM] = state[NORM].clone().fill_(float("nan"))


def infinite(state: State) -> None:
    state[NORM] = torch.full_like(state[NORM], float("inf"))


def nowhere(state: State) -> None:
    state[NORM] = state[NORM].to("meta")


def sparse(state: State) -> None:
    state[NORM] = state[NORM].to_sparse()


def no_name(state: State) -> None:
    state[7] = state[NORM]  # type: ignore[index]


def another_head(state: State) -> None:
    state[HEAD] = state[EMBEDDING] + 1


def no_tensor(state: State) -> None:
    state[NORM] = [1.0]  # type: ignore[assignment]


def twice(state: State) -> None:
    state[f"module.{NORM}"] = state[NORM]


def adapted(state: State) -> None:
    state["base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight"] = torch.zeros(2, 64)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (nothing, "only on one side"),
        (one_missing, NORM),
        (one_more, "model.extra"),
        (another_shape, r"\[3\] float32, and the engine has \[64\] float32"),
        (another_format, "bfloat16, and the engine has"),
        (no_number, f"{NORM} has numbers that are not finite"),
        (infinite, "not finite"),
        (nowhere, "meta device"),
        (sparse, "is sparse"),
        (no_name, "7 is no name of a tensor"),
        (another_head, "the engines' model ties them"),
        (no_tensor, "a list, no tensor"),
        (twice, "comes twice"),
        (adapted, "adapter that is not merged"),
    ],
)
def test_what_does_not_suit_changes_nothing(tmp_path: Path, broken: Callable[[State], None], message: str) -> None:
    folder = folder_of(tmp_path, tied=True)
    policy, state = load(folder), dict(theirs(folder).state_dict())
    before = {name: tensor.clone() for name, tensor in tensors(policy).items()}
    broken(state)
    with pytest.raises(ConfigError, match=message):
        GivenWeights(policy, folder).take(state)
    assert all(torch.equal(before[name], tensor) for name, tensor in tensors(policy).items()) and policy.stamp.whole


def test_what_is_no_weights_at_all_is_told(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, tied=True)
    with pytest.raises(ConfigError, match="a list has no weights"):
        GivenWeights(load(folder), folder).take([1])  # type: ignore[arg-type]


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Of two ranks, of which this is the first; the other one is not there."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        yield DeviceMesh("cpu", [0, 1])
    finally:
        dist.destroy_process_group()


def test_of_several_ranks_whole_tensors_are_taken_and_parts_refused(tmp_path: Path, mesh: DeviceMesh) -> None:
    folder = folder_of(tmp_path, tied=True)
    policy, model = load(folder), theirs(folder)
    state = dict(model.state_dict())
    state[NORM] = DTensor.from_local(state[NORM], mesh, [Replicate()], run_check=False)
    GivenWeights(policy, folder).take(state)
    assert same(policy, model)
    state[NORM] = DTensor.from_local(state[NORM].to_local()[:32], mesh, [Shard(0)], run_check=False)
    with pytest.raises(ConfigError, match=rf"{NORM} is spread over 2 ranks.*full_state_dict=True"):
        GivenWeights(policy, folder).take(state)


def test_what_fsdp_makes_of_one_rank_is_whole(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, tied=True)
    policy, model, plain = load(folder), theirs(folder), theirs(folder)
    plain.load_state_dict(model.state_dict())
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        fully_shard(model, mesh=DeviceMesh("cpu", [0]))
        assert isinstance(model.state_dict()[NORM], DTensor)
        GivenWeights(policy, folder).take(model)
    finally:
        dist.destroy_process_group()
    assert same(policy, plain)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # in PEFT 0.21
def test_an_adapter_is_merged_where_that_is_asked_for(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    folder = folder_of(tmp_path, tied=True)
    policy, plain = load(folder), theirs(folder)
    settings = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    adapted_model = peft.get_peft_model(plain, settings)
    with torch.no_grad():
        for name, parameter in adapted_model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    with pytest.raises(ConfigError, match=r"adapter that is not merged.*merged_weights"):
        GivenWeights(policy, folder).take(adapted_model)
    GivenWeights(policy, folder).take(merged_weights(adapted_model))
    merged = adapted_model.merge_and_unload().state_dict()  # PEFT's own way
    for name, tensor in tensors(policy).items():
        torch.testing.assert_close(tensor, merged[name], atol=1e-6, rtol=0)
    with pytest.raises(ConfigError, match="is no PEFT model"):
        merged_weights(theirs(folder))
