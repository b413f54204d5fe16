"""The reference trainer: one policy on one device, AdamW, packed micro-batches."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from rollyard.config import TrainConfig
from rollyard.errors import CheckpointError, NonFinite, TrainError
from rollyard.model.folder import save
from rollyard.model.transformer import CausalLM
from rollyard.protocols import Device
from rollyard.train.learn import learn
from rollyard.train.loss import Denominators, TokenSums, policy_loss, token_sums
from rollyard.train.rows import CACHED_TOKENS, Rows, pieces
from rollyard.types import Sampling, TrainBatch, TrainStats, WeightVersion

MOMENTS, PROGRESS = "trainer.safetensors", "trainer.json"
STATE = ("step", "exp_avg", "exp_avg_sq")  # what AdamW remembers of each parameter


@dataclass(slots=True)
class Totals:
    """Sums over the trained tokens of the batch so far."""

    loss: float = 0.0
    clipped: float = 0.0
    ratio: float = 0.0
    gap: float = 0.0
    gap_max: float = 0.0
    entropy: float = 0.0
    missed: float = 0.0

    def add(self, sums: TokenSums, entropy: Tensor, missed: Tensor) -> None:
        found = (sums.loss, sums.clipped, sums.ratio, sums.gap, sums.gap_max, entropy.sum(), missed.sum())
        loss, clipped, ratio, gap, gap_max, entropy_sum, misses = torch.stack([value.float() for value in found]).tolist()
        self.loss += loss
        self.clipped += clipped
        self.ratio += ratio
        self.gap += gap
        self.gap_max = max(self.gap_max, gap_max)
        self.entropy += entropy_sum
        self.missed += misses


class ReferenceTrainer:
    """Holds the policy's parameters and changes them in place (protocols.Trainer).

    Args:
        model: the policy, shared with an engine where the placement says so.
        device: where its work runs.
        config: the optimizer and the loss.
        max_tokens: of a completion, for the aggregation `fixed`.
        source: the folder the model came from; checkpoints take its configuration and tokenizer.
        version: the version the parameters are.
    """

    def __init__(
        self, model: CausalLM, device: Device, config: TrainConfig, max_tokens: int, source: Path, version: WeightVersion
    ) -> None:
        self._model = model
        self._device = device
        self._config = config
        self._max_tokens = max_tokens
        self._source = source
        self._version = version
        self._where = model.head_weight.device
        self._piece = CACHED_TOKENS if self._where.type == "cpu" else None
        self._products = torch.bfloat16 if config.precision == "bfloat16" else model.head_weight.dtype
        self._names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
        self._optimizer = torch.optim.AdamW(
            model.parameters(), config.lr, config.betas, config.eps, config.weight_decay, fused=True
        )

    @property
    def version(self) -> WeightVersion:
        return self._version

    async def train(self, batch: TrainBatch) -> TrainStats:
        """One optimizer step. A batch without a trained token changes no parameter, but counts as a step.

        Raises:
            NonFinite: a loss or gradient is NaN or infinite; parameters and version are as before.
            TrainError: the batch was made for another version.
        """
        return await self._device.run(self._train, batch)

    async def save(self, folder: Path) -> None:
        """Write the policy in Hugging Face format, with the optimizer's state beside it. The folder must not exist.

        Raises CheckpointError when it cannot be written, or a change of the parameters failed half way.
        """
        await self._device.run(self._save, folder)

    async def load_state(self, folder: Path) -> None:
        """Go on with the optimizer's state of a checkpoint. The parameters are loaded with the model.

        Raises TrainError when the state is not there, or is another model's; what this trainer had stays.
        """
        await self._device.run(self._read_state, folder)

    async def close(self) -> None:
        """Nothing to give back."""

    # -------------------------------------------------------------------------------------------- the step

    def _train(self, batch: TrainBatch) -> TrainStats:
        if batch.step != self._version.step:
            raise TrainError(f"the batch trains version {batch.step}, the parameters are version {self._version.step}")
        denominators = Denominators.of(batch)
        totals = Totals()
        rate = self._learning_rate(batch.step)
        try:
            for samples in batch.micro_batches:
                for families in pieces(samples, self._piece):
                    self._accumulate(Rows.of(families, self._where), batch.sampling, denominators, totals)
            norm = self._update(rate, totals.loss) if denominators.tokens else 0.0
        finally:
            self._optimizer.zero_grad(set_to_none=True)  # none is left of a failed step, and none holds memory meanwhile
        self._version = self._version._replace(step=batch.step + 1)
        return _stats(self._version, totals, denominators.tokens, norm, rate)

    def _accumulate(self, rows: Rows, sampling: Sampling, denominators: Denominators, totals: Totals) -> None:
        """Forward and backward of one piece; logits only where a trained token is predicted."""
        each = [denominators.weight(count, self._config, self._max_tokens) for count in rows.trained]
        weights = torch.from_numpy(np.repeat(np.array(each, np.float32), rows.trained)).to(self._where)
        behaviour, advantages = rows.behaviour, rows.advantages

        def loss(logprobs: Tensor, part: slice) -> Tensor:
            return policy_loss(logprobs, behaviour[part], advantages[part], weights[part], self._config)

        found = learn(self._model, rows, loss, sampling, self._products)
        totals.add(token_sums(found.logprobs, behaviour, advantages, weights, self._config), found.entropy, found.missed)

    def _update(self, rate: float, loss: float) -> float:
        """Clip and step. Returns the norm of the gradients before clipping."""
        norm = float(torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._config.max_grad_norm))
        if not (math.isfinite(norm) and math.isfinite(loss)):
            raise NonFinite(f"step {self._version.step}: loss {loss}, gradient norm {norm}; the parameters are as before")
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        with self._model.stamp.writing():
            self._optimizer.step()
        return norm

    def _learning_rate(self, step: int) -> float:
        """Linear warm-up: step i of the first n takes (i + 1) / n of the rate."""
        warmup = self._config.warmup_steps
        return self._config.lr * min(1.0, (step + 1) / warmup) if warmup else self._config.lr

    # ------------------------------------------------------------------------------------------- its state

    def _save(self, folder: Path) -> None:
        """On the device, so that a step under way is over and is not taken for a torn one."""
        if not self._model.stamp.whole:
            raise CheckpointError(f"{folder} is not written: a change of the parameters failed half way")
        try:
            save(self._model, folder, self._source, self._write_state)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{folder} cannot be written: {error}") from error

    def _write_state(self, folder: Path) -> None:
        tensors = {
            f"{key}/{self._names[parameter]}": state[key].contiguous()
            for parameter, state in self._optimizer.state.items()
            for key in STATE
        }
        save_file(tensors, folder / MOMENTS)
        (folder / PROGRESS).write_text(json.dumps(self._version._asdict()), encoding="utf-8")

    def _read_state(self, folder: Path) -> None:
        try:
            step = int(json.loads((folder / PROGRESS).read_text(encoding="utf-8"))["step"])
            tensors = load_file(folder / MOMENTS, device=str(self._model.head_weight.device))
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise TrainError(f"{folder} holds no state of a trainer: {error!r}") from error
        # Before the first step there is no state of any parameter.
        shapes = {
            f"{key}/{name}": parameter.shape if key != "step" else torch.Size()
            for parameter, name in self._names.items()
            for key in STATE
        }
        if tensors and {name: tensor.shape for name, tensor in tensors.items()} != shapes:
            raise TrainError(f"the trainer's state in {folder} belongs to another model")
        self._optimizer.state.clear()
        for parameter, name in self._names.items():
            if tensors:
                self._optimizer.state[parameter] = {key: tensors[f"{key}/{name}"] for key in STATE}
        self._version = self._version._replace(step=step)


def _stats(version: WeightVersion, totals: Totals, tokens: int, norm: float, rate: float) -> TrainStats:
    each = max(tokens, 1)  # without a token every sum is 0
    return TrainStats(
        step=version.step,
        loss=totals.loss,
        grad_norm=norm,
        learning_rate=rate,
        tokens=tokens,
        entropy=totals.entropy / each,
        clipped_share=totals.clipped / each,
        ratio_mean=totals.ratio / each,
        logprob_gap_mean=totals.gap / each,
        logprob_gap_max=totals.gap_max,
        kept_set_misses=totals.missed / each,
    )
