"""Two simulations into one folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollyard.cli import main
from rollyard.errors import ConfigError
from rollyard.plan.leave import held


def test_the_later_of_two_is_refused_before_it_begins(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["simulate", "--preset", "small", "--steps", "2", "--overwrite", "--out", str(tmp_path / "new" / "out")]
    with held(tmp_path / "new" / "out"):
        with pytest.raises(ConfigError, match="another simulation is about to write"), held(tmp_path / "new" / "out"):
            pass
        assert main(small) == 2
        assert "another simulation" in capsys.readouterr().err
        assert main([*small[:-1], str(tmp_path / "new" / "other")]) == 0
    assert main(small) == main(small) == 0
    assert {path.name for path in (tmp_path / "new").iterdir()} == {"out", "other"}


def test_a_folder_that_cannot_be_written_is_told_before_it_begins(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert main(["simulate", "--preset", "small", "--out", str(tmp_path / "file" / "out")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_a_simulation_that_fails_leaves_the_place_free(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="wrong"), held(tmp_path / "out"):
        raise ValueError("wrong")
    with held(tmp_path / "out"):
        pass
    assert not list(tmp_path.iterdir())
