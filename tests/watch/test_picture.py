from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from rollyard.types import Activity, Interval
from rollyard.watch.devices import Lane
from rollyard.watch.picture import COLOURS, LANES, LONG, SOME, picture
from rollyard.watch.trace import Mark, Traced

A = Activity
S = 10**9
SVG = "{http://www.w3.org/2000/svg}"


def run(engines: int, steps: int, setup: int = 0) -> Traced:
    """Each step: 6 s of generation, which gets shorter from engine to engine, 3 s of training, 1 s of weight sync."""
    starts = [(setup + 10 * step) * S for step in range(steps)]
    lanes = [Lane("driver", ("driver",), [Interval(A.SCORE, at + S, at + 6 * S) for at in starts])]
    for number in range(engines):
        written = [Interval(A.GENERATE, at, at + 6 * S - number * S // engines) for at in starts]
        synced = [Interval(A.SYNC, at + 9 * S, at + 10 * S, "load") for at in starts]
        lanes.append(Lane(f"engine-{number}", ("engine",), [Interval(A.SETUP, 0, setup * S), *written, *synced]))
    trained = [Interval(A.TRAIN, at + 6 * S, at + 9 * S, "step") for at in starts]
    lanes.append(Lane("trainer", ("trainer",), [Interval(A.SETUP, 0, setup * S), *trained], devices=4))
    marks = tuple(Mark(number, at + 10 * S) for number, at in enumerate(starts, 1))
    return Traced(tuple(lanes), marks, 0, (setup + 10 * steps) * S)


def parsed(traced: Traced, name: str = "run") -> ElementTree.Element:
    return ElementTree.fromstring(picture(name, traced))


def texts(root: ElementTree.Element) -> list[str]:
    return [each.text or "" for each in root.iter(f"{SVG}text")]


def paths(root: ElementTree.Element, activity: Activity) -> list[str]:
    return [each.attrib["d"] for each in root.iter(f"{SVG}path") if each.get("fill") == COLOURS[activity]]


def test_each_device_has_a_lane_and_each_activity_a_colour() -> None:
    root = parsed(run(2, 3))
    shown = texts(root)
    assert {"driver", "engine-0", "engine-1", "trainer × 4", "0 s", "5 s", "30 s", "1", "2", "3"} <= set(shown)
    assert "6 devices, 3 steps, 30 s. Where a lane is blank, it waits." in shown
    # of the time of 6 devices: 3 x (6 + 5.5) and 3 x 1 x 2 of two engines, 3 x 3 x 4 of four trainers, of 6 x 30 s
    assert {"train 20%", "generate 19%", "sync 3%", "score"} <= set(shown)
    (bars,) = paths(root, A.TRAIN)
    # 986 pixels for 30 s, in quarters of a pixel: 6 to 9 s, 16 to 19 s, 26 to 29 s
    assert re.findall(r"M([\d.]+) \d+h([\d.]+)v18", bars) == [("387", "99"), ("715.75", "98.75"), ("1044.5", "98.75")]


def test_of_very_many_the_shares_are_drawn_and_some_devices() -> None:
    root = parsed(run(LANES, 4))
    assert f"engine × {LANES}" in texts(root) and "share of time" in texts(root)
    assert sum(each.startswith("engine-") for each in texts(root)) == SOME
    assert len(picture("run", run(800, 4))) < 100_000


def test_a_long_run_is_shown_as_shares_of_its_steps_and_some_steps_close() -> None:
    root = parsed(run(2, LONG + 2))
    assert {"all steps", "steps 13 to 16", "engine × 2", "engine-1", "trainer × 4", "120 s", "160 s"} <= set(texts(root))
    titles = [each.text for each in root.iter(f"{SVG}title")]
    assert "trainer: train 30.0% of the time" in titles and "engine-0: generate 24 s" in titles


def test_a_long_setup_is_left_out_and_that_is_said() -> None:
    shown = texts(parsed(run(1, 3, setup=20)))
    assert "5 devices, 3 steps, 50 s, of which the first 19.4 s, setup, are left out. Where a lane is blank, it waits." in shown
    assert "0 s" not in shown and "30 s" in shown


def test_a_device_that_came_and_left_has_a_track_for_that_time() -> None:
    traced = run(2, 3)
    lanes = [each._replace(since_ns=10 * S, until_ns=20 * S) if each.device == "engine-1" else each for each in traced.lanes]
    root = parsed(Traced(tuple(lanes), traced.marks, 0, traced.end_ns))
    tracks = [each.attrib["width"] for each in root.iter(f"{SVG}rect") if each.get("class") == "track"]
    assert tracks == ["986", "986", "328.67", "986"]


def test_the_bytes_are_the_same_each_time_and_need_nothing_besides() -> None:
    told = picture("run", run(3, 5))
    assert told == picture("run", run(3, 5))
    assert re.findall(r"https?://[^\"]*", told) == ["http://www.w3.org/2000/svg"]
    assert "<script" not in told and "@import" not in told and "url(" not in told and "prefers-color-scheme: dark" in told


@pytest.mark.parametrize("traced", [Traced((), (), 0, 0), Traced((Lane("e", ("engine",), []),), (), 5, 5), run(0, 1)])
def test_there_may_be_nothing_to_show(traced: Traced) -> None:
    assert parsed(traced).tag == f"{SVG}svg"


def test_names_drive_nothing() -> None:
    lane = Lane("<e>\x1b[2J&\0", ("engine",), [Interval(A.GENERATE, 0, S)])
    root = parsed(Traced((lane,), (), 0, 2 * S), "a<b>\x07")
    assert "a<b>␇" in texts(root) and "<e>␛[2J&␀" in texts(root)
