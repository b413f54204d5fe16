"""What a run's devices did, as far as it was told piece by piece (`watch.live`): what the run knows itself, or coarser."""

from __future__ import annotations

from collections.abc import Sequence

from rollyard.types import Activity, Interval
from rollyard.watch.devices import Lane
from rollyard.watch.lanes import fewer
from rollyard.watch.live import Asked, LaneNews, News, Place
from rollyard.watch.slots import Stretch
from rollyard.watch.trace import DRIVER, OF_DRIVER, Mark, Traced

LEAST = 64  # intervals of a lane, however many lanes there are

Key = tuple[Activity, str, int]  # when it began


class Lanes:
    """All that was heard.

    Args:
        most: intervals of all lanes that are kept, and half as many steps, and of the driver what is drawn. Beyond, those of a
            lane are made fewer (`lanes.fewer`), and every other step is left out. None: all that is told is kept.
    """

    def __init__(self, most: int | None = None) -> None:
        self._most = most
        self._heads: dict[int, LaneNews] = {}
        self._intervals: dict[int, dict[Key, Interval]] = {}
        self._places: dict[int, Place] = {}
        self._marks: list[Mark] = []
        self._told = 0  # marks
        self._bounds = 0, 0
        self._built_ns: int | None = None

    def known(self) -> Asked:
        """What need not be told again."""
        places = tuple(self._places.get(lane, Place()) for lane in range(max(self._places, default=-1) + 1))
        return Asked(places, self._told)

    def take(self, news: News) -> None:
        """What was told of what is beyond `known`."""
        self._bounds, self._built_ns = (news.start_ns, news.now_ns), news.built_ns
        self._told += len(news.marks)
        self._marks += [Mark(step, at) for step, at in news.marks]
        for lane in news.lanes:
            if self._places.get(lane.lane, lane.place).generation != lane.place.generation:
                self._intervals[lane.lane] = {}
            found = self._intervals.setdefault(lane.lane, {})
            for each in lane.intervals:
                if self._most is not None and lane.name == DRIVER and each.activity not in OF_DRIVER:
                    continue
                key = each.activity, each.what, each.start_ns
                found[key] = each
            self._heads[lane.lane], self._places[lane.lane] = lane, lane.place
        if self._most is not None:
            self._bound(self._most)

    def _bound(self, most: int) -> None:
        each = max(most // max(len(self._intervals), 1), LEAST)
        for lane, found in self._intervals.items():
            if len(found) > each:
                self._intervals[lane] = _less(list(found.values()), each // 2)
        while len(self._marks) > most // 2:
            self._marks = self._marks[1::2]

    def traced(self, slots: Sequence[Stretch] = ()) -> Traced:
        """As a run leaves it at its end, up to now."""
        start, now = self._bounds
        setup = Interval(Activity.SETUP, start, self._built_ns or now)
        lanes, driver = list[Lane](), list[Interval]()
        for number, head in sorted(self._heads.items()):
            intervals = list(self._intervals[number].values())
            if head.name == DRIVER:
                driver += intervals
            else:
                lanes.append(Lane(head.name, head.roles, [setup, *intervals], head.since_ns, head.until_ns, head.devices))
        return Traced((Lane(DRIVER, (DRIVER,), driver), *lanes), tuple(self._marks), start, now, slots=slots)


def _less(intervals: list[Interval], most: int) -> dict[Key, Interval]:
    """The last one of each kind may go on, and stays as it is."""
    ordered = sorted(intervals, key=lambda each: each.start_ns)
    last = {(each.activity, each.what): at for at, each in enumerate(ordered)}
    rest = [each for at, each in enumerate(ordered) if last[each.activity, each.what] != at]
    kept = [*fewer(rest, most), *(ordered[at] for at in last.values())]
    return {(each.activity, each.what, each.start_ns): each for each in kept}
