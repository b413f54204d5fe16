"""What is written whole or not at all. What of it a power cut leaves: tests/durability."""

from __future__ import annotations

import ast
import errno
import os
from pathlib import Path

import pytest

from rollyard import durable
from rollyard.errors import DurableError
from tests.sources import PACKAGE, modules, nodes, text


def test_a_file_is_there_whole_or_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    durable.write_file(path, b"first")
    with pytest.raises(KeyError), durable.writing(path, "w") as file:
        file.write("half")
        raise KeyError
    for name in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os if name == "fsync" else Path, name, _fails)
            with pytest.raises(OSError, match="no space"):
                durable.write_file(path, b"second")
    assert path.read_bytes() == b"first" and list(tmp_path.iterdir()) == [path]


def _fails(*_: object) -> None:
    raise OSError("no space left on device")


FULL = errno.ENOSPC, os.strerror(errno.ENOSPC)


def test_whatever_fails_is_told_with_the_name_that_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "new"

    def within(draft: Path) -> None:
        (draft / "none" / "file").touch()

    def full(*_: object) -> None:
        raise OSError(*FULL)  # as a write says it: without a name

    with pytest.raises(FileNotFoundError, match=rf"'{path}/none/file'$"):
        durable.write_folder(path, within)
    with pytest.raises(OSError, match=rf"No space left on device: '{path}'$"):
        durable.write_folder(path, full)
    with pytest.raises(FileNotFoundError, match=rf"'{path}/file'$"):
        durable.write_file(path / "file", b"")
    with pytest.raises(FileNotFoundError, match=r"'other'$"), durable.writing(path):
        Path("other").read_bytes()
    monkeypatch.setattr(os, "fsync", full)
    for write in (lambda: durable.write_file(path, b""), lambda: durable.sync(path.parent)):
        with pytest.raises(OSError, match=rf"No space left on device: '{tmp_path}") as told:
            write()
        assert durable.is_full(str(told.value)) and "draft" not in str(told.value)


def test_a_folder_is_there_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def half(draft: Path) -> None:
        (draft / "file").write_text("x")
        assert not (tmp_path / "new").exists()
        raise KeyError

    with pytest.raises(KeyError):
        durable.write_folder(tmp_path / "new", half)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", _fails)
        with pytest.raises(OSError, match="no space"):
            durable.write_folder(tmp_path / "new", lambda draft: None)
    assert not list(tmp_path.iterdir())
    durable.write_folder(tmp_path / "parent" / "new", lambda draft: None)
    with pytest.raises(FileExistsError):
        durable.write_folder(tmp_path / "parent" / "new", lambda draft: None)
    assert [path.name for path in (tmp_path / "parent").iterdir()] == ["new"]


def test_what_a_killed_writer_left_is_deleted_and_nothing_else(tmp_path: Path) -> None:
    for name in (".a.draft-0f3e", ".b.old-12ab", "..c.draft.draft-17"):
        (tmp_path / name / "below").mkdir(parents=True)
    (tmp_path / ".a.json.draft").write_text("{")
    kept = {"a.draft", ".keep", ".a.json.swp", "old", ".git"}
    for name in kept:
        (tmp_path / name).mkdir()
    durable.clear_drafts(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == kept


def test_a_folder_that_cannot_be_emptied_is_gone_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folder").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", lambda path, ignore_errors: None)
        durable.remove_folder(tmp_path / "folder")
    assert [path.name.split("-")[0] for path in tmp_path.iterdir()] == [".folder.old"]
    durable.clear_drafts(tmp_path)
    assert not list(tmp_path.iterdir())


HEAD = (2).to_bytes(8, "little") + b"{}"  # of a safetensors file without tensors


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("state.json", b"[", r"state\.json is damaged: "),
        ("state.json", b"{} ", r"state\.json has 3 bytes, and had 2"),
        ("state.json", None, r"state\.json cannot be read: No such file"),
        ("deep/weights.safetensors", b"\xff" * 9, r"weights\.safetensors cannot be read: "),
        (durable.WHOLE, b"{", r"whole\.json is damaged: "),
        (durable.WHOLE, b"[]", r"whole\.json does not say"),
        (durable.WHOLE, b'{"state.json": "2"}', r"whole\.json does not say"),
        (durable.WHOLE, b'{"state.json": null}', r"whole\.json does not say"),
        (durable.WHOLE, b'{"state\\u0000": 2}', r"whole\.json names 'state\\x00'"),
        (durable.WHOLE, b'{"\\ud800": 2}', r"whole\.json names '\\ud800'"),
        (durable.WHOLE, b'{"a\\nb": 2}', r"whole\.json names 'a\\nb'"),
        (durable.WHOLE, None, r"whole\.json cannot be read: No such file"),
    ],
)
def test_a_folder_that_was_spoilt_is_named(tmp_path: Path, name: str, content: bytes | None, problem: str) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "state.json").write_bytes(b"[" if content == b"[" else b"{}")  # damage of the same size
    (tmp_path / "deep" / "weights.safetensors").write_bytes(b"0" * 9 if content == b"\xff" * 9 else HEAD)
    durable.seal(tmp_path)
    if content is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DurableError, match=rf"{tmp_path} is damaged: {problem}") as caught:
        durable.check_whole(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_sealed_folder_is_whole(tmp_path: Path) -> None:
    assert not durable.is_whole(tmp_path)
    (tmp_path / "state.json").write_text("{}")
    durable.seal(tmp_path)
    durable.check_whole(tmp_path)
    assert durable.is_whole(tmp_path)


MOVES = {"fsync", "fdatasync", "rename", "renames", "replace", "link", "symlink"}
HEALS = {"engine/embedded/compile.py"}  # a cache: what a power cut spoils in it is compiled again


def _moves(path: Path) -> bool:
    """Does it call something that moves files, or brings them to the disk?"""
    for node in nodes(path) if any(name in text(path) for name in MOVES) else ():
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MOVES:
            of_text = node.func.attr == "replace" and (len(node.args) != 1 or node.keywords)  # str.replace has two
            if not of_text and not (isinstance(node.func.value, ast.Name) and node.func.value.id == "dataclasses"):
                return True
            if isinstance(node.func.value, ast.Name) and node.func.value.id == "os":
                return True
    return False


def test_nobody_else_moves_files_or_brings_them_to_the_disk() -> None:
    found = {str(path.relative_to(PACKAGE)) for path in modules() if _moves(path)}
    assert found == {"durable.py"} | HEALS
