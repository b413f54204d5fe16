"""A service in its start."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollyard.errors import ConfigError
from rollyard.journal.folder import RunFolder, make_folder
from rollyard.layers import resolve_tree
from rollyard.resume import BEGAN, Began
from rollyard.serve.command import _begun
from rollyard.serve.settings import ServeConfig, check
from rollyard.watch.terminal import QuietView


def config(**options: object) -> ServeConfig:
    given = {name.replace("__", "."): value for name, value in options.items()}
    return resolve_tree(ServeConfig, check, preset="sort", environment={}, overrides=given).config


def begun(made: ServeConfig) -> Path:
    return _begun(made, None, lambda header: QuietView()).folder


def test_one_that_was_killed_in_its_start_can_be_started_again(tmp_path: Path) -> None:
    """Before anything is in the folder but its config; and while its engines load."""
    made = config(run__out=str(tmp_path / "run"))
    folder: RunFolder = make_folder(made.run_config)
    folder.release()
    assert begun(made) == folder.path
    folder.began.write_bytes(BEGAN.dump_json(Began({}, ("trainer",))))
    assert begun(made) == folder.path


def test_the_folder_of_another_run_is_left_alone(tmp_path: Path) -> None:
    made = config(run__out=str(tmp_path / "run"))
    folder = make_folder(made.run_config)
    folder.release()
    folder.began.write_bytes(BEGAN.dump_json(Began({}, ())))
    with pytest.raises(ConfigError, match="exists already"):
        begun(made)
