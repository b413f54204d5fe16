"""How a model's parameters lie on the ranks that train it: all of them on each, or some rows of every tensor on each.

Rows are torch's FSDP2 (`fully_shard`): a layer is gathered for its pass and let go after it; a backward pass leaves on each
rank its rows of the gradients' sum. All that moves is moved by the ranks' own group (`Collectives`), which is made anew
after a failure, while the model stays what it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from rollyard.errors import ConfigError


class Collectives(Protocol):
    """What all ranks do at the same time. Each raises RanksApart when not all take part to the end."""

    rank: int
    size: int

    def all_gather(self, into: Tensor, own: Tensor) -> None:
        """`own` `[n, ...]` of every rank, in their order, into `[ranks x n, ...]`."""

    def reduce_scatter(self, into: Tensor, every: Tensor) -> None:
        """Of the sum of all ranks' `every` `[ranks x n]` this rank's part, into `[n]`."""

    def bring(self, tensor: Tensor, sender: int) -> None:
        """From one rank to rank 0, which writes to `tensor` what the sender has in it; the others do nothing."""

    def spread(self, tensor: Tensor) -> None:
        """From rank 0 to all, in place."""


class Whole:
    """All parameters are here, and no other rank is needed to read one."""

    sharded = False
    first = True  # whole tensors come together here, to be sent or written

    def own(self, tensor: Tensor) -> Tensor:
        """What is here of a parameter, of its gradient, or of whatever lies as it does; no copy."""
        return tensor.detach()

    def rows(self, shape: Sequence[int]) -> slice:
        """Which rows of a tensor of this shape are here."""
        return slice(0, shape[0]) if shape else slice(None)

    def gathered(self, own: Tensor, shape: Sequence[int]) -> Tensor:
        """The whole tensor on every rank, of each one's rows."""
        return own

    def collected(self, tensor: Tensor) -> Tensor | None:
        """The whole tensor on rank 0, for as long as it is used there; None on the others."""
        return tensor.detach()

    def agreed(self, numbers: Tensor) -> Tensor:
        """Rank 0's, from which all draw the same conclusions."""
        return numbers

    def gradients(self, total: Tensor, parameters: Sequence[Tensor]) -> Sequence[Tensor]:
        """Of `total`, which every rank has computed: what is here of each of them. No `grad` is left."""
        return torch.autograd.grad(total, list(parameters))

    def rest(self) -> None:
        """Let go of what a forward pass without a backward one has gathered."""

    def recover(self) -> None:
        """A pass failed half way: let go of all that it gathered and began. The parameters are as they were."""


class Rows(Whole):
    """Some rows of every tensor are here. What is not said to be local has to be called on all ranks alike.

    Local are `own`, `rows`, `rest` and `recover`.
    """

    sharded = True

    def __init__(self, model: Any, ranks: Collectives, gathering: _AllGather) -> None:
        self._model, self._ranks, self._gathering = model, ranks, gathering
        self.first = ranks.rank == 0

    def own(self, tensor: Tensor) -> Tensor:
        found: Tensor = tensor.detach().to_local() if is_sharded(tensor) else tensor.detach()  # type: ignore[attr-defined]
        return found

    def rows(self, shape: Sequence[int]) -> slice:
        return self._of(self._ranks.rank, shape)

    def gathered(self, own: Tensor, shape: Sequence[int]) -> Tensor:
        ranks, rest = self._ranks, shape[1:]
        most = -(-shape[0] // ranks.size)
        padded = own.new_zeros((most, *rest))
        padded[: own.shape[0]] = own
        whole = own.new_empty((most * ranks.size, *rest))
        ranks.all_gather(whole, padded)
        return whole[: shape[0]]

    def collected(self, tensor: Tensor) -> Tensor | None:
        own = self.own(tensor)
        if not is_sharded(tensor):
            return own if self.first else None
        if not self.first:
            if own.numel():
                self._ranks.bring(own.contiguous(), self._ranks.rank)
            return None
        whole = own.new_empty(tensor.shape)
        whole[self.rows(tensor.shape)] = own
        for rank in range(1, self._ranks.size):
            part = whole[self._of(rank, tensor.shape)]
            if part.numel():
                self._ranks.bring(part, rank)
        return whole

    def agreed(self, numbers: Tensor) -> Tensor:
        shared = numbers.detach().clone()
        self._ranks.spread(shared)
        return shared

    def gradients(self, total: Tensor, parameters: Sequence[Tensor]) -> Sequence[Tensor]:
        """Ranks add their gradients up: that of one is the sum when the others have none."""
        (total if self.first else total * 0).backward()
        found = [self.own(parameter.grad) for parameter in parameters if parameter.grad is not None]
        for parameter in self._model.parameters():
            parameter.grad = None
        return found

    def rest(self) -> None:
        for module in _sharded_modules(self._model):
            module.reshard()

    def recover(self) -> None:
        for parameter in self._model.parameters():
            parameter.grad = None
        if self._gathering.begun:  # torch has nothing to reset before its first pass
            self._model.reset_iter_state()

    def _of(self, rank: int, shape: Sequence[int]) -> slice:
        most = -(-shape[0] // self._ranks.size)
        return slice(min(rank * most, shape[0]), min((rank + 1) * most, shape[0]))


def is_sharded(tensor: Tensor) -> bool:
    """Are only some of its rows here?"""
    return hasattr(tensor, "to_local")


def exhaust(each: Iterable[object]) -> None:
    """Take part in what another rank collects."""
    for _ in each:
        pass


def shard(model: nn.Module, layers: Iterable[nn.Module], ranks: Collectives, device: torch.device) -> Rows:
    """Leave of every parameter of a model on the meta device only this rank's rows, uninitialised, on `device`.

    torch wants a mesh of a default group for that. It is a group that moves nothing: torch's `fake` one.

    Args:
        layers: gathered one at a time. What is in none of them is gathered from the beginning of a forward pass to the
            end of the backward one: the embedding and the head.

    Raises ConfigError when this torch cannot go on after a pass that failed.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

    if not hasattr(FSDPModule, "reset_iter_state"):
        problem = f"torch {torch.__version__} leaves sharded parameters unusable when a pass fails"
        raise ConfigError(problem, where="train.shard", remedy="use torch 2.13 or newer, or train.shard false")
    if not torch.distributed.is_initialized():  # another model of these ranks may be shared already
        torch.distributed.init_process_group("fake", rank=ranks.rank, world_size=ranks.size)
    mesh = init_device_mesh(device.type, (ranks.size,))
    for module in (*layers, model):
        fully_shard(module, mesh=mesh)
    gathering, adding = _AllGather(ranks), _ReduceScatter(ranks)
    for module in _sharded_modules(model):
        module.set_custom_all_gather(gathering)
        module.set_custom_reduce_scatter(adding)
        module.set_gradient_divide_factor(1.0)  # denominators are those of the whole batch already
        module.set_force_sum_reduction_for_comms(True)
    register_fsdp_forward_method(model, "hidden")
    model.to_empty(device=device)
    return Rows(model, ranks, gathering)


def _sharded_modules(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "reshard")]


class _Moving:
    """What FSDP2 moves tensors with, instead of its default group (its `AllGather` and `ReduceScatter`)."""

    def __init__(self, ranks: Collectives) -> None:
        self._ranks, self.begun = ranks, False

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _AllGather(_Moving):
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: object, async_op: bool = False) -> None:
        self.begun = True
        self._ranks.all_gather(output_tensor, input_tensor)


class _ReduceScatter(_Moving):
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: object, op: object, async_op: bool = False) -> None:
        self._ranks.reduce_scatter(output_tensor, input_tensor)
