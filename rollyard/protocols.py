"""Every seam between rooms. A station knows these and the types; it never knows another station.

Methods that touch a device are async: what they do runs elsewhere (a device thread, a child, an actor).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from rollyard.events import EngineId, Rollover, WakePart
from rollyard.types import (
    Activity,
    Answer,
    Baseline,
    Capabilities,
    Completion,
    EngineStats,
    Finding,
    Group,
    Handed,
    Interval,
    Judged,
    Manifest,
    Probed,
    Prompt,
    Reply,
    Request,
    RequestId,
    Reward,
    Segment,
    Sent,
    TensorInfo,
    TrainBatch,
    TrainStats,
    WeightVersion,
)

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")


class Spans(Protocol):
    """What one device did, and when. Anybody on any thread of its process may add to it; one drains it."""

    def now(self) -> int:
        """Nanoseconds on the monotonic clock."""
        ...

    def add(self, activity: Activity, start_ns: int, end_ns: int, what: str = "") -> None:
        """Something was done."""
        ...

    def doing(self, activity: Activity, what: str = "") -> AbstractContextManager[None]:
        """From entering the block to leaving it."""
        ...

    def timed(self, activity: Activity, call: Callable[..., T], what: str = "") -> Callable[..., T]:
        """`call`, which adds the time that it takes."""
        ...

    def drain(self) -> tuple[Interval, ...]:
        """What was added since the last time; at most so much that it fits into a message, so ask until there is none."""
        ...


class Device(Protocol):
    """One place where torch work runs, one call at a time. Trainer and engine of a colocated run share one."""

    @property
    def spans(self) -> Spans: ...

    async def run(self, call: Callable[..., T], *args: Any) -> T: ...


class PromptSource(Protocol):
    """A resumable stream of prompts."""

    @property
    def cursor(self) -> int:
        """How many prompts were taken: the id of the next one."""
        ...

    def take(self, count: int) -> tuple[tuple[Prompt, ...], bool]:
        """The next `count` prompts, and whether the source is exhausted (fewer than asked only then)."""
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

    @property
    def spans(self) -> Spans:
        """What its device did; that device's own where it shares one."""
        ...

    async def close(self) -> None: ...


class Ask(Protocol):
    """The policy, as an environment sees it, and its tokenizer."""

    async def __call__(self, token_ids: Sequence[int], *, max_tokens: int | None = None, stop: Sequence[str] = ()) -> Reply:
        """What the policy writes after `token_ids`; one answer at a time.

        Where they leave no room in the window, or all turns are over, the reply has no tokens and finishes with CONTEXT or
        LENGTH. Raises ValueError for what cannot be asked.

        Args:
            token_ids: all that it is to see: the prompt, what it wrote before as it was sampled, what tools said.
            max_tokens: of the answer (None: `rollout.max_tokens`, which is the most).
            stop: texts that end it, besides `rollout.stop`.
        """
        ...

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of a text within a conversation: no special tokens are added."""
        ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        """Ids of a conversation by the chat template, up to where the policy's answer begins."""
        ...

    def chat_after(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
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


class Trainer(Protocol):
    """Learns from a batch and holds the policy's parameters."""

    @property
    def version(self) -> WeightVersion: ...

    async def train(self, shards: Sequence[TrainBatch]) -> TrainStats:
        """The optimizer steps on one batch, which make a version. Raises TrainError; the version is then unchanged.

        Args:
            shards: a part of the batch for each data-parallel rank, in their order; one part for a trainer that is one.
        """
        ...

    async def settle(self) -> WeightVersion:
        """Wait until nothing is under way, also what nobody waits for any more; the version then. Raises TrainError."""
        ...

    async def save(self, folder: Path) -> None:
        """Write the policy in Hugging Face format, and beside it what training needs to go on."""
        ...

    async def become(self, version: WeightVersion) -> None:
        """Go on from the state of `version`, which was copied into that of this trainer. Raises TrainError."""
        ...

    async def close(self) -> None: ...


class Learner(Protocol):
    """Makes the next version of the policy from finished groups: here, or by having it done elsewhere."""

    @property
    def version(self) -> WeightVersion:
        """What it has."""
        ...

    async def learn(self, step: int, groups: Sequence[Group]) -> TrainStats:
        """Version `step + 1` out of version `step`. Raises TrainError; the version is then unchanged."""
        ...

    async def settle(self) -> WeightVersion:
        """Wait until nothing is under way, also what nobody waits for any more; the version then. Raises TrainError."""
        ...

    async def save(self, folder: Path) -> Path:
        """A checkpoint of the version it has: where it is, which is `folder` unless it lies somewhere already."""
        ...


class ValueTrainer(Trainer, Protocol):
    """A trainer with a value head, which GAE needs."""

    async def values(self, shards: Sequence[TrainBatch]) -> tuple[tuple[tuple[float, ...], ...], ...]:
        """What it expects before each trained token: `[shards][samples][trained tokens]`, samples as in `TrainBatch.samples`.

        Nothing is trained. Raises TrainError.
        """
        ...


class LocalTrainer(Trainer, Protocol):
    """A trainer in this very process: what it needs to go on can be read as tensors, and written."""

    def state(self) -> Mapping[str, Tensor]:
        """Parameters by their names, and whatever else decides the next step. Always the same names, shapes and dtypes.

        To hand a state over: between two steps, copy each tensor into the other trainer's tensor of that name, inside
        its model's `stamp.writing()`; then the other one's `become`.
        """
        ...


class ExternalTrainer(Protocol):
    """A trainer of another stack, made by the function that `train.adapter` names. docs/trainers.md has its contract.

    Plain functions: all calls come in turn on one thread, the one that it was made on, in a process of its own.
    """

    def tensors(self) -> Sequence[TensorInfo]:
        """What it publishes: Hugging Face's names, whole shapes, a tied head left out. Always the same."""
        ...

    def each(self) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors as they are now, in the order of `tensors`. One is done with before the next is asked for."""
        ...

    def train(self, batch: TrainBatch) -> TrainStats:
        """One optimizer step. Raises TrainError with the parameters as they were; after any other error they count as torn."""
        ...

    def save(self, folder: Path) -> None:
        """Write into `folder`, which has the model already, what training needs to go on."""
        ...

    def close(self) -> None: ...


class ProvableTrainer(ExternalTrainer, Protocol):
    """One that can say what its own model says: what a canary needs. A probe needs `logprobs` only."""

    def logprobs(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """`[prompts, vocab]` float32 on the CPU: of the token after each prompt, by the pass that trains, at temperature 1."""
        ...

    def move(self, tensors: Mapping[str, Tensor]) -> None:
        """Compute with, and publish, these whole tensors in the place of those of their names, until `restore`."""
        ...

    def restore(self) -> None:
        """All parameters as they were before the first `move`, bit for bit. Harmless without one."""
        ...


class Publisher(Protocol):
    """The trainer's side of a weight transport. It knows which engines are served, and which version each one has."""

    async def publish(self, version: WeightVersion, engines: Sequence[EngineId]) -> Manifest:
        """Offer the parameters as they are now: a new copy, also of a version that was offered before.

        Once it returns, what is done on the trainer's device next may change them. Raises WeightSyncError; what was offered
        before is untouched then.
        """
        ...

    async def again(self, engines: Sequence[EngineId]) -> Manifest:
        """The last offer once more, to these engines: what was copied then, whatever became of the parameters since.

        Raises WeightSyncError when that is not there any more.
        """
        ...

    async def deliver(self) -> Sent | None:
        """Return once nothing of the last offer is on its way any more: what travelled, where that is known.

        Raises WeightSyncError when it did not get through.
        """
        ...

    def taken(self, engine: EngineId, version: WeightVersion) -> None:
        """The engine decodes with `version` from now on."""

    def lost(self, engine: EngineId) -> None:
        """The engine is gone, and with it what it had mapped."""

    def close(self) -> None: ...


class Receiver(Protocol):
    """The engine's side of a weight transport, where the engine is. Its calls block."""

    def prepare(self, manifest: Manifest) -> None:
        """Bring the tensors near, beside whatever the engine computes. Raises WeightSyncError."""
        ...

    def take(self, version: WeightVersion) -> Mapping[str, Tensor] | None:
        """The tensors of the version that was prepared; None when the engine's own parameters are that version already.

        They stay as they are until the version after the next is prepared. Raises WeightSyncError.
        """
        ...

    def close(self) -> None: ...


Answers = Sequence[Answer]  # one for each of the probe's prompts, in their order


class Evidence(Protocol):
    """The trainer's side of canary and probe: what its own model says, and what engines' answers are worth beside that.

    Each method is one call on the trainer's device; `check` needs none. Nobody trains between `begin` and `restore`.
    Where a trainer is elsewhere, all raise WeightSyncError when it does not answer in time, TrainerLost when it is gone.
    """

    async def prompts(self) -> tuple[tuple[int, ...], ...]:
        """`[prompts][tokens]`: what engines are asked to write one token after."""
        ...

    async def published(self, version: WeightVersion, engines: Sequence[EngineId]) -> None:
        """The parameters as they are now were published to these engines: keep what they say."""
        ...

    async def check(self, engine: EngineId, answers: Answers) -> Probed:
        """Does the engine decode with the version that was published last, or with the one before?"""
        ...

    async def begin(self, answers: Mapping[EngineId, Answers]) -> Baseline:
        """Keep the parameters as they are, which is what these engines answered with."""
        ...

    async def move(self, attempt: int, names: Sequence[str]) -> None:
        """Move these tensors from where they were at `begin`, farther with each attempt; the others are put back."""
        ...

    async def judge(self, answers: Mapping[EngineId, Answers]) -> Judged:
        """Answers of engines that took the parameters as they were moved last."""
        ...

    async def restore(self) -> None:
        """The parameters as they were at `begin`, bit for bit; also when a move failed half way. Harmless without one."""
        ...

    async def returned(self, answers: Mapping[EngineId, Answers]) -> Mapping[EngineId, Finding]:
        """Answers of engines that took the parameters as they were at `begin` again."""
        ...


class TrainerEvidence(Evidence, Protocol):
    """Evidence that stands beside a model which is trained."""

    async def record(self, version: WeightVersion, folder: Path) -> None:
        """Write what the parameters as they are now are, and say, beside them into `folder`, for who checks it elsewhere.

        Raises CheckpointError.
        """
        ...


class Handoff(Protocol):
    """One side of handing a trainer's whole state to another process, which trains on with it."""

    async def give(self, version: WeightVersion, to: str) -> Manifest:
        """Offer the state as it is now to the side of this name. Raises WeightSyncError."""
        ...

    async def given(self) -> None:
        """Return once nothing of it is on its way any more. Raises WeightSyncError when it did not get through."""
        ...

    async def take(self, manifest: Manifest) -> Handed:
        """Receive and check all of it, then replace what is here. Raises WeightSyncError, with the state as it was."""
        ...


class Channel(Protocol):
    """A line to another process. Both ends may call; whoever hears of the end of the other fails what is open."""

    def handle(self, name: str, handler: Callable[[bytes], Awaitable[bytes]]) -> None:
        """Answer calls of this name."""

    def ready(self) -> None:
        """All handlers are there. Calls that came before are answered now."""

    async def call(self, name: str, content: bytes = b"", *, limit_s: float) -> bytes:
        """The answer. Raises what the other end raised, TimeLimitExceeded, or EngineLost when that is gone."""
        ...

    def tell(self, name: str, content: bytes = b"") -> None:
        """A call without an answer."""

    async def ended(self) -> str:
        """Wait for the end of the other side: what is known about the cause."""
        ...

    async def close(self) -> None: ...


class Launcher(Protocol):
    """Starts hosts: other processes, each with a channel to this one."""

    async def launch(
        self, target: str, order: bytes, *, name: str, environment: Mapping[str, str], python: Path | None = None
    ) -> Channel:
        """Start a host that runs `target`, the `module:function` of a coroutine function of its channel and `order`.

        Args:
            name: for messages.
            environment: its variables.
            python: its interpreter; this one when None.

        Raises EngineLost when it cannot be started.
        """
        ...

    async def close(self) -> None:
        """End what it started."""
        ...


class Sink(Protocol):
    """Somewhere metrics go."""

    def write(self, record: dict[str, object]) -> None: ...

    def close(self) -> None: ...
