"""A folder as it may be after a power cut: what `recorder.c` wrote down is played up to the cut, and what was not synced is lost.

The rules are the weakest that programs may count on: a file's content lasts once the file was synced, a name once its folder
was, and a rename within a folder is one thing. Of everything since, any part may have arrived, in any order; of a write any
512 bytes of it.
"""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from pathlib import Path, PurePosixPath

SECTOR = 512
HEAD = struct.Struct("<IIIIq")
FLEETING = "-shm"  # of such a file nothing lasts: SQLite maps it, and makes it anew


class Op(IntEnum):
    CREATE = 1
    TRUNCATE = 2
    WRITE = 3
    RENAME = 4
    UNLINK = 5
    MKDIR = 6
    RMDIR = 7
    SYNC = 8
    LINK = 9
    MARK = 10
    BAD = 11


@dataclass(frozen=True, slots=True)
class Record:
    """`other` is the new name, or of a sync who called it; `at` where in the file, or its new size. A mark has only a text."""

    op: Op
    path: str
    other: str = ""
    at: int = 0
    data: bytes = b""


def read_records(log: Path) -> Iterator[Record]:
    """All of a recording. Raises AssertionError when something happened that cannot be played again."""
    content, at = log.read_bytes(), 0
    while at < len(content):
        op, *sizes, where = HEAD.unpack_from(content, at)
        at += HEAD.size
        parts = []
        for size in sizes:
            parts.append(content[at : at + size])
            at += size
        record = Record(Op(op), parts[0].decode(), parts[1].decode(), where, parts[2])
        assert record.op is not Op.BAD, f"{record.path}: {record.other}"
        if not record.path.endswith(" (deleted)"):
            yield record


def below(records: Sequence[Record], root: Path) -> list[Record]:
    """Those of one folder, with paths relative to it. A mark has its text as its path."""
    inside, found = f"{root}/", list[Record]()
    for record in records:
        if record.path.startswith(inside) or (record.path == str(root) and record.op is Op.SYNC):
            new = record.other.removeprefix(inside) if record.op in (Op.RENAME, Op.LINK) else record.other
            found.append(replace(record, path=f"{record.path}/".removeprefix(inside).rstrip("/"), other=new))
    return found


# ------------------------------------------------------------------------------------------------------ the disk

Keep = Callable[[], bool]  # did this part of what was not synced arrive?
Names = Callable[["Folder"], bool]  # the same of a change to names in this folder


@dataclass(eq=False, slots=True)
class File:
    lasting: bytes = b""
    since: list[tuple[int, bytes | None]] = field(default_factory=list)  # writes; None: a truncation to that size

    def sync(self) -> None:
        self.lasting, self.since = self.content(lambda: True), []

    def content(self, keep: Keep) -> bytes:
        found = bytearray(self.lasting)
        for at, data in self.since:
            if data is None:
                if keep():
                    found[at:] = b"\0" * (at - len(found))
                continue
            for begin in range(0, len(data), SECTOR):
                if keep():
                    part = data[begin : begin + SECTOR]
                    found.extend(b"\0" * (at + begin - len(found)))
                    found[at + begin : at + begin + len(part)] = part
        return bytes(found)


@dataclass(eq=False, slots=True)
class Folder:
    """`names` as the program sees them; of each change since the last sync what became of the names in it."""

    names: dict[str, Node] = field(default_factory=dict)
    lasting: dict[str, Node] = field(default_factory=dict)
    since: list[dict[str, Node | None]] = field(default_factory=list)

    def change(self, **to: Node | None) -> None:
        self.apply(self.names, to)
        self.since.append(to)

    def sync(self) -> None:
        self.lasting, self.since = dict(self.names), []

    def found(self, keep: Names) -> dict[str, Node]:
        names = dict(self.lasting)
        for change in self.since:
            if keep(self):
                self.apply(names, change)
        return names

    @staticmethod
    def apply(names: dict[str, Node], change: dict[str, Node | None]) -> None:
        for name, node in change.items():
            if node is None:
                names.pop(name, None)
            else:
                names[name] = node


Node = File | Folder
Tree = dict[str, bytes | None]  # what is in a folder, by path; None is a folder


class Disk:
    """What a program sees, and what of it would last."""

    def __init__(self) -> None:
        self.root = Folder()

    def play(self, record: Record) -> None:
        if not record.path:  # the folder itself, which was there before
            assert record.op is Op.SYNC
            self.root.sync()
            return
        folder, name = self._place(record.path)
        match record.op:
            case Op.CREATE:
                folder.change(**{name: File()})
            case Op.MKDIR:
                folder.change(**{name: Folder()})
            case Op.UNLINK | Op.RMDIR:
                folder.change(**{name: None})
            case Op.WRITE | Op.TRUNCATE:
                node = folder.names[name]
                assert isinstance(node, File)
                node.since.append((record.at, record.data if record.op is Op.WRITE else None))
            case Op.RENAME | Op.LINK:
                to, new = self._place(record.other)
                assert to is folder, "between two folders it would be two things"
                gone: dict[str, Node | None] = {name: None} if record.op is Op.RENAME else {}
                folder.change(**gone, **{new: folder.names[name]})
            case Op.SYNC:
                folder.names[name].sync()

    def _place(self, path: str) -> tuple[Folder, str]:
        folder = self.root
        *above, name = PurePosixPath(path).parts
        for part in above:
            below_ = folder.names[part]
            assert isinstance(below_, Folder)
            folder = below_
        return folder, name

    def seen(self) -> Tree:
        """As the program sees it."""
        return dict(_walk(self.root, every, yes, ""))

    def cut(self, names: Names, data: Keep) -> Tree:
        """As it is after a cut now; what arrived of changes to names, and of those to contents."""
        return {path: content for path, content in _walk(self.root, names, data, "") if not path.endswith(FLEETING)}


def _walk(folder: Folder, names: Names, data: Keep, at: str) -> Iterator[tuple[str, bytes | None]]:
    for name, node in folder.found(names).items():
        if isinstance(node, Folder):
            yield at + name, None
            yield from _walk(node, names, data, f"{at}{name}/")
        else:
            yield at + name, node.content(data)


def yes() -> bool:
    return True


def no() -> bool:
    return False


def every(folder: Folder) -> bool:
    return True


def none(folder: Folder) -> bool:
    return False


def leaf(folder: Folder) -> bool:
    """It has no folders in it."""
    return not any(isinstance(node, Folder) for node in folder.names.values())


def some(number: random.Random) -> Keep:
    share = number.choice((0.2, 0.5, 0.8))
    return lambda: number.random() < share


def some_names(number: random.Random) -> Names:
    keep = some(number)
    return lambda folder: keep()


# What may have arrived: names, and contents. A file whose name arrived without its content is the case that most programs forget.
ARRIVED: dict[str, Callable[[random.Random], tuple[Names, Keep]]] = {
    "nothing": lambda number: (none, no),
    "names": lambda number: (every, no),
    "inner names": lambda number: (leaf, no),
    "all": lambda number: (every, yes),
    "some": lambda number: (some_names(number), some(number)),
    "some contents": lambda number: (every, some(number)),
    "some names": lambda number: (some_names(number), yes),
}


@dataclass(frozen=True, slots=True)
class Cut:
    """What is there after a power cut, and what the program had marked by then."""

    at: int  # records before it
    arrived: str
    tree: Tree
    marks: tuple[str, ...]


def cuts(
    records: Sequence[Record],
    arrived: Sequence[str],
    moment: Callable[[int], bool] = lambda at: True,
    ignored: Callable[[Record], bool] | None = None,
) -> Iterator[Cut]:
    """Cuts after each record that `moment` names, no two the same.

    Args:
        ignored: syncs that do nothing. Then only cuts that differ for it.
    """
    disk, whole, marks, seen = Disk(), Disk(), list[str](), set[int]()
    differs = ignored is None
    for at, record in enumerate(records, 1):
        if record.op is Op.MARK:
            marks.append(record.path)
        else:
            whole.play(record)
            if ignored is not None and record.op is Op.SYNC and ignored(record):
                differs = True
            else:
                disk.play(record)
        for name in arrived if differs and moment(at) else ():
            tree = disk.cut(*ARRIVED[name](random.Random(f"{at}/{name}")))
            if ignored is not None and tree == whole.cut(*ARRIVED[name](random.Random(f"{at}/{name}"))):
                continue
            key = hash((frozenset(tree.items()), len(marks)))
            if key not in seen:
                seen.add(key)
                yield Cut(at, name, tree, tuple(marks))


def write_tree(tree: Tree, target: Path) -> None:
    target.mkdir()
    for path, content in tree.items():
        if content is None:
            os.mkdir(target / path)
        else:
            (target / path).write_bytes(content)


def read_tree(folder: Path) -> Tree:
    found = {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}
    return {path: content for path, content in found.items() if not path.endswith(FLEETING)}
