"""One request under way at a server.

Where a completion ends is decided here, token by token, and not by the server: an end-of-sequence token or a stop string
keeps the same tokens with every engine, also when it lies across the place where the request was cut and went on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from uuid import uuid4

from rollyard.engine.sglang.event import End, News, Reader
from rollyard.engine.written import Written
from rollyard.types import FinishReason, Request, Segment, WeightVersion

SEGMENT_TOKENS = 16
SEEDS = 2**63  # the server's seeds are signed


class Job:
    """What was asked, and what came of it so far.

    Args:
        written: collects its tokens.
        label: what the server calls the version that it was sent under.
        load: which load of this engine that was.
    """

    def __init__(self, written: Written, label: str, load: int) -> None:
        self.written, self.label, self.load = written, label, load
        self.rid = uuid4().hex  # of one length: the server takes what a name begins with for the name
        self.reader = Reader()
        self.task: asyncio.Task[None] | None = None
        self._version = written.started

    @property
    def request(self) -> Request:
        return self.written.request

    def body(self, *, eos_ids: Iterable[int], seeds: bool) -> dict[str, object]:
        """What /generate is asked. Prompts are cached by version, so that none computed with other weights is taken.

        Args:
            eos_ids: of the model.
            seeds: does the server hear them? It draws token i with noise that belongs to (seed, place in the sequence).
        """
        request, sampling = self.request, self.request.sampling
        parameters: dict[str, object] = {
            "max_new_tokens": self.written.room,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "ignore_eos": sampling.ignore_eos,
            "stop_token_ids": sorted(eos_ids),
        }
        if seeds:
            parameters["sampling_seed"] = request.seed % SEEDS
        return {
            "rid": self.rid,
            "input_ids": [*request.prompt_ids, *request.written_ids],
            "sampling_params": parameters,
            "return_logprob": True,
            "stream": True,
            "extra_key": self.label,
        }

    def take(self, news: News, version: WeightVersion | None) -> list[Segment]:
        """What must go out now that this came; the last segment says so.

        Args:
            version: of the new tokens; None where there are none.
        """
        segments, finish = [], None
        if version is not None:
            if self.written.unsent and version != self._version:
                segments.append(self.flush())
            self._version = version
            finish = self._push(news)
        if finish is not None:
            segments.append(self.flush(finish))
        elif news.end is not None:
            segments.append(self.flush(*_finish(news.end)))
        elif self.written.unsent >= SEGMENT_TOKENS:
            segments.append(self.flush())
        return segments

    def flush(self, finish: FinishReason | None = None, problem: str = "") -> Segment:
        """All that was not sent yet."""
        return self.written.flush(self._version, finish, problem)

    def _push(self, news: News) -> FinishReason | None:
        for token_id, logprob in zip(news.token_ids, news.logprobs, strict=True):
            finish = self.written.push(token_id, logprob)
            if finish is not None:  # what the server wrote beyond does not count
                return finish
        return None


def _finish(end: End) -> tuple[FinishReason, str]:
    """A reason of the server's own: what it is here, and what went wrong."""
    match end.type:
        case "stop":  # by a token that ends a text for the server only
            return FinishReason.STOP, ""
        case "length":  # before what was asked was written: its own window is full
            return FinishReason.CONTEXT, ""
        case "abort" if end.status_code is None:
            return FinishReason.ABORT, ""
        case "abort":
            return FinishReason.ERROR, f"the server gave up: {end.message} ({end.status_code})"
        case other:
            return FinishReason.ERROR, f"the server gave a reason that is not in its schema: {other!r}"
