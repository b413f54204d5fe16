"""What things take: numbers by hand, and what may only grow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollyard.errors import ConfigError
from rollyard.model.architecture import Architecture
from rollyard.model.flops import attention_flops, gemms
from rollyard.plan.costs import Costs, costs_of, fewer_pages, priced
from rollyard.plan.hardware import HARDWARE, hardware_of
from rollyard.plan.memory import Memory
from rollyard.plan.models import MODELS
from rollyard.plan.shape import Shape
from rollyard.plan.trace import prompts_of
from rollyard.types import Sample, Sampling, TrainBatch
from tests.plan.scenarios import scenario

EIGHT = {
    "model__path": "llama-8b", "model__dtype": "bfloat16", "place__placement": "separate", "weights__transport": "broadcast",
}  # fmt: skip # billion
SMALL = EIGHT | {"model__path": "qwen2.5-1.5b"}


def costs(**values: Any) -> Costs:
    return costs_of(scenario(**(EIGHT | values)))


BATCHES = st.lists(st.tuples(st.integers(1, 60_000), st.integers(1, 10**8)), min_size=1, max_size=6)


@settings(deadline=None)
@given(BATCHES, st.sampled_from((1, 3)), st.sampled_from((0.8, 0.001)), st.sampled_from((0.0, 0.5)), st.sampled_from((1, 2)))
def test_batches_take_no_less_than_the_least_of_their_mean(
    batches: list[tuple[int, int]], minibatches: int, collective: float, besides: float, stages: int
) -> None:
    """Two batches of one micro-batch and of two have one and a half in the mean, of which two would be gathered."""
    found = costs(
        place__train=4,
        train__shard=True,
        train__minibatches=minibatches,
        costs__collective=collective,
        costs__microbatch_s=besides,
        costs__stages=stages,
    ).training
    taken = sum(found.train_s(*batch) for batch in batches) / len(batches)
    tokens, pairs = (sum(numbers) / len(batches) for numbers in zip(*batches, strict=True))
    assert found.least_s(tokens, pairs) <= taken * (1 + 1e-9)


def test_least_by_hand() -> None:
    """One micro-batch and a half on four devices, of which three quarters of 16.06 GB pass each twice for each, and gradients."""
    found = costs(place__train=4, train__shard=True, costs__collective=0.001).training
    each = 0.75 * 2 * found.shape.parameters / (0.001 * found.devices.rate(4))
    assert found.least_s(1.5 * 4 * 8192, 0) == pytest.approx((3 + 1) * each + found.optimizer_s())
    assert found.train_s(6 * 8192, 0) == pytest.approx((4 + 1) * each + found.optimizer_s())


def test_a_decode_step_of_one_sequence_by_hand() -> None:
    """All weights but the embedding once, 7,504,924,672 of 2 bytes, at 0.7 of 3.35 TB/s, and 3 ms: 9.4 ms."""
    step = costs(place__train=4, train__shard=True).engine.step(1)
    assert step.floor_s == 0.003
    assert step.at(0) == pytest.approx(0.003 + (2 * 7_504_924_672 + 131_072) / (0.7 * 3.35e12))
    assert step.at(1000) - step.at(0) == pytest.approx(1000 * 131_072 / (0.7 * 3.35e12))


def test_a_decode_step_of_many_is_bound_by_arithmetic() -> None:
    """512 sequences with little context: 2 operations for each weight and sequence, at half of 989 TFLOP/s: 15.5 ms."""
    step = costs(place__train=4, train__shard=True).engine.step(512)
    assert step.at(0) == pytest.approx(0.003 + 2 * 7_504_924_672 * 512 / (0.5 * 989e12))


def test_tensor_parallelism_by_hand() -> None:
    """An eighth of the weights, 2 ms, and two sums a layer of 16 bits, past every device 2 * 7 / 8 times at 0.8 of 450 GB/s."""
    step = costs(place__train=4, train__shard=True, engine__tensor_parallel_size=8).engine.step(64)
    sums = 2 * 32 * 64 * 4096 * 2 * 2 * 7 / 8 / (0.8 * 450e9)
    assert step.floor_s == pytest.approx(0.003 + 0.002 + sums)
    assert step.lines[0].fixed == pytest.approx((2 * 7_504_924_672 + 64 * 131_072) / 8 / (0.7 * 3.35e12))


def test_an_engine_on_two_nodes_waits_at_each_sum() -> None:
    """By 16 cards of 50 GB/s a ring is no faster than by the cards of a node, 400 GB/s; and 0.1 ms twice a layer."""
    step = costs(place__train=4, train__shard=True, engine__tensor_parallel_size=16).engine.step(1)
    sums = 2 * 32 * 4096 * 2 * 2 * 15 / 16 / (0.8 * 400e9)
    assert step.floor_s == pytest.approx(0.003 + 0.002 + sums + 2 * 32 * 1e-4)


def test_keys_and_values_are_on_every_device_that_has_no_head_of_its_own() -> None:
    values = {"model__path": "qwen2.5-7b", "place__train": 8, "train__shard": True}  # 4 key-value heads
    of = {many: costs(engine__tensor_parallel_size=many, **values).engine.step(1).lines[0].per_token for many in (1, 4, 28)}
    assert of[4] == pytest.approx(of[1] / 4)
    assert of[28] == pytest.approx(of[4])


def test_prefill_by_hand() -> None:
    """1,000 tokens that attend to 500,500 pairs: weights but for the head, and 4 operations a pair, head, number and layer."""
    engine = costs(place__train=4, train__shard=True).engine
    body = 7_504_924_672 - 128_256 * 4096
    assert engine.prefill_s(1000, 500_500) == pytest.approx((2 * body * 1000 + 4 * 4096 * 32 * 500_500) / (0.5 * 989e12))


def test_prefill_reads_experts_that_nothing_else_goes_to() -> None:
    """16 tokens beside one: of 128 experts, 8 for each, 128 (1 - (15/16)^17) are read, 8 anyway; at 0.7 of 3.35 TB/s."""
    engine = costs(model__path="qwen3-30b-a3b", place__train=16, train__shard=True).engine
    more = 128 * (1 - (15 / 16) ** 17) - 8
    assert engine.prefill_s(16, 136) == pytest.approx(2 * 48 * more * 3 * 2048 * 768 / (0.7 * 3.35e12))
    assert engine.prefill_s(16, 136, beside=2000) == pytest.approx(engine.prefill_s(16, 136, beside=4000))  # all are read anyway


def test_training_by_hand() -> None:
    """8 N a token and four times attention's 4 operations a pair; two logprob passes add 4 N and half of that."""
    tokens, pairs = 1_000_000, 500_000_000
    values = {"place__train": 8, "train__shard": True, "costs__minibatch_s": 0.5, "train__minibatches": 4}
    forward = 2 * 7_504_924_672 * tokens + 4 * 4096 * 32 * pairs
    adam = 7 * 2 * 8_030_261_248 / 8 / 3.35e12
    plain = costs(**values)
    assert plain.train_s(tokens, pairs) == pytest.approx(4 * forward / (8 * 0.35 * 989e12) + 4 * (0.5 + adam))
    passes = costs(costs__logprob_passes=2, costs__recompute=False, batch__token_budget=2048, **values)
    assert passes.training.flops(tokens, pairs) == pytest.approx(5 * forward)


def test_every_micro_batch_takes_something_besides() -> None:
    """Two optimizer steps on 100,000 tokens each, 8 devices, 8,192 at a time: two micro-batches each. Few tokens are one each."""
    values = {"place__train": 8, "train__shard": True, "train__minibatches": 2}
    plain, slow = costs(**values).training, costs(**values, costs__microbatch_s=0.25).training
    assert slow.train_s(200_000, 10**6) - plain.train_s(200_000, 10**6) == pytest.approx(2 * 2 * 0.25)
    assert slow.train_s(10, 50) - plain.train_s(10, 50) == pytest.approx(2 * 0.25)


def test_a_pipeline_fills_and_empties() -> None:
    """Two pipelines of two stages, each of two devices; 8,192 tokens at a time: 98,304 tokens are 6, and one more."""
    values = {"place__train": 8, "train__shard": True, "costs__gather": "step"}
    plain = costs(**values).training
    piped = costs(**values, costs__stages=2, costs__stage_devices=2, costs__microbatch_s=0.25).training
    optimizer = plain.optimizer_s()
    computed = plain.train_s(98_304, 10**9) - optimizer
    assert piped.microbatches(98_304) == 6
    assert piped.train_s(98_304, 10**9) - optimizer == pytest.approx(computed * 7 / 6 + 7 / 2 * 0.25)
    with pytest.raises(ConfigError, match="8 devices that train are no whole number of pipelines on 3 devices each"):
        costs(**values, costs__stages=3)


def test_whole_sequences_in_micro_batches() -> None:
    """Of at most 8,192 tokens. Six of 5,000 are one each, on four devices two each; evenly packed they would be four, one each.

    Of 6,000, 2,000 and 1,000 the first two go together on one of two devices, and the other waits for it.
    """
    values = {"train__shard": True, "costs__shared_prompts": False, "costs__packed": "whole", "costs__microbatch_s": 0.25}
    whole, evenly = (
        costs(place__train=4, **values).training,
        costs(place__train=4, **values | {"costs__packed": "evenly"}).training,
    )
    groups = [(1_000, [4_001] * 3)] * 2
    assert whole.work(groups) == (30_000, 6 * 5_000 * 5_001 // 2)
    least = whole.optimizer_s() + max(whole.flops(8 * 5_000, 8 * 5_000 * 5_001 / 2) / whole._speed, whole._exchange_s(2))
    assert whole.batch_s(groups) == pytest.approx(least + 2 * 0.25)
    assert evenly.batch_s(groups) == evenly.train_s(*evenly.work(groups)) < whole.batch_s(groups)
    two = costs(place__train=2, train__minibatches=1, **values).training
    fullest = two.flops(8_000, 6_000 * 6_001 // 2 + 2_000 * 2_001 // 2)
    least = max(2 * fullest / two._speed, two._exchange_s(1))
    assert two.batch_s([(500, [5_501, 1_501, 501])]) == pytest.approx(least + two.optimizer_s() + 0.25)


@given(
    st.lists(st.tuples(st.integers(1, 900), st.lists(st.integers(0, 7_000), min_size=1, max_size=6)), min_size=1, max_size=12),
    st.integers(1, 3),
    st.booleans(),
)
@settings(max_examples=50, deadline=None)
def test_whole_sequences_never_take_less_than_their_tokens(
    groups: list[tuple[int, list[int]]], minibatches: int, shared: bool
) -> None:
    values = {"train__minibatches": minibatches, "costs__shared_prompts": shared, "costs__microbatch_s": 0.01}
    whole = costs(place__train=4, train__shard=True, costs__packed="whole", rollout__groups_per_step=3, **values).training
    assert whole.batch_s(groups) >= whole.least_s(*whole.work(groups)) * (1 - 1e-9)


def test_who_works_on_a_micro_batch_together() -> None:
    """Of two engines on 4 devices each that train: the devices of each, or as many as are said."""
    values = {"place__placement": "colocated", "place__train": 2, "engine__tensor_parallel_size": 4, "train__shard": True}
    found = [costs(**values, costs__stage_devices=each).training.microbatches(8 * 8192) for each in (0, 1, 2, 4, 8)]
    assert found == [4, 1, 2, 4, 8]


def test_parameters_that_are_gathered_once() -> None:
    """By 8 devices: all but an eighth, parameters and gradients of 2 bytes; anew for two micro-batches, each way, 5 of 2."""
    values = {"place__train": 8, "train__shard": True}
    once, anew = (costs(**values, costs__gather=each).training.exchange_s(100_000) for each in ("step", "microbatch"))
    assert once == pytest.approx(7 / 8 * 4 * 8_030_261_248 / (0.8 * 450e9))
    assert anew == pytest.approx(once * 5 / 2)


def test_devices_of_one_rank_work_on_one_micro_batch() -> None:
    """1.02 million tokens, 8,192 at a time: 125 micro-batches of one rank of 8 devices, 63 of two; all parameters twice."""
    whole, values = 2 * 8_030_261_248, {"engine__tensor_parallel_size": 8}
    half = costs(place__placement="swap", **values).training
    assert half.microbatches(1_020_000) == 125
    assert half.exchange_s(1_020_000) == pytest.approx(7 / 8 * (2 * 125 + 1) * whole / (0.8 * 450e9))  # 9.80 s
    both = costs(place__placement="colocated", place__train=2, **values).training
    assert both.microbatches(1_020_000) == 63
    piped = costs(place__placement="colocated", place__train=2, costs__stages=4, costs__stage_devices=4, **values).training
    assert piped.microbatches(1_020_000) == 125
    alone = costs(place__placement="colocated", place__train=2, costs__stage_devices=1, **values)
    assert alone.training.microbatches(1_020_000) == 8  # each device has sequences of its own, whatever engines are
    shared = costs(place__placement="colocated", place__train=2, **values)
    assert alone.memory[1].activations == pytest.approx(8 * shared.memory[1].activations)
    staged = costs(place__placement="colocated", place__train=2, costs__stages=4, costs__stage_devices=1, **values).training
    assert staged.microbatches(1_020_000) == 32  # four pipelines: who says so trains otherwise than engines are laid out


def test_the_work_of_a_batch_by_hand() -> None:
    """A prompt of 3 and completions of 2 and 5, whose last tokens are no input: 3 + 1 + 4 tokens; prompts apart 3 + 1 + 3 + 4."""
    together, apart = (costs(place__train=8, train__shard=True, costs__shared_prompts=each).training for each in (True, False))
    assert together.work([(3, [2, 5])]) == (8, 6 + (3 + 1) + (12 + 10))
    assert apart.work([(3, [2, 5])]) == (11, 2 * 6 + (3 + 1) + (12 + 10))


def test_an_empty_completion_is_no_work() -> None:
    together, apart = (costs(place__train=8, train__shard=True, costs__shared_prompts=each).training for each in (True, False))
    assert together.work([(3, [0, 2]), (9, [0]), (9, [])]) == apart.work([(3, [2])]) == (4, 6 + 3 + 1)
    assert apart.work([(3, [0, 2]), (9, [0]), (9, [])]) == (4, 6 + 3 + 1)


def test_the_optimizer_moves_what_it_keeps() -> None:
    """7 numbers of 2 bytes; with moments and a copy in 32 bits it keeps 16 bytes, read and written, and reads a gradient of 2."""
    usual, finer = (costs(place__train=32, train__shard=True, costs__state_bytes=each).training for each in (0, 16))
    assert usual.optimizer_s() == pytest.approx(7 * 2 * 8_030_261_248 / 32 / 3.35e12)
    assert finer.optimizer_s() == pytest.approx((2 * 16 + 2) * 8_030_261_248 / 32 / 3.35e12)


def test_the_work_of_a_batch_is_what_a_real_batch_has() -> None:
    """Against what the roofline counts of a batch that is packed."""

    def row(member: int, tokens: int) -> Sample:
        mask = (False,) * 3 + (True,) * tokens
        return Sample(0, member, (1,) * len(mask), mask, (0.0,) * len(mask), (1.0,) * len(mask), ())

    architecture = Architecture.from_hf(dict(MODELS["smollm2-135m"]))
    batch = TrainBatch(0, ((row(0, 2), row(1, 5)),), Sampling(8))
    training = costs_of(scenario(model__path="smollm2-135m")).training
    tokens, pairs = training.work([(3, [2, 5])])
    assert 6 * training.shape.attended * pairs == attention_flops(batch, architecture)
    linear = {gemm.rows for gemm in gemms(batch, architecture) if gemm.columns != architecture.vocab_size}
    assert linear == {tokens}


def test_exchange_bounds_training_on_little() -> None:
    """Parameters twice and gradients once, 7 of 8 parts of 16.1 GB each, at 0.8 of 450 GB/s."""
    found = costs(place__train=8, train__shard=True).train_s(100, 100)
    assert found == pytest.approx(3 * 7 / 8 * 2 * 8_030_261_248 / (0.8 * 450e9) + 7 * 2 * 8_030_261_248 / 8 / 3.35e12)


def test_copies_exchange_gradients_alone() -> None:
    found = costs_of(scenario(**SMALL, place__train=4)).training.exchange_s(100)
    assert found == pytest.approx(2 * 3 / 4 * 2 * 1_543_714_304 / (0.8 * 450e9))


def test_copies_that_are_shared_do_both() -> None:
    """Four share each of two copies: 3 of 4 parts, thrice, of 3.1 GB, and a quarter of the gradients summed over two."""
    whole = 2 * 1_543_714_304
    found = costs_of(scenario(**SMALL, place__train=8, costs__state_devices=4)).training.exchange_s(100)
    assert found == pytest.approx((3 * 3 / 4 * whole + 2 * 1 / 2 * whole / 4) / (0.8 * 450e9))
    with pytest.raises(ConfigError, match="8 devices that train are no whole number of copies on 3"):
        costs_of(scenario(**SMALL, place__train=8, costs__state_devices=3))


def test_a_verdict_may_take_as_long_as_its_completion() -> None:
    found = costs(place__train=4, train__shard=True, costs__score_s=0.5, costs__score_token_s=0.001)
    assert found.score_s(1000) == pytest.approx(1.5)


def test_devices_of_many_nodes_share_the_cards_of_each() -> None:
    """8 cards of 25 GB/s let less through than links of 300."""
    found = costs(cluster__hardware="A100-80", place__train=16, train__shard=True).devices
    assert (found.rate(8), found.rate(16)) == (300e9, 200e9)


def test_room_for_keys_and_values_by_hand() -> None:
    """0.9 of 80 GB without 16.06 GB of weights, 0.2 GB of activations and 0.03 GB of logits; 131,072 bytes a token."""
    found = costs(place__train=4, train__shard=True)
    alive = 2048 * 12 * 4096 * 2 + 64 * 128_256 * 4
    tokens = int((0.9 * 80e9 - 2 * 8_030_261_248 - alive) / 131_072)
    assert found.engine.kv_tokens == tokens // 16 * 16
    assert costs(place__train=4, train__shard=True, engine__pages=1000).engine.kv_tokens == 16_000


def test_prompts_of_a_trace_count_where_there_is_one(tmp_path: Path) -> None:
    """Of 6,000 and 10,000 tokens: with 64 of a completion a sequence has 10,064: more than a micro-batch."""
    trace = tmp_path / "a.jsonl"
    trace.write_text('{"group": 0, "prompt_tokens": 6000, "tokens": 9}\n{"group": 1, "prompt_tokens": 10000, "tokens": 9}\n')
    run = scenario(**EIGHT, place__train=4, train__shard=True, workload__trace=str(trace))
    found = costs_of(run)
    assert prompts_of(run) == (8000, 10_000) and found.training.budget == 10_064
    assert found.memory[1].activations == pytest.approx(10_064 * 4096 * 2 * (32 + 17))
    with pytest.raises(ConfigError, match="does not hold 10,064 tokens"):
        costs(place__train=4, train__shard=True, workload__trace=str(trace), engine__gpu_memory_utilization=0.2175)


def test_an_embedded_engine_makes_room_for_every_slot_at_its_longest() -> None:
    """4 slots of 1,000 tokens in pages of 16: 63 and one more each. vLLM takes what its share of memory leaves; so does one
    that memory has no room for, and then a run needs its pages named."""
    values = {"place__train": 4, "train__shard": True, "engine__slots": 4}
    found = costs(engine__window=1000, **values)
    assert found.engine.kv_tokens == 4 * (63 + 1) * 16
    assert found.memory[0].kv == 4 * 64 * 16 * 131_072 and found.memory[0].free > 1e9
    whole = costs(engine__window=1000, engine__kind="vllm", **values)
    assert whole.memory[0].free == 0 and whole.engine.kv_tokens > 400_000
    embedded = scenario(**(EIGHT | values))  # 4 of 131,072 tokens
    assert fewer_pages(costs_of(embedded), embedded) == costs_of(embedded).engine.kv_tokens // 16 > 25_000
    assert fewer_pages(found, scenario(**(EIGHT | values), engine__window=1000)) == 0
    assert fewer_pages(whole, scenario(**(EIGHT | values), engine__kind="vllm")) == 0


def test_memory_of_a_device_that_trains_by_hand() -> None:
    found = costs(place__train=8, train__shard=True, costs__state_bytes=16, batch__token_budget=8192).memory[1]
    assert (found.weights, found.state) == (8_030_261_248 * 2 / 8, 8_030_261_248 * 16 / 8)
    assert found.activations == pytest.approx(8192 * 4096 * 2 * (32 + 17))


def test_an_engine_that_is_too_small_is_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match=r"an engine of 1 H100 does not hold 576 tokens .*weights 141\.1 GB") as error:
        costs(model__path="llama-70b", place__train=32, train__shard=True)
    assert (error.value.where, error.value.remedy) == (
        "engine.tensor_parallel_size",
        "use --engine.tensor_parallel_size 2",  # 70.6 GB of 72
    )


def test_the_remedy_is_the_smallest_engine_that_holds_it() -> None:
    """671 billion parameters of two bytes, in 72 GB each: 16 devices hold 84 GB each, and 32 hold 42; heads allow powers of 2."""
    many = {"model__path": "deepseek-v3", "train__shard": True}
    for train, remedy in ((63, "--engine.tensor_parallel_size 32"), (31, "no engine of these devices holds it")):
        with pytest.raises(ConfigError) as error:
            costs(place__train=train, **many)
        assert remedy in error.value.remedy
    with pytest.raises(ConfigError) as error:
        costs(place__placement="colocated", place__train=64, **many)
    assert error.value.remedy == "use --costs.offload true with --engine.tensor_parallel_size 32"
    with pytest.raises(ConfigError, match="does not hold"):
        costs(place__placement="colocated", place__train=1, costs__offload=True, engine__tensor_parallel_size=16, **many)


def test_training_that_does_not_fit_is_refused_with_the_numbers() -> None:
    said = r"training does not fit in 8 H100, 1 of which share a copy: of each weights 16\.1 GB, gradients and optimizer 128\.5"
    with pytest.raises(ConfigError, match=said) as error:
        costs(place__train=8, costs__state_bytes=16)
    assert error.value.where == "place.train"
    assert "train.shard" in str(error.value.remedy)


def test_a_colocated_engine_has_what_training_leaves() -> None:
    values = {"place__placement": "colocated", "place__train": 4, "costs__state_devices": 4}
    beside, offloaded = costs(**values), costs(costs__offload=True, **values)
    assert beside.memory[0].weights == 2 * 8_030_261_248 * (1 + 1 / 4)  # its own, and its part of the trainers'
    assert beside.memory[0].state == 6 * 8_030_261_248 / 4
    assert offloaded.memory[0].state == 0
    assert offloaded.engine.kv_tokens > beside.engine.kv_tokens
    assert beside.sleep_s == 0
    assert offloaded.sleep_s == offloaded.wake_s == pytest.approx(8 * 8_030_261_248 / 4 / (0.8 * 63e9))


def test_a_window_that_slides_is_refused_where_it_would_count() -> None:
    shape = Shape.from_hf({**MODELS["mistral-7b"], "sliding_window": 4096}, "mistral")
    values = EIGHT | {"place__train": 4, "train__shard": True}
    assert priced(scenario(**values), shape, hardware_of("H100")).shape.sliding == 4096
    with pytest.raises(ConfigError, match="looks back 4,096 tokens in some layers, and sequences have up to 8,704"):
        priced(scenario(**values, rollout__max_tokens=8192), shape, hardware_of("H100"))


def test_an_adapter_trains_and_travels_alone() -> None:
    whole, adapter = costs(place__train=8, train__shard=True), costs(place__train=8, train__shard=True, weights__what="lora")
    assert adapter.moving.bytes == 4 * adapter.training.trained < whole.moving.bytes / 50
    assert adapter.checkpoint_s == pytest.approx(12 * adapter.training.trained / 2e9)
    assert adapter.training.flops(1000, 0) < whole.training.flops(1000, 0)
    with pytest.raises(ConfigError, match="how large an adapter of qwen3-30b-a3b is"):
        costs(model__path="qwen3-30b-a3b", place__train=8, train__shard=True, weights__what="lora")


def test_float32_has_its_own_rate() -> None:
    """67 TFLOP/s of an H100; an engine in 16 bits beside it has 989; and what is given by number is given in the run's format."""
    values = {"model__path": "qwen2.5-1.5b", "place__train": 4, "train__shard": True, "model__dtype": "float32"}
    whole, mixed = costs(**values), costs(engine__dtype="bfloat16", **values)
    operations = 2 * 1_543_714_304 * 512
    assert whole.engine.step(512).lines[1].fixed == pytest.approx(operations / (0.5 * 67e12))
    assert mixed.engine.step(512).lines[1].fixed == pytest.approx(operations / (0.5 * 989e12))
    assert (
        whole.train_s(10**7, 0)
        == mixed.train_s(10**7, 0)
        > 10 * costs(**(values | {"model__dtype": "bfloat16"})).train_s(10**7, 0)
    )
    given = costs(cluster__flops=1e14, **values)
    assert given.engine.step(512).lines[1].fixed == pytest.approx(operations / (0.5 * 1e14))


def test_devices_given_by_number() -> None:
    """No torch, no measuring."""
    given = {"cluster__hardware": "cpu", "cluster__bandwidth": 15e9, "cluster__flops": 150e9, "cluster__memory": 16e9}
    found = costs_of(scenario(model__path="smollm2-135m", **given)).devices.hardware
    assert (found.bandwidth, found.flops, found.link, found.memory) == (15e9, 150e9, 7.5e9, 16e9)


def test_this_machine_is_measured() -> None:
    found = costs_of(scenario(model__path="smollm2-135m", cluster__hardware="cpu")).devices.hardware
    assert 1e8 < found.bandwidth < 1e13
    assert 1e8 < found.flops < 1e15


def test_a_device_that_nobody_knows_is_refused() -> None:
    with pytest.raises(ConfigError, match="there is no device 'H1000'"):
        costs(cluster__hardware="H1000")


def test_the_policy_of_a_task_needs_no_name() -> None:
    assert costs_of(scenario(prompts__task="sort")).shape.name == "base policy of sort"
    with pytest.raises(ConfigError, match="no model is named"):
        costs_of(scenario())


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(sorted(HARDWARE)),
    st.sampled_from(["qwen2.5-1.5b", "qwen3-30b-a3b", "llama-8b"]),
    st.sampled_from([1, 2, 4]),
    st.integers(1, 400),
    st.integers(0, 10**6),
)
def test_more_work_never_takes_less(hardware: str, model: str, size: int, running: int, context: int) -> None:
    found = costs_of(
        scenario(**(EIGHT | {"model__path": model}), cluster__hardware=hardware, place__train=16, train__shard=True,
                 engine__tensor_parallel_size=size)
    )  # fmt: skip
    engine = found.engine
    now = engine.step(running).at(context)
    assert 0 < now <= engine.step(running + 1).at(context)
    assert now <= engine.step(running).at(context + 1)
    assert engine.prefill_s(running, context) < engine.prefill_s(running + 1, context)
    assert found.train_s(running, context) <= found.train_s(running + 1, context) <= found.train_s(running + 1, context + 1)
    assert all(isinstance(each, Memory) and each.free >= -1 for each in found.memory)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 64), st.integers(10**6, 10**8))
def test_more_devices_never_train_more_slowly(devices: int, tokens: int) -> None:
    fewer, more = (costs_of(scenario(**SMALL, place__train=many)).train_s(tokens, tokens) for many in (devices, devices + 1))
    assert more <= fewer * (1 + 1e-9)
