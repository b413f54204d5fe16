"""A run's folder among other users, links and names: what is written for whom, and what a name can never reach."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

import rollyard
from rollyard.checkpoints import Whole
from rollyard.config import Config
from rollyard.durable import WHOLE, check_whole, clear_drafts
from rollyard.errors import ConfigError, DurableError, RollyardError
from rollyard.journal.folder import make_folder, take_folder
from rollyard.reward import origin


def config(out: Path, **changes: object) -> Config:
    return rollyard.resolve(preset="sort", environment={}, overrides={"run.out": str(out), **changes}).config


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize(("mask", "folder", "file"), [(0o002, 0o755, 0o644), (0o000, 0o755, 0o644), (0o077, 0o700, 0o600)])
def test_nobody_else_writes_into_a_run(tmp_path: Path, mask: int, folder: int, file: int) -> None:
    """Who may read it is the user's to say, by the mask."""
    before = os.umask(mask)
    try:
        made = make_folder(config(tmp_path / "run"))
        made.write_config(config(tmp_path / "run"))
    finally:
        os.umask(before)
    made.release()
    assert (mode(made.path), mode(made.config)) == (folder, file)
    take_folder(made.path).release()


@pytest.mark.parametrize("name", ["", "config.toml"])
@pytest.mark.parametrize("bits", [0o020, 0o002])
def test_a_run_that_another_user_can_write_is_not_resumed(tmp_path: Path, name: str, bits: int) -> None:
    """Its config names code."""
    made = make_folder(config(tmp_path / "run"))
    made.release()
    target = made.path / name
    target.chmod(mode(target) | bits)
    with pytest.raises(ConfigError, match="another user can write it"):
        take_folder(made.path)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
def test_nor_is_one_that_belongs_to_another_user(tmp_path: Path) -> None:
    made = make_folder(config(tmp_path / "run"))
    made.release()
    os.chown(made.config, 12345, -1)
    with pytest.raises(ConfigError, match="another user can write it"):
        take_folder(made.path)


def test_a_link_is_not_replaced(tmp_path: Path) -> None:
    make_folder(config(tmp_path / "run")).release()
    (tmp_path / "link").symlink_to(tmp_path / "run")
    with pytest.raises(ConfigError, match="is a link"):
        make_folder(config(tmp_path / "link", **{"run.overwrite": True}))
    assert (tmp_path / "run" / "config.toml").exists()


def test_replacing_a_run_deletes_nothing_behind_its_links(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "file").write_text("kept")
    made = make_folder(config(tmp_path / "run"))
    made.release()
    for name in ("link", "weights", ".x.draft", "checkpoints/.step-000001.old-1", "checkpoints/step-000001"):
        (made.path / name).symlink_to(mine)
    clear_drafts(made.path / "checkpoints")
    made.clear()
    assert not (made.path / ".x.draft").is_symlink()
    make_folder(config(tmp_path / "run", **{"run.overwrite": True})).release()
    assert (mine / "file").read_text() == "kept"
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["checkpoints", "config.toml"]


@pytest.mark.parametrize("name", ["../x", "a/b", "..", ".", "/etc", "a\\b", "a\nb", "a\x00b", "", "x" * 101])
def test_names_of_runs_are_names_of_one_folder(name: str) -> None:
    with pytest.raises(ConfigError):
        rollyard.resolve(preset="sort", environment={}, overrides={"run.name": name})


@pytest.mark.parametrize(
    "name", ["/tmp", "..", "checkpoints/../..", "checkpoints", "", "checkpoints/x", "checkpoints/step-1/..", "a\0"]
)
def test_what_a_journal_calls_a_checkpoint_is_one_of_the_run(tmp_path: Path, name: str) -> None:
    whole = Whole(tmp_path)
    assert not whole(name) and "no checkpoint of the run" in whole.passed[0]


@pytest.mark.parametrize("name", ["../x", "/etc/hostname", "a/../../x", "a\\u0000"])
def test_what_is_whole_lies_in_its_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / WHOLE).write_text(f'{{"{name}": 3}}')
    with pytest.raises(DurableError, match="not in it"):
        check_whole(tmp_path)


def test_a_function_is_read_from_a_file_of_this_user_alone(tmp_path: Path) -> None:
    path = tmp_path / "reward-0.pickle"
    origin.write(path, origin.pickled(lambda prompt, completion: 1.0, "it", "reward.function"))
    assert mode(path) == 0o600 and origin.read(path)("", "") == 1.0
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(OSError):
        origin.read(tmp_path / "link")
    path.chmod(0o620)
    with pytest.raises(RollyardError, match="not this user's alone"):
        origin.read(path)
