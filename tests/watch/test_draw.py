import io
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console, Group, RenderableType

from rollyard.chaos.survival import Survived, Tally
from rollyard.types import Canary, Handed
from rollyard.watch.devices import DeviceTime, PoolTime
from rollyard.watch.draw import WIDEST, LivePanel, bar, cells, duration, places, shares, sparkline, stacked, table
from rollyard.watch.eta import Left
from rollyard.watch.report import (
    Counts,
    EvalRewards,
    Filtering,
    Finished,
    Lengths,
    Report,
    RewardCurve,
    TokenLedger,
    Usage,
    WeightTraffic,
)
from rollyard.watch.roofline import Operation
from rollyard.watch.snapshot import Header, Snapshot
from rollyard.watch.survived import survival
from rollyard.watch.timeline import PhaseSeconds
from rollyard.watch.usage import tables

HEADER = Header(run="sort", model="llama 0.43M", placement="colocated", engine="embedded", steps=100)
PHASES = PhaseSeconds(
    wall_s=20.0,
    generate_s=10.0,
    train_s=5.0,
    setup_s=4.0,
    unaccounted_s=1.0,
    generating_s=10.0,
    scoring_s=4.0,
    scoring_hidden_s=3.0,
)
SNAPSHOT = Snapshot(
    step=40,
    phases=PHASES,
    rewards=[0.25, 0.5, 0.75],
    activity="generate",
    judged=180,
    wanted=256,
    eval_first=0.39,
    eval_last=0.62,
    tokens=50_000,
    slots_busy=0.83,
    dropped=2,
    left=Left(0.4, 0.4, 0.8),
)
DID = ["generate", "70.0%,", "sync", "5.0%"]
WORK = {"generate": 7 * 10**9, "sync": 5 * 10**8}
REPORT = Report(
    name="sort",
    model="llama 0.43M",
    placement="colocated",
    engine="embedded",
    steps=3,
    wall_s=20.0,
    phases=PHASES,
    generation_tokens=50_000,
    generation_tokens_per_s=5_000.0,
    reward=RewardCurve(0.25, 0.75, (0.25, 0.5, 0.75)),
    rewards={"exact": RewardCurve(0.0, 1.0, (0.0, None, 1.0)), "format": RewardCurve(0.0, 0.0, (0.0, 1.0, 0.0))},
    eval=EvalRewards(0.39, 0.86, 1024, 3),
    lengths=Lengths(8.5, 7, 16, 24, 0.125),
    slots_busy=0.83,
    decoder="native",
    prompts=Counts(99, 96, {"failed": 3}),
    members=Counts(792, 768, {"failed": 24}),
    weights=WeightTraffic(
        "in_place",
        0,
        Canary(26, 1e-7, 2e-7, 1e-4, ("model.norm.weight",), 6.0),
        {"verified": 2, "undecidable": 1},
        (Handed(600_000, 0.25), Handed(600_000, 0.75)),
        200_000,
    ),
    versions=(),
    lost=("engine engine-0 is lost: it was ended by signal 9", "engine-0 is started again"),
    finished=Finished("3 steps done", failed=False),
    software={},
    tokens=TokenLedger(12_000, 11_000, {"failed": 1_000}, 0, 42),
    filtering=Filtering(4, 3, 2),
    staleness={0: 8_250, 1: 2_750},
    usage=Usage(
        (
            DeviceTime(
                "engine-0",
                ("engine",),
                10**10,
                {"generate": 7 * 10**9, "sync": 5 * 10**8},
                {},
                0.75,
                {"train": 0.2, "sync": 0.05},
                0,
                0,
                1_500_000_000,
            ),
            DeviceTime("trainer-0", ("trainer",), 10**10, {}, {}, 0.5, {"generate": 0.497, "score": 0.003}),
        ),
        (PoolTime("engine", 1, 0.75, {"train": 0.2}, 2_000_000_000),),
        (
            Operation("rollout", "prefill", 10, 1, 10.0, "compute", None, None),
            Operation("rollout", "decode", 10, 4, 2.5, "memory", 7.5, 0.375),
        ),
        8.0,
    ),
)


def lines(renderable: RenderableType, width: int = 80) -> list[str]:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(renderable)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return [line.rstrip() for line in text.splitlines()]


def test_a_sparkline_goes_from_the_lowest_to_the_highest() -> None:
    assert sparkline([0.0, 0.5, 1.0], 10) == "▁▅█"  # level 3.5 of 7 rounds to the even 4
    assert sparkline([0.0, 1.0, 7.0, 7.0], 2) == "▁█"  # means 0.5 and 7
    assert sparkline([3.0, None, 3.0], 10) == "▁ ▁"
    assert sparkline([None], 10) == " "
    assert sparkline([], 10) == ""


def test_cells_go_to_the_largest_remainders() -> None:
    assert cells({"a": 1, "b": 1, "c": 1}, 10) == {"a": 4, "b": 3, "c": 3}
    assert cells({"a": 0.5, "b": 99.5}, 10) == {"a": 0, "b": 10}
    assert cells({"a": 0.0}, 10) == {"a": 0}


@given(st.dictionaries(st.text(), st.floats(0, 1e6), min_size=1), st.integers(1, 200))
def test_cells_fill_the_width_and_are_off_by_less_than_one(parts: dict[str, float], width: int) -> None:
    sizes = cells(parts, width)
    total = sum(parts.values())
    if total > 0:
        assert sum(sizes.values()) == width
        assert all(abs(sizes[name] - part / total * width) < 1 + 1e-9 for name, part in parts.items())


def test_bars_are_as_long_as_what_they_show() -> None:
    assert bar(0.5, 4, "blue").plain == "██  "
    assert bar(0.25 + 1 / 32, 4, "blue").plain == "█▏  "
    assert bar(1.0, 4, "blue").plain == "████"
    assert bar(0.0, 4, "blue").plain == "    "
    spans = [(span.start, span.end, span.style) for span in stacked({"generate": 3.0, "train": 1.0}, 8).spans]
    assert spans == [(0, 6, "blue"), (6, 8, "green")]


def test_durations_and_shares() -> None:
    assert [duration(s) for s in (0, 59.6, 61, 3_723)] == ["0:00", "1:00", "1:01", "1:02:03"]
    assert shares(PHASES) == {"generate": 0.5, "train": 0.25, "setup": 0.2, "unaccounted": 0.05}


def test_the_live_panel_shows_it_all_in_80_columns() -> None:
    shown = lines(LivePanel(HEADER, SNAPSHOT, since_s=2.0))
    assert all(len(line) == 80 for line in shown)
    text = "\n".join(shown)
    for part in (
        "rollyard · sort",
        "llama 0.43M   colocated · embedded",
        " 40/100 │",
        "generate  180/256 completions judged  scoring 75% hidden",
        "0.750  ▁▅█  held-out 0.390 → 0.620",
        "5,000 tokens/s   dropped 2   slots busy 83% █████████████▎",  # 13.28 of 16
        "█ generate 50%  ▓ train 25%  ▒ setup 20%  ░ unaccounted 5%",
        "0:22 · eta 0:22",  # 59 steps of 0.4 s, 0.8 s at the end, less 2 s
    ):
        assert part in text


@pytest.mark.parametrize("width", [30, 40, 60, 80, 200])
def test_panel_and_table_fit_any_width_and_leave_nothing_out(width: int) -> None:
    panel, report = lines(LivePanel(HEADER, SNAPSHOT), width), lines(table(REPORT), width)
    assert {len(line) for line in (*panel, *report)} == {min(width, WIDEST)}
    if width >= 40:
        text = " ".join(" ".join(line.strip("│ ").split()) for line in (*panel, *report))
        for part in (
            "colocated · embedded",
            "180/256 completions judged",
            "held-out 0.390 → 0.620",
            "unaccounted 5%",
            "dropped 2",
        ):
            assert part in text
        assert "…" not in text, "nothing is cut"


def test_without_colours_the_parts_of_the_time_are_told_apart_by_their_shades() -> None:
    coloured, plain = io.StringIO(), io.StringIO()
    for file, options in ((coloured, {}), (plain, {"no_color": True})):
        console = Console(file=file, width=80, force_terminal=True, color_system="truecolor", **options)  # type: ignore[arg-type]
        console.print(LivePanel(HEADER, SNAPSHOT))
    assert "▓" not in coloured.getvalue() and "■ " in coloured.getvalue()
    assert "█ generate 50%  ▓ train 25%" in re.sub("\x1b[^m]*m", "", plain.getvalue())
    bars = [line for line in plain.getvalue().splitlines() if "time" in line]
    assert [bars[0].count(sign) for sign in "█▓▒░"] == [34, 17, 13, 3]  # of 67


def test_the_live_panel_before_anything_happened() -> None:
    shown = "\n".join(lines(LivePanel(HEADER, Snapshot(0, PhaseSeconds(), [], "making the base policy"))))
    assert "making the base policy" in shown
    assert "0/100" in shown
    assert "eta" not in shown
    assert "slots busy" not in shown


def test_one_evaluation_is_shown_once() -> None:
    shown = "\n".join(lines(LivePanel(HEADER, replace(SNAPSHOT, eval_last=0.39))))
    assert "held-out 0.390 " in shown
    assert "→" not in shown


def test_the_report_as_a_table_in_80_columns() -> None:
    shown = lines(table(REPORT))
    assert all(len(line) == 80 for line in shown)
    text = "\n".join(shown)
    for part in (
        "3 in 0:20 (20.0 s)",
        "0.750  ▁▅█  held-out 0.390 → 0.860",
        "50,000 tokens, 5,000 a second of generation, slots busy 83%",
        "4.00 s, 75% of it while completions were written; 0.00 s waited",
        "3 of 1,024 held-out completions have no verdict",
        "1.000  ▁ █  exact",
        "0.000  ▁█▁  format",
        "mean 8.5, p50 7, p95 16, max 24 tokens, 12.5% truncated",
        "99 admitted, 96 trained, 3 dropped (3 failed)",
        "792 admitted, 768 trained, 24 dropped (24 failed)",
        "0 versions, in_place, 0 bytes copied",
        "2 states of 0.6 MB in 0.500 s, 3.0 times what async moves",
        "engine engine-0 is lost: it was ended by signal 9",
        "26 tensors moved, engines 2e-07 nats off (limit 0.0001)",
        "model.norm.weight",
        "canary 6.0 s of sync, once (weights.canary false skips it)",
        "2 verified, 1 undecidable",
        "undecidable: no version before it, or one too much like it",
        "3 steps done",
        "12,000 generated, 11,000 trained, 1,000 dropped (1,000 failed), 42",
        "4 prompts with equal rewards dropped, 3 asked in their place, 2",
        "lag 0 75%, lag 1 25%",
    ):
        assert part in text
    rows = [line.strip("│ ").split() for line in shown]
    assert ["engine-0", "75.0%", *DID, "train", "20.0%,", "sync", "5.0%", "1.50", "s"] in rows
    assert ["trainer-0", "50.0%", "-", "generate", "49.7%"] in rows  # what is less than half a percent is left out
    assert not any("×" in row for row in rows), "a device alone has its line already"
    assert ["rollout", "prefill", "10.0", "compute", "-", "-"] in rows
    assert ["rollout", "decode", "2.5", "memory", "7.50", "37.5%"] in rows
    assert ["machine", "balance", "8.0"] in rows
    bars = {name: line.count("█") for line in shown for name in ("generate", "train", "sync") if f"│ {name} " in line}
    assert bars["generate"] == pytest.approx(2 * bars["train"], abs=1)
    assert bars["sync"] == 0
    assert any(line.split()[1:4] == ["train", "5.00", "25.0%"] for line in shown)


def test_several_devices_of_a_role_have_a_line_and_two_roles_of_the_same_devices_one() -> None:
    both, engine = ("engine", "trainer"), ("engine",)
    pools = [PoolTime(role, 2, 0.75, {"train": 0.25}, 2 * 10**9) for role in both]
    devices = [replace(REPORT.usage.devices[0], device=f"engine-{at}", roles=both) for at in range(2)]
    shared = lines(Group(*tables(Usage(tuple(devices), tuple(pools)))))
    assert [line.split()[:3] for line in shared if "×" in line] == [["2", "×", "engine+trainer"]]
    apart = [replace(each, roles=engine) for each in devices] + [
        replace(each, device=f"trainer-{at}", roles=("trainer",)) for at, each in enumerate(devices)
    ]
    own = lines(Group(*tables(Usage(tuple(apart), tuple(pools)))))
    assert [line.split()[:3] for line in own if "×" in line] == [["2", "×", "engine"], ["2", "×", "trainer"]]
    assert sum("bubbles 2.00" in line for line in own) == 2


def test_a_report_of_nothing_can_be_drawn() -> None:
    empty = replace(
        REPORT,
        wall_s=0.0,
        phases=PhaseSeconds(),
        reward=RewardCurve(None, None, ()),
        eval=EvalRewards(None, None),
        lengths=Lengths(None, None, None, None, None),
        finished=Finished("[bold]Ctrl-C", failed=True),
    )
    assert any("[bold]Ctrl-C" in line for line in lines(table(empty)))


def test_nodes_are_shown_with_who_is_there_at_last() -> None:
    nodes = {"engine-0": ("10.0.0.2", "10.0.0.1"), "engine-1": ("10.0.0.3",), "trainer-0": ("10.0.0.1",)}
    assert places(nodes) == "10.0.0.1 engine-0, trainer-0; 10.0.0.3 engine-1"


def test_what_came_of_faults_has_a_line_each_and_a_sum() -> None:
    stalled = Survived(1, "stall", "engine-0", 0, 1.25, recovered=Tally(2, 30), delay_s=2.5, outcome="it went on")
    killed = Survived(2, "kill", "run", 1, 3.0, lost=Tally(1, 4), repeated=Tally(3, 1000))
    shown = lines(Group(*survival([stalled, killed])), 120)
    assert [" ".join(line.split()) for line in shown if line.strip()] == [
        "fault at lost repeated recovered delay what came of it",
        "stall engine-0 1.2 s of life 1 - - 2 (30) 2.50 s it went on",
        "kill run 3.0 s of life 2 1 (4) 3 (1,000) - - not over",
        "2 faults 1 (4) 3 (1,000) 2 (30) 2.50 s members (tokens) that were on their way there",
    ]
    assert survival([]) == []
