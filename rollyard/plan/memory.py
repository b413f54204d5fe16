"""What a device has to hold, and how many tokens' keys and values there is room for then (PURE).

Activations of training are 34 bytes a token, layer and number of the hidden size in 16-bit formats, attention left out, which is
never stored; with recomputation a layer's input is kept and one layer at a time is whole (Korthikanti et al. 2022, arXiv
2205.05198, equation 2 and section 5). Where products have another format than parameters (autocast), what a layer's two norms
are taken of has that of the parameters. Logits are computed in chunks and not counted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import isclose
from typing import Final

from rollyard.errors import ConfigError
from rollyard.plan.decoding import cached_bytes
from rollyard.plan.devices import Devices, devices_of, engine_sizes
from rollyard.plan.hardware import CPU
from rollyard.plan.scenario import Scenario
from rollyard.plan.shape import Shape

LAYER: Final = 17  # numbers a token and hidden number that a layer keeps for its backward pass: 34 bytes of 2
STREAM: Final = 2  # of these, what its norms are taken of
PIECE: Final = 1200  # tokens that our own trainer computes at a time on a CPU: train.rows.CACHED_TOKENS
ALIVE: Final = (
    12  # the same while a layer is only computed: its input, queries, keys, values, both sides of the feed-forward part
)
LOGIT: Final = 4  # bytes


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of one parameter.

    Args:
        train: as it is trained.
        state: gradient, moments and finer copies.
        engine: in an engine.
        cache: of a number of keys and values.
        trained: parameters that have such a state.
        number: of one of these, and of its gradient.
        product: of a number as it is multiplied in training.
        reference: of a policy that stays as it was at first, beside that which is trained; 0: there is none.
        base: as an engine keeps it beside its own: what adapters are merged with, or what is rounded; 0: it keeps none.
        sent: of all that travels, which the trainer copies to its own device before they travel; 0: it makes no such copy.
    """

    train: int
    state: float
    engine: float
    cache: int
    trained: int
    number: int
    product: int
    reference: int = 0
    base: int = 0
    sent: float = 0.0


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one device, in one phase of the run. `kv` is what weights, state and activations leave for keys and values."""

    phase: str  # generation or training
    capacity: float
    weights: float
    state: float  # gradients and optimizer
    activations: float
    kv: float = 0.0
    sent: float = 0.0  # the copy that travels

    @property
    def free(self) -> float:
        """Below 0: so much does not fit."""
        return self.capacity - self.weights - self.state - self.activations - self.kv - self.sent

    def __str__(self) -> str:
        parts = (
            ("weights", self.weights),
            ("gradients and optimizer", self.state),
            ("activations", self.activations),
            ("a copy that travels", self.sent),
        )
        told = ", ".join(f"{name} {size / 1e9:.1f} GB" for name, size in parts if size)
        return f"{told}, of {self.capacity / 1e9:.1f} GB"


def generating(scenario: Scenario, shape: Shape, devices: Devices, sizes: Sizes, longest: int) -> Memory:
    """A device of an engine. What does not hold weights, state and activations is for keys and values.

    Args:
        longest: tokens of the longest sequence.

    Raises:
        ConfigError: the weights do not fit, or not one sequence beside them.
    """
    engine, size = scenario.engine, devices.tensor_parallel
    empty = _empty(scenario, shape, devices, sizes)
    token = cached_bytes(shape, size, sizes.cache)
    asked = engine.pages * engine.page_tokens or longest
    if asked * token > empty.free:
        holds = max(0, int(empty.free / token))
        problem = f"an engine of {size} {devices.hardware.name} does not hold {asked:,} tokens ({asked * token / 1e9:.1f} GB)"
        problem += f": of each device {empty}; left is room for {holds:,} tokens"
        raise ConfigError(problem, where="engine.tensor_parallel_size", remedy=_remedy(scenario, shape, devices, sizes, asked))
    wanted = engine.pages * engine.page_tokens or wanted_of(scenario, shape) or empty.free / token
    kv = min(wanted * token, empty.free)
    return replace(empty, kv=kv)


def _empty(scenario: Scenario, shape: Shape, devices: Devices, sizes: Sizes) -> Memory:
    """A device of an engine that holds no keys and values."""
    engine, size = scenario.engine, devices.tensor_parallel
    capacity = devices.hardware.memory * engine.gpu_memory_utilization
    weights, state = shape.parameters * (sizes.engine + sizes.base) / size, 0.0
    if not devices.apart and not scenario.costs.offload:
        state = sizes.state * sizes.trained / devices.copies
        weights += shape.parameters * sizes.reference / devices.copies
        # Else it decodes with the trainer's own. Adapters are merged into weights of its own.
        if sizes.engine != sizes.train or devices.copies != size or scenario.weights.what == "lora":
            weights += shape.parameters * sizes.train / devices.copies
    activations = engine.step_tokens * ALIVE * shape.hidden * sizes.cache / size + engine.slots * shape.vocabulary * LOGIT / size
    return Memory("generation", capacity, weights, state, activations)


def wanted_of(scenario: Scenario, shape: Shape) -> int:
    """Tokens that an embedded engine makes room for by itself: a page more than each slot needs at its longest. 0: others take
    what memory leaves, and so does one whose window nobody knows.
    """
    engine = scenario.engine
    window = engine.window or shape.window
    if engine.kind != "embedded" or not window:
        return 0
    return engine.slots * (-(-window // engine.page_tokens) + 1) * engine.page_tokens


def room(scenario: Scenario, shape: Shape, devices: Devices, sizes: Sizes, longest: int) -> int:
    """Tokens of keys and values that an engine has room for, in whole pages; see `generating`. Raises ConfigError."""
    found = generating(scenario, shape, devices, sizes, longest).kv / cached_bytes(shape, devices.tensor_parallel, sizes.cache)
    whole, page = round(found), scenario.engine.page_tokens
    return (whole if isclose(found, whole, rel_tol=1e-12) else int(found)) // page * page


def training(scenario: Scenario, shape: Shape, devices: Devices, sizes: Sizes, longest: int) -> Memory:
    """A device that trains.

    Args:
        longest: tokens of the longest sequence.

    Raises:
        ConfigError: it does not fit.
    """
    copies = devices.copies
    # Each stage has its part of the layers, and as many micro-batches under way as there are stages (Narayanan et al. 2021).
    shared = devices.ranks * scenario.costs.stages / devices.train
    tokens = _together(scenario, devices, longest) * shared
    layer = STREAM * sizes.train + (LAYER - STREAM) * sizes.product
    kept = shape.layers * sizes.train + layer if scenario.recomputes else shape.layers * layer
    found = Memory(
        "training",
        devices.hardware.memory,
        shape.parameters * (sizes.train + sizes.reference) / copies,
        sizes.state * sizes.trained / copies,
        tokens * shape.hidden * kept,
        sent=sizes.sent,
    )
    if found.free < 0:
        problem = (
            f"training does not fit in {devices.train} {devices.hardware.name}, {copies} of which share a copy: of each {found}"
        )
        remedy = "train on more devices"
        if copies < devices.train:
            remedy += ", with one copy for all (--train.shard true where engines are apart, --costs.state_devices elsewhere)"
        elif found.activations > found.capacity / 2:
            remedy += ", or use a smaller --batch.token_budget"
            remedy += "" if scenario.recomputes else ", or --train.recompute true"
        if found.sent >= -found.free:
            remedy += ", or --weights.transport checkpoint, which makes no copy there"
        raise ConfigError(problem, where="place.train", remedy=remedy)
    return found


def _together(scenario: Scenario, devices: Devices, longest: int) -> int:
    """Tokens of which activations are held at a time: of a micro-batch, or of a piece of one."""
    budget = max(scenario.batch.token_budget, longest)
    pieces = devices.hardware.name == CPU and not scenario.train.shard
    return min(budget, max(PIECE, longest)) if pieces else budget


def _remedy(scenario: Scenario, shape: Shape, devices: Devices, sizes: Sizes, asked: int) -> str:
    """What would make room for so many tokens: the smallest engine that there are devices for, with and without the state."""
    found, now = [], devices.tensor_parallel
    if size := _least(scenario, shape, devices, sizes, asked):
        found.append(f"--engine.tensor_parallel_size {size}")
    if not devices.apart and not scenario.costs.offload:
        costs = scenario.costs.model_copy(update={"offload": True})
        if size := _least(scenario.model_copy(update={"costs": costs}), shape, devices, sizes, asked):
            found.append("--costs.offload true" + f" with --engine.tensor_parallel_size {size}" * (size != now))
    if scenario.engine.pages and _empty(scenario, shape, devices, sizes).free > 0:
        found.append("fewer --engine.pages")
    return f"use {', or '.join(found)}" if found else "no engine of these devices holds it: use more, or some with more memory"


def _least(scenario: Scenario, shape: Shape, devices: Devices, sizes: Sizes, asked: int) -> int:
    """Devices of the smallest engine that holds so many tokens; 0: none does. Halves are as large as they are."""
    now = devices.tensor_parallel
    wider = engine_sizes(shape) if scenario.place.placement != "swap" else [now]
    fitting = (size for size in wider if now <= size <= _most(devices))
    return next((size for size in fitting if _holds(scenario, shape, devices, sizes, size, asked)), 0)


def _most(devices: Devices) -> int:
    """Devices of an engine at most, beside one that trains."""
    engines = devices.engines * devices.tensor_parallel
    return engines + devices.train - 1 if devices.apart else engines


def _holds(scenario: Scenario, shape: Shape, devices: Devices, sizes: Sizes, size: int, asked: int) -> bool:
    """Would engines of `size` devices hold so many tokens? As many devices as there are."""
    place = scenario.place
    if not devices.apart:
        place = place.model_copy(update={"train": devices.train // size})
    engine = scenario.engine.model_copy(update={"tensor_parallel_size": size})
    other = scenario.model_copy(update={"engine": engine, "place": place})
    try:
        empty = _empty(other, shape, devices_of(other, devices.hardware), sizes)
    except ConfigError:
        return False  # what trains is not shared out like that
    return asked * cached_bytes(shape, size, sizes.cache) <= empty.free
