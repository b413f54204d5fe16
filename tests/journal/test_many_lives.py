"""A journal tells the next life of a run what a list of everything that happened would have told it."""

from contextlib import suppress
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from rollyard.journal.check import Kind, check_journal
from rollyard.journal.journal import Journal
from rollyard.journal.recover import read_past
from rollyard.types import WeightVersion
from tests.journal.histories import Entry, Life, Row, left
from tests.journal.records import RUN

MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None  # where nobody waits for a disk
WRITES = ("before flush", "after flush", "before checkpoint", "after checkpoint", "none")


class Killed(BaseException):
    """The process is, at this point."""


class History:
    """One run, life after life, and beside it what its journal must know."""

    def __init__(self, random: Random, path: Path) -> None:
        self.random, self.path = random, path
        self.rows: list[Row] = []  # checkpoints that were committed, the newest last
        self.lives: list[list[Entry]] = []  # what was written, of each life
        self.held: list[Entry] = []
        self.saving: list[Row] = []
        self.kill, self.writes = "none", 0  # where, at how many writes of that name from now

    def at(self, name: str) -> None:
        if name.startswith("after"):
            self.lives[-1] += self.held
            self.held = []
        if name == "after checkpoint":
            self.rows += self.saving
        if name == self.kill:
            self.writes -= 1
            if self.writes < 0:
                raise Killed

    def live(self, broken: frozenset[str]) -> None:
        """One more life, which ends somehow."""
        random, number = self.random, len(self.lives)
        row = next((row for row in reversed(self.rows) if row.folder not in broken), None)
        done, found = left(row, self.lives)
        if self.lives:
            past = read_past(self.path, lambda folder: folder not in broken)
            assert (past.version, past.checkpoint) == ((row.version, row.folder) if row else (WeightVersion(0), ""))
            assert (past.done, past.recovered, past.lives) == (done, found, number)
        life = Life(random, number, row, done, found)
        self.kill, self.writes = random.choice(WRITES), random.randint(0, 3)
        self.lives.append([])
        self.held = []
        journal = Journal(self.path, RUN, at=self.at)
        journal.record_beginning(life.begun)
        with suppress(Killed):
            self._live(journal, life)
        journal.abandon()
        sound = check_journal(self.path, lambda folder: True)
        assert [finding for finding in sound.findings if finding.kind is not Kind.CHECKPOINT] == []  # they have no folders

    def _live(self, journal: Journal, life: Life) -> None:
        def step(entries: list[Entry]) -> None:
            self.held += entries
            journal.record_step(entries)

        step(life.open())
        for _ in range(self.random.randint(0, 120)):
            step(life.act())
            if self.random.random() < 0.1:
                journal.flush()
            if life.version.step and self.random.random() < 0.05:
                folder = f"{life.version.step}.{life.life}.{len(self.rows)}"
                self.saving = [Row(life.version, folder, life.weights)]
                journal.commit_checkpoint(life.version, folder, 0, {}).result(60)
        if self.random.random() < 0.5:
            step(life.stop())
            journal.flush()


@settings(max_examples=40, deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))  # a seed has nothing to shrink
@given(st.integers(0, 2**32))
def test_every_life_takes_over_what_the_ones_before_had_written(seed: int) -> None:
    random = Random(seed)
    with TemporaryDirectory(dir=MEMORY) as folder:
        history = History(random, Path(folder) / "journal.sqlite")
        for _ in range(random.randint(2, 5)):
            names = [row.folder for row in history.rows]
            history.live(frozenset(name for name in names if random.random() < 0.2))
