"""The vocabulary, in the order data flows. Every record is frozen and slotted.

Prompt -> Request -> Segment -> Completion -> Rollout -> Group -> Sample -> TrainBatch -> WeightVersion

Tokens are tuples; where they may be any sequence, a simulation has `plan.tokens.Told`, which only knows how many they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import GenericAlias
from typing import Annotated, Any, NamedTuple, get_args

from rollyard.stats import EngineStats as EngineStats

LARGEST = 3.4028235e38  # of float32, which is what losses are computed in


class _Tuple:
    """What pydantic reads such a field as: a record that crossed a line or a file is the one that was written."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        return handler.generate_schema(GenericAlias(tuple, (*get_args(source), ...)))


Tokens = Annotated[Sequence[int], _Tuple()]
Logprobs = Annotated[Sequence[float], _Tuple()]


class FinishReason(StrEnum):
    """Why a completion ended. A closed set: every engine maps its own words onto these."""

    STOP = "stop"  # an end-of-sequence token or a stop string
    LENGTH = "length"  # max_tokens written
    CONTEXT = "context"  # no room left in the window
    ABORT = "abort"  # cut; the tokens so far are kept and the request can continue anywhere
    ERROR = "error"

    @property
    def truncated(self) -> bool:
        """Cut by a limit, before the policy ended it."""
        return self in (FinishReason.LENGTH, FinishReason.CONTEXT)


class DropReason(StrEnum):
    """Why a prompt, or one member of its group, left without being trained on."""

    CONTEXT = "context"  # the prompt leaves no room for one token in the window
    FAILED = "failed"  # retries used up, or fewer scored members than the failure policy asks for
    NO_VERDICT = "no_verdict"  # member only: the judge gave no number
    STALE = "stale"  # would exceed the staleness limit
    FILTERED = "filtered"  # all verdicts of the group are equal; of a member alone: a limit cut it, and such are masked
    OVERSAMPLED = "oversampled"
    DISTRUSTED = "distrusted"  # written by an engine that decoded with other weights than it said, or answered wrongly
    STOPPED = "stopped"  # the run was stopped while it was live


class Activity(StrEnum):
    """What a device does with its time, the one that it counts as first: where two overlap, one hides the other."""

    TRAIN = "train"
    GENERATE = "generate"  # at least one sequence decodes or prefills
    EVAL = "eval"  # the same for held-out prompts
    TOOLS = "tools"  # an environment is at work between two answers
    SCORE = "score"
    CHECKPOINT = "checkpoint"
    SYNC = "sync"  # weights are copied, brought near, switched to, probed; a cache is given back or taken again
    PROMPTS = "prompts"  # of the driver alone, as the next two: prompts are read and handed out
    RESTART = "restart"  # an engine that was lost is started again
    CALLER = "caller"  # a batch is ready, and a trainer of the caller's has not taken it yet
    CLOSING = "closing"  # the run is over, its processes end
    SETUP = "setup"


class Interval(NamedTuple):
    """Something was done from `start_ns` to `end_ns`, on the monotonic clock that all processes of a machine share.

    `what` says which part of the activity, such as "prepare" or "load" of sync.
    """

    activity: Activity
    start_ns: int
    end_ns: int
    what: str = ""


class WeightVersion(NamedTuple):
    """Which weights: `step` batches trained on, in the `incarnation`-th life of the run.

    A resumed run trains a step again under a higher incarnation, so that the two are never confused.
    Example: WeightVersion(3, 0).
    """

    step: int
    incarnation: int = 0


PROOFS = -(2**40)


class RequestId(NamedTuple):
    """Names one attempt at one member: late news of an earlier attempt is recognised by `attempt`.

    Evaluation uses negative groups, canary and probes those from PROOFS down. Example: RequestId(group=17, member=3, attempt=0).
    """

    group: int
    member: int
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn. `temperature` 0 is greedy; `top_p` 1 and `top_k` 0 keep every token."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False  # for benchmarks that need a fixed number of tokens


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt to be completed K times.

    `id` is its ordinal in the source's stream: unique in a run, also over epochs, and the id of its group.
    Example: Prompt(id=4, row=4, token_ids=(3, 9, 4), text="cab", columns={"answer": "abc"}).
    """

    id: int
    row: int  # the row of the data set it came from
    token_ids: Tokens  # [tokens]
    text: str
    columns: Mapping[str, object] = field(default_factory=dict)  # handed to the reward by name
    messages: tuple[Mapping[str, str], ...] = ()  # role and content of each, where the data has a conversation


@dataclass(frozen=True, slots=True)
class Request:
    """All an engine needs to write one completion, or to go on with one that was cut elsewhere.

    Token i of the completion is drawn with noise that belongs to (`seed`, i) alone, whatever the batch.
    `sampling.max_tokens` counts the tokens still to write, after `written_ids`.
    """

    id: RequestId
    prompt_ids: Tokens  # [tokens]
    sampling: Sampling
    seed: int  # 64 bits, from (run seed, prompt, member)
    written_ids: Tokens = ()  # [tokens]
    priority: int = 0  # lower goes first


@dataclass(frozen=True, slots=True)
class Segment:
    """Some consecutive tokens of one request, all from forward passes of one weight version.

    The last segment of a request carries `finish`; it may have no tokens.
    """

    request: RequestId
    token_ids: Tokens  # [tokens]
    logprobs: Logprobs  # [tokens], under the distribution each token was drawn from
    version: WeightVersion
    oldest_kv: WeightVersion  # the oldest version whose keys and values these tokens attended to
    finish: FinishReason | None = None
    problem: str = ""  # what went wrong, when finish is ERROR


class VersionSpan(NamedTuple):
    """`tokens` consecutive tokens written by `version`, attending to nothing older than `oldest_kv`."""

    version: WeightVersion
    oldest_kv: WeightVersion
    tokens: int


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer of the policy within an episode.

    Example, a tool's answer 8 9 before the second turn of prompt 3 4: Turn((3, 4), 2, STOP), Turn((3, 4, 5, 6, 8, 9), 1, STOP)
    of a completion with the tokens 5 6 7.
    """

    prompt_ids: Tokens  # [tokens], all that the policy saw before it
    tokens: int  # of the completion's tokens, those of earlier turns come first
    finish: FinishReason


@dataclass(frozen=True, slots=True)
class Asking:
    """What an environment asks of the policy.

    Example: Asking((3, 4, 5, 6, 8, 9), max_tokens=16, stop=("</call>",)).
    """

    prompt_ids: tuple[int, ...]  # [tokens], all that the policy is to see
    max_tokens: int  # of the answer at most
    stop: tuple[str, ...] = ()  # texts that end it
    streams: bool = False  # whoever asks hears of tokens as they come


@dataclass(frozen=True, slots=True)
class Reply:
    """What the policy wrote in one turn. `text` is without special tokens, and cut before a stop string."""

    token_ids: Tokens  # [tokens], as they were sampled
    text: str
    finish: FinishReason
    logprobs: Logprobs = ()  # [tokens], under the distribution each was drawn from
    spans: tuple[VersionSpan, ...] = ()  # over the tokens, in order


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished completion. Spans cover the tokens in order: sum(span.tokens) == len(token_ids).

    `text` is for people and rewards: special tokens left out, cut before a stop string.
    An episode's has the tokens of all its turns, one turn's after the other's, and nothing that came between them.
    """

    group: int
    member: int
    token_ids: Tokens  # [tokens], what the policy sampled, end-of-sequence included
    logprobs: Logprobs  # [tokens]
    spans: tuple[VersionSpan, ...]
    finish: FinishReason
    text: str
    turns: tuple[Turn, ...] = ()  # of an episode; none: all tokens follow the group's prompt


@dataclass(frozen=True, slots=True)
class Reward:
    """A verdict. `value` None means no verdict, which is not zero: the member gets weight 0.

    Example: Reward(1.0, parts={"exact_match": 1.0}); Reward(None, problem="ValueError: no number").
    """

    value: float | None
    parts: Mapping[str, float] = field(default_factory=dict)
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Rollout:
    """A completion that was judged."""

    completion: Completion
    reward: Reward


@dataclass(frozen=True, slots=True)
class Group:
    """The judged completions of one prompt, by member. Members that were dropped are not among them.

    A member without a verdict is among them, with reward.value None.
    """

    prompt: Prompt
    rollouts: tuple[Rollout, ...]

    @property
    def id(self) -> int:
        return self.prompt.id

    @property
    def rewards(self) -> tuple[float | None, ...]:
        """[members], None where there is no verdict."""
        return tuple(rollout.reward.value for rollout in self.rollouts)


@dataclass(frozen=True, slots=True)
class Partial:
    """What was written of an answer that has not ended. Spans cover the tokens in order."""

    member: int
    token_ids: Tokens  # [tokens]
    logprobs: Logprobs  # [tokens]
    spans: tuple[VersionSpan, ...]


@dataclass(frozen=True, slots=True)
class Begun:
    """What an earlier life of the run left of a group that was not complete, each by member. Members it lacks were not begun.

    Example: Begun(4, rollouts=(Rollout(done, Reward(1.0)),), partials=(Partial(2, (7,), (-0.5,), (span,)),)).
    """

    group: int
    rollouts: tuple[Rollout, ...] = ()  # judged
    completions: tuple[Completion, ...] = ()  # ended, and not judged yet
    partials: tuple[Partial, ...] = ()  # to be gone on with


@dataclass(frozen=True, slots=True)
class Sample:
    """One training row: a prompt, what the policy wrote after it, and what to learn from it.

    Example with 2 prompt and 3 sampled tokens: mask (0, 0, 1, 1, 1); logprobs and advantages are 0 where mask is.
    """

    group: int
    member: int
    token_ids: tuple[int, ...]  # [tokens]
    mask: tuple[bool, ...]  # [tokens], True on tokens the policy sampled, end-of-sequence included
    logprobs: tuple[float, ...]  # [tokens], behaviour logprobs: recorded when the token was sampled
    advantages: tuple[float, ...]  # [tokens]
    spans: tuple[VersionSpan, ...]  # over the sampled tokens
    part: int = 0  # which row of its rollout: an episode has several where what came before was rewritten between turns
    others: int = 0  # tokens that are trained on in the other rows of its rollout
    values: tuple[float, ...] = ()  # [tokens] of a value head before this step, where there is one; 0 where mask is
    returns: tuple[float, ...] = ()  # [tokens] what the value head learns, likewise


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """What one optimizer step learns from, packed into micro-batches that fit a token budget.

    `sampling` holds the temperature, top_p and top_k the tokens were drawn with.
    """

    step: int  # trains weight version `step` into `step + 1`
    micro_batches: tuple[tuple[Sample, ...], ...]
    sampling: Sampling

    @property
    def samples(self) -> tuple[Sample, ...]:
        return tuple(sample for micro in self.micro_batches for sample in micro)


@dataclass(frozen=True, slots=True)
class TrainStats:
    """What one optimizer step did. Means are over all trained tokens of the global batch."""

    step: int
    loss: float
    grad_norm: float  # before clipping
    learning_rate: float
    tokens: int  # trained tokens: mask True
    entropy: float  # nats per token, of the distribution tokens were drawn from
    clipped_share: float  # of trained tokens, ratio outside the clip range on the side that matters
    ratio_mean: float
    logprob_gap_mean: float  # |trainer - engine| per trained token, nats, whatever version wrote it
    logprob_gap_max: float
    kept_set_misses: float  # share of tokens that the trainer's own top_p/top_k set would have left out
    ratio_p1: float = 1.0  # percentiles of the ratio over trained tokens, by nearest rank
    ratio_p99: float = 1.0
    truncated_share: float = 0.0  # of trained tokens, whose importance weight was cut or masked
    kl: float | None = None  # to the reference policy per trained token, nats; None without a reference
    value_loss: float | None = None  # None without a value head
    # The gap again: of tokens written by the very version that is trained, with no older keys and values, and of all others.
    fresh_gap_mean: float | None = None  # engine and trainer alone; None: no such token, or nobody looked
    fresh_gap_max: float | None = None
    stale_gap_mean: float | None = None  # and what the policy has become since; likewise
    stale_gap_max: float | None = None
    thread_s: float | None = field(default=None, compare=False)  # processor time of the thread that trained; of rank 0


class TensorInfo(NamedTuple):
    """One tensor of a manifest."""

    name: str
    shape: tuple[int, ...]
    dtype: str


class Slice(NamedTuple):
    """Part of a tensor: indices `start` to `end` of dimension `dim`, all of the others."""

    dim: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a publisher offers: the version, its tensors, and how many bytes had to be copied for it.

    Where engines are several workers each, `shares` says which part of each tensor a worker needs, None for all of it.

    Example: Manifest(WeightVersion(3), (TensorInfo("model.norm.weight", (64,), "torch.float32"),), 256, "/tmp/run/v3").
    """

    version: WeightVersion
    tensors: tuple[TensorInfo, ...]
    bytes_copied: int
    source: str = ""  # where receivers find them, in the transport's own words
    fingerprints: tuple[int, ...] = ()  # of the tensors, in their order; none where they travel behind these, or nothing moves
    shares: tuple[tuple[Slice | None, ...], ...] = ()  # [workers of an engine][tensors]; none for engines that are one
    name: str = ""  # of these contents, where receivers may get later ones as what changed since
    base: str = ""  # only what changed since the contents of this name travels


@dataclass(frozen=True, slots=True)
class Sent:
    """What travelled for one offer. Example: Sent(5_400_000, 0.99)."""

    bytes: int  # that left the trainer, to all machines together
    unchanged: float | None = None  # share of the numbers that are as they were in the version before; None: nobody compared


@dataclass(frozen=True, slots=True)
class Handed:
    """What handing a trainer's state over took, from the manifest until it was in its place."""

    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Answer:
    """What an engine said after one prompt of the probe."""

    token: int
    logprob: float
    version: WeightVersion | None = None  # which weights it is to be of; None: those that were published last


class Verdict(StrEnum):
    """What a probe says of an engine's weights."""

    VERIFIED = "verified"  # nearer the logprobs of its version than those of any other that is known, by more than noise
    UNDECIDABLE = "undecidable"  # they are too near each other to tell
    CONTRADICTED = "contradicted"  # nearer those of another one, by more than noise, or far from all


@dataclass(frozen=True, slots=True)
class Probed:
    """A verdict, and the distances that it comes from; infinite where no other version is known."""

    verdict: Verdict
    new: float  # nats between the engine's logprobs and those of its version
    old: float  # nats between them and those of the nearest other one
    other: WeightVersion | None = None  # which that is


@dataclass(frozen=True, slots=True)
class Baseline:
    """What engines differ by from the trainer before the canary moves anything."""

    tensors: tuple[str, ...]  # all that can be moved
    noise: Mapping[str, float]  # nats, by engine


@dataclass(frozen=True, slots=True)
class Finding:
    """What the canary says of one engine."""

    gap: float  # nats between it and the trainer
    limit: float  # nats; more is no noise
    behind: tuple[str, ...] = ()  # tensors each of which, had it stayed as it was, explains a gap above the limit

    @property
    def passed(self) -> bool:
        return self.gap <= self.limit


@dataclass(frozen=True, slots=True)
class Judged:
    """What the canary says of one move, by engine. Where one did not pass, those after it were not looked at."""

    findings: Mapping[str, Finding]
    unseen: tuple[str, ...]  # tensors whose absence would hide within the limit


@dataclass(frozen=True, slots=True)
class Canary:
    """What came of moving every tensor once and looking whether engines follow: the numbers of the worst engine."""

    tensors: int
    noise: float  # nats between engine and trainer, with the same weights
    gap: float  # nats between them, with moved weights
    limit: float  # nats; a gap above it ends the run
    unseen: tuple[str, ...]  # tensors whose absence would hide within the limit
    seconds: float = 0.0  # that it took, once in a life of the run


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an engine can do beyond the contract that all keep. A run that asks for more is refused before it starts."""

    keep: bool = False  # swap weights under running requests
    sleep: bool = False  # sleeping gives memory back
    noise: bool = False  # token i of a request depends on (seed, i) alone, on any engine of this kind
    logprobs: bool = True  # of each token, under the distribution it was drawn from
    truncation: bool = True  # also where top_p or top_k narrowed that distribution
    token_ids: bool = True  # as they were sampled; False: of a text that was tokenised anew, never for training
    train: bool = True  # takes new weights; False: for judges, teachers and evaluation only
    transports: tuple[str, ...] = ()
