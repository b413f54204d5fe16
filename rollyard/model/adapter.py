"""LoRA adapters: PEFT's layers around a policy's linears, whose own weights stay as they are.

y = W x + alpha / rank x B A x; https://arxiv.org/abs/2106.09685. An adapter's tensors are named as the weights they go with:
`model.layers.0.self_attn.q_proj.lora_A.weight`. They are float32, whatever the format of the weights. PEFT is imported
only where an adapter is trained; whoever merges one needs tensors alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from rollyard.config import LoraConfig
from rollyard.errors import ConfigError
from rollyard.model.architecture import SETTINGS, Architecture, base_of
from rollyard.model.transformer import CausalLM
from rollyard.types import TensorInfo

if TYPE_CHECKING:
    import peft

WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."  # of names in PEFT's files
A, B = ".lora_A.", ".lora_B."


def add(model: CausalLM, lora: LoraConfig, seed: int) -> None:
    """Freeze the parameters and put an adapter around them: A random, B zeros, so that the function is the same.

    Args:
        seed: of A's numbers; trainers of one run have the same.
    """
    import peft

    settings = peft.LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, lora_dropout=lora.dropout, target_modules=list(lora.modules), bias="none"
    )
    settings.task_type = peft.TaskType.CAUSAL_LM
    model.requires_grad_(False)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        peft.inject_adapter_in_model(settings, model)
    for parameter in model.trained().values():
        parameter.data = parameter.data.float()


def infos(model: CausalLM, lora: LoraConfig) -> tuple[TensorInfo, ...]:
    """The tensors that `add` would make for `model`, which has none yet; in their order."""
    found = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] in lora.modules:
            found.append(TensorInfo(f"{name}{A}weight", (lora.rank, module.in_features), "torch.float32"))
            found.append(TensorInfo(f"{name}{B}weight", (module.out_features, lora.rank), "torch.float32"))
    return tuple(found)


def base(model: CausalLM) -> dict[str, Tensor]:
    """The weights under an adapter by their Hugging Face names, shared and frozen; a tied head left out."""
    return {
        name.replace(".base_layer.", "."): parameter.detach()
        for name, parameter in model.named_parameters()
        if not parameter.requires_grad
    }


@contextmanager
def standing_in(model: CausalLM, others: Mapping[str, Tensor]) -> Iterator[None]:
    """Within it `model` computes with these tensors in the place of the adapter's own. Nothing is copied."""
    parameters = model.trained() if others else {}
    own = {name: parameter.data for name, parameter in parameters.items()}
    try:
        for name, parameter in parameters.items():
            parameter.data = others[name]
        yield
    finally:
        for name, parameter in parameters.items():
            parameter.data = own[name]


def initial(model: CausalLM, folder: Path) -> dict[str, Tensor]:
    """What `model` would have for an adapter if it began with `folder`: the one there, or one without an effect.

    Raises ConfigError for one that does not fit.
    """
    if not (folder / SETTINGS).is_file():
        return {name: torch.zeros_like(each, requires_grad=False) for name, each in model.trained().items()}
    return {name: tensor.to(model.trained()[name]) for name, tensor in _stored(model, folder).items()}


def partner(name: str) -> str:
    """The tensor that this one is multiplied with."""
    return name.replace(A, B) if A in name else name.replace(B, A)


@torch.no_grad()
def merge(
    weights: Mapping[str, Tensor], adapter: Mapping[str, Tensor], scaling: float, memory: dict[str, Tensor]
) -> dict[str, Tensor]:
    """All weights, with an adapter's effect in those that have one: W + scaling x B A, rounded once to W's format.

    `weights` stay as they are, and those without an adapter are shared.

    Args:
        memory: what the others are written to; made where there is none yet. New memory would cost more than the rest.
    """
    for name, a in adapter.items():
        if A in name:
            target, b = name.replace(A, "."), adapter[partner(name)]
            weight = weights[target]
            if target not in memory:
                memory[target] = torch.empty_like(weight)
            out = memory[target]
            if weight.dtype == a.dtype:
                torch.addmm(weight, b, a, alpha=scaling, out=out)
            else:
                out.copy_(torch.addmm(weight.to(a.dtype), b, a, alpha=scaling))
    return {**weights, **memory}


# ------------------------------------------------------------------------------------------------------ its folder


def write(model: CausalLM, folder: Path, source: Path) -> None:
    """The files that PEFT reads, into `folder`. Raises OSError or SafetensorError.

    Args:
        source: the folder of the model under the adapter, or of an adapter on it.
    """
    settings: peft.LoraConfig = _settings(model)
    settings.base_model_name_or_path = str(base_of(source).resolve())
    settings.inference_mode = True  # as PEFT writes it
    settings.save_pretrained(str(folder))
    settings.inference_mode = False
    tensors = {PREFIX + name: parameter.detach().contiguous() for name, parameter in model.trained().items()}
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})


def write_blank(architecture: Architecture, lora: LoraConfig, folder: Path) -> None:
    """An adapter without an effect, with no more than readers need; PEFT is not."""
    shapes = infos(CausalLM(architecture, device="meta"), lora)
    save_file({PREFIX + info.name: torch.zeros(info.shape) for info in shapes}, folder / WEIGHTS, {"format": "pt"})
    settings = {"peft_type": "LORA", "r": lora.rank, "lora_alpha": lora.alpha, "target_modules": lora.modules, "bias": "none"}
    (folder / SETTINGS).write_text(json.dumps(settings), encoding="utf-8")


def read(model: CausalLM, folder: Path) -> None:
    """Fill the adapter of `model`, where `folder` has one. Raises ConfigError for one that does not fit."""
    if not (folder / SETTINGS).is_file():
        return
    stored = _stored(model, folder)
    with model.stamp.writing(), torch.no_grad():
        for name, parameter in model.trained().items():
            parameter.copy_(stored[name])


def _stored(model: CausalLM, folder: Path) -> dict[str, Tensor]:
    """The adapter in `folder`. Raises ConfigError for one that is not like that of `model`."""
    try:
        settings = dict(json.loads((folder / SETTINGS).read_text(encoding="utf-8")))
        stored = {name.removeprefix(PREFIX): tensor for name, tensor in load_file(folder / WEIGHTS).items()}
    except (OSError, ValueError, TypeError, RecursionError, SafetensorError) as error:
        problem = f"{folder} holds no adapter that can be read: {error}"
        raise ConfigError(problem, where="model.path", remedy="give the folder that a run wrote") from error
    own, asked = model.trained(), _settings(model)
    same = {name: tensor.shape for name, tensor in stored.items()} == {name: each.shape for name, each in own.items()}
    if not same or (settings.get("r"), settings.get("lora_alpha")) != (asked.r, asked.lora_alpha):
        problem = f"the adapter in {folder} has another rank, alpha or other targets than this run"
        raise ConfigError(problem, where="lora", remedy=f"use those in its {SETTINGS}")
    return stored


def _settings(model: CausalLM) -> Any:
    """Where PEFT leaves them."""
    found: Any = model.peft_config
    return found["default"]
