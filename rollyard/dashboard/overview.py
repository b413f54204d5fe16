"""The run at a glance: of its report where it has one, else of its metrics and its journal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from rollyard.dashboard.state import State, named
from rollyard.dashboard.told import RUNNING, Curve, Evaluated, Members, Overview
from rollyard.errors import ConfigError
from rollyard.inspect.overview import Overview as Seen
from rollyard.inspect.overview import overview as seen_of
from rollyard.inspect.source import Lives, Source, read_config
from rollyard.journal.folder import RunFolder
from rollyard.layers import resolve
from rollyard.watch.devices import work
from rollyard.watch.live import Live
from rollyard.watch.metrics import LengthCounts
from rollyard.watch.report import Lengths, Report
from rollyard.watch.timeline import BESIDE
from rollyard.worker import transport_of

PHASE: Final = "phase/"
MEAN: Final = "/mean"
PART: Final = "reward/"
# CROSS: batches come first, and what belongs to them in this order, see inspect.steps.
STALE: Final = """
    SELECT bg.step - (s.value ->> 0), sum(s.value ->> 4) FROM batches b
    CROSS JOIN batch_groups bg ON bg.incarnation = b.incarnation AND bg.step = b.step
    CROSS JOIN completions c ON c.incarnation = bg.incarnation AND c.group_id = bg.group_id
    CROSS JOIN verdicts v ON v.incarnation = c.incarnation AND v.group_id = c.group_id AND v.member = c.member
    LEFT JOIN drops d ON d.incarnation = c.incarnation AND d.group_id = c.group_id AND ifnull(d.member, -1) = c.member,
    json_each(c.spans) s
    WHERE b.trained_at IS NOT NULL AND v.value IS NOT NULL AND d.reason IS NULL AND {steps} GROUP BY 1 ORDER BY 1"""
TRAINED_MEMBERS: Final = """
    SELECT count(*) FROM batches b
    CROSS JOIN batch_groups bg ON bg.incarnation = b.incarnation AND bg.step = b.step
    CROSS JOIN verdicts v ON v.incarnation = bg.incarnation AND v.group_id = bg.group_id
    LEFT JOIN drops d ON d.incarnation = v.incarnation AND d.group_id = v.group_id AND ifnull(d.member, -1) = v.member
    WHERE b.trained_at IS NOT NULL AND d.reason IS NULL AND {steps}"""
GROUP_SIZE: Final = "SELECT group_size FROM incarnations ORDER BY incarnation DESC LIMIT 1"
FINISHES: Final = "SELECT tokens, finish IN ('length', 'context'), count(*) FROM completions c WHERE {groups} GROUP BY 1, 2"


def overview(folder: RunFolder, state: State, lines: Sequence[Mapping[str, Any]], live: Live | None) -> Overview:
    """What there is to say.

    Args:
        lines: of the metrics.
        live: what the run says, where it goes on and does.

    Raises JournalError where the journal is damaged.
    """
    told = _known(folder, state)
    if state.report is not None:
        return of_report(told, state.report)
    told = _of_metrics(told, folder, lines)
    if live is not None:
        return _of_live(told, live)
    if not folder.journal.exists():
        return told
    seen = state.seen if state.name != RUNNING else seen_of(folder, Lives())
    return told if seen is None or seen.admitted is None else _of_journal(told, folder, seen)


def _known(folder: RunFolder, state: State) -> Overview:
    """What every run has: names, and how it stands."""
    config = read_config(folder) or {}
    seen = state.seen
    unreadable = dict(seen.unreadable) if seen is not None else {}
    if state.why:
        unreadable["report.json"] = state.why
    if state.name == RUNNING and not folder.journal.exists():
        del unreadable["journal.sqlite"]  # it is about to be made
    name = named(config, "run.name") or folder.path.resolve().name
    model = named(config, "model.path") or f"base policy of {named(config, 'prompts.task')}"
    return Overview(
        run=str(name),
        folder=str(folder.path),
        state=state.name,
        cause=state.cause,
        model=str(model),
        placement=str(named(config, "place.placement") or ""),
        engine=str(named(config, "engine.kind") or ""),
        planned=_whole(named(config, "run.steps")),
        lives=() if seen is None else seen.lives or (),
        problems=() if seen is None else seen.problems or (),
        unreadable=unreadable,
        has_journal=folder.journal.exists(),
    )


def of_report(told: Overview, report: Report) -> Overview:
    """What was known, and what the report says, which counts."""
    forecast = report.forecast
    members = report.members
    return replace(
        told,
        run=report.name,
        model=report.model,
        placement=report.placement,
        engine=report.engine,
        transport=report.weights.transport,
        objective=report.objective,
        steps=report.steps,
        version=report.versions[-1].step if report.versions else None,
        wall_s=report.wall_s,
        phases=report.phases.parts(),
        canary_s=0.0 if report.weights.canary is None else report.weights.canary.seconds,
        beside=report.phases.beside(),
        reward=_curve(report.reward.curve),
        rewards={name: _curve(curve.curve) for name, curve in report.rewards.items()},
        eval=Evaluated(report.eval.first, report.eval.last, report.eval.samples, report.eval.unscored),
        lengths=report.lengths,
        tokens=report.generation_tokens,
        tokens_per_s=report.generation_tokens_per_s,
        slots_busy=report.slots_busy,
        decoder=report.decoder,
        admitted=report.prompts.admitted,
        trained=report.prompts.trained,
        dropped=report.prompts.dropped,
        live=report.prompts.admitted - report.prompts.trained - sum(report.prompts.dropped.values()),
        members=Members(members.admitted, members.trained, members.dropped),
        staleness=report.staleness,
        pools=report.usage.pools,
        work={pool.role: work([each for each in report.usage.devices if pool.role in each.roles]) for pool in report.usage.pools},
        forecast=() if forecast is None else forecast.rows,
        forecast_of="" if forecast is None else forecast.source,
        lost=report.lost,
    )


def _of_metrics(told: Overview, folder: RunFolder, lines: Sequence[Mapping[str, Any]]) -> Overview:
    """What is in the metrics of a run that has no report."""
    phases = _sums(lines, PHASE)
    beside = {name: sum(_number(line.get(name)) for line in lines) for name in BESIDE}
    tokens = sum(int(_number(line.get("tokens"))) for line in lines)
    generating = beside["generating_s"]
    names = dict.fromkeys(name for line in lines for name in line if name.startswith(PART) and name.endswith(MEAN))
    return replace(
        told,
        transport=_transport(folder),
        steps=int(lines[-1]["step"]) if lines else 0,
        wall_s=sum(_number(line.get("seconds")) for line in lines),
        phases={name.removesuffix("_s"): value for name, value in phases.items()},
        beside=beside,
        reward=_curve([_mean(line.get("reward_mean")) for line in lines]),
        rewards={name[len(PART) : -len(MEAN)]: _curve([_mean(line.get(name)) for line in lines]) for name in names},
        tokens=tokens,
        tokens_per_s=tokens / generating if generating else 0.0,
    )


def _of_live(told: Overview, live: Live) -> Overview:
    """What the run says of itself, which counts."""
    prompts, members = live.prompts, live.members
    return replace(
        told,
        steps=live.step,
        version=live.version,
        wall_s=live.wall_s,
        phases=live.phases,
        canary_s=live.canary_s,
        beside=live.beside,
        eval=Evaluated(live.eval.first, live.eval.last, live.eval.samples, live.eval.unscored),
        tokens=live.tokens,
        tokens_per_s=live.tokens_per_s,
        slots_busy=live.slots_busy,
        admitted=prompts.admitted,
        trained=prompts.trained,
        dropped=prompts.dropped,
        live=live.live,
        members=Members(members.admitted, members.trained, members.dropped),
        staleness=live.staleness,
        lost=live.lost,
    )


def _of_journal(told: Overview, folder: RunFolder, seen: Seen) -> Overview:
    """What the journal of a run has that does not say it itself."""
    evaluations = seen.evaluations or ()
    admitted, trained, dropped = seen.admitted or 0, seen.trained or 0, seen.dropped or {}
    with Source(folder, Lives()) as source:
        members = source.row(TRAINED_MEMBERS.format(steps=source.of_steps("b")))[0]
        return replace(
            told,
            eval=Evaluated(
                evaluations[0][1] if evaluations else None,
                evaluations[-1][1] if evaluations else None,
                sum(samples for *_, samples, _ in evaluations),
                sum(unscored for *_, unscored in evaluations),
            ),
            admitted=admitted,
            trained=trained,
            dropped=dropped,
            live=admitted - trained - sum(dropped.values()),
            members=Members(admitted * source.row(GROUP_SIZE)[0], members, seen.members_dropped or {}),
            lengths=lengths(source),
            staleness=staleness(source),
        )


def staleness(source: Source) -> Mapping[int, int]:
    """Trained tokens by lag, as the report counts them. Raises JournalError."""
    return dict(source.rows(STALE.format(steps=source.of_steps("b"))))


def lengths(source: Source) -> Lengths:
    """Of all completions that finished, in this life and those before. Raises JournalError."""
    counts = LengthCounts(Counter())
    for tokens, truncated, members in source.rows(FINISHES.format(groups=source.of_groups("c"))):
        counts.tokens[tokens] += members
        counts.truncated += truncated * members
    return Lengths.of(counts)


def _transport(folder: RunFolder) -> str:
    try:
        return transport_of(resolve(file=folder.config, environment={}).config)
    except ConfigError:  # it is damaged, or of another version: that is told elsewhere
        return ""


def _sums(lines: Sequence[Mapping[str, Any]], prefix: str) -> dict[str, float]:
    names = dict.fromkeys(name for line in lines for name in line if name.startswith(prefix))
    return {name[len(prefix) :]: sum(_number(line.get(name)) for line in lines) for name in names}


def _curve(values: Iterable[float | None]) -> Curve:
    known = [value for value in values if value is not None]
    return Curve(known[0], known[-1], sum(known) / len(known)) if known else Curve()


def _mean(value: object) -> float | None:
    """Of a line of metrics, where one that is not finite is a text."""
    return None if value is None else float(str(value))


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) else None
