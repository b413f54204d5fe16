"""A decode step beside its linear layers, on a tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollyard.bench import decode
from rollyard.bench.setting import Setting
from rollyard.errors import ConfigError
from tests.compiler import needs_compiler
from tests.tiny import tiny_folder


def setting(folder: Path, **options: object) -> Setting:
    return Setting(
        workload="decode", model=folder, dtype="float32", rounds=1, threads=1, peer="", options={"engine.window": 200, **options}
    )


@needs_compiler
async def test_the_linear_layers_are_a_part_of_the_step(tmp_path: Path) -> None:
    result = await decode.bench(setting(tiny_folder(tmp_path)), lambda line: None)
    step, alone = result.sides
    figures = {figure.name: figure.value for figure in step.figures}
    assert result.unit == "ms" and step.name == "decode step" and alone.name == "its linear layers alone"
    assert 0 < figures["outside linear layers"] < figures["step"]
    assert alone.values[0] > 0


async def test_plain_torch_has_no_packed_layers_to_time(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine\.kernels"):
        await decode.bench(setting(tiny_folder(tmp_path), **{"engine.kernels": "plain"}), lambda line: None)
