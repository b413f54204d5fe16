"""What both jobs of an exchange must agree on, and every later one with those before it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from rollyard.config import Config
from rollyard.datafiles import fingerprint
from rollyard.errors import ConfigError
from rollyard.exchange.files import read_whole, write_whole
from rollyard.exchange.folder import Folder, Job
from rollyard.model.architecture import Architecture
from rollyard.objective import own_engine

FORMAT = 4
SAMPLING = ("group_size", "groups_per_step", "max_tokens", "temperature", "top_p", "top_k", "stop", "ignore_eos")
PROMPTS = ("dataset", "subset", "split", "field", "columns", "held_out", "shuffle", "epochs", "chat", "options", "system")

Agreed = dict[str, Any]  # what JSON can hold, by the option that it comes from
AGREED = TypeAdapter(Agreed)


def agreed(config: Config, architecture: Architecture, job: Job) -> Agreed:
    """What this job must keep to. Only the generation job reads the prompts."""
    found: Agreed = {"format": FORMAT, "run.seed": config.run.seed, "model.dtype": config.model.dtype}
    found |= {f"rollout.{name}": getattr(config.rollout, name) for name in SAMPLING}
    # what `train.correction auto` is decided by: the training job must not take for exact what the other writes
    found["rollout.max_staleness"] = config.rollout.max_staleness
    found["engine.kind (our own)"] = own_engine(config)
    found["advantage.overlong"] = config.advantage.overlong  # one job leaves out what was cut, the other counts it so
    found["prompts.task"] = config.prompts.task
    found["model.path"] = "a folder" if config.model.path else ""  # which may have another name on another machine
    if config.model.path:
        shape = asdict(architecture) | {"eos_ids": sorted(architecture.eos_ids)}
        found |= {f"model.path ({name})": value for name, value in shape.items()}
    else:  # the base policy is made of these
        found |= {f"warmup.{name}": value for name, value in config.warmup.model_dump().items()}
    if job is Job.GENERATION:
        found |= {f"prompts.{name}": getattr(config.prompts, name) for name in PROMPTS}
        found |= {f"environment.{name}": getattr(config.environment, name) for name in ("name", "turns")}
        if path := config.prompts.path:
            found["prompts.path (contents)"] = fingerprint(Path(path))
    return dict(json.loads(json.dumps(found)))


def agree(folder: Folder, job: Job, own: Agreed) -> None:
    """Leave `own` for others, unless it is there. Raises ConfigError for the first option in which the folder differs,
    ExchangeError for a file that is damaged.

    Called by who holds the job's seat. Both jobs may do it at the same time: each writes first and then reads the other's.
    """
    path = folder.path / "agreed" / f"{job}.json"
    compare(folder, job, own)
    if not path.exists():
        write_whole(path, json.dumps(own, indent=1).encode())
        try:
            compare(folder, job, own)
        except ConfigError:
            path.unlink()
            raise


def compare(folder: Folder, job: Job, own: Agreed) -> None:
    """With what either job has left. Raises ConfigError, and ExchangeError for what cannot be read."""
    for other in (job, job.other):
        path = folder.path / "agreed" / f"{other}.json"
        if not path.exists():
            continue
        theirs = read_whole(path, AGREED)
        names = own.keys() | theirs.keys() if other is job else own.keys() & theirs.keys()
        for name in sorted(names):
            if own.get(name) != theirs.get(name):
                what = f"{own.get(name)!r} here and {theirs.get(name)!r} in {folder.path}"
                remedy = f"keep to what the {other} job began with, or give another folder"
                raise ConfigError(what, where=name, remedy=remedy)
