"""The table of weight syncs that were published: made of what the simulator goes by, and bounds that nobody beats."""

from __future__ import annotations

import importlib.util
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from rollyard.plan.costs import priced
from rollyard.plan.hardware import HARDWARE
from rollyard.plan.models import shape_of
from tests.plan.scenarios import scenario

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def published() -> ModuleType:
    spec = importlib.util.spec_from_file_location("weight_sync", ROOT / "benchmarks" / "published" / "weight_sync.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_no_published_sync_is_faster_than_its_links(published: ModuleType) -> None:
    assert all(row.predicted_s() <= row.seconds[0] for row in published.ROWS)


def test_bounds_by_hand(published: ModuleType) -> None:
    """An engine of 32 needs 41.9 GB a device; eight H800 tell each other 470 GB by links of 200 GB/s; both at 0.8, and 0.1 s.

    Besides a source of 256, or 8, copies its part, and a device of an engine of 32, or 8, packs its own.
    """
    of = {row.system: row.predicted_s() for row in published.ROWS[:5]}
    whole, memory = 2 * 671_026_419_200, 3.35e12
    copied = 2 * whole / 256 / memory + 2 * whole / 32 / memory
    assert of["NeMo-RL, NIXL"] == pytest.approx(whole / 32 / 40e9 + copied + 0.1)
    whole = 2 * 235_093_634_560
    assert published.ROWS[4].predicted_s() == pytest.approx(whole / 160e9 + 2 * 2 * whole / 8 / memory + 0.1)


def test_a_simulated_run_has_the_sync_of_the_table(published: ModuleType) -> None:
    """Of rows in which weights travel as they are trained."""
    for row in (row for row in published.ROWS if row.item == 2):
        values = {"costs__changed": row.changed} if row.changed else {}
        run = scenario(
            model__path=row.model, model__dtype="bfloat16", place__placement="separate", engine__kind="vllm",
            cluster__hardware=row.hardware, engine__tensor_parallel_size=row.engine, place__train=row.sources, train__shard=True,
            place__generate=row.receivers // row.engine, weights__transport="broadcast", weights__delta=bool(row.changed),
            costs__parts=row.costs.parts, costs__cards=row.costs.cards, **values,
        )  # fmt: skip
        hardware = replace(HARDWARE[row.hardware], memory=1e12)  # only time is looked at
        assert priced(run, shape_of(row.model), hardware).moving.total_s == row.predicted_s(), row


def test_a_share_that_is_fitted_gives_what_it_was_fitted_to(published: ModuleType) -> None:
    firsts = {row.way: row for row in reversed(published.ROWS)}
    for way, row in firsts.items():
        assert row.predicted_s(published.link_of(way)) == pytest.approx(row.middle_s)


def test_scenarios_of_steps_have_the_share_that_is_fitted_to_the_same_system(published: ModuleType) -> None:
    """Of weights that go to devices apart, in T2: as DeepSeek-V3's went."""
    for path in (ROOT / "benchmarks" / "published" / "scenarios").glob("t2-*-off.toml"):
        found = tomllib.loads(path.read_text(encoding="utf-8"))["costs"]
        assert found["link"] == pytest.approx(published.link_of("everything"), abs=5e-4)


def test_the_page_has_the_table(published: ModuleType) -> None:
    page = (ROOT / "docs" / "costs.md").read_text(encoding="utf-8")
    assert "\n".join(published.table()) in page
