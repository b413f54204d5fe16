"""What is shown of one run: read of its folder when it is asked for, and kept as long as the files are the same.

Nothing in the folder is changed, and nothing stays open: who writes the journal closes it as if nobody had looked.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from pathlib import Path
from threading import Lock
from typing import Any, Final, TypeVar, cast

from rollyard.dashboard import lists
from rollyard.dashboard.feed import Feed
from rollyard.dashboard.figures import figures
from rollyard.dashboard.histograms import histograms, lags, told_lengths
from rollyard.dashboard.options import shown
from rollyard.dashboard.overview import overview
from rollyard.dashboard.state import State, going, state_of
from rollyard.dashboard.timeline import Whole
from rollyard.dashboard.told import (
    RUNNING,
    GroupRows,
    GroupShown,
    Histograms,
    OptionShown,
    Overview,
    Pulse,
    RolloutRows,
    RolloutShown,
    Steps,
    Timeline,
)
from rollyard.inspect.rows import MetricRows
from rollyard.inspect.select import Wanted
from rollyard.inspect.simulated import refuse
from rollyard.inspect.source import Source, goes_on
from rollyard.inspect.words import Words, words_of
from rollyard.journal.folder import RunFolder
from rollyard.journal.quiet import LOG
from rollyard.watch.kept import Kept, read_kept, traces_last, with_news, with_trace
from rollyard.watch.prometheus import exposition

RESTS: Final = 9  # times as long as it takes to make the timeline of a run that goes on, it is left as it is
KEPT: Final = 64  # answers
NO_TIMELINE: Final = "a run keeps its timeline from the end of its setup on, and this one has none"
STARTING: Final = "the run does not say what its devices do: it is starting, or busy"

T = TypeVar("T")


class Shown:
    """One run. One question is answered at a time, whoever asks: the machine is for the run.

    Every call may raise JournalError or OSError where the file that it needs is damaged, or not there.
    """

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self._lock = Lock()
        self._kept: OrderedDict[Hashable, tuple[object, object]] = OrderedDict()
        self._rows, self._feed = MetricRows(folder.metrics), Feed(folder.path)
        self._clock, self._rests = time.monotonic, 0.0
        self._heard: Whole | None = None

    def overview(self) -> Overview:
        """See `told.Overview`."""
        with self._lock:
            return self._overview()

    def steps(self, after: int) -> Steps:
        """Those beyond this one."""
        with self._lock:
            lines = [line for line in self._rows.rows() if line["step"] > after]
        names = tuple(dict.fromkeys(name for line in lines for name in line))
        return Steps(names, tuple(tuple(line.get(name) for name in names) for line in lines))

    def pulse(self, after: int) -> Pulse:
        """What is new since this step was done."""
        with self._lock:
            goes_on = going(self.folder)  # before the rows: of one that is over, they are all there
            live, state = (self._feed.live(), None) if goes_on else (None, self._state())
            rows = self._rows.rows()
            last = rows[-1]["step"] if rows else 0
            new = tuple(line for line in rows if line["step"] > after)
            name, cause = (RUNNING, "") if state is None else (state.name, state.cause)
            return Pulse(name, cause, live, self._rows.files, last, new)

    def metrics(self) -> bytes:
        """For Prometheus."""
        with self._lock:
            told, rows = self._overview(), self._rows.rows()
            live = self._feed.live() if told.state == RUNNING else None
            return exposition(figures(told, live, rows[-1] if rows else {}))

    def timeline(self, start_ns: int, end_ns: int, width: int) -> Timeline:
        """Of what the run keeps and left, or of what it says while it goes on."""
        with self._lock:
            state = self._state()
            whole = self._whole(state)
            if whole is None:
                return Timeline(0, 0, 0, (), why=STARTING if state.name == RUNNING else NO_TIMELINE)
            return whole.within(start_ns, end_ns, width)

    def _whole(self, state: State) -> Whole | None:
        path, trace = self.folder.timeline, self.folder.trace
        stamp = _stamp(path), _stamp(trace)
        kept = self._same("kept", stamp[0], lambda: read_kept(path))
        if state.name == RUNNING or not traces_last(kept, trace) or (kept is None and state.report is None):
            return self._followed(kept, stamp, going=state.name == RUNNING)
        return self._same("trace", stamp, lambda: Whole(with_trace(kept, trace)))

    def _followed(self, kept: Kept | None, stamp: Hashable, *, going: bool) -> Whole | None:
        """With what was heard of its devices. It is made anew as often as takes a tenth of the time, and once it is over."""
        began = self._clock()
        if going and began < self._rests:
            return self._heard
        heard = self._feed.traced(ask=going)
        if heard is None and kept is None:
            return None
        moment = None if heard is None else heard.end_ns
        self._heard = self._same("heard", (moment, stamp, going), lambda: Whole(with_news(kept, heard, going=going)).ready())
        self._rests = self._clock() + RESTS * (self._clock() - began)
        return self._heard

    def histograms(self) -> Histograms:
        """See `told.Histograms`."""
        with self._lock:
            return self._same("histograms", self._stamp(), self._histograms)

    def groups(self, wanted: Wanted) -> GroupRows:
        """A page of them."""
        if not self.folder.journal.exists():
            return GroupRows(0, ())
        return self._read(("groups", wanted), lambda source: lists.group_rows(source, wanted))

    def rollouts(self, wanted: Wanted) -> RolloutRows:
        """A page of them."""
        if not self.folder.journal.exists():
            return RolloutRows(0, ())
        return self._read(("rollouts", wanted), lambda source: lists.rollout_rows(source, wanted))

    def group(self, group: int) -> GroupShown:
        """Raises ConfigError when there is none."""
        self._check_journal("a group")
        return self._read(("group", group), lambda source: lists.group(source, group, self._words()[0]))

    def rollout(self, group: int, member: int) -> RolloutShown:
        """Raises ConfigError when there is none."""
        self._check_journal("a rollout")
        return self._read(("rollout", group, member), lambda source: lists.rollout(source, group, member, *self._words()))

    def options(self) -> tuple[OptionShown, ...]:
        """All of them."""
        return shown(self.folder)

    # ------------------------------------------------------------------------------------------------- reading

    def _state(self) -> State:
        return self._same("state", self._stamp(), lambda: state_of(self.folder))

    def _overview(self) -> Overview:
        state = self._state()
        live = self._feed.live() if state.name == RUNNING else None
        stamp = (self._stamp(), None if live is None else live.wall_s)
        return self._same("overview", stamp, lambda: overview(self.folder, state, self._rows.rows(), live))

    def _histograms(self) -> Histograms:
        stale = self._overview().staleness
        if not self.folder.journal.exists():
            return Histograms(lengths=told_lengths(self.folder.lengths), staleness=lags(stale))
        with Source(self.folder) as source:
            return histograms(source, stale)

    def _read(self, key: Hashable, read: Callable[[Source], T]) -> T:
        def made() -> T:
            with Source(self.folder) as source:
                found = read(source)
                source.check_unchanged()
                return found

        with self._lock:
            return self._same(key, self._stamp(), made)

    def _words(self) -> tuple[Words | None, str]:
        """The tokenizer, which is the same in all checkpoints."""
        key = "words"
        if key in self._kept and self._kept[key][1] is not None:
            return cast(tuple[Words | None, str], self._kept[key][1])
        found = words_of(self.folder)
        if found[0] is not None:
            self._kept[key] = ("", found)
        return found

    def _check_journal(self, what: str) -> None:
        if self.folder.scenario.exists():
            refuse(what, self.folder)

    def _stamp(self) -> Hashable:
        """Another one once what the run has written is another."""
        folder = self.folder
        log = folder.journal.with_name(folder.journal.name + LOG)
        files = (folder.journal, log, folder.metrics, folder.report, folder.config, folder.scenario, folder.lengths)
        return (goes_on(folder), *map(_stamp, files))

    def _same(self, key: Hashable, stamp: Hashable, make: Callable[[], T]) -> T:
        """What was made of the same files, or is made now."""
        found = self._kept.pop(key, None)
        if found is None or found[0] != stamp:
            found = (stamp, make())
        self._kept[key] = found
        while len(self._kept) > KEPT:
            self._kept.popitem(last=False)
        return cast(T, found[1])


def _stamp(path: Path) -> Any:
    try:
        about = path.stat()
    except OSError:
        return None
    return about.st_ino, about.st_size, about.st_mtime_ns
