"""A run of 100,000 rollouts, through the real journal: nobody has an hour to make it."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

from rollyard.events import Admit, BatchTrained, Drop, Event, Finish, Instruction, Published, Score, Scored, Train
from rollyard.journal.folder import RunFolder
from rollyard.journal.journal import Journal, RunRecord
from rollyard.types import Completion, DropReason, FinishReason, Group, Prompt, Reward, Rollout, VersionSpan, WeightVersion

GROUPS, MEMBERS, BATCH = 12_500, 8, 50
ROLLOUTS = GROUPS * MEMBERS
STALE = range(GROUPS - BATCH, GROUPS)  # groups that were dropped
MARKUP = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script><b>bold</b>&amp;"
HOSTILE = 77  # its group
METRICS = {"incarnation": 0, "reward_mean": 0.5, "reward_std": 0.25, "tokens": 20, "seconds": 1.0}


def group(id_: int, version: WeightVersion) -> Group:
    said = MARKUP if id_ == HOSTILE else f"the sum of {id_} and {id_ % 7}"
    prompt = Prompt(id_, id_, (2, 3, 4, 5), said, {"answer": said})
    return Group(prompt, tuple(_rollout(id_, member, version) for member in range(MEMBERS)))


def _rollout(group: int, member: int, version: WeightVersion) -> Rollout:
    tokens = 4 + (group * 31 + member * 7) % 29
    ids, logprobs = tuple(range(2, tokens + 2)), tuple(-0.125 * (at % 40) for at in range(tokens))
    text = MARKUP if group == HOSTILE else f"it is {group + member}"
    done = Completion(group, member, ids, logprobs, (VersionSpan(version, version, tokens),), FinishReason.STOP, text)
    return Rollout(done, Reward((group + member) % 5 / 4, {"match": (group + member) % 5 / 4}))


def write_many(path: Path) -> Path:
    """The folder of a run that has ended."""
    path.mkdir()
    journal = Journal(
        RunFolder(path).journal, RunRecord("many", "0.1.0", 7, MEMBERS, "{}"), clock=itertools.count(1e9, 1 / 512).__next__
    )
    journal.record_beginning(WeightVersion(0))
    lines = []
    for step, first in enumerate(range(0, GROUPS, BATCH)):
        version = WeightVersion(max(step - 1, 0))
        groups = tuple(group(id_, version) for id_ in range(first, first + BATCH))
        journal.record_step([*_finished(groups), *_became(step, groups)])
        lines.append(json.dumps(METRICS | {"step": step + 1}))
    journal.record_step((Finish("all steps are done", failed=False),))
    journal.close()
    (path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (path / "config.toml").write_text(f"[run]\nname = '''{MARKUP}'''\nsteps = {len(lines)}\n")
    return path


def _finished(groups: tuple[Group, ...]) -> list[Event | Instruction]:
    entries: list[Event | Instruction] = []
    for each in groups:
        entries.append(Admit(each.prompt))
        for rollout in each.rollouts:
            entries += (Score(each.prompt, rollout.completion), Scored(each.id, rollout.completion.member, rollout.reward))
    return entries


def _became(step: int, groups: tuple[Group, ...]) -> list[Event | Instruction]:
    if groups[0].id in STALE:
        return [Drop(each.id, member, DropReason.STALE, "too old") for each in groups for member in (*range(MEMBERS), None)]
    version = WeightVersion(step + 1)
    return [Train(step, groups), BatchTrained(version), Published(version)]
