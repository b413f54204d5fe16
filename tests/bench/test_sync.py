"""`bench sync` on a tiny model: every transport and every raw copy is there, and says what it should."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from rollyard.bench import travel
from rollyard.bench.choice import measure
from rollyard.bench.report import table
from rollyard.bench.setting import Setting
from rollyard.bench.sync import BOUNDS, MOVING, bench
from tests.tiny import tiny_folder


@pytest.mark.slow
async def test_every_transport_beside_its_bound(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path, window=1024)
    result = await bench(Setting(folder, "idle", "", "float32", 1, 1), lambda line: None)
    sides = {side.name: side for side in result.sides}
    assert [side.name for side in result.sides[:2]] == ["shared_memory", BOUNDS["shared_memory"]]
    assert set(sides) > {*MOVING, "in_place", *BOUNDS.values()}
    for name in (*MOVING, "in_place"):
        known = {figure.name: figure.value for figure in sides[name].figures}
        parts = sum(known[part] for part in ("publish", "prepare", "load"))
        assert parts == sides[name].values[0] and known["times its bound"] > 0
        assert (known["bytes"] > 0) == (name != "in_place")
    console = Console(width=200, record=True, file=StringIO())
    console.print(table(result))
    printed = console.export_text()
    for words in ("when to use", "engines on other machines", "anything that reads a folder", "placement colocated"):
        assert words in printed
    for name in MOVING:
        known = {figure.name: figure.value for figure in sides[name].figures}
        assert known["stall under keep"] > 0 and known["steps"] > 0


@pytest.mark.slow
@pytest.mark.timeout(300)  # many engines start
async def test_less_travels_the_less_changed(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path, window=1024)
    result = await measure("sync", Setting(folder, "delta", "", "bfloat16", 1, 1), lambda line: None)
    known = {side.name: {figure.name: figure.value for figure in side.figures} for side in result.sides}
    for transport in MOVING:
        whole = known[transport]["bytes"]
        some = [known[f"{transport} {share} changed"]["bytes"] for share in ("0.1%", "1.0%", "10.0%")]
        assert some == sorted(some) and some[0] < some[-1] < 0.3 * whole
        assert known[transport]["times its bound"] > 0
    assert known["find 1.0%"]["rate"] > 0 and known["apply 1.0%"]["rate"] > 0


@pytest.mark.slow
@pytest.mark.timeout(300)  # many engines start
async def test_a_machine_is_sent_one_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(travel, "ENGINES", (1, 3))
    folder = tiny_folder(tmp_path, window=1024)
    result = await measure("sync", Setting(folder, "relay", "", "float32", 1, 1), lambda line: None)
    known = {side.name: {figure.name: figure.value for figure in side.figures} for side in result.sides}
    one = known["to one of 1"]["bytes"]
    for count in (1, 3):
        assert known[f"to one of {count}"]["bytes"] == one and known[f"to each of {count}"]["bytes"] == count * one
        assert known[f"to one of {count}"]["memory"] > 0
