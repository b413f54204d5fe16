"""Writes the tables of docs/benchmarks.md from benchmarks/results/*.jsonl: the newest line of each benchmark counts.

Benchmarks of another model, machine or number of threads are others. Lines with options of the config that are not the
default are left out.

python benchmarks/render.py            files in the order of their names, which are dates
"""

from __future__ import annotations

import argparse
import json
import operator
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "benchmarks.md"
BEGIN, END = "<!-- results: written by benchmarks/render.py -->", "<!-- end of results -->"

# What was set out to be reached: the least ratio, by (bench, workload, second side, dtype).
RATIOS: dict[tuple[str, ...], float] = {
    **{("engine", work, "hf", dtype): 3.0 for work in ("64x1", "8x8") for dtype in ("float32", "bfloat16")},
    **{("engine", work, "vllm", dtype): 1.0 for work in ("64x1", "8x8") for dtype in ("float32", "bfloat16")},
    **{("engine", "one", peer, dtype): 1.5 for peer in ("hf", "vllm") for dtype in ("float32", "bfloat16")},
    ("engine", "ragged", "hf", "bfloat16"): 12.0,
    ("engine", "ragged", "vllm", "bfloat16"): 1.2,
    **{("engine", "static", "static", dtype): 2.0 for dtype in ("float32", "bfloat16")},
    **{("engine", "prefix", "not shared", dtype): 1.8 for dtype in ("float32", "bfloat16")},
    **{("engine", "queue", "64 queued", dtype): 1.0 for dtype in ("float32", "bfloat16")},
    **{("train", work, "its matrix products alone", "float32"): 0.65 for work in ("8x8", "ragged")},
    **{("train", work, "its matrix products alone", "bfloat16"): 0.65 for work in ("8x8", "ragged")},
    ("step", "fixed", "trl", "float32"): 2.0,
    ("step", "fixed", "trl", "bfloat16"): 3.0,
    ("step", "natural", "trl", "float32"): 2.5,
    ("step", "natural", "trl", "bfloat16"): 3.5,
}


class Most(NamedTuple):
    """What a figure of one side may be at most, in its unit, or times what the second side has."""

    workload: str
    second: str  # name of the second side
    side: str  # whose figure
    figure: str
    limit: float
    times: bool = False
    holds: Callable[[float, float], bool] = operator.le


MOST = (
    Most("decode", "its linear layers alone", "decode step", "outside linear layers", 25.0),
    Most("ragged", "hf", "rollyard", "peak memory", 1.2, times=True),
    Most("queue", "64 queued", "256 running", "scheduler share", 0.03, holds=operator.lt),
)
PARTS = ("decode",)  # workloads whose second side is a part of the first: their ratio says nothing
NAMES = {"hf": "Hugging Face `generate`", "vllm": "vLLM", "trl": "TRL `GRPOTrainer`"}
WORK = {"idle": "", "adapter": "adapter, ", "delta": "what changed, ", "relay": "engines of one machine, "}  # of weight sync
NEAR_FIGURE = "near the engine, times its bound"
NEAR = {"broadcast": 1.3}  # of that, at most
SYNC = (  # figures of weight sync, in this order
    NEAR_FIGURE,
    "times its bound",
    "publish",
    "prepare",
    "load",
    "stall under keep",
    "one step",
    "rate",
    "memory",
    "bytes",
)
COLUMNS = "| workload | format | unit | Rollyard | against | | ratio (least to most) | goal | | rounds | load |"

Row = dict[str, Any]  # one result, as `rollyard bench --json` prints it


def newest(files: Iterable[Path]) -> list[Row]:
    """The last result of each benchmark, in the order in which they were first measured."""
    found: dict[tuple[Any, ...], Row] = {}
    for file in files:
        for line in file.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            if not row["options"]:
                found[(*key(row), *place(row))] = row
    return list(found.values())


def key(row: Row) -> tuple[str, ...]:
    """What was measured."""
    if row["bench"] in WHOLE:
        return (row["bench"], row.get("workload", ""))
    return (row["bench"], row["workload"], row["sides"][1]["name"], row["dtype"])


def place(row: Row) -> tuple[Any, ...]:
    """What it was measured with."""
    machine = row["machine"]
    return (machine["cpu"], tuple(machine["features"]), machine["cores"], row.get("threads"), row.get("model"))


def render(rows: list[Row]) -> str:
    """A section for the placements on each machine; one for each machine, number of threads and model."""
    parts = [part for row in rows if row["bench"] in WHOLE for part in WHOLE[row["bench"]](row)]
    rows = [row for row in rows if row["bench"] not in WHOLE]
    for where in dict.fromkeys(map(place, rows)):
        cpu, features, cores, threads, model = where
        parts.append(f"### {model} on {cpu}, {cores} cores ({' '.join(features)}), {threads} threads")
        parts += section([row for row in rows if place(row) == where])
    return "\n\n".join(parts)


def section(rows: list[Row]) -> list[str]:
    parts = []
    for bench, title in (("engine", "Generation"), ("train", "Training"), ("step", "Whole GRPO steps")):
        chosen = [row for row in rows if row["bench"] == bench]
        if chosen:
            parts += [f"#### {title}", table(chosen)]
    for row in rows:
        if row["bench"] == "sync":
            parts += [f"#### Weight sync, {WORK[row['workload']]}{row['dtype']}, {len(row['ratios'])} rounds", sides_table(row)]
    rows = [row for row in rows if row["bench"] != "sync"] or rows
    return [*parts, "#### Figures beside them", figures(rows), "#### Measured on", circumstances(rows)]


def table(rows: list[Row]) -> str:
    """Each comparison, and a line of its own for each figure that has a goal."""
    lines = [COLUMNS, "| --- | --- | --- | ---: | --- | ---: | ---: | ---: | --- | ---: | ---: |"]
    for row in rows:
        found = [compared(row), *(limited(row, most) for most in MOST if key(row)[:3] == ("engine", *most[:2]))]
        end = [str(len(row["ratios"])), f"{max(load for pair in row['loads'] for load in pair.values()):.1f}"]
        lines += [f"| {' | '.join([*cells, *end])} |" for cells in found if cells]
    return "\n".join(lines)


def compared(row: Row) -> list[str]:
    """The first side with the second. The median is what reaches a goal."""
    ours, theirs = row["sides"][:2]
    spread, goal = row["ratio"], RATIOS.get(key(row))
    ratio = f"{spread['median']:.2f} ({spread['least']:.2f} to {spread['most']:.2f})"
    return [
        row["workload"],
        row["dtype"],
        row["unit"],
        number(ours["spread"]["median"]),
        NAMES.get(theirs["name"], theirs["name"]),
        number(theirs["spread"]["median"]),
        "" if row["workload"] in PARTS else ratio,
        f"{goal:g}" if goal else "",
        verdict(spread["median"] >= goal) if goal else "",
    ]


def limited(row: Row, most: Most) -> list[str]:
    """A figure with its limit; nothing where it was not measured."""
    known = {(side["name"], one["name"]): one for side in row["sides"] for one in side["figures"]}
    ours, theirs = known.get((most.side, most.figure)), known.get((most.second, most.figure))
    if ours is None:
        return []
    against, value = ["", ""], ours["value"]
    if most.times:
        if theirs is None:
            return []
        against, value = [NAMES.get(most.second, most.second), number(theirs["value"])], value / theirs["value"]
    whose = "" if most.side == row["sides"][0]["name"] else f", {most.side}"
    return [
        f"{row['workload']}: {most.figure}{whose}",
        row["dtype"],
        ours["unit"],
        number(ours["value"]),
        *against,
        f"{value:.2f}" if most.times else "",
        f"{'under' if most.holds is operator.lt else 'at most'} {most.limit:g}",
        verdict(most.holds(value, most.limit)),
    ]


def verdict(reached: bool) -> str:
    return "reached" if reached else "**missed**"


def sides_table(row: Row) -> str:
    """Every transport and every raw copy, a line each, with what any of them tells."""
    told = {figure["name"] for side in row["sides"] for figure in side["figures"]}
    columns = [name for name in SYNC if name in told]
    lines = [
        f"| | ms (least to most) | {' | '.join(columns)} | goal | |",
        f"| --- | ---: |{' ---: |' * len(columns)} ---: | --- |",
    ]
    for side in row["sides"]:
        spread, known = side["spread"], {figure["name"]: figure["value"] for figure in side["figures"]}
        found = (number(known[name]) if name in known else "" for name in columns)
        span = f"{number(spread['median'])} ({number(spread['least'])} to {number(spread['most'])})"
        goal = NEAR.get(side["name"]) if known.get(NEAR_FIGURE) else None
        end = (f"{goal:g}", verdict(known[NEAR_FIGURE] <= goal)) if goal else ("", "")
        lines.append(f"| {side['name']} | {span} | {' | '.join(found)} | {' | '.join(end)} |")
    return "\n".join(lines)


def placements(row: Row) -> list[str]:
    """Runs with doubles, which are the same on any machine, and runs of the tiny model."""
    machine, load = row["machine"], row["load"]
    where = (
        f"{machine['cpu']}, {machine['cores']} cores; {versions(row)}; load average {load['before']:.1f} to {load['after']:.1f}"
    )
    parts = []
    if row["doubles"]:
        parts += ["### Placements, with stations that only take time", doubles_table(row), workload(row["work"])]
    if row["real"]:
        parts += ["### Placements, with the tiny model", real_table(row)]
    return [*parts, f"Measured on {where}."]


def tails(row: Row) -> list[str]:
    """Runs on a virtual clock, which are the same on any machine."""
    columns = ("tail wait", "of plain", "slots in use", "steps/s", "p", "lag", "moved", "put off", "read again")
    lines = [
        f"| engines | members a slot | sigma | routing | {' | '.join(columns)} |",
        f"| ---: | ---: | ---: | --- |{' ---: |' * len(columns)}",
    ]
    for one in row["rows"]:
        cells = [
            f"{one['engines']}",
            f"{one['waves']}",
            f"{one['sigma']:g}",
            one["routing"],
            f"{one['tail_s']:.2f} s",
            f"{one['of_plain']:.0%}",
            f"{one['slots']:.0%}",
            f"{one['steps_per_s']:.3g}",
            f"{one['p']:.2g}",
            f"{one['staleness']:.2f}",
            number(one["moved"]),
            number(one["put_off"]),
            f"{one['read_again']:.0%}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    work, members = row["work"], [one["members"] for one in row["rows"]]
    ms = {name: f"{1000 * work[f'{name}_s']:g} ms" for name in ("step", "each", "read")}
    about = (
        f"{work['slots']} slots an engine, K {work['size']}, 25% prompts to spare; {min(members):,} to {max(members):,} "
        f"members a run. Lengths: lognormal, median {work['median']}, at most {work['cap']} tokens; {work['between']:.0%} of "
        f"the variance of their log lies between prompts, of {work['prompt']} tokens. A step takes {ms['step']} and {ms['each']} "
        f"for each that runs; reading {ms['read']} a token; training {work['train_s']:g} s."
    )
    return ["### Long tails", "\n".join(lines), about]


def doubles_table(row: Row) -> str:
    """A line for each run; further formulas on lines of their own."""
    lines = [
        "| work | placement | steps/s | tokens/s | generating | slots in use | training | tokens by lag 0, 1, ... "
        "| of theory | goal | theory, steps/s |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | --- | ---: | --- | --- |",
    ]
    for one in row["doubles"]:
        shares = [f"{one[name]:.0%}" for name in ("generating", "slots", "training")]
        rates = [number(one["steps_per_s"]), number(one["tokens_per_s"])]
        cells = [one["ratio"], f"{one['placement']} {one['rollover']}".rstrip(), *rates, *shares, lags(one["staleness"])]
        for expected in one["expected"]:
            share, formula = f"{expected['share']:.1%}", f"{expected['formula']}: {number(expected['steps_per_s'])}"
            lines.append(f"| {' | '.join([*cells, share, asked(expected), formula])} |")
            cells = [""] * len(cells)
    return "\n".join(lines)


def asked(expected: Row) -> str:
    """The goal of a figure, and whether it was reached; nothing where nothing is asked for."""
    least, most, share = expected["least"], expected["most"], expected["share"]
    if least is None:
        return ""
    span = f"{least:.0%}" + (f" to {most:.0%}" if most else "")
    return f"{span}: {verdict(least <= share <= (most or share))}"


def real_table(row: Row) -> str:
    lines = [
        "| placement | S | steps | steps/s | tokens/s | generating | training | tokens by lag 0, 1, ... "
        "| reward | held out | load |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | --- | ---: | ---: | ---: |",
    ]
    for one in row["real"]:
        cells = [
            f"{one['placement']} {one['rollover']}".rstrip(),
            str(one["staleness_limit"]),
            str(one["steps"]),
            number(one["steps_per_s"]),
            number(one["tokens_per_s"]),
            *(f"{one[name]:.0%}" for name in ("generating", "training")),
            lags(one["staleness"]),
            *(f"{one[f'{name}_first']:.3f} to {one[f'{name}_last']:.3f}" for name in ("reward", "eval")),
            f"{one['load']['after']:.1f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def lags(staleness: dict[str, int]) -> str:
    whole = sum(staleness.values())
    return ", ".join(f"{staleness.get(str(lag), 0) / whole:.0%}" for lag in range(max(map(int, staleness)) + 1))


def workload(work: Row) -> str:
    times = ", ".join(f"{name} {1000 * work[f'{name}_s']:.3g} ms" for name in ("token", "copy", "transfer", "load", "handoff"))
    return (
        f"{work['generate']} generation devices of {work['slots']} slots and {work['train']} training device; "
        f"B {work['groups']}, K {work['size']}, S {work['staleness']} with async, {work['steps']} steps. "
        f"Lengths: lognormal, median {work['median']}, sigma {work['sigma']:g}, "
        f"at most {work['cap']} tokens, which cuts {work['cut']:.0%} of them; mean {work['mean']:.1f}. "
        f"Times: {times}."
    )


def figures(rows: list[Row]) -> str:
    lines = []
    for row in rows:
        sides = "; ".join(f"{side['name']}: {shown(side)}" for side in row["sides"] if side["figures"])
        text = f"- {row['bench']} {row['workload']} {row['dtype']}, against {row['sides'][1]['name']}: {sides}"
        lines.append(text + agreement(row))
    return "\n".join(lines)


def shown(side: Row) -> str:
    return ", ".join(f"{one['name']} {number(one['value'])} {one['unit']}".rstrip() for one in side["figures"])


def agreement(row: Row) -> str:
    found = row["agreement"]
    if not found:
        return ""
    near = [f"{one['gap']:.1g}" for one in found["differences"]]
    ties = f", then near ties ({', '.join(near)} nats)" if near else ""
    return f"; greedy tokens alike: {found['agreed']} of {found['tokens']}{ties}"


def circumstances(rows: list[Row]) -> str:
    """Machine, versions, load; once each."""
    lines = []
    for row in rows:
        machine = row["machine"]
        features = " ".join(machine["features"])
        lines.append(
            f"- {machine['cpu']}, {machine['cores']} cores ({features}), {machine['memory_gib']} GiB, {machine['system']}; "
            f"{row['threads']} threads on each side"
        )
        lines.append(f"- Rollyard: {versions(row)}; model {row['model']}")
        lines += [f"- {NAMES.get(side['name'], side['name'])}: {versions(side)}" for side in row["sides"] if side["versions"]]
    loads = [load for row in rows for pair in row["loads"] for load in pair.values()]
    rounds = sorted({len(row["ratios"]) for row in rows})
    lines.append(f"- rounds: {' or '.join(map(str, rounds))}; load average {min(loads):.1f} to {max(loads):.1f}")
    return "\n".join(dict.fromkeys(lines))


def versions(row: Row) -> str:
    return ", ".join(f"{name} {version}" for name, version in row["versions"].items())


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def insert(page: str, results: str) -> str:
    """The page with what stands between the two marks replaced. Raises ValueError without them."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError("the page has no marks where the results go")
    return f"{before}{begin}\n\n{results}\n\n{end}{after}"


def load(row: Row) -> list[str]:
    """What orchestration costs: one of its workloads."""
    title, lines = LOADS[row["workload"]](row)
    about = f"{row['machine']['cpu']}, {row['machine']['cores']} cores, Python {row['versions']['python']}."
    return [f"### {title}", "\n".join(lines), about]


def load_speed(row: Row) -> tuple[str, list[str]]:
    lines = ["| | a second (least to most) | us each | us of CPU | in flight |", "| --- | --- | --- | --- | --- |"]
    for one in (*row["runs"], *row["flight"]):
        name = f"completions, K {one['size']}, {'with' if one['journal'] else 'no'} journal"
        held = f"{one['in_flight']:,.0f}" if one["in_flight"] else ""
        lines.append(f"| {name} | {_ends(one['per_s'])} | {one['us']:.1f} | {one['cpu_us']:.1f} | {held} |")
    for one in row["core"]:
        name = f"events of the core, K {one['size']}, {one['live']:,} live groups"
        lines.append(f"| {name} | {_ends(one['per_s'])} | {one['us']:.1f} | | |")
    return "Orchestration", lines


def load_journal(row: Row) -> tuple[str, list[str]]:
    lines = ["| members/s | us of CPU each | longest step | read back |", "| --- | --- | --- | --- |"]
    for one in row["rounds"]:
        read = f"{one['read']:,} in {one['read_s']:.1f} s"
        lines.append(f"| {one['per_s']:,.0f} | {one['cpu_us']:.1f} | {one['longest_s'] * 1e3:.1f} ms | {read} |")
    return "The journal, members coming at a steady rate", lines


def load_areal(row: Row) -> tuple[str, list[str]]:
    lines = ["| | us a completion (least to most) | us of CPU | Rollyard against AReaL |", "| --- | --- | --- | --- |"]
    for pair in row["pairs"]:
        for at, side in enumerate(pair["sides"]):
            ratio = "" if at else f"{pair['ratio']['median']:.2f} ({pair['ratio']['least']:.2f} to {pair['ratio']['most']:.2f})"
            spread, cpu = side["spread"], side["figures"][0]["value"]
            ends = f"{spread['median']:.1f} ({spread['least']:.1f} to {spread['most']:.1f})"
            lines.append(f"| K {pair['size']}, {side['name']} | {ends} | {cpu:.1f} | {ratio} |")
    return "Orchestration beside AReaL's executor", lines


def load_soak(row: Row) -> tuple[str, list[str]]:
    lines = ["| rollouts | resident | Python holds |", "| --- | --- | --- |"]
    for mark in row["marks"]:
        lines.append(f"| {mark['rollouts']:,} | {mark['resident'] / 2**20:.1f} MiB | {mark['traced'] / 2**20:.1f} MiB |")
    return f"Soak: nothing lost of {row['rollouts']:,} rollouts", lines


def _ends(spread: Row) -> str:
    return f"{spread['median']:,.0f} ({spread['least']:,.0f} to {spread['most']:,.0f})"


LOADS = {"speed": load_speed, "journal": load_journal, "areal": load_areal, "soak": load_soak}
WHOLE = {"placements": placements, "tails": tails, "load": load}  # benchmarks with sections of their own


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    rows = newest(sorted((HERE / "results").glob("*.jsonl")))
    if not rows:
        raise SystemExit("there are no results yet: make bench-all")
    PAGE.write_text(insert(PAGE.read_text(encoding="utf-8"), render(rows)), encoding="utf-8")
    print(f"{PAGE}: {len(rows)} results")


if __name__ == "__main__":
    main()
