"""What became of prompts, as trace events (PURE): a process each for prompts, every engine's requests, verdicts, steps, weights.

Where several go on at once, each has a lane of its own: the first that is free. Flows lead from a prompt over each member's
requests and verdict to the step that trained it, and from a step to every engine's switch to the version that it made.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from heapq import heappop, heappush
from itertools import count
from math import isfinite
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from rollyard.watch.requests import Followed, Judged, Learned, Life, Loaded, Stay

LANES: Final = 2**11  # of one trace at most
FEW: Final = 36  # engines that have a process each; more share one
LEAST_NS: Final = 1  # what takes no time at all still has a place
SPARE_NS: Final = 2  # after a slice: readers round microseconds, and what only touches must not overlap

Piece = Life | Stay | Judged | Learned | Loaded
Flows = Mapping[Piece, Sequence["Place"]]


class Timed(Protocol):
    """From when to when."""

    @property
    def start_ns(self) -> int: ...

    @property
    def end_ns(self) -> int: ...


Span = TypeVar("Span", bound=Timed)


class Track(NamedTuple):
    """A process of a trace, and its lanes: what they are called, and what is on them."""

    name: str
    lanes: Sequence[tuple[str, Sequence[Piece]]]


class Place(NamedTuple):
    """A flow comes by here: it begins (s), goes on (t) or ends (f)."""

    kind: str
    flow: int
    name: str


def shown(followed: Followed) -> Followed:
    """What can be shown of it: a trace has so many lanes at most."""
    while sum(len(track.lanes) for track in _tracks(followed)) > LANES and followed.every < 2**40:
        followed = followed.thinned(followed.every * 2)
    return followed


def lines(followed: Followed, first: int, start_ns: int) -> Iterator[str]:
    """Its events as JSON, of processes from the number `first` on. Times are microseconds after `start_ns`."""
    flows = _flows(followed)
    for pid, track in enumerate(_tracks(followed), first):
        yield json.dumps({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": track.name}})
        for tid, (name, pieces) in enumerate(track.lanes, 1):
            yield json.dumps({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}})
            for piece in pieces:
                yield from _slice(piece, f'"pid":{pid},"tid":{tid},"ts":{(piece.start_ns - start_ns) / 1e3:.3f}', flows)


def _tracks(followed: Followed) -> list[Track]:
    """In the order in which things go, so that what begins at one moment is in order, too."""
    some = f" (one in {followed.every:,})" if followed.every > 1 else ""
    engines: dict[str, list[Stay]] = defaultdict(list)
    for stay in followed.stays:
        engines[stay.engine].append(stay)
    if len(engines) > FEW:
        engines = {"all engines": list(followed.stays)}
    loads: dict[str, list[Piece]] = defaultdict(list)
    for load in followed.loads:
        loads[load.engine].append(load)
    found = [
        Track(f"prompts{some}", _numbered("prompt", followed.lives)),
        *(Track(f"requests of {name}{some}", _numbered("request", engines[name])) for name in sorted(engines)),
        Track(f"verdicts{some}", _numbered("verdict", followed.verdicts)),
        Track("training", _numbered("batch", followed.steps)),
        Track("weights", [(name, loads[name]) for name in sorted(loads)]),
    ]
    return [track for track in found if track.lanes]


def _numbered(name: str, pieces: Sequence[Any]) -> list[tuple[str, Sequence[Piece]]]:
    return [(f"{name} lane {number}", lane) for number, lane in enumerate(side_by_side(pieces), 1)]


def side_by_side(pieces: Sequence[Span]) -> list[list[Span]]:
    """In lanes where none overlaps another: each in the first that is free."""
    found: list[list[Span]] = []
    free: list[int] = []
    busy: list[tuple[int, int]] = []  # until when, and which
    for piece in sorted(pieces, key=lambda piece: piece.start_ns):
        while busy and busy[0][0] <= piece.start_ns:
            heappush(free, heappop(busy)[1])
        if not free:
            free.append(len(found))
            found.append([])
        lane = heappop(free)
        found[lane].append(piece)
        heappush(busy, (max(piece.end_ns, piece.start_ns + LEAST_NS), lane))
    return found


def _flows(followed: Followed) -> Flows:
    """Which flows come by each piece."""
    ways: dict[tuple[int, int], list[Piece]] = defaultdict(list)
    members: dict[int, dict[int, None]] = defaultdict(dict)
    stays: list[Stay | Judged] = sorted(followed.stays, key=lambda stay: stay.start_ns)
    for piece in [*stays, *followed.verdicts]:
        ways[piece.group, piece.member].append(piece)
        members[piece.group][piece.member] = None
    steps = {learned.step: learned for learned in followed.steps if learned.whole}
    found: dict[Piece, list[Place]] = defaultdict(list)
    numbers = count(1)
    for life in followed.lives:
        step = None if life.step is None else steps.get(life.step)
        ends = [member for member in members[life.group] if member not in life.left]
        for member in members[life.group]:
            last = [step] if step is not None and member in ends else []
            _lead(found, [life, *ways[life.group, member], *last], next(numbers), "rollout")
        if step is not None and not ends:  # all of it is of an earlier life of the run
            _lead(found, [life, step], next(numbers), "rollout")
    for load in followed.loads:
        if (made := steps.get(load.version.step - 1)) is not None:
            _lead(found, [made, load], next(numbers), "version")
    return found


def _lead(found: dict[Piece, list[Place]], way: Sequence[Piece], flow: int, name: str) -> None:
    for at, piece in enumerate(way):
        found[piece].append(Place("s" if at == 0 else "t" if at < len(way) - 1 else "f", flow, name))


def _slice(piece: Piece, where: str, flows: Flows) -> Iterator[str]:
    """It, and the flows that come by: at its beginning, after it in the file. Put together by hand: there are very many."""
    name, kind, told = _told(piece)
    length = max(piece.end_ns - piece.start_ns - SPARE_NS, LEAST_NS) / 1e3
    yield f'{{"ph":"X","name":"{name}","cat":"{kind}",{where},"dur":{length:.3f},"args":{{{told}}}}}'
    for place in flows.get(piece, ()):
        yield f'{{"ph":"{place.kind}","name":"{place.name}","cat":"flow","id":{place.flow},{where},"bp":"e"}}'


def _told(piece: Piece) -> tuple[str, str, str]:
    """What a slice is called, its category, and what it says of itself, as the inside of a JSON object."""
    match piece:
        case Stay():
            version = "null" if piece.version is None else piece.version
            told = f'"tokens":{piece.tokens},"version":{version},"finish":"{piece.finish}","attempt":{piece.attempt}'
            return f"prompt {piece.group}, member {piece.member}", "request", f'"engine":{json.dumps(piece.engine)},{told}'
        case Judged():
            return f"prompt {piece.group}, member {piece.member}", "verdict", f'"reward":{_number(piece.value)}'
        case Life():
            step = "" if piece.step is None else f'"step":{piece.step + 1},"reward_mean":{_number(piece.reward)},'
            return f"prompt {piece.group}", "prompt", f'{step}"fate":"{piece.fate}","members_dropped":{len(piece.left)}'
        case Learned():
            return f"step {piece.step + 1}", "step", f'"prompts":{piece.groups},"whole":{"true" if piece.whole else "false"}'
        case Loaded():
            return f"version {piece.version.step}", "version", f'"incarnation":{piece.version.incarnation}'


def _number(value: float | None) -> str:
    """JSON has no words for what is not finite."""
    return repr(float(value)) if value is not None and isfinite(value) else "null"
