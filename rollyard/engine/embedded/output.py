"""What one request has written and not yet sent, and when it is over."""

from __future__ import annotations

from rollyard.engine.embedded.scheduler import Sequence
from rollyard.model.tokenizer import StopWatcher
from rollyard.types import FinishReason, Segment, WeightVersion


class Output:
    """Collects the tokens of one request into segments."""

    __slots__ = ("_eos_ids", "_last", "_logprobs", "_oldest_kv", "_reason_at_last", "_token_ids", "_watcher", "sequence")

    def __init__(self, sequence: Sequence, window: int, eos_ids: frozenset[int], watcher: StopWatcher | None) -> None:
        sampling = sequence.request.sampling
        room = window - sequence.length
        self.sequence = sequence
        self._last = len(sequence.tokens) + min(sampling.max_tokens, room)  # tokens of the completion at most
        self._reason_at_last = FinishReason.LENGTH if sampling.max_tokens <= room else FinishReason.CONTEXT
        self._eos_ids = frozenset() if sampling.ignore_eos else eos_ids
        self._watcher = watcher
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._oldest_kv = sequence.oldest_kv  # of the unsent tokens

    def push(self, token_id: int, logprob: float) -> FinishReason | None:
        """Add the token that the sequence was just given; the reason if it is its last."""
        if not self._token_ids:
            self._oldest_kv = self.sequence.oldest_kv
        self._token_ids.append(token_id)
        self._logprobs.append(logprob)
        if token_id in self._eos_ids or (self._watcher is not None and self._watcher.push(token_id)):
            return FinishReason.STOP
        return self._reason_at_last if len(self.sequence.tokens) == self._last else None

    @property
    def unsent(self) -> int:
        """Tokens."""
        return len(self._token_ids)

    @property
    def outdated(self) -> bool:
        """The unsent tokens attended to another cache than the next one does: it was preempted and computed anew."""
        return self._oldest_kv is not self.sequence.oldest_kv and bool(self._token_ids)

    def flush(self, version: WeightVersion, finish: FinishReason | None = None) -> Segment:
        """All that was not sent yet, written by `version`."""
        token_ids, logprobs = tuple(self._token_ids), tuple(self._logprobs)
        self._token_ids.clear()
        self._logprobs.clear()
        return Segment(self.sequence.request.id, token_ids, logprobs, version, self._oldest_kv or version, finish)
