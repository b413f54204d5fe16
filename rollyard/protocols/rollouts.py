"""Where prompts come from, who writes and who judges."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from rollyard.events import Rollover, WakePart
from rollyard.protocols.devices import Spans
from rollyard.types import (
    Capabilities,
    Completion,
    EngineStats,
    Manifest,
    Prompt,
    Reply,
    Request,
    RequestId,
    Reward,
    Segment,
    WeightVersion,
)

if TYPE_CHECKING:
    pass


class PromptSource(Protocol):
    """A resumable stream of prompts."""

    @property
    def cursor(self) -> int:
        """How many prompts were taken: the id of the next one."""
        ...

    def take(self, count: int) -> tuple[tuple[Prompt, ...], bool]:
        """The next `count` prompts, and whether the source is exhausted (fewer than asked only then).

        Their ids ascend from call to call: another order is refused.
        """
        ...


class AwaitedSource(PromptSource, Protocol):
    """One that may have no prompt yet: it then gives none without being exhausted, or fewer than asked."""

    async def more(self) -> None:
        """Wait until it has a prompt, or is exhausted."""
        ...


class Engine(Protocol):
    """Token ids in, token ids and logprobs out."""

    @property
    def id(self) -> str: ...

    @property
    def slots(self) -> int:
        """How many requests it decodes at once."""
        ...

    @property
    def version(self) -> WeightVersion | None:
        """The version it acknowledged, None before the first load."""
        ...

    @property
    def capabilities(self) -> Capabilities: ...

    async def start(self) -> None:
        """Make ready to serve. Raises EngineError."""
        ...

    def generate(self, requests: Sequence[Request]) -> None:
        """Hand over requests; their tokens come out of `segments`. Raises EngineError if the engine cannot take them now."""
        ...

    def segments(self) -> AsyncIterator[tuple[Segment, ...]]:
        """What was written, as it is written (at least every 16 tokens or 200 ms). One consumer.

        Raises EngineLost when the engine is gone; ends when it is closed.
        """
        ...

    async def abort(self, requests: Sequence[RequestId]) -> None:
        """Cut these requests: each ends with a segment that finishes with ABORT, its tokens kept. Unknown ids are ignored."""
        ...

    async def pause(self, rollover: Rollover) -> None:
        """Stop at a token boundary. Returns when nothing runs (DRAIN, ABORT) or all stand still (KEEP)."""
        ...

    async def prepare(self, manifest: Manifest) -> None:
        """Bring the bytes of a version near, beside generation. Raises WeightSyncError; nothing has changed then."""
        ...

    async def load(self, version: WeightVersion) -> None:
        """Switch to the version that was prepared and drop caches that belong to older weights.

        Raises WeightSyncError with the version unchanged, EngineError while requests run.
        """
        ...

    async def resume(self) -> None: ...

    async def sleep(self) -> None:
        """Give back the memory of the cache. Raises EngineError while requests run."""
        ...

    async def wake(self, part: WakePart) -> None: ...

    def stats(self) -> EngineStats: ...

    def condemn(self, cause: str) -> None:
        """It is of no more use: lost from now on, and its process, where it has one of its own, ended at once.

        Raises EngineError when it is a part of this process, or a trainer's: it cannot be taken out then.
        """
        ...

    @property
    def spans(self) -> Spans:
        """What its device did; that device's own where it shares one."""
        ...

    async def close(self) -> None: ...


class Hearing(Protocol):
    """Hears of an answer while it is written."""

    def __call__(self, after: int, token_ids: Sequence[int]) -> None:
        """What came after its first `after` tokens. Where more had been heard of, the rest of that was taken back."""
        ...


class Ask(Protocol):
    """The policy, as an environment sees it, and its tokenizer."""

    async def __call__(
        self,
        token_ids: Sequence[int],
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        hearing: Hearing | None = None,
    ) -> Reply:
        """What the policy writes after `token_ids`; one answer at a time.

        Where they leave no room in the window, or all turns are over, the reply has no tokens and finishes with CONTEXT or
        LENGTH. Raises ValueError for what cannot be asked.

        Args:
            token_ids: all that it is to see: the prompt, what it wrote before as it was sampled, what tools said.
            max_tokens: of the answer (None: `rollout.max_tokens`, which is the most).
            stop: texts that end it, besides `rollout.stop`.
            hearing: is called with tokens as they come, in the run's own process; in a worker process it hears nothing. The reply
                alone is sure, and has all of them.
        """
        ...

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of a text within a conversation: no special tokens are added."""
        ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def chat(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> tuple[int, ...]:
        """Ids of a conversation by the chat template, up to where the policy's answer begins.

        Args:
            tools: that it is told of, as OpenAI's interface has them. Raises ConfigError where the template shows none.
        """
        ...

    def chat_after(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> tuple[int, ...]:
        """Ids of what the template puts between an answer and the next one: the end of the first, and these messages."""
        ...


class Environment(Protocol):
    """Plays episodes with the policy: asks it, several times, and acts on what it wrote. docs/episodes.md has examples."""

    async def episode(self, ask: Ask, prompt: Prompt) -> float | Reward | None:
        """One episode. Its verdict; None: the configured rewards judge what was written. What it raises is no verdict."""
        ...


class Scorer(Protocol):
    """A judge. Bounded in time; a failure is a Reward without a value, never an exception and never 0."""

    async def score(self, prompt: Prompt, completion: Completion) -> Reward: ...

    async def close(self) -> None: ...
