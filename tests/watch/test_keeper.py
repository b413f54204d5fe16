"""The timeline that a run keeps while it goes on: when, how much of it, and what becomes of it where it cannot be written."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rollyard.durable import write_file
from rollyard.stats import SlotsNow
from rollyard.types import Activity
from rollyard.watch import kept as kept_module
from rollyard.watch.accounts import Accounts
from rollyard.watch.heard import Lanes
from rollyard.watch.keeper import EVERY_S, RESTS, YOUNG, Keeper
from rollyard.watch.kept import MOST, Kept, read_kept
from rollyard.watch.spans import SpanLog
from rollyard.watch.timeline import Timeline

S = 1_000_000_000


class Life:
    """A run whose clock is ours."""

    def __init__(self, path: Path, began_ns: int = 1000) -> None:
        self.path, self.now_ns = path, began_ns
        self.timeline = Timeline(lambda: self.now_ns)
        self.accounts = Accounts(self.timeline)
        self.engine = SpanLog(lambda: self.now_ns)
        self.accounts.watch("engine-0", "engine", self.engine)
        self.keeper = Keeper(path / "timeline.json", self.accounts, clock=lambda: self.now_ns / 1e9)
        self.writes = 0
        self.step = 0

    def begin(self) -> None:
        self.accounts.built()
        self.keeper.begin()

    async def go_on(self, seconds: float, steps: int = 0) -> None:
        """And look for what is due, as the loop does."""
        with self.engine.doing(Activity.GENERATE):
            self.now_ns += int(seconds * S * 0.75)
        self.now_ns += int(seconds * S * 0.25)
        for _ in range(steps):
            self.step += 1
            self.accounts.stepped(self.step)
        self.accounts.slots.note(self.now_ns, SlotsNow(3, 4, 7))
        self.timeline.seconds()
        before = self.keeper._writing
        self.keeper.keep()
        if self.keeper._writing is not None and self.keeper._writing is not before:
            self.writes += 1
            await asyncio.wait((self.keeper._writing,))

    def kept(self) -> Kept:
        found = read_kept(self.path / "timeline.json")
        assert found is not None
        return found


async def test_it_is_never_far_behind_and_written_seldom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.thread_time", lambda: 0.0)
    life = Life(tmp_path)
    await life.go_on(1.0)
    assert life.writes == 0, "it has not begun"
    life.begin()
    for _ in range(500):
        await life.go_on(0.2, steps=1)
        behind_s = (life.now_ns - 1000 - life.kept().end_ns) / 1e9
        assert behind_s <= min(EVERY_S, life.now_ns / 1e9 / YOUNG) + 0.4
    assert life.writes < 100 / EVERY_S + 8 * YOUNG
    kept = life.kept()
    assert kept.marks[-1].step > 470 and kept.slots[-1][2:] == (0.75, 7.0) and not kept.whole


async def test_where_it_takes_long_it_is_done_seldom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A five hundredth of the time, or less."""
    taken = 0.0

    def slow() -> float:
        nonlocal taken
        taken += 0.05
        return taken

    monkeypatch.setattr("time.thread_time", slow)
    life = Life(tmp_path)
    life.begin()
    for _ in range(1000):
        await life.go_on(0.2)
    assert life.writes == 200 / (RESTS * 0.1)


async def test_it_stays_small_however_long_the_run(tmp_path: Path) -> None:
    life = Life(tmp_path)
    life.begin()
    life.keeper._lanes = Lanes(512)
    for _ in range(3000):
        await life.go_on(0.001, steps=1)
    await life.go_on(1000.0)
    kept = life.kept()
    assert 50 < len(kept.lanes[1].intervals) <= 512 and len(kept.marks) <= 256
    busy = sum(each.end_ns - each.start_ns for each in kept.lanes[1].intervals if each.end_ns <= 3 * S)
    assert busy == pytest.approx(0.75 * 3 * S, rel=0.01)
    assert kept.marks[-1].step > 2900 and kept.end_ns == pytest.approx(1003 * S, rel=1e-3)
    assert (life.path / "timeline.json").stat().st_size < 50_000 and MOST == 8192


async def test_the_end_is_in_it_and_the_next_life_goes_on_after_it(tmp_path: Path) -> None:
    first = Life(tmp_path)
    first.begin()
    for _ in range(20):
        await first.go_on(0.2, steps=1)
    await first.keeper.close(tmp_path / "trace.json")
    kept = first.kept()
    assert kept.whole and kept.end_ns == 4 * S and [mark.step for mark in kept.marks] == list(range(1, 21))
    second = Life(tmp_path, 77)
    assert second.kept() == kept, "a life that has not begun changes nothing"
    second.begin()
    await second.go_on(0.2)
    killed = second.kept()
    assert (killed.whole, killed.lives, killed.clock_ns, killed.end_ns) == (False, (4 * S,), 77, 4 * S + S // 5)
    assert killed.marks == kept.marks and killed.lanes[1].intervals[: len(kept.lanes[1].intervals)] == kept.lanes[1].intervals


async def test_a_disk_that_is_full_is_told_of_once_and_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = 0

    def full(path: Path, content: bytes, *, at_once: bool) -> None:
        nonlocal tried
        tried += 1
        raise OSError(28, "No space left on device")

    life = Life(tmp_path)
    life.begin()
    monkeypatch.setattr(kept_module, "write_file", full)
    with pytest.warns(RuntimeWarning, match="No space left") as warned:
        for _ in range(60):
            await life.go_on(0.2, steps=1)
    assert len(warned) == 1 and 3 <= tried <= 5
    monkeypatch.setattr(kept_module, "write_file", write_file)
    for _ in range(30):
        await life.go_on(0.2, steps=1)
    assert life.kept().marks[0].step == 1 and life.kept().marks[-1].step > 60
    monkeypatch.setattr(kept_module, "write_file", full)
    with pytest.raises(OSError, match="No space left"):
        await life.keeper.close(tmp_path / "trace.json")
    assert (tmp_path / "trace.json").exists() and not life.kept().whole


async def test_what_cannot_be_read_is_told_of_and_begun_anew(tmp_path: Path) -> None:
    (tmp_path / "timeline.json").write_bytes(b"\x00\x00")
    life = Life(tmp_path)
    with pytest.warns(RuntimeWarning, match="what earlier lives did is lost"):
        life.begin()
    await life.go_on(0.2)
    assert life.kept().lives == ()
