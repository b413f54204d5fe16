"""The disk that the power cuts are tried on, by itself."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.durability.disk import ARRIVED, Disk, Op, Record, Tree, below

WRITTEN = [
    Record(Op.MKDIR, "f"),
    Record(Op.CREATE, "f/a.draft"),
    Record(Op.WRITE, "f/a.draft", at=0, data=b"x" * 600),
    Record(Op.RENAME, "f/a.draft", "f/a"),
]
SYNCED = [WRITTEN[0], Record(Op.SYNC, ""), *WRITTEN[1:3], Record(Op.SYNC, "f/a.draft"), WRITTEN[3], Record(Op.SYNC, "f")]


def after(records: list[Record], arrived: str) -> Tree:
    disk = Disk()
    for record in records:
        disk.play(record)
    return disk.cut(*ARRIVED[arrived](random.Random(0)))


@pytest.mark.parametrize(
    ("arrived", "left"),
    [
        ("nothing", {}),
        ("names", {"f": None, "f/a": b""}),
        ("inner names", {}),
        ("all", {"f": None, "f/a": b"x" * 600}),
    ],
)
def test_what_was_not_synced_may_be_lost(arrived: str, left: Tree) -> None:
    assert after(WRITTEN, arrived) == left


@pytest.mark.parametrize("arrived", ARRIVED)
def test_what_was_synced_is_there(arrived: str) -> None:
    assert after(SYNCED, arrived) == {"f": None, "f/a": b"x" * 600}


@pytest.mark.parametrize("arrived", ARRIVED)
def test_a_rename_is_one_thing(arrived: str) -> None:
    """A file is under one name or the other, and what it replaces is there until then."""
    again = [Record(Op.CREATE, "f/b"), Record(Op.WRITE, "f/b", at=0, data=b"y"), Record(Op.SYNC, "f/b")]
    found = after([*SYNCED, *again, Record(Op.SYNC, "f"), Record(Op.RENAME, "f/b", "f/a")], arrived)
    assert found in ({"f": None, "f/a": b"x" * 600, "f/b": b"y"}, {"f": None, "f/a": b"y"})


def test_a_write_may_arrive_in_part_and_a_later_one_without_it() -> None:
    disk = Disk()
    for record in [*SYNCED, Record(Op.TRUNCATE, "f/a", at=1), Record(Op.WRITE, "f/a", at=1024, data=b"z" * 1024)]:
        disk.play(record)
    parts = iter([False, False, True])  # the truncation, and half of the write
    assert disk.cut(lambda folder: True, lambda: next(parts))["f/a"] == b"x" * 600 + b"\0" * 936 + b"z" * 512


def test_records_of_one_folder() -> None:
    records = [
        Record(Op.MKDIR, "/runs/one"),
        Record(Op.RENAME, "/runs/one/a", "/runs/one/b"),
        Record(Op.SYNC, "/runs/one", "durable.py:sync:1"),
        Record(Op.MARK, "/runs/one/named 3"),
        Record(Op.UNLINK, "/runs/other/a"),
    ]
    assert below(records, Path("/runs/one")) == [
        Record(Op.RENAME, "a", "b"),
        Record(Op.SYNC, "", "durable.py:sync:1"),
        Record(Op.MARK, "named 3"),
    ]
