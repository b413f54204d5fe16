"""The reference trainer: one policy on one device, AdamW, packed micro-batches. Several of them are ranks of one trainer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from time import thread_time

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor

from rollyard.config import TrainConfig
from rollyard.errors import CheckpointError, NonFinite, TrainError
from rollyard.model.folder import save, whole_tensors
from rollyard.model.shards import exhaust
from rollyard.model.transformer import CausalLM
from rollyard.protocols.devices import Device
from rollyard.train.gradients import Copies, Gradients, Shards
from rollyard.train.learn import learn, look, policy_logprobs
from rollyard.train.loss import Denominators, Known, needs_rows, of_rows, part_loss, token_sums
from rollyard.train.minibatches import Part, cut
from rollyard.train.ranks import Joint, Ranks
from rollyard.train.reference import Reference
from rollyard.train.rows import CACHED_TOKENS, Rows, pieces
from rollyard.train.state import State
from rollyard.train.totals import Totals, joined
from rollyard.train.values import ValueHead
from rollyard.types import Activity, Sample, Sampling, TrainBatch, TrainStats, WeightVersion

Families = list[list[Sample]]

ZEROS = (0.0, 0.0)
NOTHING = [[Sample(0, 0, (0, 0), (False, True), ZEROS, ZEROS, (), values=ZEROS, returns=ZEROS)]]  # a pass whose gradients are 0


class ReferenceTrainer:
    """Holds the policy's parameters and changes them in place (protocols.Trainer).

    Args:
        model: the policy, shared with an engine where the placement says so.
        device: where its work runs.
        config: the optimizer and the loss; `correction` is no longer `auto`.
        max_tokens: of a completion, for the aggregation `fixed`.
        source: the folder the model came from; checkpoints take its configuration and tokenizer.
        version: the version the parameters are.
        ranks: that the model is shared with, where each has a part of it.
        reference: that the policy is to stay near, where `train.kl` asks for it.
        values: train a value head too.
        life: of the run: the incarnation of the versions that are made here.
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
        *,
        reference: Reference | None = None,
        values: bool = False,
        life: int = 0,
    ) -> None:
        assert config.correction != "auto", "who knows the engines has to say what auto is"
        assert (reference is not None) == (config.kl > 0), "a reference goes with a weight"
        self._model = model
        self._device = device
        self._config = config
        self._max_tokens = max_tokens
        self._source = source
        self._version, self._life = version, life
        self._where = model.head_weight.device
        self._piece = CACHED_TOKENS if self._where.type == "cpu" and ranks is None else None  # a piece gathers the model twice
        self._products = torch.bfloat16 if config.precision == "bfloat16" else model.head_weight.dtype
        model.recompute(layers=config.recompute)
        self._reference = reference
        self._head = ValueHead(model.architecture.hidden_size, self._where, config) if values else None
        more = self._head.parameters if self._head is not None else {}
        groups = [{"params": list(model.trained().values())}, *([{"params": list(more.values())}] if more else [])]
        self._optimizer = torch.optim.AdamW(groups, config.lr, config.betas, config.eps, config.weight_decay, fused=True)
        self._state = State(model, self._optimizer, more)
        self._ranks = ranks or Ranks(self._where)
        # Where the model is shared, whatever needs all of it is done on this device.
        self._together = device if ranks is None else Joint(device, ranks, "the trainer's step or state", self._recover)
        self._gradients: Gradients = Copies(model, self._ranks) if ranks is None else Shards(model, ranks)

    @property
    def version(self) -> WeightVersion:
        return self._version

    async def train(self, shards: Sequence[TrainBatch]) -> TrainStats:
        """`train.minibatches` optimizer steps. A batch without a trained token changes no parameter, but counts as a version.

        Args:
            shards: this rank's part of the batch, and no other. The others are trained on elsewhere, at the same time.

        Raises:
            NonFinite: a loss or gradient is NaN or infinite, on whatever rank; parameters and version are as before.
            RanksApart: another rank did not take part to the end. Parameters are as before, or torn if they were changing.
            TrainError: the batch was made for another version; parameters of ranks are not the same; or a later one of
                several optimizer steps met such a number, and the parameters are torn.
        """
        if len(shards) != 1:
            raise TrainError(f"one rank trains on one part of a batch, not on {len(shards)}")
        return await self._together.run(self._device.spans.timed(Activity.TRAIN, self._train, "step"), shards[0])

    async def values(self, shards: Sequence[TrainBatch]) -> tuple[tuple[tuple[float, ...], ...], ...]:
        """See `protocols.ValueTrainer`; of this rank's part. All ranks have to be asked at the same time.

        Raises TrainError without a value head, RanksApart when another rank did not take part to the end.
        """
        if len(shards) != 1:
            raise TrainError(f"one rank values one part of a batch, not {len(shards)}")
        return (await self._together.run(self._device.spans.timed(Activity.TRAIN, self._values, "values"), shards[0]),)

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
        before = thread_time()
        try:
            with self._ranks.together():
                return replace(self._step(batch), thread_s=thread_time() - before)
        finally:
            self._optimizer.zero_grad(set_to_none=True)  # none is left of a failed step, and none holds memory meanwhile

    def _step(self, batch: TrainBatch) -> TrainStats:
        minibatches = cut(batch.micro_batches, self._config.minibatches, self._ranks)
        each = self._agree(batch, minibatches)
        steps = [(self._pieces(own), of) for own, of in zip(minibatches, each, strict=True) if of.tokens]
        proximals = [self._proximal(parts, batch.sampling) if number else [] for number, (parts, _) in enumerate(steps)]
        totals, norms, rate = [], [], self._learning_rate(batch.step)
        with ExitStack() as changing:
            for number, (parts, denominators) in enumerate(steps):
                found = self._gradients_of(parts, proximals[number], batch.sampling, denominators)
                totals.append(found.over(self._ranks))
                where = f"step {self._version.step + 1}" + (f", minibatch {number + 1} of {len(steps)}" if len(steps) > 1 else "")
                update = self._device.spans.timed(Activity.TRAIN, self._update, "optimizer")
                norms.append(update(rate, totals[-1], where, changing if number == 0 else None))
        self._version = WeightVersion(batch.step + 1, self._life)
        tokens, norm = sum(of.tokens for of in each), sum(norms) / max(len(norms), 1)
        kl, values = self._reference is not None, self._head is not None
        return joined(totals).stats(self._version, tokens, norm, rate, kl=kl, values=values)

    def _agree(self, batch: TrainBatch, minibatches: Sequence[Sequence[Part]]) -> list[Denominators]:
        """Those of each step, of all ranks together. Raises TrainError, on all alike, unless all train the same version."""
        own = [Denominators.of([sample for part in parts for sample in part]) for parts in minibatches]
        counts = [batch.step, self._version.step, *(count for of in own for count in (of.tokens, of.sequences))]
        steps, versions, *sums = self._ranks.gather(torch.tensor(counts)).t().tolist()
        if len({*steps, *versions}) > 1:
            trained, had = (" and ".join(map(str, sorted(set(found)))) for found in (steps, versions))
            raise TrainError(f"the batch trains version {trained}, the parameters are version {had}")
        if self._head is not None and any(len(each.values) != len(each.mask) for each in batch.samples):
            raise TrainError("the batch has no values and returns for the value head")
        return [Denominators(sum(tokens), sum(rows)) for tokens, rows in zip(sums[::2], sums[1::2], strict=True)]

    def _pieces(self, parts: Sequence[Part]) -> list[Families]:
        """Passes: those of this rank, and some with nothing where others have more."""
        found = [families for samples in parts for families in pieces(samples, self._piece)]
        return found + [NOTHING] * (self._gradients.passes(len(found)) - len(found))

    def _proximal(self, parts: Sequence[Families], sampling: Sampling) -> list[Tensor]:
        """The policy's logprobs of every pass before the first step; none where nothing is compared with them."""
        if self._config.correction == "none":
            return []
        return [policy_logprobs(self._model, Rows.of(each, self._where), sampling, self._products) for each in parts]

    def _gradients_of(
        self, parts: Sequence[Families], proximal: Sequence[Tensor], sampling: Sampling, denominators: Denominators
    ) -> Totals:
        """Forward and backward of the passes of one step."""
        self._optimizer.zero_grad(set_to_none=True)
        self._gradients.begin()
        totals = Totals()
        for number, families in enumerate(parts):
            before = proximal[number] if proximal else None
            self._accumulate(families, before, sampling, denominators, totals)
        self._gradients.add_up()
        if self._head is not None:
            self._head.add_up(self._ranks)
        return totals

    def _accumulate(
        self, families: Families, proximal: Tensor | None, sampling: Sampling, denominators: Denominators, totals: Totals
    ) -> None:
        """Forward and backward of one pass; logits only where a trained token is predicted."""
        config, whole_version = self._config, proximal is not None or self._model.stamp.whole  # else a minibatch was learnt from
        version = self._version if whole_version else None
        rows = Rows.of(families, self._where, values=self._head is not None, version=version)
        counted = families is not NOTHING  # a reference or a value head would teach it something
        each = [denominators.weight(count, config, self._max_tokens) * counted for count in rows.whole]
        weights = torch.from_numpy(np.repeat(np.array(each, np.float32), rows.trained)).to(self._where)
        reference = None if self._reference is None else self._reference.logprobs(rows, sampling, self._products)
        known = Known(rows.behaviour, rows.advantages, weights, rows.trained, proximal, reference, fresh=rows.fresh)
        whole, value_loss = known, None

        def before(logprobs: Tensor) -> None:
            nonlocal whole
            whole = of_rows(known, logprobs, config)

        def loss(logprobs: Tensor, part: slice) -> Tensor:
            return part_loss(logprobs, whole, part, config)

        def beside(states: Tensor) -> Tensor | None:
            nonlocal value_loss
            assert self._head is not None and rows.values is not None and rows.returns is not None
            value_loss, gradient = self._head.learn(states, rows.values, rows.returns, weights)
            return gradient

        rows_first = needs_rows(config, proximal=proximal is not None)
        if not rows_first:
            whole = of_rows(known, None, config)
        found = learn(
            self._model,
            rows,
            loss,
            sampling,
            self._products,
            before=before if rows_first else None,
            beside=None if self._head is None else beside,
        )
        if counted:
            totals.add(token_sums(found.logprobs, known, config), found.entropy, found.missed, value_loss)

    def _update(self, rate: float, totals: Totals, where: str, changing: ExitStack | None) -> float:
        """Clip and step. Returns the norm of the policy's gradients before clipping.

        Args:
            changing: of the first step of a batch: from then on whatever fails leaves the parameters torn.
        """
        config, norm = self._config, self._gradients.clip(self._config.max_grad_norm)
        numbers = [totals.loss, totals.value_loss, norm]
        if self._head is not None:
            numbers.append(self._head.clip(config.max_grad_norm))
        if not all(map(math.isfinite, numbers)):
            problem = f"{where}: loss {totals.loss}, gradient norm {norm}"
            if changing is not None:
                raise NonFinite(f"{problem}; the parameters are as before")
            raise TrainError(f"{problem}; steps before it were taken, and the parameters are of no version any more")
        for group, peak in zip(self._optimizer.param_groups, (config.lr, config.value_lr), strict=False):
            group["lr"] = peak * (rate / config.lr)
        if changing is not None:
            changing.enter_context(self._model.stamp.writing())
        self._optimizer.step()
        self._gradients.check(self._version.step + 1)
        return norm

    def _learning_rate(self, step: int) -> float:
        """Linear warm-up: step i of the first n takes (i + 1) / n of the rate."""
        warmup = self._config.warmup_steps
        return self._config.lr * min(1.0, (step + 1) / warmup) if warmup else self._config.lr

    def _values(self, batch: TrainBatch) -> tuple[tuple[float, ...], ...]:
        if self._head is None:
            raise TrainError("this trainer has no value head")
        found: dict[int, tuple[float, ...]] = {}
        for families in self._pieces(batch.micro_batches):
            rows = Rows.of(families, self._where)
            values = look(self._model, rows, self._products, self._head.values).cpu().split(list(rows.trained))
            samples = (sample for members in families for sample in members)
            found |= {id(sample): tuple(each.tolist()) for sample, each in zip(samples, values, strict=True)}
        return tuple(found.get(id(sample), ()) for sample in batch.samples)

    def _recover(self) -> None:
        """A pass of models that are shared failed half way."""
        self._model.parts.recover()
        if self._reference is not None:
            self._reference.model.parts.recover()

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
            save(self._model, folder, self._source, lambda draft: self._state.write(draft, self._version))
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{folder} cannot be written: {getattr(error, 'strerror', None) or error}") from error

    def _become(self, version: WeightVersion) -> None:
        if not self._model.stamp.whole:
            raise TrainError(f"version {version.step} is not whole: a change of the parameters failed half way")
        self._state.take()
        self._version = version

    def _read_state(self, folder: Path) -> None:
        self._version = self._state.read(folder)
