"""`bench sync --workload adapter` on a tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollyard.bench.adapter import bench
from rollyard.bench.setting import Setting
from tests.tiny import tiny_folder


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_an_adapter_is_less_to_move(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path, width=256, window=1024)
    result = await bench(Setting(folder, "adapter", "", "float32", 1, 1), lambda line: None)
    moved = [{figure.name: figure.value for figure in side.figures}["bytes"] for side in result.sides]
    assert [side.name.partition(",")[0] for side in result.sides] == ["adapter", "all parameters"] * 2
    assert moved[0] < moved[1] / 4 and moved[2] < moved[3] / 4
