"""What the dashboard's addresses answer: a record each, as JSON. A number that is not finite is null there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final

from pydantic import Field

from rollyard.inspect.overview import Life
from rollyard.inspect.select import GroupRow, RolloutRow
from rollyard.watch.devices import PoolTime
from rollyard.watch.forecast import Compared
from rollyard.watch.live import Live
from rollyard.watch.report import Lengths
from rollyard.watch.slots import Stretch

RUNNING: Final = "running"
FINISHED: Final = "finished"
FAILED: Final = "failed"
KILLED: Final = "killed"
SIMULATED: Final = "simulated"
CHECK: Final = "`rollyard inspect RUN --check` says what is sound"


@dataclass(frozen=True, slots=True)
class Problem:
    """Why there is no answer, as in ConfigError."""

    problem: str
    where: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Curve:
    """Of a reward: the first and the last step that have one, and the mean over such steps."""

    first: float | None = None
    last: float | None = None
    mean: float | None = None


@dataclass(frozen=True, slots=True)
class Evaluated:
    """Mean reward on held-out prompts, at the first and the last evaluation."""

    first: float | None = None
    last: float | None = None
    samples: int = 0
    unscored: int = 0


@dataclass(frozen=True, slots=True)
class Members:
    """Where members went."""

    admitted: int = 0
    trained: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Overview:
    """The run at a glance. What has a counterpart in `report.json` is equal to it, once that is there.

    Before that it is what the run itself says while it goes on; of one that was killed, what metrics and journal have: then
    `phases` and `wall_s` are of the steps that were done. Seconds are of the last life, counts of the whole run.
    """

    run: str
    folder: str
    state: str  # running, finished, failed, killed, simulated
    cause: str  # of its end
    model: str = ""
    placement: str = ""
    engine: str = ""
    transport: str = ""
    objective: str = ""
    steps: int = 0
    version: int | None = None  # step of the weights that were published last; None: nobody says
    planned: int | None = None
    wall_s: float = 0.0
    phases: Mapping[str, float] = field(default_factory=dict)  # seconds by name, unaccounted last
    canary_s: float = 0.0  # seconds of these, in sync, that the canary took; 0: none is known of
    beside: Mapping[str, float] = field(default_factory=dict)  # seconds of what went on besides, see docs/metrics.md
    reward: Curve = Curve()
    rewards: Mapping[str, Curve] = field(default_factory=dict)  # by name
    eval: Evaluated = Evaluated()
    lengths: Lengths | None = None
    tokens: int = 0  # sampled for rollouts
    tokens_per_s: float = 0.0  # of generation
    slots_busy: float | None = None
    decoder: str = ""
    admitted: int = 0
    trained: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)
    live: int = 0  # prompts that are under way
    members: Members = Members()
    staleness: Mapping[int, int] = field(default_factory=dict)  # trained tokens by lag
    pools: tuple[PoolTime, ...] = ()  # devices by role
    work: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # what they were busy with, by role: shares
    forecast: tuple[Compared, ...] = ()
    forecast_of: str = ""
    lives: tuple[Life, ...] = ()
    lost: tuple[str, ...] = ()  # engines
    problems: tuple[tuple[float, str, str, str], ...] = ()  # the newest of engines: when, which, what, why
    unreadable: Mapping[str, str] = field(default_factory=dict)  # files, and what is wrong with them
    has_journal: bool = True  # without one there are no groups and no rollouts to look at


@dataclass(frozen=True, slots=True)
class Pulse:
    """What goes on, and lines of the metrics that are new. `file`: another one when a new life began, and steps are others."""

    state: str
    cause: str
    live: Live | None
    file: int
    last: int  # step that there is a line of
    rows: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, slots=True)
class Ended:
    """How the run stands that does not go on."""

    state: str
    cause: str


@dataclass(frozen=True, slots=True)
class Steps:
    """Lines of the metrics, see docs/metrics.md. A value is a number, null, or one of the texts nan, inf and -inf."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]


@dataclass(frozen=True, slots=True)
class LaneSpans:
    """What a device did. Spans may overlap: one that comes later lies on top. Without spans it waits.

    `exact`: these are the intervals as they were noted; else each stretch shows what took most of it.
    """

    name: str
    role: str
    devices: int
    exact: bool
    spans: tuple[tuple[int, int, str, str], ...]  # start_ns, end_ns, activity, which part of it


@dataclass(frozen=True, slots=True)
class Timeline:
    """From `start_ns` to `end_ns`, of a run that lasts from 0 to `whole_ns`. `why`: why there is none."""

    start_ns: int
    end_ns: int
    whole_ns: int
    lanes: tuple[LaneSpans, ...]
    marks: tuple[tuple[int, int], ...] = ()  # steps, and when each was done
    slots: tuple[Stretch, ...] = ()  # share of slots busy, requests that wait: means
    lives: tuple[tuple[int, int], ...] = ()  # the second and later ones, and when each begins: right after the one before
    why: str = ""


@dataclass(frozen=True, slots=True)
class Bars:
    """A histogram: `counts[i]` values lie in [edges[i], edges[i + 1]), the last edge included."""

    edges: tuple[float, ...] = ()
    counts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Lags:
    """Trained tokens by how many versions they lie behind."""

    lags: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Histograms:
    """Tokens of finished completions, staleness of trained tokens, rewards of judged members."""

    lengths: Bars = Bars()
    staleness: Lags = Lags()
    rewards: Bars = Bars()


@dataclass(frozen=True, slots=True)
class GroupRows:
    """Some of `total` groups."""

    total: int
    rows: tuple[GroupRow, ...]


@dataclass(frozen=True, slots=True)
class RolloutRows:
    """Some of `total` rollouts."""

    total: int
    rows: tuple[RolloutRow, ...]


@dataclass(frozen=True, slots=True)
class Token:
    """`version` wrote it; `oldest_kv` is the version of the oldest keys and values that it attended to."""

    id: int
    text: str | None  # None: there is no tokenizer
    logprob: float | None = None
    version: int | None = None
    oldest_kv: int | None = None


@dataclass(frozen=True, slots=True)
class TurnShown:
    """Of an episode: what the policy read before it wrote `tokens` more, as far as it had not read or written it before."""

    cut: int  # tokens of what was there before that were taken away
    prompt: tuple[Token, ...]
    tokens: int
    finish: str


@dataclass(frozen=True, slots=True)
class GroupShown:
    """A prompt and its members."""

    group: GroupRow
    text: str
    tokens: tuple[Token, ...]
    columns: Mapping[str, Any]
    messages: tuple[Mapping[str, Any], ...]
    members: tuple[RolloutRow, ...]


@dataclass(frozen=True, slots=True)
class RolloutShown:
    """One rollout. `text` is what was written, as one text."""

    row: RolloutRow
    prompt: str
    columns: Mapping[str, Any]
    text: str
    tokens: tuple[Token, ...]
    turns: tuple[TurnShown, ...]
    reward: float | None
    rewards: Mapping[str, float | None]
    problem: str
    spans: tuple[tuple[int, int, int, int, int], ...]  # version, its life, oldest keys and values, their life, tokens
    finish: str | None
    finished_at: float | None
    no_texts: str  # why tokens have no texts; empty: they have


@dataclass(frozen=True, slots=True)
class OptionShown:
    """One option of the run. `from`: default, or the file that has another value."""

    name: str
    value: Any
    origin: Annotated[str, Field(serialization_alias="from")]
    default: Any
    description: str
