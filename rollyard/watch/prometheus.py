"""What a run is at, as Prometheus reads it: `/metrics`. `watch/grafana.json` is a Grafana dashboard over it.

Names and units are as Prometheus recommends: base units in the name, shares as `_ratio`, `_total` for what only grows while
a process lives. What a resumed run takes back (its steps since the last checkpoint) is no such thing, and a gauge.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Final

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST  # of what `exposition` gives
STATES: Final = ("running", "finished", "failed", "killed", "simulated")
NEWEST: Final = "of the newest step"
NOT_FINITE: Final = ("nan", "inf", "-inf")  # as records of metrics have them

# Of a record of metrics (docs/metrics.md): the names here, and what they are.
STEP: Final[Mapping[str, tuple[str, str]]] = {
    "incarnation": ("incarnation", "life of the run, 0 until it is resumed"),
    "reward_mean": ("reward_mean", f"mean verdict {NEWEST}"),
    "reward_std": ("reward_std", f"standard deviation of the verdicts {NEWEST}"),
    "reward_min": ("reward_min", f"the least verdict {NEWEST}"),
    "reward_max": ("reward_max", f"the greatest verdict {NEWEST}"),
    "flat_groups": ("flat_groups", f"groups {NEWEST} whose verdicts are all equal"),
    "flat_share": ("flat_groups_ratio", f"share of the groups {NEWEST} whose verdicts are all equal"),
    "unscored": ("members_unscored", f"judged members {NEWEST} without a verdict"),
    "groups": ("batch_groups", f"groups {NEWEST}"),
    "completion_tokens_mean": ("completion_tokens_mean", f"tokens of a completion {NEWEST}: mean"),
    "completion_tokens_p50": ("completion_tokens_p50", f"tokens of a completion {NEWEST}: 50th percentile"),
    "completion_tokens_p95": ("completion_tokens_p95", f"tokens of a completion {NEWEST}: 95th percentile"),
    "completion_tokens_max": ("completion_tokens_max", f"tokens of the longest completion {NEWEST}"),
    "completion_truncated_share": ("completion_truncated_ratio", f"share of the completions {NEWEST} that were cut by a limit"),
    "turns_mean": ("turns_mean", f"answers of an episode {NEWEST}"),
    "tokens_per_prompt": ("tokens_per_prompt", f"sampled tokens {NEWEST} for each of its prompts"),
    "prompt_tokens_mean": ("prompt_tokens_mean", f"tokens of a prompt {NEWEST}"),
    "tokens": ("step_tokens", "tokens sampled during the newest step, whatever became of them"),
    "tokens_per_s": ("tokens_per_second", "tokens sampled in a second of generation, during the newest step"),
    "weights_unchanged": ("weights_unchanged_ratio", "share of the weights that the newest version had like the one before"),
    "dropped": ("step_prompts_dropped", "prompts dropped during the newest step"),
    "seconds": ("step_seconds", "wall time of the newest step"),
    "generating_s": ("step_generating_seconds", "of the newest step: an engine held a request"),
    "scoring_s": ("step_scoring_seconds", "of the newest step: a verdict was awaited"),
    "scoring_hidden_s": ("step_scoring_hidden_seconds", "of the newest step: both at once"),
    "driver_s": ("step_driver_seconds", "processor time of the driver's thread during the newest step"),
    "driver_generating_s": ("step_driver_generating_seconds", "likewise while an engine held a request"),
    "train/loss": ("train_loss", f"loss {NEWEST}"),
    "train/grad_norm": ("train_grad_norm", f"norm of the gradients {NEWEST}, before they were clipped"),
    "train/learning_rate": ("train_learning_rate", f"learning rate {NEWEST}"),
    "train/tokens": ("train_tokens", f"trained tokens {NEWEST}"),
    "train/entropy": ("train_entropy_nats", f"entropy of the distribution that a trained token {NEWEST} was drawn from"),
    "train/clipped_share": ("train_clipped_ratio", f"share of the trained tokens {NEWEST} whose importance ratio was clipped"),
    "train/ratio_mean": ("train_importance_mean", f"importance ratio of a trained token {NEWEST}: mean"),
    "train/ratio_p1": ("train_importance_p1", f"importance ratio of a trained token {NEWEST}: 1st percentile"),
    "train/ratio_p99": ("train_importance_p99", f"importance ratio of a trained token {NEWEST}: 99th percentile"),
    "train/truncated_share": ("train_truncated_ratio", f"share of the trained tokens {NEWEST} whose importance weight was cut"),
    "train/logprob_gap_mean": ("train_logprob_gap_mean_nats", f"logprob of a trained token {NEWEST}, trainer less engine: mean"),
    "train/logprob_gap_max": ("train_logprob_gap_max_nats", "likewise: the largest"),
    "train/fresh_gap_mean": ("train_fresh_gap_mean_nats", "likewise, of tokens written by the version that was trained: mean"),
    "train/fresh_gap_max": ("train_fresh_gap_max_nats", "likewise: the largest"),
    "train/stale_gap_mean": ("train_stale_gap_mean_nats", "likewise, of all other tokens: mean"),
    "train/stale_gap_max": ("train_stale_gap_max_nats", "likewise: the largest"),
    "train/thread_s": ("train_thread_seconds", f"processor time of the thread that trained {NEWEST}"),
    "train/kept_set_misses": ("train_kept_set_misses_ratio", f"share of the tokens {NEWEST} that the trainer had left out"),
    "train/kl": ("train_kl_nats", f"divergence from the reference policy {NEWEST}, of a token"),
    "train/value_loss": ("train_value_loss", f"loss of the value head {NEWEST}"),
}
PARTS: Final[Mapping[str, tuple[str, str]]] = {  # of `reward/NAME/...`
    "mean": ("reward_part_mean", f"mean of the reward of this name {NEWEST}, unweighted"),
    "std": ("reward_part_std", f"standard deviation of the reward of this name {NEWEST}"),
    "flat_share": ("reward_part_flat_groups_ratio", f"share of the groups {NEWEST} whose rewards of this name are all equal"),
}


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """One engine at one moment. None: nobody knows."""

    name: str
    version: int | None = None  # step of the weights it generates with
    slots_busy: float | None = None  # mean share of its decode slots doing work, since it started
    requests: int | None = None  # that it holds


@dataclass(frozen=True, slots=True)
class Figures:
    """A run at one moment. None, or empty: nobody knows, and nothing is told of it.

    Prompts and members, trained tokens and the newest step are of the whole run; `phases` and `tokens` of its present life.
    """

    run: str
    state: str = ""  # one of STATES
    about: Mapping[str, str] = field(default_factory=dict)  # model, placement, engine, transport: what stays the same
    step: int | None = None  # steps done
    planned: int | None = None
    version: int | None = None  # step of the weights published last
    eta_s: float | None = None
    lives: int | None = None
    phases: Mapping[str, float] = field(default_factory=dict)  # seconds by phase, unaccounted included
    tokens: int | None = None  # sampled for rollouts
    admitted: int | None = None  # prompts
    trained: int | None = None
    dropped: Mapping[str, int] = field(default_factory=dict)  # by reason
    members_dropped: Mapping[str, int] = field(default_factory=dict)
    staleness: Mapping[int, int] = field(default_factory=dict)  # trained tokens by their lag in versions
    live_groups: int | None = None
    waiting: int | None = None  # requests that no engine holds
    eval_reward: float | None = None  # of the newest evaluation
    busy: Mapping[str, float] = field(default_factory=dict)  # share of their time, devices by role
    slots_busy: float | None = None  # mean share of decode slots doing work, of all engines
    engines: Sequence[EngineFigures] = ()
    metrics: Mapping[str, object] = field(default_factory=dict)  # the newest record of metrics.jsonl


def exposition(*runs: Figures) -> bytes:
    """In Prometheus' text format, of `CONTENT_TYPE`. Every sample has the label `run`."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Told(runs))
    return generate_latest(registry)


class _Told(Collector):
    """Of some runs: each name once, with the samples of all of them."""

    def __init__(self, runs: Iterable[Figures]) -> None:
        self._families: dict[str, Metric] = {}
        for run in runs:
            self._run(run)
            self._counts(run)
            self._step(run)

    def collect(self) -> Iterable[Metric]:
        return self._families.values()

    def _gauge(self, run: Figures, name: str, told: str, value: object, **labels: str) -> None:
        """Nothing where there is no number. One that is not finite is a text in a record of metrics."""
        if isinstance(value, int | float) or value in NOT_FINITE:
            made = GaugeMetricFamily(f"rollyard_{name}", _sentence(told), labels=("run", *labels))
            family = self._families.setdefault(name, made)
            family.add_sample(family.name, {"run": run.run, **labels}, float(value))

    def _counter(self, run: Figures, name: str, told: str, value: float | None, **labels: str) -> None:
        """Likewise. `name` without the `_total` that is put at its end."""
        if value is not None:
            made = CounterMetricFamily(f"rollyard_{name}", _sentence(told), labels=("run", *labels))
            family = self._families.setdefault(name, made)
            family.add_sample(f"{family.name}_total", {"run": run.run, **labels}, value)

    def _run(self, run: Figures) -> None:
        info = self._families.setdefault("run", InfoMetricFamily("rollyard_run", "What stays the same during a run."))
        info.add_sample("rollyard_run_info", {"run": run.run, **run.about, "rollyard": metadata.version("rollyard")}, 1)
        for state in STATES if run.state else ():
            self._gauge(run, "run_state", "whether the run is in this state: 1 or 0", int(state == run.state), state=state)
        self._gauge(run, "step", "optimizer steps done", run.step)
        self._gauge(run, "steps_planned", "optimizer steps that the run is to do", run.planned)
        self._gauge(run, "weight_version", "version of the weights published last", run.version)
        self._gauge(run, "eta_seconds", "time until the run is done, at its pace so far", run.eta_s)
        self._gauge(run, "lives", "lives of the run so far: one, and one more for each time it was resumed", run.lives)
        self._gauge(run, "eval_reward_mean", "mean reward of the newest evaluation on held-out prompts", run.eval_reward)
        for role, share in run.busy.items():
            self._gauge(run, "devices_busy_ratio", "share of their time in which devices of a role are busy", share, role=role)
        told = "mean share of all decode slots at work while engines step"
        self._gauge(run, "slots_busy_ratio", told, run.slots_busy)
        for engine in run.engines:
            told, name = "step of the weights that an engine generates with", engine.name
            self._gauge(run, "engine_weight_version", told, engine.version, engine=name)
            told = "mean share of an engine's decode slots at work while it steps"
            self._gauge(run, "engine_slots_busy_ratio", told, engine.slots_busy, engine=name)
            self._gauge(run, "engine_requests", "requests that an engine holds", engine.requests, engine=name)

    def _counts(self, run: Figures) -> None:
        for phase, seconds in run.phases.items():
            told = "time of the run's present life by phase; what several go on in counts for one"
            self._counter(run, "phase_seconds", told, seconds, phase=phase)
        self._counter(run, "generated_tokens", "tokens sampled for rollouts in the run's present life", run.tokens)
        self._gauge(run, "prompts_admitted", "prompts admitted", run.admitted)
        self._gauge(run, "prompts_trained", "prompts whose groups were trained on", run.trained)
        for reason, prompts in run.dropped.items():
            self._gauge(run, "prompts_dropped", "prompts dropped, by reason", prompts, reason=reason)
        for reason, members in run.members_dropped.items():
            self._gauge(run, "members_dropped", "members of groups dropped, by reason", members, reason=reason)
        for lag, tokens in run.staleness.items():
            told = "trained tokens by their lag: the version that was trained less the one that wrote them"
            self._gauge(run, "trained_tokens", told, tokens, lag=str(lag))
        self._gauge(run, "groups_live", "groups under way", run.live_groups)
        self._gauge(run, "requests_waiting", "requests that no engine holds yet", run.waiting)

    def _step(self, run: Figures) -> None:
        for name, (as_, told) in STEP.items():
            self._gauge(run, as_, told, run.metrics.get(name))
        for name, value in run.metrics.items():
            kind, _, rest = name.partition("/")
            if kind == "phase":
                phase = rest.removesuffix("_s")
                self._gauge(run, "step_phase_seconds", "time of the newest step by phase", value, phase=phase)
            elif kind == "reward":
                part, _, what = rest.rpartition("/")
                if what in PARTS:
                    self._gauge(run, *PARTS[what], value, reward=part)


def _sentence(told: str) -> str:
    return f"{told[0].upper()}{told[1:]}."
