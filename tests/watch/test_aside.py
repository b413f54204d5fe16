"""Sinks on threads of their own: what they are told over the lives of a run, and what befalls one that fails or hangs."""

import asyncio
import json
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, current_thread

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollyard.protocols.devices import Tracked
from rollyard.watch.aside import FOLDER, Aside, Record, Tell

SUMMARY: Record = {"run/steps": 3}


class Book:
    """What a tracker keeps of a run, over its lives."""

    def __init__(self, takes_back: bool = False) -> None:
        self.takes_back = takes_back
        self.steps: list[int] = []
        self.evaluated_: list[int] = []
        self.opened: list[Tracked] = []
        self.closed: list[tuple[Record, bool]] = []
        self.threads: set[str] = set()

    def open(self, run: Tracked) -> str:
        self.opened.append(run)
        if self.takes_back:
            self.steps = [step for step in self.steps if step <= run.begins]
            self.evaluated_ = [step for step in self.evaluated_ if step <= run.begins]
        return run.id or "the-first"

    def write(self, record: Record) -> None:
        self.threads.add(current_thread().name)
        self.steps.append(int(str(record["step"])))

    def evaluated(self, record: Record) -> None:
        self.evaluated_.append(int(str(record["step"])))

    def close(self, summary: Record, failed: bool) -> None:
        self.closed.append((summary, failed))


def run(folder: Path, begins: int = 0, again: bool = False) -> Tracked:
    earlier = tuple({"step": step} for step in range(1, begins + 1))
    return Tracked("r", folder, "p", {"run": {"steps": 3}}, again, begins, earlier)


def aside(sink: Book, **given: float) -> Aside:
    return Aside("book", lambda tell: sink, **given)  # type: ignore[arg-type]


async def live(folder: Path, sink: Book, begins: int, ends: int, again: bool) -> None:
    """A life that trains these steps, and evaluates every second version."""
    writer = aside(sink)
    writer.open(run(folder, begins, again))
    for step in range(begins, ends + 1):
        if step > begins:
            writer.write({"step": step})
        if step % 2 == 0:
            writer.evaluated({"step": step})
    writer.close(SUMMARY, failed=True)
    await writer.closed()


async def test_told_in_order_elsewhere(tmp_path: Path) -> None:
    sink = Book()
    await live(tmp_path, sink, 0, 5, again=False)
    assert sink.steps == [1, 2, 3, 4, 5] and sink.evaluated_ == [0, 2, 4]
    assert sink.closed == [(SUMMARY, True)] and sink.threads == {"sink book"}
    assert json.loads((tmp_path / FOLDER / "book.json").read_text()) == {"id": "the-first", "step": 5, "evaluated": 4}


@settings(max_examples=25, deadline=None)
@given(st.booleans(), st.lists(st.tuples(st.integers(0, 6), st.integers(0, 4)), min_size=1, max_size=4))
def test_no_step_twice_and_none_missing_whatever_is_done_again(takes_back: bool, lives: list[tuple[int, int]]) -> None:
    """Each life begins with a checkpoint of the one before, and does some steps again."""
    sink, done = Book(takes_back), 0
    with TemporaryDirectory() as folder:
        for number, (back, on) in enumerate(lives):
            begins = max(done - back, 0) if number else 0
            asyncio.run(live(Path(folder), sink, begins, begins + on, again=number > 0))
            done = begins + on
            furthest = done if takes_back else max(sink.steps, default=0)
            assert sink.steps == list(range(1, furthest + 1)) and furthest >= done
            assert sink.evaluated_ == sorted(set(sink.evaluated_))
        assert [each.id for each in sink.opened] == ["", *["the-first"] * (len(lives) - 1)]


async def test_one_that_comes_late_is_told_what_it_missed(tmp_path: Path) -> None:
    sink = Book()
    await live(tmp_path, sink, 3, 5, again=True)
    assert sink.steps == [1, 2, 3, 4, 5]


# --------------------------------------------------------------------------------------------- what goes wrong


class Failing(Book):
    def __init__(self, where: str) -> None:
        super().__init__()
        self._where = where

    def _may(self, where: str) -> None:
        if where == self._where:
            raise SystemExit(3) if where == "close" else KeyError("no\nroom")

    def open(self, run: Tracked) -> str:
        self._may("open")
        return super().open(run)

    def write(self, record: Record) -> None:
        if record["step"] == 2:
            self._may("write")
        super().write(record)

    def evaluated(self, record: Record) -> None:
        self._may("evaluated")

    def close(self, summary: Record, failed: bool) -> None:
        self._may("close")


@contextmanager
def told(*wanted: str) -> Iterator[None]:
    """These warnings, each once and in this order, and no other."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    said = [str(each.message) for each in caught]
    assert len(said) == len(wanted) and all(text in each for text, each in zip(wanted, said, strict=True)), said


@pytest.mark.parametrize("where", ["make", "open", "write", "evaluated", "close"])
async def test_one_that_fails_warns_once(tmp_path: Path, where: str) -> None:
    def make(tell: Tell) -> Book:
        if where == "make":
            raise ImportError("no such thing")
        return Failing(where)

    writer = Aside("book", make)
    with told("book: it failed, and is told nothing more: "):
        writer.open(run(tmp_path))
        writer.evaluated({"step": 0})
        for step in range(1, 5):
            writer.write({"step": step})
            await asyncio.sleep(0.01)
        writer.close(SUMMARY, failed=False)
        await writer.closed()
        writer.hear()


async def test_a_damaged_note_is_a_failure_too(tmp_path: Path) -> None:
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "book.json").write_text('{"id": ')
    writer, sink = aside(Book()), Book()
    with told("it failed, and is told nothing more: JSONDecodeError"):
        writer.open(run(tmp_path))
        writer.close(SUMMARY, failed=False)
        await writer.closed()
    assert not sink.opened


class Slow(Book):
    """Takes a record at a time, when it is let."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self._where, self.let, self.arrived = where, Event(), Event()

    def open(self, run: Tracked) -> str:
        if self._where == "open":
            self.arrived.set()
            self.let.wait(10)
        return super().open(run)

    def write(self, record: Record) -> None:
        if self._where == "write":
            self.arrived.set()
            self.let.wait(10)
        super().write(record)

    def close(self, summary: Record, failed: bool) -> None:
        if self._where == "close":
            self.let.wait(10)
        super().close(summary, failed)


@pytest.mark.parametrize("where", ["open", "write", "close"])
async def test_one_that_hangs_is_left_alone(tmp_path: Path, where: str) -> None:
    sink = Slow(where)
    writer = aside(sink, limit_s=0.05)
    began = time.monotonic()
    with told("book: it is not done within 0.05 s, and left alone"):
        writer.open(run(tmp_path))
        for step in range(1, 4):
            writer.write({"step": step})
        writer.close(SUMMARY, failed=False)
        await writer.closed()
    assert time.monotonic() - began < 2.0
    sink.let.set()


async def test_what_there_is_no_room_for_is_counted(tmp_path: Path) -> None:
    sink = Slow("write")
    writer = aside(sink, room=3)
    with told("book: it is slow: 3 records wait for it", "book: 4 records were dropped in all"):
        writer.open(run(tmp_path))
        writer.write({"step": 1})
        assert await asyncio.to_thread(sink.arrived.wait, 5)
        for step in range(2, 9):
            writer.write({"step": step})
        sink.let.set()
        writer.close(SUMMARY, failed=False)
        await writer.closed()
    assert writer.dropped == 4 and sink.steps == [1, 2, 3, 4] and sink.closed


async def test_what_it_says_is_told_where_the_run_is(tmp_path: Path) -> None:
    def make(tell: Tell) -> Book:
        tell("it is offline")
        return Book()

    writer = Aside("book", make)
    with told("book: it is offline"):
        writer.open(run(tmp_path))
        writer.close(SUMMARY, failed=False)
        await writer.closed()
        writer.hear()


async def test_one_that_was_never_opened_is_not_waited_for() -> None:
    writer = aside(Book())
    given: Mapping[str, object] = {"step": 1}
    writer.write(given)
    writer.close(SUMMARY, failed=True)
    await writer.closed()
