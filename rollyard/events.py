"""Events (what happened) and instructions (what to do next): the only language between the core and the world.

The pure machines (`rollout.core`, `place.modes`, `weights.rollover`, joined by `conductor`) take events and return
instructions. The shell (`rollout.controller`, `loop`) carries instructions out and reports the outcomes as events.
Signals are what one machine tells another; they are delivered within the same step and never leave the conductor.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from rollyard.types import Completion, DropReason, Group, Prompt, Request, RequestId, Reward, Segment, WeightVersion

EngineId = str


class Rollover(StrEnum):
    """What happens to requests in flight when an engine takes new weights."""

    DRAIN = "drain"  # finish them first
    ABORT = "abort"  # cut them; they continue later under the new weights, tokens kept
    KEEP = "keep"  # swap under them; their cached keys and values stay


class WakePart(StrEnum):
    """Waking has a fixed order: weights, load, cache."""

    WEIGHTS = "weights"
    CACHE = "cache"


# ------------------------------------------------------------------------------------------------ events


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened."""


@dataclass(frozen=True, slots=True)
class PromptsOffered(Event):
    """The source's answer to FetchPrompts. Fewer prompts than asked only when `exhausted`, or when it has no more yet; never none
    then."""

    prompts: tuple[Prompt, ...]
    exhausted: bool


@dataclass(frozen=True, slots=True)
class EngineUp(Event):
    """An engine can be reached. `version` is the one it acknowledged, None if it has not."""

    engine: EngineId
    slots: int
    version: WeightVersion | None


@dataclass(frozen=True, slots=True)
class EngineDown(Event):
    engine: EngineId
    cause: str


@dataclass(frozen=True, slots=True)
class EngineLeaving(Event):
    """An engine is to leave the run: it gets no request any more."""

    engine: EngineId
    cut: bool  # what it still holds goes on elsewhere, with its tokens; else it is finished first


@dataclass(frozen=True, slots=True)
class SegmentArrived(Event):
    """An engine wrote. `problem` is of its tokens, each of which whoever tells this has looked at."""

    engine: EngineId
    segment: Segment
    text: str = ""  # the whole completion's text, given with the last segment
    problem: str = ""  # what is wrong with the tokens (`rollout.answers`), so that they are not to be taken


@dataclass(frozen=True, slots=True)
class RequestFailed(Event):
    engine: EngineId
    request: RequestId
    cause: str
    retryable: bool


@dataclass(frozen=True, slots=True)
class Scored(Event):
    group: int
    member: int
    reward: Reward


@dataclass(frozen=True, slots=True)
class BatchTrained(Event):
    version: WeightVersion  # the new one


@dataclass(frozen=True, slots=True)
class HandedOver(Event):
    """The half that trains next has the whole training state."""

    version: WeightVersion


@dataclass(frozen=True, slots=True)
class Published(Event):
    """A version is on offer to `engines` (None: to all that are up)."""

    version: WeightVersion
    engines: tuple[EngineId, ...] | None = None


@dataclass(frozen=True, slots=True)
class Delivered(Event):
    """Nothing of the offer is on its way any more."""

    version: WeightVersion


@dataclass(frozen=True, slots=True)
class EnginePrepared(Event):
    """The tensors of a version are near the engine; it still decodes with older ones."""

    engine: EngineId
    version: WeightVersion


@dataclass(frozen=True, slots=True)
class SyncFailed(Event):
    """A part of bringing the version to the engines failed: the trainer's, or a Prepare or Load of `engine`."""

    version: WeightVersion
    cause: str
    engine: EngineId | None = None


@dataclass(frozen=True, slots=True)
class Proved(Event):
    """Every tensor was seen to reach every engine."""

    version: WeightVersion


@dataclass(frozen=True, slots=True)
class EnginePaused(Event):
    engine: EngineId


@dataclass(frozen=True, slots=True)
class EngineLoaded(Event):
    engine: EngineId
    version: WeightVersion


@dataclass(frozen=True, slots=True)
class EngineResumed(Event):
    engine: EngineId


@dataclass(frozen=True, slots=True)
class EngineSlept(Event):
    engine: EngineId


@dataclass(frozen=True, slots=True)
class EngineWoke(Event):
    engine: EngineId
    part: WakePart


@dataclass(frozen=True, slots=True)
class Evaluated(Event):
    version: WeightVersion


@dataclass(frozen=True, slots=True)
class EvaluationCut(Event):
    """Every engine that was asked is lost."""

    version: WeightVersion


@dataclass(frozen=True, slots=True)
class Checkpointed(Event):
    version: WeightVersion


@dataclass(frozen=True, slots=True)
class StopRequested(Event):
    """End the run cleanly: finish and save the training under way, cut the rest."""

    cause: str


@dataclass(frozen=True, slots=True)
class RunBroken(Event):
    """The run cannot go on, or nobody wants it to (`failed` False): nothing more is done for it."""

    cause: str
    failed: bool


# ----------------------------------------------------------------------------------------------- signals


@dataclass(frozen=True, slots=True)
class Signal:
    """What one machine tells another, within the same step."""


@dataclass(frozen=True, slots=True)
class GenerationOpened(Signal):
    """Admission and dispatch may go on."""


@dataclass(frozen=True, slots=True)
class GenerationClosed(Signal):
    """No admission and no dispatch until opened again."""


@dataclass(frozen=True, slots=True)
class BatchWanted(Signal):
    """The trainer is free: take the next batch as soon as the rules allow."""


@dataclass(frozen=True, slots=True)
class BatchTaken(Signal):
    step: int
    groups: tuple[Group, ...]


@dataclass(frozen=True, slots=True)
class RolloutsFinished(Signal):
    """No batch will come any more: nothing is live, and the source is exhausted or the run was cancelled."""


@dataclass(frozen=True, slots=True)
class RolloutsCancelled(Signal):
    """Drop whatever is live."""


@dataclass(frozen=True, slots=True)
class RolloutsFailed(Signal):
    """Generation cannot go on: prompt after prompt is dropped."""

    cause: str


@dataclass(frozen=True, slots=True)
class EngineHeld(Signal):
    """The engine is being changed: it gets no request."""

    engine: EngineId


@dataclass(frozen=True, slots=True)
class EngineReleased(Signal):
    engine: EngineId


@dataclass(frozen=True, slots=True)
class EnginesAwaited(Signal):
    """They will soon take requests with new weights."""

    engines: tuple[EngineId, ...]


@dataclass(frozen=True, slots=True)
class EnginesMissed(Signal):
    """New weights did not reach them: nobody knows when they take requests with those."""

    engines: tuple[EngineId, ...]


@dataclass(frozen=True, slots=True)
class EngineEmptied(Signal):
    """An engine that is to leave holds no request any more."""

    engine: EngineId


@dataclass(frozen=True, slots=True)
class EngineLeft(Signal):
    """An engine is no part of the run any more."""

    engine: EngineId


@dataclass(frozen=True, slots=True)
class RolloverWanted(Signal):
    """Bring a version to all engines, or to those that are named."""

    version: WeightVersion
    engines: tuple[EngineId, ...] | None = None


@dataclass(frozen=True, slots=True)
class RolloverDone(Signal):
    """Every engine that it was for acknowledged the version and takes requests again."""

    version: WeightVersion


@dataclass(frozen=True, slots=True)
class RolloverFailed(Signal):
    """The version does not reach the engines, however often it is offered."""

    cause: str


# ------------------------------------------------------------------------------------------ instructions


@dataclass(frozen=True, slots=True)
class Instruction:
    """Something to do."""


@dataclass(frozen=True, slots=True)
class FetchPrompts(Instruction):
    count: int


@dataclass(frozen=True, slots=True)
class Admit(Instruction):
    """Record that a prompt is live from now on."""

    prompt: Prompt


@dataclass(frozen=True, slots=True)
class Generate(Instruction):
    engine: EngineId
    request: Request


@dataclass(frozen=True, slots=True)
class Abort(Instruction):
    engine: EngineId
    requests: tuple[RequestId, ...]


@dataclass(frozen=True, slots=True)
class Move(Instruction):
    """Cut a request, to go on with its tokens on another engine: on a certain one, or on any."""

    engine: EngineId
    request: RequestId
    to: EngineId | None


@dataclass(frozen=True, slots=True)
class Score(Instruction):
    """Judge a completion. `verdict`: what an environment said of it already, which is its verdict."""

    prompt: Prompt
    completion: Completion
    verdict: Reward | None = None


@dataclass(frozen=True, slots=True)
class Keep(Instruction):
    """Record that a group is complete, as it will be trained. `recovered`: its completions are of an earlier life."""

    group: Group
    recovered: bool = False


@dataclass(frozen=True, slots=True)
class Drop(Instruction):
    """Record that a prompt (member None) or one member left without being trained on."""

    group: int
    member: int | None
    reason: DropReason
    cause: str = ""


@dataclass(frozen=True, slots=True)
class Train(Instruction):
    """One optimizer step, by the trainer or by one of two halves."""

    step: int
    groups: tuple[Group, ...]
    half: EngineId | None = None


@dataclass(frozen=True, slots=True)
class HandOver(Instruction):
    """Bring the whole training state (parameters, moments, random state) from one half to the other."""

    version: WeightVersion
    source: EngineId
    target: EngineId


@dataclass(frozen=True, slots=True)
class Publish(Instruction):
    """Offer a version, to all engines unless some are named."""

    version: WeightVersion
    engines: tuple[EngineId, ...] = ()


@dataclass(frozen=True, slots=True)
class Prove(Instruction):
    """Show that every tensor reaches every engine: move all, look, and move them back."""

    version: WeightVersion


@dataclass(frozen=True, slots=True)
class Prepare(Instruction):
    """Bring the tensors of a version near the engine, which goes on decoding."""

    engine: EngineId
    version: WeightVersion


@dataclass(frozen=True, slots=True)
class Forget(Instruction):
    """The engine is gone: no version is brought to it any more."""

    engine: EngineId


@dataclass(frozen=True, slots=True)
class Pause(Instruction):
    engine: EngineId
    rollover: Rollover


@dataclass(frozen=True, slots=True)
class Load(Instruction):
    engine: EngineId
    version: WeightVersion


@dataclass(frozen=True, slots=True)
class Resume(Instruction):
    engine: EngineId


@dataclass(frozen=True, slots=True)
class Restart(Instruction):
    """Start an engine that was lost anew. It comes up, without weights, or goes down again."""

    engine: EngineId


@dataclass(frozen=True, slots=True)
class Retire(Instruction):
    """Close an engine that left, or that is lost and is not started again."""

    engine: EngineId
    lost: bool = False


@dataclass(frozen=True, slots=True)
class Sleep(Instruction):
    engine: EngineId


@dataclass(frozen=True, slots=True)
class Wake(Instruction):
    engine: EngineId
    part: WakePart


@dataclass(frozen=True, slots=True)
class Evaluate(Instruction):
    """Score held-out prompts with the engines that are named, or with all."""

    version: WeightVersion
    engines: tuple[EngineId, ...] = ()


@dataclass(frozen=True, slots=True)
class Checkpoint(Instruction):
    version: WeightVersion


@dataclass(frozen=True, slots=True)
class Finish(Instruction):
    """The run is over. `failed` when it ended because of `cause` rather than as planned, `stopped` when on request."""

    cause: str
    failed: bool = False
    stopped: bool = False
