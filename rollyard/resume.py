"""What a run needs to go on where an earlier life of it ended: its options, what it left, and the model that it began with.

Nothing here changes the run's folder.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError

from rollyard.checkpoints import Whole
from rollyard.config import Config
from rollyard.datafiles import fingerprint
from rollyard.durable import is_whole, write_file
from rollyard.errors import ConfigError, JournalError
from rollyard.journal.beside import lost_end, options_of, without_metrics
from rollyard.journal.decode import PROMPT, prompt_of
from rollyard.journal.folder import CHECKPOINTS, RunFolder, refuse_foreign
from rollyard.journal.reader import JournalReader, has_lives
from rollyard.journal.recover import Past, read_past
from rollyard.journal.schema import OWN
from rollyard.layers import options, resolve, value
from rollyard.lives import GroupsRecovered
from rollyard.place.mode import USED_UP
from rollyard.texts import in_a_line, visible
from rollyard.types import DropReason, Prompt
from rollyard.watch.lives import Lives
from rollyard.worker import FIRST

# What may be another option in a later life: how long it goes on, what is shown and kept of it, and what it runs on. Not what
# is asked, what is written and how it is judged, and what is learnt from it.
OPEN: Final = (
    "run.steps", "run.name", "run.inject", "checkpoint.*", "watch.*", "forecast.*", "eval.*", "*limit_s",
    "place.placement", "place.generate", "place.train", "place.restarts", "place.runtime", "place.ray_address", "place.nodes",
    "place.silent_s", "place.threads",
    "engine.slots", "engine.page_tokens", "engine.pages", "engine.step_tokens", "engine.prefill_tokens", "engine.batching",
    "engine.share_prompts", "engine.python", "engine.start_s", "engine.tensor_parallel_size", "engine.gpu_memory_utilization",
    "engine.server", "engine.url", "engine.silent_s", "engine.faults", "engine.failures",
    "weights.transport", "weights.rollover", "weights.retries", "weights.delta", "weights.address",
    "weights.canary", "weights.probe", "weights.probe_every",
    "batch.token_budget", "train.shard", "train.recompute",
    "rollout.max_live_groups", "rollout.moves", "rollout.retries", "rollout.give_up_after",
    "environment.workers", "environment.memory_mib",
    "reward.workers", "reward.start_s", "reward.memory_mib", "reward.concurrency", "reward.batch", "reward.give_up_after",
    "reward.model.place", "reward.model.token_budget", "reward.model.wait_s", "reward.model.restarts",
    "reward.judge.url", "reward.judge.retries", "reward.judge.concurrency",
    "reward.remote.url", "reward.remote.retries", "reward.remote.concurrency", "reward.remote.cache",
)  # fmt: skip
SET_ANEW: Final = ("run.out", "run.overwrite")  # by each resume
ABSENT: Final = object()
NOTHING: Final = Past(FIRST, "", frozenset(), GroupsRecovered(()), {}, 0)  # what a first life goes on from

PROMPTS: Final = "prompts"
TRAINER: Final = "trainer"
OF_MODEL: Final = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt")


def config_of(folder: Path, overrides: Mapping[str, Any] | None = None) -> Config:
    """Of a run's next life: what the run was given, with these options instead. The environment is not looked at.

    Raises ConfigError for a folder that is no run's, and for an option that would make another run of it.
    """
    refuse_foreign(folder)
    before = resolve(file=folder / "config.toml", environment={}).config
    now = resolve(file=folder / "config.toml", environment={}, overrides=overrides).config
    for option in options():
        name = option.name
        if value(before, name) != value(now, name) and not any(fnmatch(name, each) for each in OPEN):
            raise another(folder, name, value(before, name), value(now, name), "leave it out")
    return now.model_copy(update={"run": now.run.model_copy(update={"out": str(folder), "overwrite": False})})


def another(folder: Path, name: str, had: object, has: object, remedy: str) -> ConfigError:
    """An option that may not be another one in a later life."""
    problem = f"the run in {folder} has {had!r}: with {has!r} it would be another run"
    remedy = f"{remedy}; or begin a new run with it, from a checkpoint of this one: --model.path RUN/checkpoints/STEP"
    return ConfigError(problem, where=name, remedy=remedy)


def left_by(folder: RunFolder, steps: int) -> Past:
    """What earlier lives left in the folder, whose lock is held.

    A checkpoint that is damaged, or not there any more, is passed over with a warning. So it is told when there is more of the
    run than the journal knows, and when steps that survive have no metrics.

    Raises JournalError when their journal cannot be read; ConfigError when the run came further than `steps`, or none of its
    checkpoints is left.
    """
    try:
        if not _did(folder):
            return NOTHING  # it was killed before anything was done
        return _left_by(folder, steps)
    except JournalError as error:
        raise JournalError(f"{error} ({_without_journal(folder)})") from error


def _did(folder: RunFolder) -> bool:
    return _trained(folder) or has_lives(folder.journal)


def _trained(folder: RunFolder) -> bool:
    return bool(folder.checkpoints()) or folder.metrics.exists()


def of_caller(folder: RunFolder) -> bool:
    """Is it the folder of a run that was given its trainer, or of one that was killed while it loaded?

    A life may have begun then: the journal says so before the model is there, whose digests are kept with what was given.

    Raises ConfigError when what says so cannot be read.
    """
    if not folder.config.is_file():
        return False
    return TRAINER in _began(folder).given if folder.began.exists() else not _trained(folder)


def _left_by(folder: RunFolder, steps: int) -> Past:
    with JournalReader(folder.journal) as journal:
        begun = {life.incarnation: life.begun.step for life in journal.incarnations() if life.begun is not None}
    whole = Whole(folder.path, begun)
    past = read_past(folder.journal, whole)
    lost = lost_end(folder)
    if lost is not None:
        told = f"{folder.journal}: {lost}; a run goes on from what its journal knows, and checkpoints that it does not are kept"
        warnings.warn(visible(f"{told}, as {CHECKPOINTS}/unnamed-*"), RuntimeWarning, stacklevel=2)
        past = replace(past, unnamed=lost.checkpoints)
    whole.tell(past.version)
    if past.version.step > steps:
        problem = f"the run has version {past.version.step} already"
        raise ConfigError(problem, where="run.steps", remedy=f"use {past.version.step} or more")
    if absent := without_metrics(folder, past.version.step):
        told = f"{folder.metrics} has no rows of steps {absent}: they are missing in it, and in the report, from now on"
        warnings.warn(visible(told), RuntimeWarning, stacklevel=2)
    return past


def _without_journal(folder: RunFolder) -> str:
    """What can be done where it cannot be read."""
    back = "put the journal back as it was, with its -wal file; or begin a new run"
    whole = [path for path in folder.checkpoints() if is_whole(path)]
    if not whole:
        return back
    if (whole[-1] / "adapter_config.json").exists():
        return f"{back}: {whole[-1]} is a PEFT adapter, to be merged into its model first"
    return f"{back}, which can begin with a checkpoint as with any Hugging Face folder: --model.path {whole[-1]}"


def changed_options(folder: RunFolder, config: Config) -> Iterator[ConfigError]:
    """Options that are others than the run had so far, as its journal has them, and may not be. Raises JournalError."""
    with JournalReader(folder.journal) as journal:
        before = options_of(journal.incarnation)
    now = json.loads(config.model_dump_json())
    for name in (option.name for option in options()):
        had, has = (_of(tree, name) for tree in (before, now))
        if had is not ABSENT and had != has and not any(fnmatch(name, each) for each in (*OPEN, *SET_ANEW)):
            yield another(folder.path, name, had, has, f"put it back, in {folder.config}")


def _of(tree: Any, name: str) -> Any:
    """Of the option of this dotted name. What another version of Rollyard did not know yet is absent."""
    for part in name.split("."):
        tree = tree.get(part, ABSENT) if isinstance(tree, dict) else ABSENT
    return tree


def finished(folder: RunFolder, past: Past, steps: int) -> str:
    """Why there is nothing left to do; empty when there is."""
    if not past.lives:
        return ""
    with JournalReader(folder.journal) as journal:
        begun = [life for life in journal.incarnations() if life.begun is not None]
    life = begun[-1] if begun else None  # later ones ended in their start, and changed nothing
    if life is None or life.ended_at is None or life.failed or life.cause is None or past.recovered.batches:
        return ""
    if past.version.step == steps:
        return f"{folder.path} has all its {steps} steps; --run.steps with a larger number makes it go on"
    return f"{folder.path} has used up its prompts, in {past.version.step} steps" if life.cause == USED_UP else ""


def left(folder: RunFolder, past: Past) -> tuple[dict[str, int], dict[str, int]]:
    """Prompts that were dropped for good over all lives, by reason, and members that were, of all prompts that have left."""
    live = {group.id for batch in past.recovered.batches for group in batch}
    prompts: dict[str, int] = {}
    members: dict[str, int] = {}
    with JournalReader(folder.journal) as journal:
        for id_, member, reason in journal.query(DROPS):
            if id_ in past.done and id_ not in live:
                counts = prompts if member is None else members
                counts[reason] = counts.get(reason, 0) + 1
    return prompts, members


def submitted(folder: RunFolder, past: Past) -> tuple[tuple[Prompt, ...], int]:
    """Prompts that code had submitted to earlier lives and that are asked again, and the id of the next one.

    One that was not admitted is not in the journal: it has to be submitted again. Raises JournalError when one is damaged.
    """
    sql = f"SELECT {PROMPT} FROM prompts p WHERE incarnation = ? AND group_id = ?"
    with JournalReader(folder.journal) as journal:
        own = dict(journal.query(OWN))
        rows = [row for id_, life in sorted(own.items()) if id_ not in past.done for row in journal.query(sql, life, id_)]
    return tuple(prompt_of(*row) for row in rows), max(own, default=-1) + 1


def lives(folder: RunFolder, past: Past) -> Lives:
    """So far, with the one that begins now. One that ended in its start is none."""
    with JournalReader(folder.journal) as journal:
        earlier = [life for life in journal.incarnations() if life.incarnation < past.lives]
        before = [(life.incarnation, life.begun.step) for life in earlier if life.begun is not None]
        reached = dict(journal.query(REACHED))
    begun = [*(step for _, step in before), past.version.step]
    repeated = sum(max(reached.get(life, 0) - after, 0) for (life, _), after in zip(before, begun[1:], strict=True))
    return Lives(len(begun), tuple(begun), repeated)


REACHED: Final = "SELECT incarnation, max(step) + 1 FROM batches WHERE trained_at IS NOT NULL GROUP BY incarnation"
DROPS: Final = f"""
    SELECT group_id, member, reason FROM drops JOIN ({OWN}) USING (group_id, incarnation)
    WHERE reason != '{DropReason.STOPPED}'"""


# ------------------------------------------------------------------------------------- what the config does not say


@dataclass(frozen=True, slots=True)
class Began:
    """What a run began with, as far as its config does not say it. It is kept in the run's folder.

    Args:
        files: a digest of each: the model's by their names, and the prompts.
        given: what it was given directly, in Python: reward, environment.
    """

    files: Mapping[str, str]
    given: tuple[str, ...]


BEGAN: Final = TypeAdapter(Began)


def given_directly(reward: object, environment: object, trainer: object = None) -> tuple[str, ...]:
    """Their names."""
    found = {"environment": environment, "reward": reward, TRAINER: trainer}
    return tuple(name for name, each in found.items() if each is not None)


def remember(folder: RunFolder, config: Config, model: Path, given: tuple[str, ...]) -> None:
    """So that a later life can tell whether it is still the same run."""
    write_file(folder.began, BEGAN.dump_json(Began(_digests(config, model), given), indent=1))


def check_given(folder: RunFolder, given: tuple[str, ...], past: Past = NOTHING) -> None:
    """Raises ConfigError when the run was given something else directly. Without the file that says it, nobody can tell."""
    if not folder.began.exists():
        if past.version.step:  # else it was killed before it had begun
            told = f"{folder.began} is not there any more: model, prompts and reward are taken as they are now"
            warnings.warn(visible(told), RuntimeWarning, stacklevel=2)
        return
    for name in sorted({*_began(folder).given} ^ {*given}):
        if name in given:
            raise ConfigError(f"the run was not given its {name} directly", where=name, remedy="leave it out")
        call = "Rollouts.resume(folder)" if name == TRAINER else f"Run.resume(folder, {name}=...)"
        problem, remedy = f"the run was given its {name} in Python", f"resume it there: rollyard.{call}"
        raise ConfigError(problem, where=name, remedy=remedy)


def check_files(folder: RunFolder, config: Config, model: Path) -> None:
    """Raises ConfigError when the model, or the file of prompts, is not the one that the run began with."""
    before, now = _began(folder).files, _digests(config, model)
    changed = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
    if PROMPTS in changed:
        problem = f"{config.prompts.path} is not what the run began with"
        raise ConfigError(problem, where="prompts.path", remedy="restore it, or begin a new run")
    if changed:
        problem = f"{model} is not the model that the run began with: of {', '.join(changed[:3])} something is another now"
        remedy = "restore it; or begin a new run, from a checkpoint of this one: --model.path RUN/checkpoints/STEP"
        raise ConfigError(problem, where="model.path", remedy=remedy)


def _began(folder: RunFolder) -> Began:
    try:
        return BEGAN.validate_json(folder.began.read_bytes())
    except (OSError, ValidationError) as error:
        problem = f"it does not say what the run began with: {in_a_line(error)}"
        raise ConfigError(problem, where=str(folder.began), remedy="restore the file, or begin a new run") from None


def _digests(config: Config, model: Path) -> dict[str, str]:
    files = {path for pattern in OF_MODEL for path in model.glob(pattern) if path.is_file()}
    found = {path.name: fingerprint(path) for path in sorted(files)}
    return found | ({PROMPTS: fingerprint(Path(config.prompts.path))} if config.prompts.path else {})
