"""What may be chosen of a run (PURE): every placement, split, engine size and staleness that so many devices allow."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rollyard.plan.hardware import CPU
from rollyard.plan.scenario import Scenario

SPLITS = 32  # ways at most to part the devices, for one size of engines
SLOTS = 3  # numbers of slots that are tried: enough for all that is under way at once, half of it, a quarter
SPARE = (0.25, 0.5)  # prompts beyond a batch, as a share of it
CHOSEN = (  # options that a point sets
    "place.placement",
    "place.generate",
    "place.train",
    "engine.tensor_parallel_size",
    "engine.slots",
    "rollout.max_staleness",
    "rollout.oversample",
    "weights.rollover",
    "train.shard",
)


@dataclass(frozen=True, slots=True)
class Point:
    """One choice. The fields are the options of the same names; `generate` counts engines, `train` as `place.train` does."""

    placement: str
    generate: int
    train: int
    tensor_parallel: int
    slots: int
    staleness: int = 0
    oversample: int = 0
    rollover: str = "drain"
    shard: bool = False

    @property
    def apart(self) -> bool:
        return self.placement in ("separate", "async")

    @property
    def engines(self) -> int:
        """That generate at a time."""
        if self.apart:
            return self.generate
        return 1 if self.placement == "swap" else self.train

    @property
    def training(self) -> int:
        """Devices that train at a time."""
        if self.apart:
            return self.train
        return self.tensor_parallel * self.engines

    @property
    def devices(self) -> int:
        """In all."""
        if self.apart:
            return self.generate * self.tensor_parallel + self.train
        return self.tensor_parallel * (2 if self.placement == "swap" else self.train)

    @property
    def options(self) -> dict[str, Any]:
        """By their names in the config. Where nothing is in flight when weights change, no choice says what becomes of it."""
        values = (
            self.placement,
            self.generate,
            self.train,
            self.tensor_parallel,
            self.slots,
            self.staleness,
            self.oversample,
            self.rollover,
            self.shard,
        )
        found = dict(zip(CHOSEN, values, strict=True))
        if self.placement != "async":
            del found["weights.rollover"]
        return found


@dataclass(frozen=True, slots=True)
class Space:
    """What is searched.

    Attributes:
        base: all options that are not chosen.
        gpus: devices there are.
        node: devices of a node.
        staleness: the largest limit that is allowed.
        widest: devices of an engine at most.
        pinned: names of options that the user gave, and that keep the value that `base` has.
        far: how weights go from node to node.
    """

    base: Scenario
    gpus: int
    node: int
    staleness: int
    widest: int
    pinned: Collection[str] = ()
    far: str = "broadcast"

    def points(self) -> Iterator[Point]:
        """All of them, those that memory has no room for included."""
        for point in self._placed():
            if all(self._kept(name, value) for name, value in point.options.items()):
                yield point

    def left_out(self) -> dict[str, int]:
        """Points that there would be besides, by option of a choice that the user gave; sizes count together."""
        here, found = set(self.points()), dict[str, int]()
        sizes = frozenset({"place.generate", "place.train"})
        for name in (name for name in CHOSEN if name in self.pinned):
            free = frozenset(self.pinned) - (sizes if name in sizes else {name})
            found[name] = len(set(replace(self, pinned=free).points()) - here)
        return found

    def scenario(self, point: Point) -> Scenario:
        """All options."""
        usual = {name: value for name, value in self._usual(point).items() if name not in self.pinned}
        return with_options(self.base, usual | point.options)

    def _usual(self, point: Point) -> dict[str, Any]:
        """What goes with a choice, unless the user says otherwise: engines, how weights travel, where it runs."""
        found: dict[str, Any] = {"engine.kind": "vllm" if point.apart and self.base.cluster.hardware != CPU else "embedded"}
        if point.placement != "colocated" and point.devices > self.node:
            found["weights.transport"] = self.far if point.apart else "broadcast"
        if point.slots > self.base.engine.step_tokens:
            found["engine.step_tokens"] = point.slots
        if point.shard and not point.apart:
            found["costs.offload"] = True
        if point.devices > self.node:
            found |= {"place.runtime": "ray", "place.ray_address": "auto"}
        return found

    def _kept(self, name: str, value: Any) -> bool:
        section, _, leaf = name.partition(".")
        return name not in self.pinned or bool(getattr(getattr(self.base, section), leaf) == value)

    def _placed(self) -> Iterator[Point]:
        if "place.generate" in self.pinned or "place.train" in self.pinned:
            yield from self._pinned_sizes()
            return
        for wide in self._widths():
            for engines, trainers in self._splits(wide):
                yield from self._apart(engines, trainers, wide)
            if engines := self.gpus // wide:
                yield from self._colocated(engines, wide)
        if self.gpus >= 2:
            yield from self._swap(self.gpus // 2)

    def _pinned_sizes(self) -> Iterator[Point]:
        """Sizes that are given are kept under every placement that they mean something to."""
        place = self.base.place
        for wide in self._widths():
            if place.generate * wide + place.train <= self.gpus:
                yield from self._apart(place.generate, place.train, wide)
            if place.train * wide <= self.gpus:
                yield from self._colocated(place.train, wide)
            if 2 * wide <= self.gpus:
                yield from self._swap(wide)

    def _widths(self) -> Iterator[int]:
        if "engine.tensor_parallel_size" in self.pinned:
            yield self.base.engine.tensor_parallel_size
            return
        wide = 1
        while wide <= min(self.gpus, self.widest):
            yield wide
            wide *= 2

    def _splits(self, wide: int) -> Iterator[tuple[int, int]]:
        """Engines and training devices; all devices are used."""
        most = (self.gpus - 1) // wide
        stride = max(1, -(-most // SPLITS))
        for engines in range(stride, most + 1, stride):
            yield engines, self.gpus - engines * wide

    def _apart(self, engines: int, trainers: int, wide: int) -> Iterator[Point]:
        groups, whole = self.base.rollout.groups_per_step, "train.shard" in self.pinned and not self.base.train.shard
        shard = trainers > 1 and not whole  # what is given is for any number of them
        for slots in self._slots(groups, engines):
            yield Point("separate", engines, trainers, wide, slots, shard=shard)
        for staleness in range(1, self.staleness + 1):
            for spare in (0, *self._spares(staleness)):
                live = groups + spare if spare else groups * (staleness + 1)
                for slots in self._slots(live, engines):
                    for rollover in ("keep", "abort", "drain"):
                        yield Point("async", engines, trainers, wide, slots, staleness, spare, rollover, shard)

    def _colocated(self, engines: int, wide: int) -> Iterator[Point]:
        """Each device has all of the training state, or (this only simulated) they share it."""
        groups = self.base.rollout.groups_per_step
        for shard in (False, True) if wide == 1 and engines > 1 else (engines * wide > 1,):
            for slots in self._slots(groups, engines):
                yield Point("colocated", 1, engines, wide, slots, shard=shard)
            for staleness in range(1, self.staleness + 1):
                for spare in self._spares(staleness):
                    for slots in self._slots(groups + spare, engines):
                        yield Point("colocated", 1, engines, wide, slots, staleness, spare, shard=shard)

    def _swap(self, wide: int) -> Iterator[Point]:
        if self.staleness:
            for slots in self._slots(self.base.rollout.groups_per_step, 1):
                yield Point("swap", 1, 1, wide, slots, staleness=1)

    def _spares(self, staleness: int) -> Iterator[int]:
        groups = self.base.rollout.groups_per_step
        if "rollout.oversample" in self.pinned:
            shares: Collection[int] = (self.base.rollout.oversample,)
        else:
            shares = sorted({round(share * groups) for share in SPARE})
        yield from (spare for spare in shares if 0 < spare <= staleness * groups)

    def _slots(self, live: int, engines: int) -> Iterator[int]:
        """Of an engine."""
        if "engine.slots" in self.pinned:
            yield self.base.engine.slots
            return
        most = -(-live * self.base.rollout.group_size // engines)
        yield from sorted({max(1, -(-most // 2**halved)) for halved in range(SLOTS)}, reverse=True)


def with_options(scenario: Scenario, options: Mapping[str, Any]) -> Scenario:
    """The scenario with these values, which are taken as they are; names are dotted."""
    sections: dict[str, dict[str, Any]] = {}
    for name, value in options.items():
        section, _, leaf = name.partition(".")
        sections.setdefault(section, {})[leaf] = value
    return scenario.model_copy(
        update={name: getattr(scenario, name).model_copy(update=values) for name, values in sections.items()}
    )
