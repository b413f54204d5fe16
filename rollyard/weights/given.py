"""Weights that a caller who trains by itself gives: looked at as a whole, then copied into the policy that is published."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn

from rollyard.errors import ConfigError, WeightSyncError
from rollyard.model.folder import EMBEDDING, HEAD, WEIGHTS, infos, save, tensors, write_tensors
from rollyard.model.transformer import CausalLM
from rollyard.types import TensorInfo
from rollyard.weights.layout import compare

Weights = nn.Module | Mapping[str, Tensor]

WHERE: Final = "publish"
WRAPPERS: Final = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})  # DDP, compile, FSDP
OF_ADAPTERS: Final = ("lora_", ".base_layer.", "modules_to_save", "base_model.model.")
SHOWN: Final = 3  # names in a message


class GivenWeights:
    """The policy that engines get, and what is taken for it.

    Args:
        model: the policy. Its names, shapes and formats are what the caller has to give.
        source: the folder it came from; what is saved takes its configuration and tokenizer.
    """

    def __init__(self, model: CausalLM, source: Path) -> None:
        self._model, self._source = model, source

    @property
    def infos(self) -> Sequence[TensorInfo]:
        """What is to be given, a tied head left out."""
        return infos(tensors(self._model))

    def take(self, weights: Weights) -> None:
        """Copy the weights into the policy: all, or none of them when one does not suit. Called on the policy's device.

        Raises ConfigError for weights that do not suit; nothing has changed then.
        """
        own = tensors(self._model)
        found = self._checked(named(weights), own)
        with self._model.stamp.writing(), torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(found[name])

    def save(self, folder: Path, also: Callable[[Path], None]) -> None:
        """Write the policy as a new Hugging Face folder, with what `also` adds; whole or not at all. Raises OSError."""
        save(self._model, folder, self._source, also)

    def _checked(self, given: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole tensors of this process by the policy's names. Raises ConfigError."""
        found = {name: whole(name, tensor) for name, tensor in given.items()}
        if self._model.architecture.tied and HEAD in found and HEAD not in own:
            _check_tied(found.pop(HEAD), found.get(EMBEDDING))
        try:
            compare(infos(found), infos(own))
        except WeightSyncError as error:
            remedy = "publish Hugging Face's names and whole shapes, in model.dtype; nothing has changed"
            raise ConfigError(f"these are not the engines' tensors: {error}", where=WHERE, remedy=remedy) from None
        wrong = [name for name, tensor in found.items() if not bool(torch.isfinite(tensor).all())]
        if wrong:
            problem = f"{_some(wrong)} {'has' if len(wrong) == 1 else 'have'} numbers that are not finite"
            raise ConfigError(problem, where=WHERE, remedy="look at the loss and the gradients; nothing has changed")
        return found


def named(weights: Weights) -> dict[str, Tensor]:
    """The tensors by their Hugging Face names, without what wrappers put into them. Raises ConfigError for an adapted model."""
    if isinstance(weights, CausalLM):
        return tensors(weights)
    given = weights.state_dict() if isinstance(weights, nn.Module) else weights
    if not isinstance(given, Mapping):
        remedy = "publish a module, or a mapping of names to tensors"
        raise ConfigError(f"a {type(weights).__name__} has no weights", where=WHERE, remedy=remedy)
    if odd := [name for name in given if not isinstance(name, str)]:
        problem = f"{odd[0]!r:.60} is no name of a tensor"
        raise ConfigError(problem, where=WHERE, remedy="publish a mapping of names to tensors")
    adapted = [name for name in given if any(part in name for part in OF_ADAPTERS)]
    if adapted:
        remedy = "publish what merged_weights(model) gives, or model.merge_and_unload(); nothing has changed"
        raise ConfigError(f"the model has an adapter that is not merged: {_some(adapted)}", where=WHERE, remedy=remedy)
    found: dict[str, Tensor] = {}
    for name, tensor in given.items():
        plain = ".".join(part for part in name.split(".") if part not in WRAPPERS)
        if plain in found:
            raise ConfigError(f"{plain} comes twice", where=WHERE, remedy="publish each tensor once")
        if not isinstance(tensor, Tensor):
            problem = f"{name} is a {type(tensor).__name__}, no tensor"
            raise ConfigError(problem, where=WHERE, remedy="publish a mapping of names to tensors")
        found[plain] = tensor.detach()
    return found


def whole(name: str, tensor: Tensor) -> Tensor:
    """A tensor all of which is in this process. Raises ConfigError for a part of one."""
    if tensor.is_meta:
        raise ConfigError(f"{name} is on the meta device: it has no numbers", where=WHERE, remedy="publish loaded weights")
    if tensor.layout != torch.strided:
        remedy = "publish what to_dense() gives; nothing has changed"
        raise ConfigError(f"{name} is sparse ({tensor.layout})", where=WHERE, remedy=remedy)
    mesh = getattr(tensor, "device_mesh", None)
    if mesh is None:
        return tensor
    from torch.distributed.tensor import DTensor

    assert isinstance(tensor, DTensor)
    if mesh.size() > 1 and not all(placement.is_replicate() for placement in tensor.placements):
        problem = f"{name} is spread over {mesh.size()} ranks, and this one has a part of it"
        remedy = (
            "on all ranks: get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)) of "
            "torch.distributed.checkpoint.state_dict; then publish what rank 0 got"
        )
        raise ConfigError(problem, where=WHERE, remedy=remedy)
    return tensor.to_local()


def _check_tied(head: Tensor, embedding: Tensor | None) -> None:
    if embedding is None:
        return  # told as missing
    same = head.data_ptr() == embedding.data_ptr() or (head.shape == embedding.shape and torch.equal(head, embedding))
    if not same:
        problem = f"{HEAD} differs from {EMBEDDING}, and the engines' model ties them"
        raise ConfigError(problem, where=WHERE, remedy="tie them in your model; nothing has changed")


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:SHOWN])
    return shown + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


def write_weights(weights: Weights, folder: Path) -> None:
    """Write these weights as a safetensors file of a Hugging Face folder, tensors that are one in two places once."""
    found: dict[str, Tensor] = {}
    seen: set[tuple[int, torch.Size]] = set()
    for name, tensor in named(weights).items():
        all_of_it = whole(name, tensor)
        if (key := (all_of_it.data_ptr(), all_of_it.shape)) not in seen:
            seen.add(key)
            found[name] = all_of_it
    write_tensors(folder / WEIGHTS, infos(found), iter(found.items()))


def merged_weights(model: nn.Module) -> dict[str, Tensor]:
    """The weights of a PEFT model with its active LoRA adapters merged into them, to be published. The model stays as it is.

    W + alpha / rank x B A of each adapted linear or embedding, in the number format of W; the others are its own tensors.

    Raises ConfigError for a model of another kind, or one whose adapter is more than LoRA.
    """
    try:
        from peft import PeftModel
        from peft.tuners.lora import LoraLayer
    except ImportError:
        raise ConfigError("PEFT is not installed", where=WHERE, remedy="pip install 'rollyard[lora]'") from None
    if not isinstance(model, PeftModel):
        remedy = "publish the model itself, where it has no adapter"
        raise ConfigError(f"a {type(model).__name__} is no PEFT model", where=WHERE, remedy=remedy)
    base: nn.Module = model.get_base_model()
    found = {name.replace(".base_layer.", "."): tensor for name, tensor in base.state_dict().items() if ".lora_" not in name}
    for name, module in base.named_modules():
        if isinstance(module, LoraLayer) and not module.merged:
            for adapter in module.active_adapters:
                if adapter in module.lora_A or adapter in module.lora_embedding_A:
                    weight = f"{name}.weight"
                    found[weight] = found[weight] + module.get_delta_weight(adapter).to(found[weight].dtype)
    odd = [name for name in (*found, *base.state_dict()) if "modules_to_save" in name or "lora_magnitude" in name]
    if odd or str(model.peft_type) not in ("PeftType.LORA", "LORA"):
        problem = f"the adapter is more than LoRA: {_some(odd) or model.peft_type}"
        raise ConfigError(problem, where=WHERE, remedy="publish model.merge_and_unload() of a copy")
    return found
