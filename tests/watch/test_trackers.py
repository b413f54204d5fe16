"""Trackers: what they keep is read back, over two lives of a run; whole runs go on whatever becomes of them."""

import json
import logging
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Event, current_thread
from typing import get_args

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import rollyard
from rollyard.bench import virtual
from rollyard.bench.placements import config_of
from rollyard.config import Tracker, WatchConfig
from rollyard.errors import ConfigError
from rollyard.events import Rollover
from rollyard.layers import resolve
from rollyard.protocols.devices import Tracked
from rollyard.watch.aside import Aside, Record
from rollyard.watch.report import Report
from rollyard.watch.timeline import Phase, Timeline
from rollyard.watch.trackers.open import NEEDS, check_trackers, open_trackers
from rollyard.watch.trackers.opentelemetry import OpenTelemetrySink
from rollyard.watch.trackers.phased import Phased
from tests.resuming import Death, Life, live, stations, work
from tests.small import BASE
from tests.test_house import PROJECT
from tests.watch.lives import CONFIG, SUMMARY, two_lives
from tests.watch.test_aside import Book, told

KEPT = [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0), (5, 5.0), (6, 6.5)]  # by one that takes nothing back
NEWEST = [*KEPT[:3], (4, 4.5), (5, 5.5), (6, 6.5)]  # by one that does


def test_what_is_not_installed_is_refused_before_anything_loads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("rollyard.watch.trackers.open.find_spec", lambda name: None if name == "wandb" else object())
    check_trackers(("tensorboard", "mlflow"))
    config = resolve(preset="sort", environment={}, overrides={"watch.sinks": "wandb", "run.out": str(tmp_path / "r")}).config
    with pytest.raises(ConfigError, match="wandb needs wandb, which is not installed") as refused:
        rollyard.Run(config)
    assert refused.value.where == "watch.sinks" and refused.value.remedy.startswith("pip install 'rollyard[wandb]'")
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(("given", "why"), [("wandb,wandb", "named twice"), ("comet", "'mlflow' or 'opentelemetry'")])
def test_names_that_make_no_sense_are_refused(given: str, why: str) -> None:
    with pytest.raises(ConfigError, match="watch") as refused:
        resolve(preset="sort", environment={}, overrides={"watch.sinks": given})
    assert why in str(refused.value)


def test_each_is_an_extra_of_its_own() -> None:
    """And has a thread of its own."""
    assert set(get_args(Tracker)) == set(NEEDS) <= set(PROJECT["project"]["optional-dependencies"])
    assert all(isinstance(open_trackers([name], Timeline())[0], Aside) for name in NEEDS)


def events(run: Path) -> EventAccumulator:
    """As TensorBoard reads them."""
    return EventAccumulator(str(run / "tensorboard")).Reload()


def tensorboard_scalars(run: Path, name: str) -> list[tuple[int, float]]:
    return [(each.step, each.value) for each in events(run).Scalars(name)]


def test_tensorboard_forgets_what_is_done_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from rollyard.watch.trackers.tensorboard import TensorBoardSink

    caplog.set_level(logging.CRITICAL, logger="tensorboard")
    assert two_lives(TensorBoardSink, "tensorboard", tmp_path / "r") == []
    assert tensorboard_scalars(tmp_path / "r", "reward_mean") == NEWEST
    assert tensorboard_scalars(tmp_path / "r", "eval/reward_mean") == [(2, 0.25), (4, 0.5), (6, 0.75)]
    read = events(tmp_path / "r")
    assert [each.value for each in read.Scalars("reward/judge.py:f(x)/mean")] == [0.25] * 6
    assert all(each.value != each.value for each in read.Scalars("train/loss")) and "train/kl" not in read.Tags()["scalars"]
    shown = read.Tensors("config")[-1].tensor_proto.string_val[0].decode()
    assert json.loads(shown) == CONFIG and all(line.startswith("    ") for line in shown.splitlines())
    assert json.loads(read.Tensors("summary")[-1].tensor_proto.string_val[0]) == SUMMARY


async def test_opentelemetry_has_a_span_for_a_step_and_its_phases(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clock, spans = iter(range(0, 10**12, 10**9)), InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    monkeypatch.setattr("rollyard.watch.trackers.phased.time.time_ns", lambda: 1000 * 10**9)
    timeline = Timeline(lambda: next(clock))
    with timeline.phase(Phase.SETUP):
        pass
    sink = Phased("opentelemetry", lambda tell: OpenTelemetrySink(tell, provider), timeline)
    sink.open(Tracked("r", tmp_path, "p", {}, begins=1, earlier=[{"step": 1}]))
    for step in (2, 3):
        for phase in (Phase.GENERATE, Phase.TRAIN)[: step - 1]:
            with timeline.phase(phase):
                pass
        sink.write({"step": step, "reward_mean": 0.5, "tokens": 7, "dropped": None})
    sink.close({"run/cause": "it broke"}, failed=True)
    await sink.closed()
    found = spans.get_finished_spans()
    first, second, end = (each for each in found if each.parent is None)
    assert [each.name for each in (first, second, end)] == ["step", "step", "end"]
    assert first.attributes == {"rollyard.run": "r", "rollyard.step": 2, "rollyard.reward_mean": 0.5, "rollyard.tokens": 7}
    assert end.status.status_code is StatusCode.ERROR and end.status.description == "it broke"
    below = {each.context.span_id: [] for each in (first, second, end)}
    for each in found:
        if each.parent is not None:
            below[each.parent.span_id].append(each)
    assert [[each.name for each in below[span.context.span_id]] for span in (first, second, end)] == [
        ["generate"],
        ["generate", "train"],
        [],
    ]
    assert first.start_time == 1000 * 10**9 and second.start_time == first.end_time and end.start_time == second.end_time
    for span in (first, second):
        assert all(span.start_time <= each.start_time < each.end_time <= span.end_time for each in below[span.context.span_id])


async def spans(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, provider: TracerProvider | trace.ProxyTracerProvider) -> None:
    """Of one step, in a program with this provider."""
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    (sink,) = open_trackers(["opentelemetry"], Timeline())
    assert isinstance(sink, Aside)
    sink.open(Tracked("r", tmp_path, "p", {}))
    sink.write({"step": 1})
    sink.close({"run/cause": "all steps are done"}, failed=False)
    await sink.closed()


async def test_spans_that_nobody_takes_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with told("opentelemetry: nobody in this program takes spans: run it with `opentelemetry-instrument`"):
        await spans(monkeypatch, tmp_path, trace.ProxyTracerProvider())


class Exporter(SpanProcessor):
    """One that exports at once, or breaks."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.threads = error, set[str]()

    def on_end(self, span: ReadableSpan) -> None:
        self.threads.add(current_thread().name)
        if self.error is not None:
            raise self.error


async def test_spans_are_taken_on_a_thread_of_its_own_whatever_befalls_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    well, broken = Exporter(), Exporter(RuntimeError("no collector"))
    for exporter, news in ((well, ()), (broken, ("opentelemetry: it failed, and is told nothing more: RuntimeError: no coll",))):
        provider = TracerProvider()
        provider.add_span_processor(exporter)
        with told(*news):
            await spans(monkeypatch, tmp_path, provider)
        assert exporter.threads == {"sink opentelemetry"}


# ------------------------------------------------------------------------------------------- whole runs


class Stuck(Book):
    def __init__(self) -> None:
        super().__init__()
        self.let = Event()

    def write(self, record: Record) -> None:
        self.let.wait(20)


class Broken(Book):
    def open(self, run: Tracked) -> str:
        raise ConnectionError("nobody is there")


def of_doubles(folder: Path) -> tuple[Life, Report | None]:
    of, life = work(), Life()
    config = config_of("separate", Rollover.DRAIN, of, folder).model_copy(update={"watch": WatchConfig(sinks=("wandb",))})
    run = rollyard.Run(config, stations=lambda past: stations(past, life, folder / "run", of, 1000, of.length))

    async def whole() -> None:
        life.steps.extend([step async for step in run])

    virtual.run(whole())
    return life, run.report


def test_a_run_goes_on_whatever_its_sinks_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sinks = {"well": Book(), "stuck": Stuck(), "broken": Broken()}
    made = [Aside(name, lambda tell, sink=sink: sink, limit_s=0.1) for name, sink in sinks.items()]
    monkeypatch.setattr("rollyard.loop.open_trackers", lambda names, timeline: made)
    with told("broken: it failed, and is told nothing more: ConnectionError", "stuck: it is not done within 0.1 s"):
        life, report = of_doubles(tmp_path)
    assert report is not None and report.finished.cause == "all steps are done" and len(life.steps) == 5
    assert [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3, 4, 5]
    well = sinks["well"]
    assert well.steps == [1, 2, 3, 4, 5] and well.closed[0][0]["run/steps"] == 5 and not well.closed[0][1]
    assert well.opened[0].config["watch"] and well.opened[0].folder == tmp_path / "run"
    sinks["stuck"].let.set()  # type: ignore[attr-defined]


def test_a_resumed_run_goes_on_in_the_same_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed after step 4, with the checkpoint of step 2."""
    sink = Book()
    monkeypatch.setattr("rollyard.loop.open_trackers", lambda names, timeline: [Aside("book", lambda tell: sink)])
    with pytest.warns(RuntimeWarning, match="closing the run: Killed"):
        killed = live(tmp_path, work(), death=Death("before checkpoint folder", 1))
    again = live(tmp_path, work())
    assert [step.step for step in killed.steps] == [1, 2, 3, 4] and [step.step for step in again.steps] == [3, 4, 5]
    assert sink.steps == [1, 2, 3, 4, 5] and [failed for _, failed in sink.closed] == [True, False]
    first, second = sink.opened
    assert (first.again, first.begins, first.id) == (False, 0, "") and (second.again, second.begins) == (True, 2)
    assert second.id == "the-first" and [row["step"] for row in second.earlier] == [1, 2]


# ------------------------------------------------------------------------------------------- with their packages


def wandb_records(folder: Path) -> Iterator[object]:
    """Records of the offline runs in a folder, the oldest run first: a log in blocks, each record in one piece or several."""
    from wandb.proto.wandb_internal_pb2 import Record as Kept

    for path in sorted(folder.glob("offline-run-*/run-*.wandb")):
        data, at, whole = path.read_bytes(), 7, b""
        while at + 7 <= len(data):
            if (left := 32768 - at % 32768) < 7:
                at += left
                continue
            _, size, kind = struct.unpack_from("<IHB", data, at)
            whole += data[at + 7 : at + 7 + size]
            at += 7 + size
            if kind in (1, 4):  # whole, or the last piece
                yield Kept.FromString(whole)
                whole = b""


def wandb_history(folder: Path, name: str) -> list[tuple[int, float]]:
    """Values of a metric by step."""
    found = []
    for each in wandb_records(folder):
        if each.WhichOneof("record_type") == "history":  # type: ignore[attr-defined]
            items = {item.key or ".".join(item.nested_key): item.value_json for item in each.history.item}  # type: ignore[attr-defined]
            found += [(each.history.step.num, json.loads(items[name]))] if name in items else []  # type: ignore[attr-defined]
    return found


def mlflow_history(store: Path, run: Path, name: str) -> list[tuple[int, float]]:
    import mlflow

    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{store}")
    found = client.get_metric_history(json.loads((run / "trackers" / "mlflow.json").read_text())["id"], name)
    return sorted((each.step, each.value) for each in found)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whatever trackers whoever runs this has is left alone."""
    for name in os.environ:
        if name.startswith(("WANDB_", "MLFLOW_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
def test_wandb_offline(tmp_path: Path) -> None:
    from rollyard.watch.trackers.wandb import WandbSink

    said = two_lives(WandbSink, "wandb", tmp_path / "r")
    assert len(said) == 2 and all("wandb: there is no key, so it is offline" in each for each in said)
    kept = tmp_path / "r" / "wandb"
    assert wandb_history(kept, "reward_mean") == KEPT and wandb_history(kept, "eval/step") == [(2, 2), (4, 4), (6, 6)]
    assert wandb_history(kept, "reward/judge.py:f(x)/mean") == [(step, 0.25) for step in range(1, 7)]
    runs = [each.run for each in wandb_records(kept) if each.WhichOneof("record_type") == "run"]  # type: ignore[attr-defined]
    assert len({each.run_id for each in runs}) == 1 and {each.project for each in runs} == {"rollyard"}
    assert {each.display_name for each in runs} == {"r"}
    config = {each.key: json.loads(each.value_json) for each in runs[0].config.update}
    assert {name: config[name] for name in CONFIG} == CONFIG


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
def test_mlflow_without_a_server(tmp_path: Path) -> None:
    import mlflow

    from rollyard.watch.trackers.mlflow import STORE, MlflowSink

    assert two_lives(MlflowSink, "mlflow", tmp_path / "r") == []
    store, run = tmp_path / STORE, tmp_path / "r"
    assert mlflow_history(store, run, "reward_mean") == KEPT
    assert mlflow_history(store, run, "eval/reward_mean") == [(2, 0.25), (4, 0.5), (6, 0.75)]
    assert [value for _, value in mlflow_history(store, run, "reward/judge.py:f_x_/mean")] == [0.25] * 6
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{store}")
    (experiment,) = client.search_experiments(filter_string="name = 'rollyard'")
    (kept,) = client.search_runs([experiment.experiment_id])
    assert kept.info.status == "FINISHED" and kept.info.run_name == "r" and kept.data.tags["cause"] == "all steps are done"
    assert kept.data.params["rollout.stop"] == "['#']" and kept.data.params["run.steps"] == "6"
    assert kept.data.metrics["run/reward/last"] == 0.5


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("alone")
def test_a_real_run_that_is_killed_and_resumed(tmp_path: Path) -> None:
    """With all of them: what each has is what metrics.jsonl has, but for steps that were done again."""
    options = {f"warmup.{name}": value for name, value in BASE.items()} | {
        "run.out": "r",
        "run.steps": 6,
        "rollout.group_size": 2,
        "rollout.groups_per_step": 4,
        "engine.kernels": "plain",
        "rollout.max_tokens": 8,
        "prompts.held_out": 2,
        "weights.canary": "false",
        "checkpoint.every": 4,
        "watch.sinks": "tensorboard,wandb,mlflow",
        "watch.view": "plain",
    }
    environment = os.environ | {"ROLLYARD_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    rollyard_ = [sys.executable, "-m", "rollyard"]
    run, given = tmp_path / "r", [f"--{name}={value}" for name, value in options.items()]
    process = subprocess.Popen([*rollyard_, "run", "--preset", "sort", *given], cwd=tmp_path, env=environment)
    while process.poll() is None and not (run / "checkpoints" / "step-000004").exists():
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    subprocess.run([*rollyard_, "resume", str(run)], cwd=tmp_path, env=environment, check=True, timeout=200)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [row["step"] for row in rows]
    assert steps == [1, 2, 3, 4, 5, 6]
    assert [step for step, _ in mlflow_history(tmp_path / "mlflow.db", run, "reward_mean")] == steps
    sent = [step for step, _ in wandb_history(run / "wandb", "reward_mean")]
    assert sent == sorted(set(sent)) and sent[-2:] == [5, 6], "what W&B had not written when it was killed may lack"
    assert tensorboard_scalars(run, "reward_mean") == [(row["step"], pytest.approx(row["reward_mean"])) for row in rows]
