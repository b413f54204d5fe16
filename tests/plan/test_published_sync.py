"""The table of weight syncs that were published: made of what the simulator goes by, and bounds that nobody beats."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

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
    """An engine of 32 needs 41.9 GB a device; eight H800 tell each other 470 GB by links of 200 GB/s; both at 0.8, and 0.1 s."""
    of = {row.system: row.predicted_s() for row in published.ROWS[:5]}
    assert of["NeMo-RL, NIXL"] == pytest.approx(2 * 671_026_419_200 / 32 / 40e9 + 0.1)
    assert published.ROWS[4].predicted_s() == pytest.approx(2 * 235_093_634_560 / 160e9 + 0.1)


def test_the_page_has_the_table(published: ModuleType) -> None:
    page = (ROOT / "docs" / "costs.md").read_text(encoding="utf-8")
    assert "\n".join(published.table()) in page
