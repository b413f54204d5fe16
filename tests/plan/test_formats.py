"""What training and engines multiply in, pass over and hold, by hand."""

from __future__ import annotations

import pytest

from rollyard.errors import ConfigError
from rollyard.plan.costs import costs_of
from rollyard.plan.memory import PIECE
from rollyard.train.rows import CACHED_TOKENS
from tests.plan.scenarios import scenario
from tests.plan.test_costs import costs


def test_training_is_priced_by_what_it_multiplies_and_moves_what_it_stores() -> None:
    """Autocast: products at 989 TFLOP/s, not 67; parameters of 4 bytes are gathered, and AdamW goes through 7 numbers of 4."""
    values = {"model__path": "qwen2.5-1.5b", "place__train": 4, "train__shard": True, "model__dtype": "float32"}
    mixed, whole = costs(train__precision="bfloat16", **values).training, costs(**values).training
    forward = 2 * 1_543_714_304 * 10**8
    assert mixed.train_s(10**8, 0) - mixed.optimizer_s() == pytest.approx(4 * forward / (4 * 0.35 * 989e12))
    assert whole.train_s(10**8, 0) - whole.optimizer_s() == pytest.approx(4 * forward / (4 * 0.35 * 67e12))
    assert mixed.exchange_s(10**7) == whole.exchange_s(10**7)
    assert mixed.optimizer_s() == whole.optimizer_s() == pytest.approx(7 * 4 * 1_543_714_304 / 4 / 3.35e12)
    half = costs(**values | {"model__dtype": "bfloat16"}, train__precision="bfloat16").training
    assert half == costs(**values | {"model__dtype": "bfloat16"}).training


def test_activations_are_what_is_multiplied_and_two_numbers_of_what_is_stored() -> None:
    """Whatever engines have."""
    values = {"place__train": 8, "train__shard": True, "model__dtype": "float32", "engine__dtype": "bfloat16"}
    each = {precision: costs(train__precision=precision, **values).memory[1].activations for precision in ("model", "bfloat16")}
    assert each["model"] == pytest.approx(8192 * 4096 * 4 * (32 + 17))
    assert each["bfloat16"] == pytest.approx(8192 * 4096 * (4 * 32 + 2 * 4 + 15 * 2))
    kept = costs(train__precision="bfloat16", costs__recompute=False, **values | {"model__path": "qwen2.5-1.5b"}).memory[1]
    assert kept.activations == pytest.approx(8192 * 1536 * 28 * (2 * 4 + 15 * 2))


def test_a_processor_computes_a_micro_batch_in_pieces() -> None:
    assert PIECE == CACHED_TOKENS
    values = {"model__path": "smollm2-135m", "cluster__hardware": "cpu", "cluster__bandwidth": 15e9, "cluster__flops": 150e9}
    found = costs_of(scenario(**values, costs__recompute=False)).memory[1]
    assert found.activations == pytest.approx(1200 * 576 * 30 * 17 * 4)
    longer = costs_of(scenario(**values, costs__recompute=False, rollout__max_tokens=2000)).memory[1]
    assert longer.activations == pytest.approx(2512 * 576 * 30 * 17 * 4)


def test_passes_of_our_own_trainer_by_hand() -> None:
    """Four optimizer steps: three quarters of the batch are looked at before the first, where there is a correction."""
    tokens, pairs = 1_000_000, 500_000_000
    values = {"place__train": 8, "train__shard": True, "train__minibatches": 4, "engine__kind": "vllm"}
    forward, head = 2 * 7_504_924_672 * tokens + 4 * 4096 * 32 * pairs, 2 * 128_256 * 4096 * tokens
    for options, more in (
        ({"train__correction": "none"}, 0.0),
        ({}, 0.75 * forward),
        ({"costs__logprob_passes": 1}, forward),
        ({"train__kl": 0.1}, 1.75 * forward),
        ({"advantage__kind": "gae"}, 1.75 * forward - head),
        ({"train__correction_level": "sequence"}, 0.75 * forward + 0.25 * head),
        ({"train__loss": "gspo"}, 0.75 * forward + 0.75 * head),
        ({"train__loss": "gspo", "train__correction": "none"}, head),
    ):
        assert costs(**values, **options).training.flops(tokens, pairs) == pytest.approx(4 * forward + more), options
    once = costs(**values | {"train__minibatches": 1}).training
    assert once.flops(tokens, pairs) == pytest.approx(4 * forward)
    assert once.exchange_s(10**6) == pytest.approx(costs(**values, train__correction="none").training.exchange_s(10**6))


def test_a_reference_policy_is_held_too() -> None:
    """An adapter's is the same model without it."""
    values = {"place__train": 8, "train__shard": True}
    with_one, without = costs(train__kl=0.1, **values), costs(**values)
    assert with_one.memory[1].weights == 2 * without.memory[1].weights == 2 * 2 * 8_030_261_248 / 8
    assert with_one.memory[0] == without.memory[0]
    adapter = costs(train__kl=0.1, place__train=1, weights__what="lora", weights__transport="auto", model__path="qwen2.5-1.5b")
    assert adapter.memory[1].weights == 2 * 1_543_714_304
    beside = costs(train__kl=0.1, place__placement="colocated", place__train=4, costs__state_devices=4, weights__transport="auto")
    assert beside.memory[0].weights == 2 * 8_030_261_248 * (1 + 1 / 4 + 1 / 4)


def test_adapters_are_merged_with_all_weights() -> None:
    """By our own engine, which keeps what it merges with; a trainer beside it has that."""
    values = {"model__path": "qwen2.5-1.5b", "weights__what": "lora", "weights__transport": "auto"}
    whole = 2 * 1_543_714_304
    apart, vllm = costs(**values), costs(engine__kind="vllm", **values)
    assert apart.memory[0].weights == 2 * vllm.memory[0].weights == 2 * whole
    assert apart.load_s - vllm.load_s == pytest.approx(2 * whole / 3.35e12)
    beside = costs(**values | {"place__placement": "colocated"})
    assert beside.memory[0].weights == 2 * whole
    assert beside.load_s > 2 * whole / 3.35e12


def test_an_engine_of_our_own_keeps_what_it_rounds() -> None:
    values = {"place__train": 8, "train__shard": True, "model__dtype": "float32", "engine__dtype": "bfloat16"}
    rounds, vllm = (costs(engine__kind=kind, **values).memory[0].weights for kind in ("embedded", "vllm"))
    assert (rounds, vllm) == (6 * 8_030_261_248, 2 * 8_030_261_248)


def test_a_copy_that_travels_is_held_where_that_is_said() -> None:
    values = {"place__train": 8, "train__shard": True}
    found = costs(costs__sent_copy=True, **values)
    assert found.memory[1].sent == 2 * 8_030_261_248 and costs(**values).memory[1].sent == 0
    assert costs(costs__sent_copy=True, **values | {"weights__transport": "shared_memory", "place__train": 4}).memory[1].sent == 0
    with pytest.raises(ConfigError, match=r"a copy that travels 141\.1 GB") as error:
        costs(costs__sent_copy=True, model__path="llama-70b", engine__tensor_parallel_size=4, place__train=64, train__shard=True)
    assert "--weights.transport checkpoint" in str(error.value.remedy)
