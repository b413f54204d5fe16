"""What everything in a run takes: of a scenario's model, devices and constants, in seconds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rollyard.errors import ConfigError
from rollyard.model.architecture import Architecture
from rollyard.model.flops import adapter_numbers
from rollyard.plan.decoding import EngineCosts
from rollyard.plan.devices import Devices, check_heads, devices_of
from rollyard.plan.hardware import CPU, Hardware
from rollyard.plan.learning import TrainingCosts
from rollyard.plan.measured import device_of
from rollyard.plan.memory import Memory, Sizes, generating, room, training, wanted_of
from rollyard.plan.models import shape_of
from rollyard.plan.moving import Moving, Weights, handoff_s, moving, stored_s
from rollyard.plan.passes import passes_of
from rollyard.plan.scenario import Scenario
from rollyard.plan.shape import WHERE, Shape
from rollyard.plan.trace import prompts_of
from rollyard.warmup import architecture
from rollyard.worker import NUMBER_BYTES, handoff_of, trains_here, transport_of

MOMENTS = 2  # of a parameter, beside its gradient
ADAPTER = NUMBER_BYTES["float32"]


@dataclass(frozen=True, slots=True)
class Costs:
    """Of a scenario. An engine is several devices with tensor parallelism; training is of all that train together."""

    shape: Shape
    devices: Devices
    engine: EngineCosts
    training: TrainingCosts
    moving: Moving
    memory: tuple[Memory, ...]  # of a device that generates, and of one that trains
    handoff_s: float  # the whole training state to the other half (swap)
    sleep_s: float  # engines make room for training (colocated)
    wake_s: float
    probe_s: float
    checkpoint_s: float
    restart_s: float
    verdict_s: float
    verdict_token_s: float
    evidence_s: float = 0.0  # what the trainer computes for probes, with each version

    def train_s(self, tokens: int, pairs: int) -> float:
        """A batch, all its optimizer steps; see `TrainingCosts.train_s`."""
        return self.training.train_s(tokens, pairs)

    def batch_s(self, groups: Iterable[tuple[int, Sequence[int]]]) -> float:
        """The same of tokens of prompts, each with those of its completions."""
        return self.training.batch_s(groups)

    def score_s(self, tokens: int) -> float:
        """A verdict on a completion of so many tokens."""
        return self.verdict_s + self.verdict_token_s * tokens

    @property
    def copy_s(self) -> float:
        """The trainer makes its copy of new weights, computes what probes compare with, and does nothing else."""
        return self.moving.copy_s + self.evidence_s

    @property
    def transfer_s(self) -> float:
        """New weights are on their way, while engines go on."""
        return self.moving.transfer_s

    @property
    def load_s(self) -> float:
        """An engine changes over, and writes nothing. The probe comes after it."""
        return self.moving.load_s


def fewer_pages(costs: Costs, scenario: Scenario) -> int:
    """Pages that memory has room for, where an embedded engine would make more by itself, and fail; 0: it would not."""
    held, engine = costs.engine.kv_tokens, scenario.engine
    return 0 if engine.pages or held >= wanted_of(scenario, costs.shape) else held // engine.page_tokens


def shape_for(scenario: Scenario) -> Shape:
    """Of the scenario's model; without one, of its task's base policy. Raises ConfigError."""
    if scenario.model.path:
        return shape_of(scenario.model.path)
    if scenario.prompts.task:
        return Shape.from_hf(architecture(scenario).to_hf(), f"base policy of {scenario.prompts.task}")
    raise ConfigError("no model is named", where=WHERE, remedy="give its folder, its config.json, or a name such as llama-8b")


def costs_of(scenario: Scenario) -> Costs:
    """What everything takes. Devices called cpu are measured, once.

    Raises:
        ConfigError: the model or the kind of device is not known, or does not fit; with the numbers.
    """
    shape = shape_for(scenario)
    return priced(scenario, shape, device_of(scenario.cluster, formats_of(scenario)))


def priced(scenario: Scenario, shape: Shape, hardware: Hardware) -> Costs:
    """The same for a model and a kind of device that are known already. Raises ConfigError."""
    longest = longest_of(scenario, shape)
    _check_sliding(shape, longest)
    check_heads(scenario, shape)
    costs, devices = scenario.costs, devices_of(scenario, hardware)
    _check_nodes(scenario, devices)
    sizes = sizes_of(scenario, shape)
    budget = max(scenario.batch.token_budget, longest)
    shared = scenario.place.placement == "colocated" and trains_here(scenario)  # engine and driver are one process
    decoding = costs if shared else costs.model_copy(update={"step_s": costs.step_s + costs.process_s})
    engine = EngineCosts(shape, devices, decoding, sizes.engine, sizes.cache, room(scenario, shape, devices, sizes, longest))
    own = sizes.number if sizes.trained == shape.parameters else 0  # an adapter is among its state
    each = own + sizes.state - sizes.number  # all but the gradient
    kept = sizes.trained * each
    learning = TrainingCosts(
        shape=shape,
        devices=devices,
        costs=costs,
        item=sizes.train,
        product=sizes.product,
        trained=sizes.trained,
        number=sizes.number,
        kept=each,
        minibatches=scenario.train.minibatches,
        budget=budget,
        passes=passes_of(scenario),
        recompute=scenario.recomputes,
    )
    swapped = offloaded_s(scenario, shape, devices, sizes)
    return Costs(
        shape=shape,
        devices=devices,
        engine=engine,
        training=learning,
        moving=moving(transport_of(scenario), travelling(scenario, shape, sizes), devices, costs),
        memory=(generating(scenario, shape, devices, sizes, longest), training(scenario, shape, devices, sizes, longest)),
        handoff_s=handoff_s(kept, devices, costs),
        sleep_s=costs.sleep_s + swapped,
        wake_s=costs.sleep_s + swapped,
        probe_s=costs.probe_s if scenario.weights.probe else 0.0,
        checkpoint_s=stored_s(kept, devices, costs),
        restart_s=scenario.failures.restart_s,
        verdict_s=costs.score_s,
        verdict_token_s=costs.score_token_s,
        evidence_s=costs.evidence_s if scenario.weights.probe else 0.0,
    )


def formats_of(scenario: Scenario) -> tuple[str, ...]:
    """Number formats that training, and engines, multiply in."""
    return product_of(scenario), _engine_format(scenario)


def product_of(scenario: Scenario) -> str:
    """Number format of training's matrix products, whatever parameters are stored in."""
    return "bfloat16" if scenario.train.precision == "bfloat16" else scenario.model.dtype


def _engine_format(scenario: Scenario) -> str:
    return scenario.model.dtype if scenario.engine.dtype == "model" else scenario.engine.dtype


def sizes_of(scenario: Scenario, shape: Shape) -> Sizes:
    """Bytes of a parameter here and there."""
    train, product, cache = (
        NUMBER_BYTES[each] for each in (scenario.model.dtype, product_of(scenario), _engine_format(scenario))
    )
    engine, lora = scenario.costs.weight_bytes or cache, scenario.weights.what == "lora"
    # Our own engine keeps what it merges adapters with, or rounds, where no trainer beside it has that.
    keeps = scenario.engine.kind == "embedded" and scenario.place.apart and scenario.cluster.hardware != CPU
    base = train if keeps and (lora or cache != train) else 0
    if lora:  # its reference is the same without it
        trained, number, reference = adapter_of(scenario, shape), ADAPTER, 0
        state: float = (2 + MOMENTS) * ADAPTER  # and itself
    else:
        trained, number, reference = shape.parameters, train, train if scenario.train.kl else 0
        state = scenario.costs.state_bytes or (1 + MOMENTS) * train
    sent = trained * number if _copies(scenario) else 0
    return Sizes(train, state, engine, cache, trained, number, product, reference, base, sent)


def _copies(scenario: Scenario) -> bool:
    """Has a device that trains a copy of all that travels? Our own broadcast makes it (`weights.broadcast`)."""
    return scenario.costs.sent_copy and transport_of(scenario) == "broadcast"


def adapter_of(scenario: Scenario, shape: Shape) -> int:
    """Numbers of the adapter that is trained. Raises ConfigError for a model with experts, whose adapters are not known."""
    if not shape.feed_forward:
        problem = f"how large an adapter of {shape.name} is cannot be told: it has experts"
        raise ConfigError(problem, where="weights.what", remedy="use full, or a dense model")
    dense = Architecture(
        "llama", shape.vocabulary, shape.hidden, shape.layers, shape.heads, shape.kv_heads, shape.head_dim, shape.feed_forward, 1
    )
    return adapter_numbers(dense, scenario.lora)


def travelling(scenario: Scenario, shape: Shape, sizes: Sizes) -> Weights:
    """What a sync brings to an engine: parameters as they are trained, what changed of them, or an adapter."""
    if scenario.weights.what == "lora":
        merged = scenario.engine.kind == "embedded"  # with all of the weights, each time
        return Weights(sizes.trained, ADAPTER, sizes.engine, rewritten=2 * shape.parameters * sizes.train if merged else 0)
    return Weights(shape.parameters, sizes.train, sizes.engine, scenario.costs.changed if scenario.weights.delta else None)


def offloaded_s(scenario: Scenario, shape: Shape, devices: Devices, sizes: Sizes) -> float:
    """Seconds until what training keeps is out of a device, or in it again; every device has a way of its own."""
    if devices.apart or not scenario.costs.offload:
        return 0.0
    kept = (shape.parameters * (sizes.train + sizes.reference) + sizes.trained * sizes.state) / devices.copies
    return kept / (devices.hardware.host * scenario.costs.link)


def travels_by(scenario: Scenario) -> str:
    """How weights go from device to device, or the training state where halves swap."""
    return handoff_of(scenario) if scenario.place.placement == "swap" else transport_of(scenario)


def _check_nodes(scenario: Scenario, devices: Devices) -> None:
    """Processes on this machine (cpu) share its memory, however many they are."""
    if devices.nodes > 1 and scenario.cluster.hardware != CPU and travels_by(scenario) == "shared_memory":
        problem = (
            f"the run lies on {devices.nodes} nodes of {devices.hardware.node} {devices.hardware.name}, and what goes through"
        )
        problem += " the memory of one does not reach the others"
        raise ConfigError(problem, where="weights.transport", remedy="use broadcast, or fewer devices")


def longest_of(scenario: Scenario, shape: Shape) -> int:
    """Tokens of the longest sequence, as far as is known: a prompt and a whole completion. Raises ConfigError."""
    window, most = scenario.engine.window or shape.window, prompts_of(scenario)[1] + scenario.rollout.max_tokens
    return min(most, window) if window else most


def _check_sliding(shape: Shape, longest: int) -> None:
    if shape.sliding and longest > shape.sliding:
        problem = f"{shape.name} looks back {shape.sliding:,} tokens in some layers, and sequences have up to {longest:,}"
        raise ConfigError(
            problem, where=WHERE, remedy="such a window is not modelled: use a model without, or shorter completions"
        )
