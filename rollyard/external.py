"""Builds the trainer of another stack, and what stands beside it in its process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch

from rollyard import worker
from rollyard.config import Config
from rollyard.model.architecture import Architecture
from rollyard.model.folder import save_each
from rollyard.model.stamp import WeightStamp
from rollyard.model.transformer import CausalLM
from rollyard.objective import options_of
from rollyard.protocols.devices import Device
from rollyard.protocols.training import ProvableTrainer
from rollyard.protocols.weights import TrainerEvidence
from rollyard.train.external import CANARY, PROBE, AdaptedTrainer, TrainerSetup, go_on, make
from rollyard.weights.external import ExternalEvidence, ExternalSource
from rollyard.weights.flat import model_infos


def build_external(
    config: Config, folder: Path, device: Device, begin: worker.Beginning
) -> tuple[AdaptedTrainer, ExternalSource, TrainerEvidence | None]:
    """A trainer of another stack, what it publishes, and what it can say of that. Called on the device's thread.

    Raises ConfigError for an adapter that does not suit, TrainError when it fails.
    """
    train, weights, kind, dtype = options_of(config), config.weights, worker.device_of(config), config.model.dtype
    extra = json.loads(train.extra or "{}")
    setup = TrainerSetup(begin.checkpoint or folder, train, dtype, kind, config.rollout.max_tokens, begin.version, extra)
    needed = CANARY if weights.canary else PROBE if weights.probe else ()
    external = make(train.adapter, setup, needed)
    if begin.checkpoint is not None:
        go_on(external, train.adapter, begin.checkpoint)
    shape, stamp, format_ = Architecture.from_folder(folder), WeightStamp(), getattr(torch, dtype)
    source = ExternalSource(external, model_infos(CausalLM(shape, format_, "meta")), stamp, torch.device(kind))

    def write(target: Path, also: Callable[[Path], None]) -> None:
        save_each(source.infos, source.checked(), target, folder, also)

    if needed:
        parts = worker.shares_of(config, shape, source.infos)
        evidence = ExternalEvidence(cast(ProvableTrainer, external), source, shape, format_, device, parts)
    else:
        evidence = None
    adapted = AdaptedTrainer(external, train.adapter, device, stamp, write, begin.version, begin.life)
    return adapted, source, evidence
