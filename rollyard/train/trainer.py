"""The reference trainer: one policy on one device, AdamW, packed micro-batches. Several of them are ranks of one trainer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor

from rollyard.config import TrainConfig
from rollyard.errors import CheckpointError, NonFinite, TrainError
from rollyard.model.folder import save, whole_tensors
from rollyard.model.shards import exhaust
from rollyard.model.transformer import CausalLM
from rollyard.protocols import Device
from rollyard.train.gradients import Copies, Gradients, Shards
from rollyard.train.learn import learn
from rollyard.train.loss import Denominators, TokenSums, policy_loss, token_sums
from rollyard.train.ranks import Joint, Ranks
from rollyard.train.rows import CACHED_TOKENS, Rows, pieces
from rollyard.train.state import State
from rollyard.types import Activity, Sample, Sampling, TrainBatch, TrainStats, WeightVersion

GAP_MAX = 4  # its place in Totals
NOTHING = [[Sample(0, 0, (0, 0), (False, True), (0.0, 0.0), (0.0, 0.0), ())]]  # a pass whose gradients are 0


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

    def over(self, ranks: Ranks) -> Totals:
        """Of all ranks together."""
        columns = list(zip(*ranks.gather(torch.tensor(astuple(self), dtype=torch.float64)).tolist(), strict=True))
        found = Totals(*map(sum, columns))
        found.gap_max = max(columns[GAP_MAX])
        return found


class ReferenceTrainer:
    """Holds the policy's parameters and changes them in place (protocols.Trainer).

    Args:
        model: the policy, shared with an engine where the placement says so.
        device: where its work runs.
        config: the optimizer and the loss.
        max_tokens: of a completion, for the aggregation `fixed`.
        source: the folder the model came from; checkpoints take its configuration and tokenizer.
        version: the version the parameters are.
        ranks: that the model is shared with, where each has a part of it.
    """

    def __init__(
        self,
        model: CausalLM,
        device: Device,
        config: TrainConfig,
        max_tokens: int,
        source: Path,
        version: WeightVersion,
        ranks: Ranks | None = None,
    ) -> None:
        self._model = model
        self._device = device
        self._config = config
        self._max_tokens = max_tokens
        self._source = source
        self._version = version
        self._where = model.head_weight.device
        self._piece = CACHED_TOKENS if self._where.type == "cpu" and ranks is None else None  # a piece gathers the model twice
        self._products = torch.bfloat16 if config.precision == "bfloat16" else model.head_weight.dtype
        self._optimizer = torch.optim.AdamW(
            list(model.trained().values()), config.lr, config.betas, config.eps, config.weight_decay, fused=True
        )
        self._state = State(model, self._optimizer)
        self._ranks = ranks or Ranks(self._where)
        # Where the model is shared, whatever needs all of it is done on this device.
        self._together = device if ranks is None else Joint(device, ranks, "the trainer's step or state", model.parts.recover)
        self._gradients: Gradients = Copies(model, self._ranks) if ranks is None else Shards(model, ranks)

    @property
    def version(self) -> WeightVersion:
        return self._version

    async def train(self, shards: Sequence[TrainBatch]) -> TrainStats:
        """One optimizer step. A batch without a trained token changes no parameter, but counts as a step.

        Args:
            shards: this rank's part of the batch, and no other. The others are trained on elsewhere, at the same time.

        Raises:
            NonFinite: a loss or gradient is NaN or infinite, on whatever rank; parameters and version are as before.
            RanksApart: another rank did not take part to the end. Parameters are as before, or torn if they were changing.
            TrainError: the batch was made for another version; parameters of ranks are not the same.
        """
        if len(shards) != 1:
            raise TrainError(f"one rank trains on one part of a batch, not on {len(shards)}")
        return await self._together.run(self._device.spans.timed(Activity.TRAIN, self._train, "step"), shards[0])

    async def settle(self) -> WeightVersion:
        """The version once the device has done what it was asked."""
        await self._device.run(int)
        return self._version

    async def save(self, folder: Path) -> None:
        """Write the policy in Hugging Face format, or the adapter in PEFT's, with the rest of the state beside it.

        The folder must not exist.

        Ranks that share a model have to be asked all at once; rank 0 writes, and holds one whole tensor at a time.

        Raises CheckpointError when it cannot be written, or a change of the parameters failed half way.
        """
        await self._together.run(self._device.spans.timed(Activity.CHECKPOINT, self._save), folder)

    async def load_state(self, folder: Path) -> None:
        """Go on with the state in a checkpoint. The parameters are loaded with the model.

        Raises TrainError when the state is not there, or is another model's; what this trainer had stays.
        """
        await self._device.run(self._read_state, folder)

    def state(self) -> dict[str, Tensor]:
        """NAME, `step/NAME`, `exp_avg/NAME` and `exp_avg_sq/NAME` of every parameter; `random/cpu`, and on a GPU `random/cuda`.

        Views of what is trained, but for the random state. That is copied by this call, so it comes anew before each time
        that a state is read, and once before one is written; `become` gives it to torch.
        """
        return self._state.all()

    async def become(self, version: WeightVersion) -> None:
        """The tensors of `state` now are those of `version`: go on as if it had been trained here.

        Raises TrainError when a change of the parameters failed half way.
        """
        await self._device.run(self._device.spans.timed(Activity.SYNC, self._become, "handoff"), version)

    async def open(self, address: str, limit_s: float) -> str:
        """See `Ranks.open`: where the ranks of a group can meet. Rank 0's is the process that they meet in."""
        return self._ranks.open(address, limit_s)

    async def join(self, place: str, rank: int, size: int, limit_s: float) -> None:
        """Be one of the ranks that meet at `place`, for all steps from now on. Raises RanksApart.

        Raises TrainError when the model is shared, and by other ranks than these.
        """
        if self._model.parts.sharded and (rank, size) != (self._ranks.rank, self._ranks.size):
            part = f"part {self._ranks.rank} of {self._ranks.size} of the model"
            raise TrainError(f"this trainer has {part}, and cannot be rank {rank} of {size}")
        await self._device.run(self._ranks.join, place, rank, size, limit_s)

    async def close(self) -> None:
        """Leave the other ranks."""
        self._ranks.close()

    # -------------------------------------------------------------------------------------------- the step

    def _train(self, batch: TrainBatch) -> TrainStats:
        try:
            with self._ranks.together():
                return self._step(batch)
        finally:
            self._optimizer.zero_grad(set_to_none=True)  # none is left of a failed step, and none holds memory meanwhile

    def _step(self, batch: TrainBatch) -> TrainStats:
        denominators = self._agree(batch)
        totals, norm, rate = Totals(), 0.0, self._learning_rate(batch.step)
        parts = [families for samples in batch.micro_batches for families in pieces(samples, self._piece)]
        passes = self._gradients.begin(len(parts))
        for families in parts:
            self._accumulate(Rows.of(families, self._where), batch.sampling, denominators, totals)
        for _ in range(passes - len(parts)):  # others have more
            self._accumulate(Rows.of(NOTHING, self._where), batch.sampling, denominators, Totals())
        if denominators.tokens:
            self._gradients.add_up()
            totals = totals.over(self._ranks)
            norm = self._device.spans.timed(Activity.TRAIN, self._update, "optimizer")(rate, totals.loss)
        self._version = self._version._replace(step=batch.step + 1)
        return _stats(self._version, totals, denominators.tokens, norm, rate)

    def _agree(self, batch: TrainBatch) -> Denominators:
        """The denominators of all ranks together. Raises TrainError, on all alike, unless all train the same version."""
        own = Denominators.of(batch)
        counts = torch.tensor([batch.step, self._version.step, own.tokens, own.sequences])
        steps, versions, tokens, sequences = self._ranks.gather(counts).t().tolist()
        if len({*steps, *versions}) > 1:
            trained, had = (" and ".join(map(str, sorted(set(found)))) for found in (steps, versions))
            raise TrainError(f"the batch trains version {trained}, the parameters are version {had}")
        return Denominators(sum(tokens), sum(sequences))

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
        norm = self._gradients.clip(self._config.max_grad_norm)
        if not (math.isfinite(norm) and math.isfinite(loss)):
            raise NonFinite(f"step {self._version.step}: loss {loss}, gradient norm {norm}; the parameters are as before")
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        with self._model.stamp.writing():
            self._optimizer.step()
            self._gradients.check(self._version.step)
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
        if not self._model.parts.first:
            exhaust(whole_tensors(self._model))
            exhaust(self._state.each())
            return
        try:
            save(self._model, folder, self._source, lambda draft: self._state.write(draft, self._version.step))
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{folder} cannot be written: {error}") from error

    def _become(self, version: WeightVersion) -> None:
        if not self._model.stamp.whole:
            raise TrainError(f"version {version.step} is not whole: a change of the parameters failed half way")
        self._state.take()
        self._version = version

    def _read_state(self, folder: Path) -> None:
        self._version = self._version._replace(step=self._state.read(folder))


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
