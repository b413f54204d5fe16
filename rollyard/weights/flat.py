"""Tensors in one flat buffer, and how it is known that they are the ones that were sent."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from rollyard.errors import WeightSyncError
from rollyard.model.folder import infos, tensors
from rollyard.model.stamp import WeightStamp
from rollyard.model.transformer import CausalLM
from rollyard.types import Manifest, TensorInfo, WeightVersion
from rollyard.weights.layout import Layout
from rollyard.weights.words import named

STRIDE = 8191  # words; one of so many is read for a fingerprint. Prime, so that no regular pattern hides between them


def model_infos(model: CausalLM) -> tuple[TensorInfo, ...]:
    """The same of what is trained of a model."""
    return infos(tensors(model))


def views(buffer: Tensor, layout: Layout) -> dict[str, Tensor]:
    """The tensors of a layout within `buffer` `[bytes]` uint8."""
    return {
        place.info.name: buffer[place.offset : place.offset + place.size]
        .view(getattr(torch, place.info.dtype.removeprefix("torch.")))
        .view(place.info.shape)
        for place in layout.places
    }


@torch.no_grad()
def fill(targets: Mapping[str, Tensor], sources: Iterable[tuple[str, Tensor]]) -> None:
    """Copy every source to the target of its name, one after the other."""
    for name, source in sources:
        targets[name].copy_(source)
        del source  # before the next one comes


def marked(each: Iterable[tuple[str, Tensor]], found: list[int]) -> Iterator[tuple[str, Tensor]]:
    """These tensors as they come; `found` gets the fingerprint of each."""
    for name, tensor in each:
        found.append(fingerprint(tensor))
        yield name, tensor
        del tensor  # before the next one comes


def fingerprint(tensor: Tensor) -> int:
    """A number that a tensor with other contents is unlikely to share: the sum of some of its 16-bit words.

    It costs a small part of a copy, and catches a tensor, or a piece of one, that did not arrive. Bytes are few, and all summed.
    """
    if not tensor.numel():
        return 0
    flat = tensor.detach().contiguous().view(-1)
    if flat.dtype is torch.uint8:
        return int(flat.sum(dtype=torch.int64))
    words = flat.view(torch.int16)
    return int(words[::STRIDE].sum(dtype=torch.int64)) + int(words[-1])


def check(manifest: Manifest, arrived: Mapping[str, Tensor], fingerprints: Sequence[int]) -> None:
    """Raise WeightSyncError unless what arrived has these fingerprints, in the manifest's order."""
    if len(fingerprints) != len(manifest.tensors):
        problem = f"{len(fingerprints)} fingerprints of {len(manifest.tensors)} tensors"
        raise WeightSyncError(f"{named(manifest.version)} was offered with {problem}")
    for info, sent in zip(manifest.tensors, fingerprints, strict=True):
        if fingerprint(arrived[info.name]) != sent:
            raise WeightSyncError(f"{info.name} of {named(manifest.version)} arrived changed")


@contextmanager
def replacing(stamp: WeightStamp) -> Iterator[None]:
    """All that the stamp counts the changes of is written anew inside this block: what was torn is whole afterwards."""
    if stamp.whole:
        with stamp.writing():
            yield
    else:
        yield
        stamp.restored()


def once_more(offered: Manifest | None) -> Manifest:
    """What was offered last, to be offered again. Raises WeightSyncError when there is nothing."""
    if offered is None:
        raise WeightSyncError("nothing that was offered is there to be offered again")
    return replace(offered, bytes_copied=0)


Prepared = tuple[WeightVersion, Mapping[str, Tensor]]


def taken(prepared: Prepared | None, version: WeightVersion) -> Mapping[str, Tensor]:
    """The tensors of `version`. Raises WeightSyncError unless it is what was prepared."""
    chosen(None if prepared is None else prepared[0], version)
    assert prepared is not None
    return prepared[1]


def chosen(prepared: WeightVersion | None, version: WeightVersion) -> None:
    """Raise WeightSyncError unless `version` is what was prepared."""
    if prepared != version:
        has = "nothing" if prepared is None else named(prepared)
        raise WeightSyncError(f"{named(version)} was asked for, {has} was prepared")
