"""Files and folders that appear whole or not at all, also when power fails: every fsync and every rename of data is here.

A name that begins with a dot and ends with `draft` or `old` is not there yet, or not any more. Calls raise OSError, and leave
what was there as it was.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final

from safetensors import SafetensorError, safe_open

from rollyard.errors import DurableError

WHOLE: Final = "whole.json"  # in a folder that was sealed: bytes of each file, by its name
LEFT: Final = re.compile(r"\..+\.(draft|old)(-\w+)?")  # what a writer that was killed leaves; nothing else is ours


FULL: Final = (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT), "database or disk is full")


def is_full(told: str) -> bool:
    """Does an error say that a disk has no room? It does so in the words of the system or of SQLite, whatever it is by now."""
    return any(words in told for words in FULL)


@contextmanager
def naming(path: Path, draft: Path | None = None) -> Iterator[None]:
    """An OSError of this block names `path`, where it names nothing, as that of a write, or `draft` and what is in it."""
    try:
        yield
    except OSError as error:
        if error.errno is None or not (error.filename is None or isinstance(error.filename, str)):
            raise
        found = path
        if error.filename is not None:
            if draft is None or not Path(error.filename).is_relative_to(draft):
                raise
            found = path / Path(error.filename).relative_to(draft)
        raise OSError(error.errno, error.strerror, str(found)) from error


def sync(path: Path) -> None:
    """To the disk: a file's content, or a folder's names."""
    with naming(path):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


@contextmanager
def writing(path: Path, mode: str = "wb", *, at_once: bool = True) -> Iterator[IO[Any]]:
    """A file that has another name for the length of a block, and is `path` after it. Texts are UTF-8. One writer a path.

    Args:
        at_once: else a power cut soon after it may leave what was there before.
    """
    draft = path.with_name(f".{path.name}.draft")
    try:
        with naming(path, draft):
            with draft.open(mode, encoding=None if "b" in mode else "utf-8") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    if at_once:
        sync(path.parent)


def write_file(path: Path, content: bytes, *, at_once: bool = True) -> None:
    """Make the file, or replace it. `at_once`: see `writing`."""
    with writing(path, at_once=at_once) as file:
        file.write(content)


def make_folder(folder: Path) -> None:
    """With the parents that it lacks. Harmless when it is there."""
    for absent in reversed([path for path in (folder, *folder.parents) if not path.exists()]):
        absent.mkdir(exist_ok=True)
        sync(absent.parent)


def write_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Make `folder`, and its parents, with what `write` puts into the draft that it is given.

    Raises FileExistsError when `folder` exists.
    """
    make_folder(folder.parent)
    draft = folder.with_name(f".{folder.name}.draft-{secrets.token_hex(4)}")
    try:
        with naming(folder, draft):
            draft.mkdir()
            write(draft)
            commit_folder(draft, folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)  # gone already when all went well


def commit_folder(draft: Path, folder: Path) -> None:
    """`draft`, beside `folder` and with all that was put into it, becomes `folder`. Raises FileExistsError when that exists."""
    if folder.exists():
        raise FileExistsError(f"{folder} exists")
    for path in (*draft.rglob("*"), draft):
        sync(path)
    draft.rename(folder)
    sync(folder.parent)


def remove_folder(folder: Path) -> None:
    """At once for readers; what it holds is deleted after that. What cannot be goes with the drafts."""
    away = folder.with_name(f".{folder.name}.old-{secrets.token_hex(4)}")
    folder.rename(away)
    sync(folder.parent)
    shutil.rmtree(away, ignore_errors=True)


def clear_drafts(folder: Path) -> None:
    """Delete what writers that were killed left in it. Only for who alone may write there."""
    for left in [path for path in folder.iterdir() if LEFT.fullmatch(path.name)]:
        if left.is_dir() and not left.is_symlink():  # a link is removed, and nothing that it leads to
            shutil.rmtree(left)
        else:
            left.unlink()


def seal(draft: Path) -> None:
    """Nothing more comes into it: note what that is. For `commit_folder` after it."""
    sizes = {str(path.relative_to(draft)): path.stat().st_size for path in sorted(draft.rglob("*")) if path.is_file()}
    (draft / WHOLE).write_text(json.dumps(sizes, indent=1))


def is_whole(folder: Path) -> bool:
    """Was it sealed? A folder that somebody else made is none of ours."""
    return (folder / WHOLE).is_file()


def check_whole(folder: Path) -> None:
    """Raises DurableError for one that was spoilt since it was sealed, as far as names, sizes and heads of files tell."""
    try:
        sizes = _parsed(folder / WHOLE)
        if not isinstance(sizes, dict) or not all(type(size) is int for size in sizes.values()):
            raise DurableError(f"{WHOLE} does not say what is in it")
        for name, size in sizes.items():
            if Path(name).is_absolute() or ".." in Path(name).parts or not name.isprintable():  # nor any that no path can have
                raise DurableError(f"{WHOLE} names {name!r}, which is not in it")
            _check(folder / name, size)
    except DurableError as error:
        raise DurableError(f"{folder} is damaged: {error}") from error


def _check(path: Path, size: int) -> None:
    try:
        found = path.stat().st_size
        if found != size:
            raise DurableError(f"{path.name} has {found:,} bytes, and had {size:,}")
        if path.suffix == ".json":
            _parsed(path)
        elif path.suffix == ".safetensors":
            with safe_open(path, framework="np"):
                pass  # its head says where the tensors are, and was looked at
    except (OSError, SafetensorError) as error:
        raise DurableError(f"{path.name} cannot be read: {getattr(error, 'strerror', None) or error}") from error


def _parsed(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise DurableError(f"{path.name} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise DurableError(f"{path.name} is damaged: {error}") from error
