"""All that decides a trainer's next step, as tensors: to be written beside a checkpoint, or handed to another trainer."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from rollyard.errors import ConfigError, TrainError
from rollyard.model.folder import infos, stored, tensors, write_tensors
from rollyard.model.shards import is_sharded
from rollyard.model.transformer import CausalLM
from rollyard.types import WeightVersion

TENSORS, PROGRESS = "trainer.safetensors", "trainer.json"
MOMENTS = ("exp_avg", "exp_avg_sq")
ADAMW = ("step", *MOMENTS)  # what AdamW remembers of each parameter


class State:
    """Parameters, AdamW's moments and torch's random state, under names that never change.

    Args:
        model: whose parameters are trained.
        optimizer: theirs. Its moments are made here, zeros as before its first step.
        more: parameters of a value head, which are trained too and are not the policy's.
    """

    def __init__(
        self, model: CausalLM, optimizer: torch.optim.AdamW, more: Mapping[str, torch.nn.Parameter] | None = None
    ) -> None:
        self._model, self._remembered, where = model, optimizer.state, model.head_weight.device
        self._more = dict(more or {})
        for parameter in (*model.trained().values(), *self._more.values()):
            moments = {key: torch.zeros_like(parameter, requires_grad=False) for key in MOMENTS}
            self._remembered[parameter] = {"step": torch.zeros((), dtype=torch.float32, device=where), **moments}
        self._generators: dict[str, torch.Generator] = {"random/cpu": torch.default_generator}
        if where.type == "cuda":
            self._generators["random/cuda"] = torch.cuda.default_generators[where.index or 0]
        self._random = {name: generator.get_state() for name, generator in self._generators.items()}

    def all(self) -> dict[str, Tensor]:
        """Views of what is trained; the random state as it is now, which is a copy."""
        for name, generator in self._generators.items():
            self._random[name].copy_(generator.get_state())
        return {**tensors(self._model), **self._beside()}

    def take(self) -> None:
        """The tensors were written: let torch have the random state in them."""
        for name, generator in self._generators.items():
            generator.set_state(self._random[name])

    def write(self, folder: Path, version: WeightVersion) -> None:
        """What is not in the model's own files. Raises OSError or SafetensorError.

        Of ranks that share a model the others exhaust `each` at the same time.
        """
        write_tensors(folder / TENSORS, infos(self._beside()), self.each())
        (folder / PROGRESS).write_text(json.dumps(version._asdict()), encoding="utf-8")

    def each(self) -> Iterator[tuple[str, Tensor]]:
        """What is not in the model's own files, one whole tensor after the other; only on rank 0."""
        self.all()
        for name, tensor in self._beside().items():
            whole = self._model.parts.collected(tensor)
            if whole is not None:
                yield name, whole
                del whole  # before the next one comes

    def read(self, folder: Path) -> WeightVersion:
        """What `write` wrote; the version of then. Raises TrainError when it does not fit, and nothing has changed then."""
        try:
            progress = json.loads((folder / PROGRESS).read_text(encoding="utf-8"))
            version = WeightVersion(int(progress["step"]), int(progress["incarnation"]))
            found = dict(stored([folder / TENSORS]))
        except ConfigError as error:
            raise TrainError(f"{folder} holds no state of a trainer: {error.problem}") from error
        except OSError as error:
            raise TrainError(f"{folder} holds no state of a trainer: {error}") from error
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise TrainError(f"{folder} holds no state of a trainer: {PROGRESS} names no version") from error
        own, parts = self._beside(), self._model.parts
        if lacks := [name for name in self._more if name not in found]:
            raise TrainError(f"the trainer's state in {folder} has no {' and no '.join(lacks)}: it had no value head")
        other = found.keys() ^ own.keys()
        if other and all(name.startswith("random/") for name in other):
            raise TrainError(
                f"the trainer's state in {folder} was written on another kind of device: its random state is none of this one's"
            )
        if {name: tensor.shape for name, tensor in found.items()} != {name: tuple(tensor.shape) for name, tensor in own.items()}:
            raise TrainError(f"the trainer's state in {folder} belongs to another model")
        for name, tensor in own.items():
            rows = parts.rows(tensor.shape) if is_sharded(tensor) else slice(None)
            parts.own(tensor).copy_(found[name].rows(rows))
        self.take()
        return version

    def _beside(self) -> dict[str, Tensor]:
        """All but the policy's parameters."""
        remembered = {
            f"{key}/{name}": self._remembered[parameter][key]
            for name, parameter in (*self._model.trained().items(), *self._more.items())
            for key in ADAMW
        }
        more = {name: parameter.detach() for name, parameter in self._more.items()}
        return {**more, **remembered, **self._random}
