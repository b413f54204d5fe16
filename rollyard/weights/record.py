"""What a version is and says, written beside its weights: for whoever looks later whether an engine decodes with them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from rollyard.errors import CheckpointError, WeightSyncError
from rollyard.model.folder import weight_files
from rollyard.model.transformer import CausalLM
from rollyard.texts import in_a_line
from rollyard.types import Manifest, WeightVersion
from rollyard.weights import probe, wire
from rollyard.weights.flat import marked
from rollyard.weights.source import OwnSource

MANIFEST, PROBE = "manifest.json", "probe.safetensors"


def record(model: CausalLM, version: WeightVersion, folder: Path) -> None:
    """Write them from the parameters as they are in memory; `folder` holds the weights already. Raises CheckpointError."""
    try:
        source, found = OwnSource.of(model), list[int]()
        for _ in marked(source.each(version), found):
            pass  # one after the other, for its fingerprint alone
        size = sum(path.stat().st_size for path in weight_files(folder))
        manifest = Manifest(version, source.infos, size, fingerprints=tuple(found))
        (folder / MANIFEST).write_bytes(wire.MANIFEST.dump_json(manifest))
        asked = torch.tensor(probe.prompts(model.architecture.vocab_size))
        save_file({"prompts": asked, "logprobs": probe.table(model)}, folder / PROBE)
    except (OSError, SafetensorError, WeightSyncError) as error:
        raise CheckpointError(f"{folder} cannot be written: {error}") from error


def manifest_of(folder: Path) -> Manifest:
    """What was written, to be read from there. Raises WeightSyncError."""
    try:
        found = wire.MANIFEST.validate_json((folder / MANIFEST).read_bytes())
    except (OSError, ValidationError) as error:
        raise WeightSyncError(f"{folder / MANIFEST} cannot be read: {in_a_line(error)}") from error
    return replace(found, source=str(folder))


def table_of(folder: Path, vocabulary: int) -> Tensor:
    """What the trainer says there: `[prompts, vocab]` logprobs. Raises WeightSyncError, also when it was asked other prompts."""
    try:
        found = load_file(folder / PROBE)
    except (OSError, SafetensorError) as error:
        raise WeightSyncError(f"{folder / PROBE} cannot be read: {error}") from error
    if found["prompts"].tolist() != [list(each) for each in probe.prompts(vocabulary)]:
        raise WeightSyncError(f"{folder / PROBE} is of another version of Rollyard: other prompts were asked")
    return found["logprobs"]
