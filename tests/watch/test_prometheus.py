"""What Prometheus reads, by its own parser, and the Grafana dashboard over it."""

import json
import math
import re
from collections.abc import Iterator
from typing import Any

import promql_parser
import pytest
from prometheus_client.parser import text_string_to_metric_families

from rollyard.watch.prometheus import CONTENT_TYPE, STATES, STEP, EngineFigures, Figures, exposition
from tests.sources import PACKAGE, ROOT
from tests.watch.records import STEP as DONE

METRICS = {name: 0.5 if value is None else value for name, value in DONE.to_metrics().items()}
ALL = Figures(
    run="sort",
    state="running",
    about={"model": "m", "placement": "async", "engine": "embedded", "transport": "broadcast"},
    step=7,
    planned=10,
    version=7,
    eta_s=12.5,
    lives=2,
    phases={"generate": 2.5, "unaccounted": 0.5},
    tokens=1000,
    admitted=60,
    trained=50,
    dropped={"stale": 1, "failed": 2},
    members_dropped={"no_verdict": 3},
    staleness={0: 300, 1: 100},
    live_groups=7,
    waiting=4,
    eval_reward=0.75,
    busy={"engine": 0.5},
    slots_busy=0.25,
    engines=(EngineFigures("engine-0", 6, 0.25, 8),),
    metrics=METRICS,
)
Sample = tuple[str, frozenset[tuple[str, str]]]


def read(text: bytes) -> dict[Sample, float]:
    """Its samples; each has a type, a text, and is there once."""
    found: dict[Sample, float] = {}
    for family in text_string_to_metric_families(text.decode()):
        assert family.documentation[0].isupper() and family.documentation[-1] == "."
        assert family.type in ("gauge", "counter") and (family.type == "counter") == family.samples[0].name.endswith("_total")
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in found
            found[key] = sample.value
    return found


def of(samples: dict[Sample, float], name: str, **labels: str) -> float:
    return samples[name, frozenset(({"run": "sort"} | labels).items())]


def test_every_figure_has_its_sample() -> None:
    samples = read(exposition(ALL))
    assert of(samples, "rollyard_step") == 7 and of(samples, "rollyard_steps_planned") == 10
    assert of(samples, "rollyard_generated_tokens_total") == 1000
    assert of(samples, "rollyard_phase_seconds_total", phase="generate") == 2.5
    assert of(samples, "rollyard_prompts_dropped", reason="failed") == 2
    assert of(samples, "rollyard_trained_tokens", lag="1") == 100
    assert of(samples, "rollyard_engine_slots_busy_ratio", engine="engine-0") == 0.25
    assert {state: of(samples, "rollyard_run_state", state=state) for state in STATES} == {
        state: float(state == "running") for state in STATES
    }
    assert of(samples, "rollyard_reward_mean") == METRICS["reward_mean"]
    assert of(samples, "rollyard_reward_part_mean", reward="x") == METRICS["reward/x/mean"]
    assert of(samples, "rollyard_step_phase_seconds", phase="train") == 2.0
    assert CONTENT_TYPE.startswith("text/plain; version=")


def test_each_number_of_a_step_is_told() -> None:
    """One that a step has and the table lacks would be missing without a word."""
    known = {name for name in METRICS if name.partition("/")[0] not in ("reward", "phase", "dropped")}
    assert (known | {"dropped"}) - {"step"} == set(STEP)


def test_what_nobody_knows_is_not_told() -> None:
    assert {name for name, _ in read(exposition(Figures("r")))} == {"rollyard_run_info"}
    odd: dict[str, object] = {"train/loss": "nan", "train/kl": None, "reward_mean": "much", "reward/x": 1}
    samples = read(exposition(Figures("sort", metrics=odd)))
    assert math.isnan(of(samples, "rollyard_train_loss"))
    assert {name for name, _ in samples} == {"rollyard_run_info", "rollyard_train_loss"}


@pytest.mark.parametrize("name", ['a "b"', "a\nb", "a\\", "ü{}", ""])
def test_a_name_of_any_kind_comes_through(name: str) -> None:
    (sample,) = (each for each in read(exposition(Figures(name, step=3))) if each[0] == "rollyard_step")
    assert dict(sample[1]) == {"run": name}


def test_several_runs_share_names() -> None:
    samples = read(exposition(ALL, Figures("other", step=1)))
    assert of(samples, "rollyard_step") == 7 and of(samples, "rollyard_step", run="other") == 1


# ------------------------------------------------------------------------------------------ the dashboard

BOARD: dict[str, Any] = json.loads((PACKAGE / "watch/grafana.json").read_text())
WIDE = 24  # columns of Grafana's grid


def targets() -> Iterator[tuple[str, str]]:
    """Queries, with the legends of what they give."""
    for panel in BOARD["panels"]:
        for target in panel.get("targets", ()):
            yield target["expr"].replace("$__rate_interval", "1m"), target["legendFormat"]


@pytest.mark.parametrize(("query", "legend"), tuple(targets()))
def test_each_query_asks_for_what_there_is(query: str, legend: str) -> None:
    promql_parser.parse(query)  # raises ValueError
    samples = read(exposition(ALL))
    labels = {name: {label for label, _ in told} for name, told in samples}
    names = re.findall(r"rollyard_\w+", query)
    assert names and set(names) <= set(labels)
    for name in names:
        assert set(re.findall(r"{{(\w+)}}", legend)) <= labels[name] or len(names) > 1
    counted = set(re.findall(r"rate\((\w+)", query))
    assert counted == {name for name in names if name.endswith("_total")}, "a counter is asked for its rate, and nothing else is"


def test_the_dashboard_is_whole() -> None:
    """Its fields were compared with those of Grafana's own Foundation SDK; here is what that would not see."""
    panels = BOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells) and all(0 <= x < WIDE for x, _ in cells)
    variables = {each["name"] for each in BOARD["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(BOARD)))
    assert used == variables | {"__rate_interval"}


def test_the_page_names_what_there_is() -> None:
    """All of it, but for the numbers of a step, of which it says how they are named."""
    page = (ROOT / "docs/trackers.md").read_text()
    there = {name for name, _ in read(exposition(ALL))}
    named = set(re.findall(r"`(rollyard_\w+)", page))
    assert named <= there
    of_steps = {f"rollyard_{name}" for name, _ in STEP.values()}
    assert {name for name in there - of_steps if not name.startswith("rollyard_step_phase")} <= named
