"""What travels from an external trainer, and what it says of engines' answers.

Its own model computes the logprobs that answers are compared with. Which way tensors move, and which one it is that stayed
behind, is found with a mirror of it: our own model, filled with what it publishes, for as long as a canary takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from rollyard.errors import ConfigError, RollyardError, WeightSyncError
from rollyard.model.architecture import Architecture
from rollyard.model.folder import tensors
from rollyard.model.stamp import WeightStamp
from rollyard.model.transformer import CausalLM
from rollyard.protocols.devices import Device
from rollyard.protocols.training import ExternalTrainer, ProvableTrainer
from rollyard.types import TensorInfo, WeightVersion
from rollyard.weights import evidence, probe
from rollyard.weights.canary import Shares
from rollyard.weights.flat import replacing
from rollyard.weights.layout import compare
from rollyard.weights.source import Source

T = TypeVar("T")

ALIKE = {torch.float32: 1e-3, torch.bfloat16: 0.3}  # nats between the trainer's logprobs and those of what it publishes


class ExternalSource(Source):
    """The tensors of an external trainer, each looked at as it comes.

    Args:
        external: asked on its thread.
        expected: what engines have.
        stamp: counts the changes of its parameters.
        where: the device of the memory that they are copied to first.

    Raises ConfigError when it has not the names, shapes and formats that engines have.
    """

    def __init__(
        self, external: ExternalTrainer, expected: Sequence[TensorInfo], stamp: WeightStamp, where: torch.device
    ) -> None:
        super().__init__([TensorInfo(name, tuple(shape), dtype) for name, shape, dtype in external.tensors()], stamp, where)
        self._external = external
        try:
            compare(self.infos, expected)
        except WeightSyncError as error:
            remedy = "publish Hugging Face's names and whole shapes in model.dtype, a tied head left out"
            raise ConfigError(f"its tensors are not the engines': {error}", where="train.adapter", remedy=remedy) from None

    def now(self) -> dict[str, Tensor]:
        """All of them at once. Raises WeightSyncError."""
        return {name: tensor.clone() for name, tensor in self.checked()}

    def each(self, version: WeightVersion) -> Iterator[tuple[str, Tensor]]:
        """Raises WeightSyncError for a tensor that is not the one that was announced, or that it cannot give."""
        self.check(version)
        return self.checked()

    def checked(self) -> Iterator[tuple[str, Tensor]]:
        """The same, whatever version they are."""
        coming = _told(self._external.each())
        for info in self.infos:
            came = next(coming, None)
            if came is None:
                raise WeightSyncError(f"the external trainer stopped before {info.name}")
            name, tensor = came
            compare([TensorInfo(name, tuple(tensor.shape), str(tensor.dtype))], [info])
            yield name, tensor.detach()
        if left := [name for name, _ in coming]:
            raise WeightSyncError(f"the external trainer gave more tensors than it announced: {', '.join(left)}")


def _told(each: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """What it meets on its way is its own; here it is a failed offer."""
    before = "the first tensor"
    try:
        for name, tensor in each:
            before = name
            yield name, tensor
    except RollyardError:
        raise
    except Exception as error:
        problem = f"the external trainer failed at {before} or the next: {type(error).__name__}: {error}"
        raise WeightSyncError(problem) from error


class ExternalEvidence(evidence.Evidence):
    """Evidence beside an external trainer.

    Args:
        external: asked on its thread.
        source: of its tensors.
        architecture, dtype: of its model.
        device: its thread.
        shares: of the workers that engines are made of, if they are several.
    """

    def __init__(
        self,
        external: ProvableTrainer,
        source: ExternalSource,
        architecture: Architecture,
        dtype: torch.dtype,
        device: Device,
        shares: Shares | None = None,
    ) -> None:
        self._nowhere = CausalLM(architecture, dtype, "meta")
        super().__init__(self._nowhere, device, shares=shares)
        self._external, self._source = external, source

    def _table(self) -> Tensor:
        asked = probe.prompts(self._nowhere.architecture.vocab_size)
        found = _asked("logprobs", self._external.logprobs, asked)
        wanted = (len(asked), self._nowhere.architecture.vocab_size)
        if tuple(found.shape) != wanted or found.dtype != torch.float32:
            raise WeightSyncError(f"the external trainer's logprobs are {tuple(found.shape)} {found.dtype}, not {wanted} float32")
        return found.detach().cpu()

    def _subject(self) -> CausalLM:
        """A mirror of the trainer's. Raises WeightSyncError when it computes something else than the trainer."""
        mirror = CausalLM(self._nowhere.architecture, self._nowhere.head_weight.dtype, self._source.where)
        own = tensors(mirror)
        with mirror.stamp.writing(), torch.no_grad():
            for name, tensor in self._source.checked():
                own[name].copy_(tensor)
        nats, limit = probe.apart(self._table(), probe.table(mirror)), ALIKE[mirror.head_weight.dtype]
        if not nats <= limit:
            problem = f"{nats:.2g} nats between its own logprobs and those of what it publishes, at most {limit:g} would be noise"
            raise WeightSyncError(f"the external trainer publishes something else than it computes with: {problem}")
        return mirror

    def _move(self, attempt: int, names: Sequence[str]) -> None:
        super()._move(attempt, names)
        case, own = self._under_way(), tensors(self._model)
        assert case.moved is not None, "they were moved"
        self._put_back()
        with self._source.stamp.writing():
            _asked("move", self._external.move, {name: own[name] for name in names})
        case.moved = replace(case.moved, table=self._table())

    def _restore(self) -> None:
        """Whatever became of the mirror, the trainer's own parameters are put back first."""
        if self._model is not self._nowhere:
            self._put_back()
            self._model = self._nowhere
        if self._case is not None:
            self._case.kept = {}

    def _put_back(self) -> None:
        with replacing(self._source.stamp):
            _asked("restore", self._external.restore)


def _asked(what: str, call: Callable[..., T], *args: object) -> T:
    """What it meets is its own; here nobody can tell then whether weights arrive. Raises WeightSyncError."""
    try:
        return call(*args)
    except RollyardError:
        raise
    except Exception as error:
        raise WeightSyncError(f"the external trainer failed in {what}: {type(error).__name__}: {error}") from error
