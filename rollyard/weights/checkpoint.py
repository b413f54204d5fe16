"""Weights through a folder on a disk that both sides see: written whole or not at all, read by whoever wants them.

Slow, and works everywhere: every engine that can read a Hugging Face folder can take weights this way.
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from rollyard.durable import write_folder
from rollyard.errors import ConfigError, WeightSyncError
from rollyard.events import EngineId
from rollyard.model.folder import infos, save_each, weight_files, write_tensors
from rollyard.protocols.devices import Device
from rollyard.types import Activity, Manifest, Sent, TensorInfo, WeightVersion
from rollyard.weights.delta import Bases, Changes, Frame, Scan, apply, catch_up
from rollyard.weights.flat import Prepared, check, fill, marked, once_more, taken, views
from rollyard.weights.kept import Kept
from rollyard.weights.layout import Layout, compare
from rollyard.weights.source import Source
from rollyard.weights.words import named

CHANGES = "changes.safetensors"
CHANGED, AS_IT_IS = "c", "b"  # before the number of a bucket
KEPT = 2  # versions of an engine: it may decode with one while the other is written


class CheckpointPublisher:
    """Writes each version as a folder of its own; the newest stays, and what an engine still has.

    Args:
        source: the model's tensors.
        device: where they are changed; a version is read there, between two steps.
        origin: the folder the model came from, for its configuration and tokenizer.
        folder: where versions are written. It is removed by `close`.
        delta: only what changed is written for engines that have all the version before, which is kept in memory too.
    """

    def __init__(self, source: Source, device: Device, origin: Path, folder: Path, delta: bool = False) -> None:
        self._source, self._device, self._origin, self._folder = source, device, origin, folder
        self._layout, self._bases = Layout.of(source.infos), Bases(delta)
        self._buffer = torch.zeros(self._layout.size, dtype=torch.uint8) if delta else None  # what was offered last
        self._sent = Sent(0)
        self._offers = 0
        self._offered: Manifest | None = None

    async def publish(self, version: WeightVersion, engines: Sequence[EngineId]) -> Manifest:
        """Write the parameters. Raises WeightSyncError when they cannot be written."""
        base = self._bases.of(self._offered, version, engines)
        publish = self._device.spans.timed(Activity.SYNC, self._publish, "publish")
        return self._bases.offer(await self._device.run(publish, version, base))

    async def again(self, engines: Sequence[EngineId]) -> Manifest:
        """The newest folder, with all of it. Raises WeightSyncError when nothing was written."""
        offered = once_more(self._offered)
        if offered.base:
            again = self._device.spans.timed(Activity.SYNC, self._write_kept, "publish")
            self._offered = offered = await asyncio.to_thread(again, offered)
        return offered

    async def deliver(self) -> Sent:
        """What was offered lies on the disk."""
        return self._sent

    def taken(self, engine: EngineId, version: WeightVersion) -> None:
        """An engine reads what it takes into its own memory."""
        self._bases.taken(engine, version)

    def lost(self, engine: EngineId) -> None:
        """It leaves nothing behind."""
        self._bases.lost(engine)

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def _publish(self, version: WeightVersion, base: str) -> Manifest:
        found = list[int]()
        each = marked(self._source.each(version), found)
        manifest = Manifest(version, self._source.infos, self._layout.size, name=secrets.token_hex(8))
        if self._buffer is None:
            source = self._write(version, each)
        else:
            self._offered = None  # what is kept of it changes
            source, base = self._write_changed(version, each, base)
        size = self._sent.bytes
        self._offered = replace(manifest, source=source, bytes_copied=size, fingerprints=tuple(found), base=base)
        self._remove_all_but(source)
        return self._offered

    def _write(self, version: WeightVersion, each: Iterable[tuple[str, Tensor]]) -> str:
        """All of it, as a Hugging Face folder; where."""
        target = self._next()
        try:
            save_each(self._source.infos, each, target, self._origin)
        except (OSError, SafetensorError) as error:
            raise WeightSyncError(f"{named(version)} cannot be written to {target}: {error}") from error
        self._sent = Sent(sum(path.stat().st_size for path in weight_files(target)))
        return str(target)

    def _write_changed(self, version: WeightVersion, each: Iterable[tuple[str, Tensor]], base: str) -> tuple[str, str]:
        """What changed, unless all of it is less; and the base that it is for."""
        assert self._buffer is not None
        buckets = self._layout.buckets()
        if not base:
            return self._write(version, _through(each, views(self._buffer, self._layout))), ""
        scan = Scan(self._buffer, self._layout, buckets)
        frames = {
            (AS_IT_IS if frame is None else CHANGED) + str(number): self._buffer[slice(*bucket)] if frame is None else frame
            for number, (frame, bucket) in enumerate(zip(scan.frames(each), buckets, strict=True))
        }
        unchanged, size = scan.share, sum(map(len, frames.values()))
        if size >= self._layout.size:
            source = self._write(version, views(self._buffer, self._layout).items())
            self._sent = replace(self._sent, unchanged=unchanged)
            return source, ""
        target = self._next()
        try:
            write_folder(target, lambda draft: write_tensors(draft / CHANGES, infos(frames), frames.items()))
        except (OSError, SafetensorError) as error:
            raise WeightSyncError(f"{named(version)} cannot be written to {target}: {error}") from error
        self._sent = Sent(size, unchanged)
        return str(target), base

    def _write_kept(self, offered: Manifest) -> Manifest:
        assert self._buffer is not None
        source = self._write(offered.version, views(self._buffer, self._layout).items())
        return replace(offered, source=source, base="")

    def _next(self) -> Path:
        self._offers += 1
        return self._folder / f"offer-{self._offers:06d}"

    def _remove_all_but(self, newest: str) -> None:
        for older in self._folder.glob("offer-*"):
            if str(older) != newest:
                shutil.rmtree(older, ignore_errors=True)


def _through(each: Iterable[tuple[str, Tensor]], targets: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Tensors that are copied on their way."""
    for name, tensor in each:
        fill(targets, ((name, tensor),))
        yield name, targets[name]


class CheckpointReceiver:
    """Reads a version into memory.

    Args:
        expected: the engine's own tensors.
        device: where they are wanted.
        delta: what was read is kept, so that later only what changed is read.
    """

    def __init__(self, expected: Sequence[TensorInfo], device: torch.device, delta: bool = False) -> None:
        self._expected, self._device, self._delta = expected, device, delta
        self._kept = Kept("the engine", Layout.of(expected).size, KEPT)
        self._prepared: Prepared | None = None

    def prepare(self, manifest: Manifest) -> None:
        """Read and check. Raises WeightSyncError for a folder that is not what the manifest says."""
        compare(manifest.tensors, self._expected)
        self._prepared = None
        folder = Path(manifest.source)
        try:
            arrived = self._read_kept(manifest, folder) if self._delta else _read(folder, self._device)
        except (OSError, SafetensorError, ConfigError) as error:
            raise WeightSyncError(f"{named(manifest.version)} cannot be read from {folder}: {error}") from error
        compare(infos(arrived), self._expected)
        check(manifest, arrived, manifest.fingerprints)
        self._prepared = manifest.version, arrived

    def take(self, version: WeightVersion) -> Mapping[str, Tensor]:
        """Raises WeightSyncError when another version was prepared."""
        tensors_ = taken(self._prepared, version)
        self._kept.take()
        return tensors_

    def _read_kept(self, manifest: Manifest, folder: Path) -> Mapping[str, Tensor]:
        """Into memory of our own."""
        layout = Layout.of(manifest.tensors)
        base = self._kept.base(manifest.base) if manifest.base else None
        slot, holds = self._kept.begin(self._device)
        targets, last = views(slot.tensor, layout), self._kept.last
        self._kept.last = Changes()
        if base is None:
            left = set(targets)
            for name, tensor in _each(folder, self._device):
                if name not in left:
                    raise WeightSyncError(f"{name} in {folder} is none of the engine's tensors")
                left.discard(name)
                fill(targets, ((name, tensor),))
            if left:
                raise WeightSyncError(f"{folder} lacks {', '.join(sorted(left))}")
        else:
            self._kept.last = self._read_changes(manifest, folder, slot.tensor, holds, base.tensor, last)
        slot.end(manifest.name)
        self._kept.fill(slot)
        return targets

    def _read_changes(self, manifest: Manifest, folder: Path, target: Tensor, holds: str, base: Tensor, last: Changes) -> Changes:
        frames: list[Frame] = []
        with safe_open(folder / CHANGES, framework="pt", device=str(self._device)) as file:
            names = {int(name[1:]): name for name in file.keys()}  # noqa: SIM118 (the file is no mapping)
            for number, (start, end) in enumerate(Layout.of(manifest.tensors).buckets()):
                bucket, content = target[start:end], file.get_tensor(names[number])
                if names[number].startswith(AS_IT_IS):
                    bucket.copy_(content)
                    frames.append(None)
                else:
                    catch_up(number, bucket, holds, base[start:end], manifest.base, last)
                    apply(content, bucket, number + 1)
                    frames.append(content)
        return Changes(manifest.base, manifest.name, tuple(frames))

    def close(self) -> None:
        self._prepared = None
        self._kept.close()


def _read(folder: Path, device: torch.device) -> dict[str, Tensor]:
    files = [load_file(path, device=str(device)) for path in weight_files(folder)]
    return {name: tensor for file in files for name, tensor in file.items()}


def _each(folder: Path, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """One tensor after the other."""
    for path in weight_files(folder):
        with safe_open(path, framework="pt", device=str(device)) as file:
            for name in file.keys():  # noqa: SIM118 (the file is no mapping)
                yield name, file.get_tensor(name)
