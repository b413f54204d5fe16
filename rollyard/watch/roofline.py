"""How much each part of a run computes for every byte it moves, and so what bounds it: memory or arithmetic.

The roofline model of Williams, Waterman and Patterson (2009): a machine does its floating-point operations at full rate only
where there are more of them to a byte than its balance, peak operations per second over bytes per second.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rollyard.model.architecture import Architecture
from rollyard.model.flops import ADAM_FLOPS, ADAM_NUMBERS, adapted_flops, attention_flops, gemms, pass_flops
from rollyard.model.machine import Machine
from rollyard.types import Completion, EngineStats, Prompt, TrainBatch

ADAPTER_ITEM = 4  # bytes of a number of an adapter


@dataclass(frozen=True, slots=True)
class Operation:
    """One row of the table: a part of the run over its whole time. `seconds` are of devices, None where nobody says.

    `share` is of the time of all devices.
    """

    phase: str
    operation: str
    flops: int
    bytes: int
    flops_per_byte: float
    bound: str  # memory or compute; empty where the machine is not known
    seconds: float | None
    share: float | None


class Work:
    """Counts what a run computes and moves.

    Weights count once a pass, as much as their number format takes; keys and values count once for each token that is
    written and for each that is attended to. Activations are left out: they depend on how a trainer keeps them. So
    FLOPs per byte are an upper bound in training.

    Args:
        architecture: of the policy.
        item: bytes of a number: of weights, keys and values.
        adapter: numbers of the adapter that is trained; 0 where all weights are.
    """

    def __init__(self, architecture: Architecture, item: int, adapter: int = 0) -> None:
        self._architecture, self._item, self._adapter = architecture, item, adapter
        self._prompts = self._prompt_tokens = self._prompt_pairs = 0
        self._written = self._written_pairs = 0
        self._steps = self._passes = self._train_flops = 0  # steps and passes of all ranks

    def completed(self, prompt: Prompt, completion: Completion) -> None:
        """One more completion was written: how long things are is learnt from it."""
        turns = [(len(turn.prompt_ids), turn.tokens) for turn in completion.turns if turn.tokens]
        for before, after in turns or [(len(prompt.token_ids), len(completion.token_ids))]:
            self._prompts += 1
            self._prompt_tokens += before
            self._prompt_pairs += before * (before + 1) // 2
            self._written += after
            self._written_pairs += after * before + after * (after + 1) // 2

    def trained(self, shards: Sequence[TrainBatch]) -> None:
        """One more optimizer step, taken by every rank on its part."""
        self._steps += len(shards)
        for batch in shards:
            self._passes += len(batch.micro_batches)
            if self._adapter:
                self._train_flops += adapted_flops(batch, self._architecture, self._adapter)
            else:
                self._train_flops += sum(gemm.flops for gemm in gemms(batch, self._architecture))
            self._train_flops += attention_flops(batch, self._architecture)

    def table(
        self,
        engines: Iterable[EngineStats],
        seconds: Mapping[str, float],
        copied_bytes: int,
        whole_s: float,
        machine: Machine | None,
    ) -> tuple[Operation, ...]:
        """The table.

        Args:
            engines: their totals, those for held-out prompts included.
            seconds: of devices, by `step` (forward, backward and optimizer), `optimizer` and `sync`.
            copied_bytes: of weights, over the run.
            whole_s: seconds of all devices.
            machine: one of them.
        """
        stats, parameters = tuple(engines), self._architecture.parameters
        step_s, prefill_s = sum(engine.step_s for engine in stats), sum(engine.prefill_s for engine in stats)
        known = prefill_s > 0
        # Read twice; what is trained is, and its gradients written, twice more.
        trained, item = (self._adapter, ADAPTER_ITEM) if self._adapter else (parameters, self._item)
        learnt = 2 * self._passes * (parameters * self._item + trained * item)
        learning = seconds.get("step", 0.0) - seconds.get("optimizer", 0.0)
        rows = [
            ("rollout", "prefill", *self._prefill(stats), prefill_s if known else None),
            ("rollout", "decode" if known else "decode, and prefill's seconds", *self._decode(stats), step_s - prefill_s),
            ("training", "forward and backward", self._train_flops, learnt, learning),
            (
                "training",
                "optimizer step",
                ADAM_FLOPS * trained * self._steps,
                ADAM_NUMBERS * trained * item * self._steps,
                seconds.get("optimizer", 0.0),
            ),
            ("weights", "sync", 0, copied_bytes, seconds.get("sync", 0.0)),
        ]
        return tuple(_operation(*row, whole_s, machine) for row in rows)

    def _prefill(self, stats: Iterable[EngineStats]) -> tuple[int, int]:
        """FLOPs and bytes. Where an engine does not say in how many steps, a step each prompt."""
        tokens = sum(engine.prefilled_tokens + engine.recomputed_tokens for engine in stats)
        if not (tokens and self._prompt_tokens):
            return 0, 0
        prompts = tokens * self._prompts // self._prompt_tokens
        pairs = tokens * self._prompt_pairs // self._prompt_tokens
        passes = sum(engine.prefill_steps for engine in stats) or prompts
        flops = pass_flops(self._architecture, tokens, prompts, pairs)
        return flops, self._weights(passes) + tokens * self._cached

    def _decode(self, stats: Iterable[EngineStats]) -> tuple[int, int]:
        tokens = sum(engine.generated_tokens for engine in stats)
        if not (tokens and self._written):
            return 0, 0
        pairs = tokens * self._written_pairs // self._written
        flops = pass_flops(self._architecture, tokens, tokens, pairs)
        return flops, self._weights(sum(engine.steps for engine in stats)) + (tokens + pairs) * self._cached

    def _weights(self, passes: int) -> int:
        return passes * self._architecture.parameters * self._item

    @property
    def _cached(self) -> int:
        """Bytes of one token's keys and values."""
        architecture = self._architecture
        return 2 * architecture.layers * architecture.kv_heads * architecture.head_dim * self._item


def _operation(
    phase: str, operation: str, flops: int, moved: int, seconds: float | None, whole_s: float, machine: Machine | None
) -> Operation:
    ratio = flops / moved if moved else 0.0
    bound = "" if machine is None or not moved else "memory" if ratio < machine.balance else "compute"
    share = None if seconds is None or not whole_s else seconds / whole_s
    return Operation(phase, operation, flops, moved, ratio, bound, seconds, share)
