"""Do two runs have the same groups in a step? For runs that differ in one thing, such as the kind of engine.

python examples/same_groups.py runs/with-vllm runs/with-embedded
"""

import argparse
from pathlib import Path

from rollyard.journal.reader import JournalReader


def tokens_of(run: Path, step: int) -> dict[tuple[int, int], tuple[int, ...]]:
    """Token ids by (group, member)."""
    with JournalReader(run / "journal.sqlite") as journal:
        groups = [journal.group(number) for number in journal.batches()[step]]
    return {(group.id, done.completion.member): done.completion.token_ids for group in groups for done in group.rollouts}


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare the token ids of two runs in one step.")
    parser.add_argument("runs", nargs=2, type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument("--step", type=int, default=0, help="the version that wrote them (default: 0, the first step)")
    given = parser.parse_args()
    first, second = (tokens_of(run, given.step) for run in given.runs)
    same = sum(first[name] == second[name] for name in first.keys() & second.keys())
    print(f"{len(first)} and {len(second)} completions, {same} the same")
    for name in sorted(first.keys() & second.keys()):
        if first[name] != second[name]:
            pairs = enumerate(zip(first[name], second[name], strict=False))
            place = next((i for i, (a, b) in pairs if a != b), min(len(first[name]), len(second[name])))
            print(f"group {name[0]}, member {name[1]} differs from token {place}")
    raise SystemExit(first != second)


if __name__ == "__main__":
    main()
