"""Constants from a run that is over: known ones are found again, and what says too little is refused."""

from __future__ import annotations

import json
import random
import shutil
import tomllib
from dataclasses import replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from rollyard import cli
from rollyard.config import Config, PlaceConfig
from rollyard.errors import ConfigError, JournalError, RollyardError
from rollyard.plan.again import same_run, told
from rollyard.plan.calibrate import _Fitting, calibrate, ran_on, with_values
from rollyard.plan.finished import FinishedRun, read_finished
from rollyard.plan.fit import Fit, least_squares, middle
from rollyard.plan.leave import write_folder
from rollyard.plan.outcome import means_of
from rollyard.plan.scenario import Scenario
from rollyard.plan.show import seconds
from rollyard.plan.simulate import simulate

KNOWN = {
    "cluster.hardware": "cpu",
    "cluster.flops": 4e10,
    "cluster.bandwidth": 4e12,
    "cluster.link": 1e9,
    "cluster.host": 1e9,
    "costs.step_s": 8e-4,
    "costs.decode_flops": 0.5,
    "costs.decode_bandwidth": 1.0,
    "costs.prefill_flops": 0.25,
    "costs.train_flops": 1.0,
    "costs.recompute": False,
    "costs.minibatch_s": 0.02,
    "costs.barrier_s": 0.004,
    "costs.probe_s": 0.002,
    "costs.link": 1.0,
}
PLACEMENTS = {"colocated": 0, "separate": 0, "async": 2, "swap": 1}


def scenario(placement: str = "separate", **more: Any) -> Scenario:
    options = {
        "run.name": "known",
        "run.steps": 8,
        "prompts.task": "sort",
        "rollout.group_size": 8,
        "rollout.groups_per_step": 8,
        "rollout.max_tokens": 26,
        "rollout.max_staleness": PLACEMENTS[placement],
        "workload.mean_tokens": 8.0,
        "workload.prompt_tokens": 8,
        "place.placement": placement,
        "engine.slots": 32,
    }
    return with_values(Scenario(), options | KNOWN | more)


def left(folder: Path, asked: Scenario) -> Path:
    write_folder(simulate(asked), asked, folder)
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return left(tmp_path_factory.mktemp("known") / "run", scenario())


def step_s(asked: Scenario) -> float:
    return means_of(simulate(asked).metrics)["step_s"]


def test_a_simulated_run_has_the_constants_that_it_was_simulated_with(run: Path) -> None:
    found = calibrate(run, simulated=True)
    options, flops = found.options(), KNOWN["cluster.flops"]
    rates = {name: options["cluster.flops"] * options[f"costs.{name}"] for name in ("decode_flops", "prefill_flops")}
    assert options["costs.step_s"] == pytest.approx(KNOWN["costs.step_s"], rel=0.02)
    assert rates["decode_flops"] == pytest.approx(flops * KNOWN["costs.decode_flops"], rel=0.02)
    assert rates["prefill_flops"] == pytest.approx(flops * KNOWN["costs.prefill_flops"], rel=0.05)
    assert options["costs.barrier_s"] == pytest.approx(KNOWN["costs.barrier_s"], rel=0.1)
    assert options["costs.probe_s"] == pytest.approx(KNOWN["costs.probe_s"], rel=0.01)
    assert all(each.residual is None or each.residual < 0.02 for each in found.fitted)


@pytest.mark.parametrize("source", PLACEMENTS)
def test_with_one_placement_the_others_are_predicted(source: str, tmp_path: Path) -> None:
    found = calibrate(left(tmp_path / "run", scenario(source)), simulated=True)
    for target in PLACEMENTS:
        expected = step_s(found.scenario(scenario(target)))
        assert expected == pytest.approx(step_s(scenario(target)), rel=0.1), target


def test_what_took_no_longer_the_more_there_was_is_counted_once(run: Path, tmp_path: Path) -> None:
    """Batches are nearly alike, so that noise may hide what their tokens take: all of it is fixed then, or at the best rate."""

    def slower_the_fewer(text: str) -> str:
        rows = [json.loads(line) for line in text.splitlines()]
        return "".join(json.dumps(row | {"train/thread_s": 0.3 - 1e-5 * row["train/tokens"]}) + "\n" for row in rows)

    found = calibrate(edited(run, tmp_path, "metrics.jsonl", slower_the_fewer), simulated=True)
    trained = median(found.run.column("train/thread_s"))
    again = simulate(found.scenario(scenario())).report.phases
    assert again.train_s / 8 == pytest.approx(trained, rel=0.05)
    assert found.options()["costs.train_flops"] == 1


def test_a_line_may_have_a_least_slope() -> None:
    x, y = [1.0, 2.0, 3.0], [10.0, 9.5, 9.0]
    assert middle(x, y)[:2] == least_squares(x, y, [1.0] * 3)[:2] == (9.5, 0.0)
    assert middle(x, y, 2.0)[:2] == least_squares(x, y, [1.0] * 3, 2.0)[:2] == (5.5, 2.0)
    assert middle(x, y, 20.0)[:2] == (0.0, 4.75)  # through 0 and the medians
    assert least_squares(x, y, [1.0] * 3, 20.0)[:2] == (0.0, 4.0)  # through 0: (10 + 19 + 27) / 14


def test_lines_are_found_through_noise() -> None:
    draw = random.Random(0)
    running = [1 << power for power in range(8)] * 4
    steps = [1e-3 + 2e-5 * n for n in running]
    noisy = [seconds * draw.lognormvariate(0.0, 0.05) for seconds in steps]
    fixed, slope, residual = least_squares(running, noisy, [1.0] * len(running))
    assert (fixed, slope) == (pytest.approx(1e-3, rel=0.05), pytest.approx(2e-5, rel=0.05)) and 0.02 < residual < 0.08
    tokens = [draw.uniform(1000, 3000) for _ in range(40)]
    wild = [0.05 + 1e-4 * t + (5.0 if number % 10 == 0 else draw.gauss(0.0, 0.005)) for number, t in enumerate(tokens)]
    fixed, slope, _ = middle(tokens, wild)  # a tenth of them says nothing
    assert fixed + slope * 2000 == pytest.approx(0.25, rel=0.05) and slope == pytest.approx(1e-4, rel=0.15)


def test_no_line_goes_below_nothing() -> None:
    assert least_squares([1, 2, 3], [3.0, 2.0, 1.0], [1, 1, 1])[:2] == (2.0, 0.0)  # their mean
    assert least_squares([1, 2], [1.0, 3.0], [1, 1])[:2] == (0.0, pytest.approx(7 / 5))  # through 0
    assert least_squares([4], [2.0], [5])[:2] == (2.0, 0.0)
    assert middle([1, 2, 3], [3.0, 2.0, 1.0])[:2] == (2.0, 0.0)
    assert middle([2, 2], [4.0, 6.0])[:2] == (0.0, 2.5)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated runs are taken for real ones."""
    monkeypatch.setattr("rollyard.plan.calibrate.calibrate", partial(calibrate, simulated=True))


@pytest.mark.usefixtures("taken")
def test_the_constants_are_a_file_of_a_scenario(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "constants.toml"
    assert cli.main(["simulate", "--calibrate", str(run), "--constants", str(file), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["step_s"]["mean"] == pytest.approx(step_s(scenario()), rel=0.02)
    sections = tomllib.loads(file.read_text())
    for name, value in calibrate(run, simulated=True).options().items():
        section, _, option = name.partition(".")
        assert sections[section][option] == (pytest.approx(value, rel=1e-5) if isinstance(value, float) else value)
    assert "8 steps" in file.read_text() and "residual" in file.read_text()


@pytest.mark.usefixtures("taken")
def test_what_the_command_line_says_is_not_fitted(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slow = ["simulate", "--calibrate", str(run), "--costs.step_s", "0.1", "--json"]
    assert cli.main(slow) == 0
    assert json.loads(capsys.readouterr().out)["step_s"]["mean"] > 10 * step_s(scenario())
    assert cli.main(["simulate", "--preset", "small", "--constants", "x.toml"]) == 2
    assert "--calibrate" in capsys.readouterr().err


def test_a_simulated_run_says_nothing_new(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulate", "--calibrate", str(run)]) == 2
    assert "the run was simulated, and says no more than the constants that it was given" in capsys.readouterr().err


@pytest.mark.usefixtures("taken")
def test_other_hardware_than_the_run_had_is_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for asked in (["--cluster.hardware", "H100"], ["--gpus", "8xH100"]):
        assert cli.main(["simulate", "--calibrate", str(run), *asked]) == 2
        assert "the run was on cpu, and H100 is asked for" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("device", "asked", "found"),
    [("cpu", "", "cpu"), ("cpu", "cpu", "cpu"), ("cuda", "H20", "H20"), ("auto", "", "cpu"), ("auto", "A100-80", "A100-80")],
)
def test_what_a_real_run_ran_on(device: str, asked: str, found: str, run: Path) -> None:
    assert ran_on(real(run, device), asked, False) == found


@pytest.mark.parametrize(("device", "asked"), [("cpu", "H100"), ("cuda", "cpu"), ("cuda", ""), ("cuda", "H1000")])
def test_a_real_run_on_something_else_is_refused(device: str, asked: str, run: Path) -> None:
    with pytest.raises(ConfigError, match=f"the run was on {device}") as raised:
        ran_on(real(run, device), asked, False)
    assert ("H100" in raised.value.remedy) == (device == "cuda")


def real(run: Path, device: str) -> FinishedRun:
    config = Config(place=PlaceConfig(device=device))
    return replace(read_finished(run), config=config, journal=run)


def edited(run: Path, scratch: Path, name: str, change: Any) -> Path:
    folder = scratch / "edited"
    shutil.copytree(run, folder)
    path = folder / name
    changed = change(path.read_text())
    if changed is None:
        path.unlink()
    else:
        path.write_text(changed)
    return folder


def failed(text: str) -> str:
    return json.dumps(json.loads(text) | {"finished": {"cause": "the disk is full", "failed": True}})


def resumed(text: str) -> str:
    record = json.loads(text)
    return json.dumps(record | {"lives": record["lives"] | {"count": 2}})


def without_paces(text: str) -> str:
    record = json.loads(text)
    return json.dumps(record | {"usage": {**record["usage"], "paces": []}})


@pytest.mark.parametrize(
    ("name", "change", "kind", "says"),
    [
        ("report.json", lambda text: None, ConfigError, "has not come to its end"),
        ("trace.json", lambda text: None, ConfigError, "has not come to its end"),
        ("report.json", failed, ConfigError, "the disk is full"),
        ("report.json", resumed, ConfigError, "2 lives"),
        ("report.json", without_paces, ConfigError, "what its steps take"),
        ("report.json", lambda text: text[:200], JournalError, "not a report of this version"),
        ("report.json", lambda text: text.replace('"usage"', '"used"'), JournalError, "not a report of this version"),
        ("trace.json", lambda text: text[:-30], JournalError, "no trace of this version"),
        ("trace.json", lambda text: '{"traceEvents": []}', JournalError, "the report has 8 steps, and the trace"),
        ("metrics.jsonl", lambda text: text[:-30], JournalError, "cannot be read"),
        ("metrics.jsonl", lambda text: text.replace("driver_s", "other"), JournalError, "line 1: not metrics of this version"),
        ("metrics.jsonl", lambda text: "\n".join(text.splitlines()[:-1]), JournalError, "8 steps, and metrics 7"),
        ("scenario.toml", lambda text: text.replace("group_size", "size_of_group"), JournalError, "not the options of a run"),
        ("scenario.toml", lambda text: text + "[", JournalError, "not the options of a run"),
        ("scenario.toml", lambda text: None, ConfigError, "no run's folder"),
    ],
)
def test_what_says_too_little_is_refused(
    name: str, change: Any, kind: type[RollyardError], says: str, run: Path, tmp_path: Path
) -> None:
    with pytest.raises(kind, match=says):
        calibrate(edited(run, tmp_path, name, change), simulated=True)


def test_other_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run's folder"):
        calibrate(tmp_path)
    with pytest.raises(ConfigError, match="there is no folder"):
        calibrate(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="3 steps says too little"):
        calibrate(short := left(tmp_path / "short", scenario(**{"run.steps": 3})), simulated=True)
    (short / "report.json").write_text(without_paces((short / "report.json").read_text()))
    with pytest.raises(ConfigError, match="however long the run is"):  # another run of the kind would not help
        calibrate(short, simulated=True)


@pytest.mark.parametrize(
    ("measured_s", "simulated_s", "quiet", "cpu", "says"),
    [
        (0.33, 0.3, 0.5, True, "runs/a took 0.33 s a step; the same run, simulated on a machine that does nothing else: 0.3 s"),
        (0.33, 0.3, 1.0, False, "runs/a took 0.33 s a step; the same run, simulated: 0.3 s"),
        (
            3.4,
            0.34,
            0.25,
            True,
            "so the run took 10 times as long (others were at work: its processes had a processor in 25% of",
        ),
        (3.4, 0.34, 0.95, True, "0.34 s, so the run took 10 times as long. Compare what is simulated with this simulated step"),
        (0.2, 0.4, 0.95, True, "0.4 s, so the run took 0.5 times as long. Compare"),
    ],
)
def test_a_run_stands_beside_itself_simulated(measured_s: float, simulated_s: float, quiet: float, cpu: bool, says: str) -> None:
    line = told(Path("runs/a"), measured_s, simulated_s, quiet, cpu=cpu)
    assert says in line and ("Compare" in line) == (measured_s != 0.33)


@pytest.mark.slow
def test_a_real_run_says_what_it_took(tmp_path: Path) -> None:
    folder = tmp_path / "real"
    real = ["run", "--preset", "sort", "--run.steps", "6", "--run.out", str(folder), "--prompts.held_out", "8"]
    assert cli.main([*real, "--place.device", "cpu", "--place.threads", "1", "--watch.view", "quiet"]) == 0
    found = calibrate(folder)
    means = means_of(read_finished(folder).rows)
    asked = with_values(Scenario.model_validate(found.run.config.model_dump()), {"workload.trace": str(folder)})
    done = simulate(found.scenario(asked))
    simulated_s = means_of(done.metrics)["step_s"]
    # Its very engine steps; and all is fitted to processor time, which depends little on what else the machine does.
    engine, simulated_engine = found.run.report.usage.paces, done.report.usage.paces
    did = attrgetter("running", "prefill", "steps", "sequences", "prefilled")
    assert list(map(did, simulated_engine)) == list(map(did, engine))
    engine_s = sum(pace.thread_s for pace in engine)
    assert sum(pace.seconds for pace in simulated_engine) == pytest.approx(engine_s, rel=0.05)
    trained_s, driver_s = (median(found.run.column(name)) for name in ("train/thread_s", "driver_s"))
    assert simulated_s == pytest.approx(engine_s / found.run.report.steps + trained_s + driver_s, rel=0.15)
    line = same_run(found, folder, {})
    assert line.startswith(f"{folder} took {seconds(means['step_s'])} a step") and f": {seconds(simulated_s)}" in line
    journal = folder / "journal.sqlite"
    journal.write_bytes(journal.read_bytes()[:20_000])
    with pytest.raises(JournalError, match=r"journal\.sqlite"):
        calibrate(folder)


def test_what_a_run_was_on_is_not_guessed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the table's H100 it is a fit; as something slower it is none."""
    fast = {"cluster.hardware": "H100", "cluster.flops": 0.0, "cluster.bandwidth": 0.0}
    options = fast | {"model.path": "qwen2.5-1.5b", "model.dtype": "bfloat16", "prompts.task": "", "costs.step_s": 0.0}
    folder = left(tmp_path / "run", scenario("separate", **options | {"costs.decode_bandwidth": 1.0, "costs.decode_flops": 1.0}))
    assert calibrate(folder, simulated=True).options()["costs.decode_flops"] <= 1
    monkeypatch.setattr("rollyard.plan.calibrate.ran_on", lambda *asked: "A100-80")
    with pytest.raises(ConfigError, match=r"the run did .* times what A100-80 can at its peak"):
        calibrate(folder, simulated=True)


def test_a_run_in_which_nothing_takes_longer_says_nothing(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flat = Fit(1.0, 0.0, 0.0)
    for name in ("_decode", "_train"):
        monkeypatch.setattr(_Fitting, name, lambda self: flat)
    monkeypatch.setattr(_Fitting, "_prefill", lambda self, decode: 0.0)
    with pytest.raises(ConfigError, match="nothing in the run took longer"):
        calibrate(run, simulated=True)
