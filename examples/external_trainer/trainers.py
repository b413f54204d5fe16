"""Two external trainers: transformers' model with torch's AdamW, and the same model in DeepSpeed's ZeRO stage 3.

    rollyard run --preset sort --place.placement separate --train.adapter examples/external_trainer/trainers.py:hugging_face
    rollyard run --preset sort --place.placement separate --train.adapter examples/external_trainer/trainers.py:deepspeed

docs/trainers.md has the contract. The model, the packing (padded rows) and the optimizer are the stack's own; what must be
exactly Rollyard's (denominators, the clipped loss, the kept set of top_p and top_k) is imported from there.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from rollyard.errors import ConfigError, NonFinite
from rollyard.model.kept import keep
from rollyard.train.external import TrainerSetup
from rollyard.train.loss import Denominators, Known, policy_loss, token_sums
from rollyard.train.rows import written_by
from rollyard.train.totals import Totals
from rollyard.types import Sample, Sampling, TensorInfo, TrainBatch, TrainStats


def hugging_face(setup: TrainerSetup) -> HuggingFaceTrainer:
    return HuggingFaceTrainer(setup)


def deepspeed(setup: TrainerSetup) -> DeepSpeedTrainer:
    """`train.extra` may have {"stage": 1, 2 or 3}."""
    return DeepSpeedTrainer(setup)


class HuggingFaceTrainer:
    """Implements `protocols.ProvableTrainer`."""

    def __init__(self, setup: TrainerSetup) -> None:
        self.setup, self.options = setup, setup.options
        self.model = AutoModelForCausalLM.from_pretrained(setup.model, dtype=getattr(torch, setup.dtype)).to(setup.device)
        self.model.config.use_cache = False
        self.model.get_input_embeddings().padding_idx = None  # else the pad's row gets no gradient, and the pad may be EOS
        options = self.options
        self.optimizer = torch.optim.AdamW(self.model.parameters(), options.lr, options.betas, options.eps, options.weight_decay)
        self.parameters = dict(self.model.named_parameters())  # a tied head is the embedding, and not named twice
        self.before: dict[str, Tensor] = {}  # parameters that `move` replaced

    # What DeepSpeed does in another way.

    def forward(self, ids: Tensor, seen: Tensor) -> Tensor:
        logits: Tensor = self.model(ids, attention_mask=seen).logits
        return logits

    def backward(self, loss: Tensor, *, last: bool) -> None:
        loss.backward()

    def update(self, rate: float) -> float:
        """Clip, and take a step unless the norm is no number. Returns the norm before clipping."""
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.options.max_grad_norm))
        if math.isfinite(norm):
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    def whole(self, parameter: Tensor, *, change: bool = False) -> AbstractContextManager[Any]:
        """Inside it the whole parameter is there to be read, or changed."""
        return nullcontext()

    def shape(self, parameter: Any) -> tuple[int, ...]:
        return tuple(parameter.shape)

    # The contract.

    def tensors(self) -> Sequence[TensorInfo]:
        return [TensorInfo(name, self.shape(tensor), str(tensor.dtype)) for name, tensor in self.parameters.items()]

    def each(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.parameters.items():
            with self.whole(parameter):
                yield name, parameter.detach()

    def train(self, batch: TrainBatch) -> TrainStats:
        options, denominators, totals = self.options, Denominators.of(batch.samples), Totals()  # of all micro-batches together
        parts = [[sample for sample in part if any(sample.mask)] for part in batch.micro_batches]
        parts = [part for part in parts if part]
        norm = 0.0
        for number, part in enumerate(parts, start=1):
            found = Rows(part, self.setup.device).logprobs(self.forward, batch.sampling)
            trained = [sum(sample.mask) for sample in part]
            whole = [count + sample.others for count, sample in zip(trained, part, strict=True)]  # of an episode of several rows
            weights = found.rows([denominators.weight(count, options, self.setup.max_tokens) for count in whole])
            fresh = torch.from_numpy(written_by(part, self.setup.version._replace(step=batch.step))).to(self.setup.device)
            known = Known(found.of("logprobs"), found.of("advantages"), weights, trained, fresh=fresh)
            self.backward(policy_loss(found.new, known, options), last=number == len(parts))
            totals.add(token_sums(found.new.detach(), known, options), found.entropy, found.missed)
        rate = options.lr * min(1.0, (batch.step + 1) / options.warmup_steps) if options.warmup_steps else options.lr
        if parts:
            norm = self.update(rate)
        if not (math.isfinite(norm) and math.isfinite(totals.loss)):
            raise NonFinite(f"step {batch.step}: loss {totals.loss}, gradient norm {norm}; the parameters are as before")
        return totals.stats(self.setup.version._replace(step=batch.step + 1), denominators.tokens, norm, rate)

    def save(self, folder: Path) -> None:
        torch.save(self.optimizer.state_dict(), folder / "optimizer.pt")

    def load(self, folder: Path) -> None:
        self.optimizer.load_state_dict(torch.load(folder / "optimizer.pt", weights_only=True))

    def close(self) -> None:
        pass

    # For canary and probe.

    @torch.no_grad()
    def logprobs(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        ids = torch.tensor(prompts, device=self.setup.device)  # all of one length
        return self.forward(ids, torch.ones_like(ids))[:, -1].float().log_softmax(dim=-1).cpu()

    @torch.no_grad()
    def move(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            parameter = self.parameters[name]
            with self.whole(parameter, change=True):
                self.before.setdefault(name, parameter.detach().clone())
                parameter.data.copy_(tensor)

    @torch.no_grad()
    def restore(self) -> None:
        for name, tensor in self.before.items():
            with self.whole(self.parameters[name], change=True):
                self.parameters[name].data.copy_(tensor)
        self.before.clear()


class DeepSpeedTrainer(HuggingFaceTrainer):
    """The same in DeepSpeed's engine. At stage 3 parameters are kept in shards, and gathered one at a time to be published."""

    def __init__(self, setup: TrainerSetup) -> None:
        super().__init__(setup)
        self.stage = setup.extra.get("stage", 3)
        if self.stage not in (1, 2, 3):
            raise ConfigError(f"ZeRO has no stage {self.stage}", where="train.extra", remedy='give such as {"stage": 3}')
        if setup.dtype != "float32":
            raise ConfigError("this example was run with float32 only", where="model.dtype", remedy="use float32")
        os.environ.setdefault("DS_ACCELERATOR", setup.device)
        os.environ.setdefault("LOCAL_RANK", "0")
        import deepspeed

        self.library: Any = deepspeed
        backend = "nccl" if setup.device == "cuda" else "gloo"
        torch.distributed.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)
        self.library.init_distributed(dist_backend=backend)
        config = {
            "train_micro_batch_size_per_gpu": 1,  # micro-batches and their end are told by `backward`
            "gradient_accumulation_steps": 1,
            "gradient_clipping": self.options.max_grad_norm,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": {"stage": self.stage, "stage3_param_persistence_threshold": 0},  # small ones are shards too
        }
        self.engine, *_ = self.library.initialize(model=self.model, optimizer=self.optimizer, config=config)

    def forward(self, ids: Tensor, seen: Tensor) -> Tensor:
        logits: Tensor = self.engine(ids, attention_mask=seen).logits
        return logits

    def backward(self, loss: Tensor, *, last: bool) -> None:
        self.engine.set_gradient_accumulation_boundary(last)
        self.engine.backward(loss, scale_wrt_gas=False)  # the loss is a share of the whole batch's already

    def update(self, rate: float) -> float:
        for group in self.engine.optimizer.param_groups:
            group["lr"] = rate
        self.engine.step()
        if self.engine.optimizer.overflow:  # it has left the parameters as they were
            return math.nan
        return float(self.engine.get_global_grad_norm())

    def whole(self, parameter: Tensor, *, change: bool = False) -> AbstractContextManager[Any]:
        if self.stage < 3:
            return nullcontext()
        gathered: AbstractContextManager[Any] = self.library.zero.GatheredParameters(
            [parameter], modifier_rank=0 if change else None
        )
        return gathered

    def shape(self, parameter: Any) -> tuple[int, ...]:
        return tuple(getattr(parameter, "ds_shape", parameter.shape))

    def save(self, folder: Path) -> None:
        self.engine.save_checkpoint(str(folder), tag="deepspeed")

    def load(self, folder: Path) -> None:
        self.engine.load_checkpoint(str(folder), tag="deepspeed")

    def close(self) -> None:
        torch.distributed.destroy_process_group()


class Rows:
    """Samples as padded rows: a model that attends to what came before never sees the padding behind."""

    def __init__(self, samples: Sequence[Sample], device: str) -> None:
        self.samples, self.device = samples, device
        longest = max(len(sample.token_ids) for sample in samples)
        self.ids = torch.zeros(len(samples), longest, dtype=torch.int64)
        self.seen, self.mask = torch.zeros_like(self.ids), torch.zeros(len(samples), longest, dtype=torch.bool)
        for row, sample in enumerate(samples):
            length = len(sample.token_ids)
            self.ids[row, :length] = torch.tensor(sample.token_ids)
            self.mask[row, :length] = torch.tensor(sample.mask)  # from lengths, never from the pad's id: that may be EOS
            self.seen[row, :length] = 1
        self.ids, self.seen, self.mask = self.ids.to(device), self.seen.to(device), self.mask.to(device)

    def logprobs(self, forward: Any, sampling: Sampling) -> Rows:
        """Of every trained token, under the distribution that it was drawn from: `new`, `entropy`, `missed` `[trained]`."""
        targets = self.ids[:, 1:][self.mask[:, 1:]]
        logits = forward(self.ids, self.seen)[:, :-1][self.mask[:, 1:]].float() / sampling.temperature
        out = torch.zeros_like(logits, dtype=torch.bool)
        with torch.no_grad():
            if sampling.top_p < 1.0 or sampling.top_k:
                rows = len(logits)
                top_p = logits.new_full((rows,), sampling.top_p) if sampling.top_p < 1.0 else None
                top_k = targets.new_full((rows,), sampling.top_k) if sampling.top_k else None
                out = keep(logits, top_p, top_k).isinf()
            self.missed = out.gather(1, targets[:, None])[:, 0]
            out = out.scatter(1, targets[:, None], False)  # the engine's set had it
        every = logits.masked_fill(out, -1e30).log_softmax(dim=-1)  # the kept set itself gets no gradient
        self.new = every.gather(1, targets[:, None])[:, 0]
        self.entropy = -(every.detach().exp() * every.detach()).sum(dim=-1)
        return self

    def of(self, name: str) -> Tensor:
        """A column of the samples at every trained token, in the order of `new`."""
        values = [value for sample in self.samples for value, on in zip(getattr(sample, name), sample.mask, strict=True) if on]
        return torch.tensor(values, dtype=torch.float32, device=self.device)

    def rows(self, each: Sequence[float]) -> Tensor:
        """A number for each sample, at each of its trained tokens."""
        counts = torch.tensor([sum(sample.mask) for sample in self.samples], device=self.device)
        return torch.tensor(each, dtype=torch.float32, device=self.device).repeat_interleave(counts)
