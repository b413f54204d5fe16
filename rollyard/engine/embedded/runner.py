"""Carries out one plan on the device: page copies, the forward pass, the head for rows that draw, the draw."""

from __future__ import annotations

import torch
from torch import Tensor

from rollyard.config import EngineConfig
from rollyard.engine.embedded.decoder import build
from rollyard.engine.embedded.pages import PagePool
from rollyard.engine.embedded.sampler import Drawn, draw
from rollyard.engine.embedded.scheduler import Plan, PromptPages
from rollyard.model.transformer import CausalLM

FIRST_PAGES = 64  # pages that get memory at once; more as they are needed


class Runner:
    """Holds the cache. All its methods run on the device's thread."""

    def __init__(self, model: CausalLM, pool: PagePool, config: EngineConfig, sole: bool = False) -> None:
        self._model, self._pool = model, pool
        self._device = model.head_weight.device
        self.decoder = build(model, pool, config, sole)
        self._memory = self.decoder.memory
        self._generation: int | None = None

    @property
    def cache_bytes(self) -> int:
        return self._memory.bytes

    def allocate(self) -> None:
        """Take memory for the cache."""
        self._memory.reserve(min(FIRST_PAGES, self._pool.size))

    def release(self) -> None:
        """Give the cache's memory back."""
        self.decoder.release()

    def acknowledge(self) -> None:
        """The weights as they are now are the ones to decode with: derived copies are made anew."""
        self._generation = None
        generation = self._model.stamp.generation
        self.decoder.refresh()
        self._model.stamp.check(generation)
        self._generation = generation

    @torch.no_grad()
    def execute(self, plan: Plan) -> Drawn:
        """One token for each of the plan's draws. Raises StaleWeights."""
        assert self._generation is not None, "no weights were loaded"
        self._model.stamp.check(self._generation)
        self._memory.reserve(self._pool.touched)
        if plan.copies:
            self._memory.copy(plan.copies)
        hidden = self._forward(plan)
        if not plan.draws:
            return Drawn([], [], 0)
        logits = self._logits(plan, hidden)
        requests = [sequence.request for sequence in plan.draws]
        return draw(
            logits,
            [request.sampling for request in requests],
            [request.seed for request in requests],
            [len(sequence.tokens) for sequence in plan.draws],
            self.decoder.choose,
        )

    def _forward(self, plan: Plan) -> Tensor | None:
        """`[tokens, hidden]` of the flat batch, None when the plan computes no token. Finished prompts keep their row."""
        if not plan.decodes and not plan.chunks:
            return None
        hidden = self.decoder.hidden(plan)
        for prompt, index in plan.finished:
            prompt.hidden = hidden[index].clone()
        return hidden

    def _logits(self, plan: Plan, hidden: Tensor | None) -> Tensor:
        """`[draws, vocab]`; rows that several draws share are computed once."""
        if hidden is not None and len(plan.draws) == len(plan.decodes) == hidden.shape[0]:
            return self.decoder.logits(hidden)  # the common step: everybody decodes
        row: dict[int | PromptPages, int] = {}
        for source in sorted(plan.sources, key=lambda source: isinstance(source, PromptPages)):
            row.setdefault(source, len(row))
        parts = []
        flat = [source for source in row if not isinstance(source, PromptPages)]
        kept = [source.hidden for source in row if isinstance(source, PromptPages)]
        if flat and hidden is not None:
            parts.append(hidden.index_select(0, torch.tensor(flat, device=self._device)))
        if kept:
            parts.append(torch.stack([tensor for tensor in kept if isinstance(tensor, Tensor)]))
        logits = self.decoder.logits(torch.cat(parts))
        rows = [row[source] for source in plan.sources]
        return logits.index_select(0, torch.tensor(rows, device=self._device))
