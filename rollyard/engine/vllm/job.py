"""A request under way in vLLM: what it is asked with, and which weights wrote what it gave."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rollyard.engine.written import Written, seed
from rollyard.errors import EngineLost
from rollyard.types import FinishReason, Segment, WeightVersion

Ended = tuple[FinishReason, str]  # how a request ended, and its problem
Loads = Sequence[tuple[str, WeightVersion]]  # in their order, with what vLLM calls the weights


@dataclass(slots=True, eq=False)
class Job:
    """One request."""

    written: Written
    name: str  # what vLLM calls it
    load: int  # number of the load whose weights wrote its first token
    task: asyncio.Task[None] | None = None

    def params(self) -> dict[str, object]:
        """For vLLM."""
        written, sampling = self.written, self.written.request.sampling
        return {
            "max_tokens": written.room,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "seed": seed(written.request),
            "logprobs": 0,  # of the drawn token alone
            "ignore_eos": True,  # Rollyard's own set of them is given instead
            "stop_token_ids": sorted(written.eos_ids),
            "detokenize": False,
        }

    def last_segments(self, ended: Ended, labels: Counter[str] | None, loads: Loads) -> list[Segment]:
        """What is left to send.

        Args:
            labels: tokens by the weights that vLLM says wrote them, those after a stop string too; None where it did not say.
            loads: those since it began, the first of them its own.

        Raises EngineLost when that cannot be: what vLLM says is then about other weights than were loaded here.
        """
        written = self.written
        if labels is None:
            if len(loads) > 1 and written.unsent:
                written.discard()  # nobody knows what wrote it
                if ended[0] not in (FinishReason.ABORT, FinishReason.ERROR):
                    ended = FinishReason.ERROR, "vLLM did not say which weights wrote it"
            return [written.flush(written.started, *ended)]
        sent = written.tokens - written.unsent
        if strange := labels.keys() - {label for label, _ in loads}:
            raise EngineLost(f"vLLM says that it wrote with weights {min(strange)!r}, which were not loaded: it was started anew")
        if labels.total() < written.tokens or labels[loads[0][0]] < sent:
            came = f"{written.tokens} came, {sent} of them before a load"
            raise EngineLost(f"vLLM says that it wrote {dict(labels)} tokens by weights, and {came}")
        start, parts = 0, []
        for label, version in loads:
            end = start + labels[label]
            if (count := min(end, written.tokens) - max(start, sent)) > 0:
                parts.append((version, count))
            start = end
        *early, (last, _) = parts or [(loads[-1][1], 0)]
        return [*(written.flush(version, count=count) for version, count in early), written.flush(last, *ended)]
