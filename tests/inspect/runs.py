"""A run of two lives, by hand, through the real journal.

group  life  what became of it
0      0     trained in step 1
1      0     trained in step 2; its second half was written by version 1
2      0, 1  trained in step 3 by life 0, which is lost, and again by life 1, with what life 0 wrote
3      0     dropped as stale; of its members only the first was finished
4      1     an episode, without a verdict; its other member is under way, three tokens of it are kept

The first life failed, the second has not ended.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from pathlib import Path

from rollyard.durable import seal, write_folder
from rollyard.events import (
    Admit,
    BatchTrained,
    Drop,
    EngineDown,
    EngineUp,
    Event,
    Finish,
    Instruction,
    Keep,
    Published,
    Score,
    Scored,
    Train,
)
from rollyard.journal.folder import RunFolder
from rollyard.journal.journal import Journal, RunRecord
from rollyard.lives import Wrote
from rollyard.types import (
    Completion,
    DropReason,
    FinishReason,
    Group,
    Prompt,
    RequestId,
    Reward,
    Rollout,
    Segment,
    Turn,
    VersionSpan,
    WeightVersion,
)

RUN = RunRecord("two lives", "0.1.0", 7, 2, "{}")
V0, V1, V2 = WeightVersion(0), WeightVersion(1), WeightVersion(2)
USUAL = {"train/loss": 0.125, "phase/train_s": 1.0, "phase/generate_s": 2.984, "phase/score_s": 0.016}
EVIL = "\x1b]0;owned\x07[red]no[/] \x9b2J"  # what a policy may write


def prompt(id_: int) -> Prompt:
    return Prompt(id_, 10 + id_, (id_ + 2, 3), f"prompt {id_}", {"answer": f"a{id_}"})


def rollout(group: int, member: int, value: float | None, tokens: int = 2, *versions: WeightVersion, text: str = "") -> Rollout:
    """Tokens 2, 3, ... in equal parts from these versions, or from version 0."""
    wrote = versions or (V0,)
    spans = tuple(VersionSpan(version, wrote[0], tokens // len(wrote)) for version in wrote)
    finish = FinishReason.LENGTH if tokens > 2 else FinishReason.STOP
    ids, logprobs = tuple(range(2, tokens + 2)), (-0.25,) * tokens
    done = Completion(group, member, ids, logprobs, spans, finish, text or f"text {group}.{member}")
    problem = "" if value is not None else "ValueError: no number"
    return Rollout(done, Reward(value, {} if value is None else {"match": value, "form": 0.5}, problem))


ONE = Group(prompt(0), (rollout(0, 0, 1.0), rollout(0, 1, 0.0, text=EVIL)))
TWO = Group(prompt(1), (rollout(1, 0, 0.25, 4, V0, V1), rollout(1, 1, 0.75, 6, V1)))
THREE = Group(prompt(2), (rollout(2, 0, 0.5, 2, V1), rollout(2, 1, 0.5, 8, V2)))
TURNS = (Turn((6, 3), 1, FinishReason.STOP), Turn((6, 3, 2, 9, 9), 1, FinishReason.CONTEXT))
TALK = Completion(
    4, 0, (2, 4), (-0.5, -3.0), (VersionSpan(V2, V2, 2),), FinishReason.CONTEXT, "said twice", TURNS
)  # fmt: skip


def complete(group: Group) -> Iterable[Event | Instruction]:
    yield Admit(group.prompt)
    for each in group.rollouts:
        yield Score(group.prompt, each.completion)
        yield Scored(group.id, each.completion.member, each.reward)


def train(step: int, group: Group, life: int = 0) -> Iterable[Event | Instruction]:
    version = WeightVersion(step + 1, life)
    yield from (Train(step, (group,)), BatchTrained(version), Published(version))


def first_life(path: Path) -> Journal:
    """Not closed: what was recorded is in the file all the same, as after a kill."""
    journal = Journal(path, RUN, clock=itertools.count(1000.0, 1 / 64).__next__)
    journal.record_beginning(V0)
    journal.record_step((EngineUp("engine-0", slots=4, version=V0), Published(V0)))
    for step, group in enumerate((ONE, TWO, THREE)):
        journal.record_step((*complete(group), *train(step, group)))
    stale = rollout(3, 0, 0.9)
    journal.record_step((
        Admit(prompt(3)),
        Score(prompt(3), stale.completion),
        Scored(3, 0, stale.reward),
        *(Drop(3, member, DropReason.STALE, "too old") for member in (0, 1, None)),
        EngineDown("engine-0", "killed"),
    ))  # fmt: skip
    journal.record_step((Finish("the disk is full", failed=True),))
    journal.record_evaluation(V0, 0.25, samples=4)
    journal.commit_checkpoint(V2, "checkpoints/step-000002", 4, {}).result(60)
    return journal


def second_life(path: Path) -> Journal:
    journal = Journal(path, RUN, clock=itertools.count(2000.0, 1 / 64).__next__)
    journal.record_beginning(V2)
    journal.record_step((Admit(THREE.prompt), Keep(THREE, recovered=True), *train(2, THREE, life=1)))
    journal.record_step((Admit(prompt(4)), Score(prompt(4), TALK), Scored(4, 0, Reward(None, {}, "no number"))))
    journal.record_step((Wrote(Segment(RequestId(4, 1), (5, 6, 7), (-1.0, -1.0, -1.0), V2, V2)),))
    journal.record_step((Drop(4, 0, DropReason.NO_VERDICT, "no number"),))
    journal.flush()
    return journal


def metric(step: int, life: int, **more: object) -> str:
    return json.dumps({"step": step, "incarnation": life, "reward_mean": 0.5, "dropped": 0} | USUAL | more) + "\n"


def write_files(folder: Path) -> None:
    """What lies beside the journal."""
    write_folder(folder / "checkpoints" / "step-000002", seal)
    (folder / "config.toml").write_text('[run]\nname = "two lives"\nsteps = 3\n[model]\npath = ""\n')
    lines = (metric(1, 0), metric(2, 0), metric(3, 0, reward_mean=0.125), metric(3, 1, dropped=1), '{"step": 4, "inc')
    (folder / "metrics.jsonl").write_text("".join(lines))


def write_run(folder: Path) -> RunFolder:
    """The whole of it, ended as it should."""
    folder.mkdir()
    write_files(folder)
    run = RunFolder(folder)
    first_life(run.journal).close()
    second_life(run.journal).close()
    return run
