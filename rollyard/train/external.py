"""A trainer of another stack (torchtitan, DeepSpeed, Megatron, ...) in the place of the reference trainer."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollyard.config import TrainConfig
from rollyard.errors import CheckpointError, ConfigError, RollyardError, TrainError
from rollyard.functions import Function, check_takes, load_function
from rollyard.protocols.devices import Device
from rollyard.protocols.training import ExternalTrainer
from rollyard.types import Activity, TrainBatch, TrainStats, WeightVersion

if TYPE_CHECKING:
    from rollyard.model.stamp import WeightStamp

Write = Callable[[Path, Callable[[Path], None]], None]

WHERE = "train.adapter"
REQUIRED = ("tensors", "each", "train", "save", "close")
PROBE, CANARY = ("logprobs",), ("logprobs", "move", "restore")


@dataclass(frozen=True, slots=True)
class TrainerSetup:
    """What the adapter's function is given."""

    model: Path  # a Hugging Face folder: weights to begin with, configuration, tokenizer
    options: TrainConfig  # learning rate, loss, correction (never auto), how the loss is averaged, ...
    dtype: str  # float32 or bfloat16: what is published has this format
    device: str  # cpu or cuda: of the first GPU that the process sees
    max_tokens: int  # of a completion, for the aggregation `fixed`
    version: WeightVersion  # what the weights of the folder are
    extra: Mapping[str, Any] = field(default_factory=dict)  # train.extra


def load_adapter(name: str) -> Function:
    """The function that makes an external trainer. Raises ConfigError when there is none, or it does not take a setup."""
    function, called_with = load_function(name, WHERE), "one TrainerSetup"
    check_takes(function, 1, name, WHERE, called_with)
    try:
        inspect.signature(function).bind("a setup")
    except TypeError as error:
        raise ConfigError(f"{name}: {error}", where=WHERE, remedy=f"it is called with {called_with}") from None
    return function


def make(name: str, setup: TrainerSetup, needed: Sequence[str] = ()) -> ExternalTrainer:
    """Call the adapter's function, and see whether what it gives can do what a run needs.

    Args:
        needed: methods besides `REQUIRED`.

    Raises ConfigError for an adapter that does not suit, TrainError when its function fails.
    """
    try:
        found = load_adapter(name)(setup)
    except RollyardError:
        raise
    except Exception as error:
        raise TrainError(f"{name} made no trainer: {type(error).__name__}: {error}") from error
    missing = [method for method in (*REQUIRED, *needed) if not callable(getattr(found, method, None))]
    if missing:
        problem = f"{name} made a {type(found).__name__}, which has no {', '.join(missing)}"
        raise ConfigError(problem, where=WHERE, remedy=_remedy(missing))
    trainer: ExternalTrainer = found
    return trainer


def _remedy(missing: Sequence[str]) -> str:
    if set(missing) & set(REQUIRED):
        return "see protocols.ExternalTrainer"
    off = "--weights.canary false" + (" --weights.probe false" if "logprobs" in missing else "")
    return f"see protocols.ProvableTrainer; or go without that proof: {off}"


def go_on(external: ExternalTrainer, name: str, checkpoint: Path) -> None:
    """Have it take back the state that it saved.

    Raises ConfigError when it cannot do that, TrainError when it fails.
    """
    load = getattr(external, "load", None)
    if not callable(load):
        problem = f"{name} made a {type(external).__name__}, which has no load: it cannot go on from the state in {checkpoint}"
        remedy = f"see protocols.ResumableTrainer; or begin a new run with --model.path {checkpoint}, without that state"
        raise ConfigError(problem, where=WHERE, remedy=remedy)
    try:
        load(checkpoint)
    except Exception as error:
        raise TrainError(f"{name} cannot go on from {checkpoint}: {type(error).__name__}: {error}") from error


class AdaptedTrainer:
    """Implements `protocols.Trainer` with an external one.

    Args:
        external: whose calls run on `device`, in turn.
        name: for messages, the function that made it.
        device: the thread that it was made on.
        stamp: counts the changes of its parameters.
        write: makes the model's folder with what a function adds to it, whole or not at all.
        version: the version its parameters are.
        life: of the run: the incarnation of the versions that are made here.
    """

    def __init__(
        self,
        external: ExternalTrainer,
        name: str,
        device: Device,
        stamp: WeightStamp,
        write: Write,
        version: WeightVersion,
        life: int = 0,
    ) -> None:
        self._external, self._name, self._device, self._stamp = external, name, device, stamp
        self._write, self._version, self._life = write, version, life

    @property
    def version(self) -> WeightVersion:
        return self._version

    async def train(self, shards: Sequence[TrainBatch]) -> TrainStats:
        """One optimizer step on the whole batch.

        Raises TrainError: what it raised, or that it failed, or that what it says of the step cannot be.
        """
        (batch,) = shards
        return await self._device.run(self._device.spans.timed(Activity.TRAIN, self._train, "step"), batch)

    async def settle(self) -> WeightVersion:
        """The version once the device has done what it was asked."""
        await self._device.run(int)
        return self._version

    async def save(self, folder: Path) -> None:
        """Raises CheckpointError when it cannot be written, or a change of the parameters failed half way."""
        await self._device.run(self._device.spans.timed(Activity.CHECKPOINT, self._save), folder)

    async def become(self, version: WeightVersion) -> None:
        """Raises TrainError: no state was copied into an external trainer."""
        raise TrainError(f"the trainer of {self._name} takes no state from another one")

    async def close(self) -> None:
        """On its thread, as all else."""
        await self._device.run(self._external.close)

    # ------------------------------------------------------------------------------------------- on its thread

    def _train(self, batch: TrainBatch) -> TrainStats:
        if batch.step != self._version.step:
            raise TrainError(f"the batch trains version {batch.step}, the parameters are version {self._version.step}")
        undone = False
        try:
            with self._stamp.writing():
                try:
                    stats = self._external.train(batch)
                except TrainError:
                    undone = True  # it says so itself: all is as it was
                    raise
                self._check(stats, batch)
        except TrainError:
            if undone:
                self._stamp.restored()
            raise
        except Exception as error:
            problem = f"{self._name} failed in step {batch.step + 1}: {type(error).__name__}: {error}"
            raise TrainError(f"{problem}; what became of its parameters is not known") from error
        self._version = WeightVersion(stats.step, self._life)
        return stats

    def _check(self, stats: TrainStats, batch: TrainBatch) -> None:
        if not isinstance(stats, TrainStats):
            raise TrainError(f"{self._name}: train gave a {type(stats).__name__}, not TrainStats")
        tokens = sum(sum(sample.mask) for sample in batch.samples)
        if stats.step != batch.step + 1:
            raise TrainError(f"{self._name} says that step {batch.step + 1} made version {stats.step}")
        if stats.tokens != tokens:
            raise TrainError(f"{self._name} says that it trained on {stats.tokens} tokens; the batch has {tokens}")
        if not all(math.isfinite(number) for number in astuple(stats) if number is not None):
            raise TrainError(f"{self._name} went on with numbers that are none: {stats}")

    def _save(self, folder: Path) -> None:
        if not self._stamp.whole:
            raise CheckpointError(f"{folder} is not written: a change of the parameters failed half way")
        try:
            self._write(folder, self._external.save)
        except Exception as error:
            raise CheckpointError(f"{folder} cannot be written by {self._name}: {type(error).__name__}: {error}") from error
