"""The table of operations, by hand."""

from __future__ import annotations

import pytest

from rollyard.config import LoraConfig
from rollyard.model.architecture import Architecture
from rollyard.model.flops import adapter_numbers, attention_flops, gemms, pass_flops
from rollyard.model.machine import Machine
from rollyard.types import Completion, EngineStats, FinishReason, Prompt, Sample, Sampling, TrainBatch
from rollyard.watch.roofline import Work

ARCH = Architecture("llama", vocab_size=50, hidden_size=8, layers=3, heads=4, kv_heads=2, head_dim=3, feed_forward=20, window=64)
PARAMETERS = 3160  # 3 layers of 288 + 480 + 16, a norm of 8, embedding and head of 400
CACHED = 2 * 3 * 2 * 3 * 4  # bytes of a token's keys and values
SAMPLE = Sample(0, 0, (7, 8, 9, 5, 5), (False,) * 3 + (True,) * 2, (0.0,) * 5, (0.0,) * 5, ())
BATCH = TrainBatch(0, ((SAMPLE,),), Sampling(9))
STATS = EngineStats(steps=4, prefill_steps=2, prefilled_tokens=3, generated_tokens=8, step_s=3.0, prefill_s=1.0)
SECONDS = {"step": 5.0, "optimizer": 2.0, "sync": 1.0}


def work() -> Work:
    made = Work(ARCH, 4)
    made.completed(Prompt(0, 0, (1, 2, 3), ""), Completion(0, 0, (4,) * 4, (0.0,) * 4, (), FinishReason.STOP, ""))
    made.trained((BATCH, TrainBatch(0, (), Sampling(9))))  # the second of two ranks has nothing to do
    return made


def test_by_hand() -> None:
    assert ARCH.parameters == PARAMETERS
    prefill, decode, learn, optimizer, sync = work().table([STATS], SECONDS, 1000, 50.0, Machine(11.0, 20.0))
    # Each token 3 layers of 768 weights, the last one the head of 400; pairs 1 + 2 + 3.
    assert prefill.flops == 2 * (3 * 3 * 768 + 400) + 4 * 6 * 12 * 3
    assert prefill.bytes == 2 * PARAMETERS * 4 + 3 * CACHED
    assert (prefill.bound, prefill.seconds, prefill.share) == ("compute", 1.0, 0.02)  # 0.60 against a balance of 0.55
    # Twice the completion that was seen: each of its 4 tokens attends to the prompt and to itself and those before.
    assert decode.flops == 2 * 8 * (3 * 768 + 400) + 4 * 44 * 12 * 3
    assert decode.bytes == 4 * PARAMETERS * 4 + (8 + 44) * CACHED
    assert (decode.operation, decode.seconds) == ("decode", 2.0)
    assert learn.flops == sum(gemm.flops for gemm in gemms(BATCH, ARCH)) + attention_flops(BATCH, ARCH)
    assert (learn.bytes, learn.seconds) == (4 * PARAMETERS * 4, 3.0)
    assert (optimizer.flops, optimizer.bytes) == (14 * PARAMETERS * 2, 7 * 4 * PARAMETERS * 2)
    assert (optimizer.flops_per_byte, optimizer.bound, optimizer.seconds) == (0.5, "memory", 2.0)
    assert (sync.flops, sync.bytes, sync.bound, sync.share) == (0, 1000, "memory", 0.02)


def test_a_training_step_is_three_forward_passes() -> None:
    """Inputs are all tokens but the last; two of them predict."""
    forward = pass_flops(ARCH, 4, 2, 1 + 2 + 3 + 4)
    assert 3 * forward == sum(gemm.flops for gemm in gemms(BATCH, ARCH)) + attention_flops(BATCH, ARCH)


def test_with_an_adapter_the_weights_get_no_gradients() -> None:
    lora = LoraConfig(rank=2, targets=("k_proj", "up_proj"))
    numbers = 3 * 2 * (8 + 6 + 8 + 20)
    assert adapter_numbers(ARCH, lora) == numbers
    made = Work(ARCH, 2, numbers)
    made.trained((BATCH,))
    _, _, learn, optimizer, _ = made.table([], SECONDS, 0, 50.0, None)
    # Of 4 tokens, two of them predicting: forward and towards x; the adapter's own products three times.
    weights = 2 * 2 * (4 * 3 * 768 + 2 * 400)
    assert learn.flops == weights + 3 * 2 * 4 * numbers + attention_flops(BATCH, ARCH)
    assert learn.bytes == 2 * PARAMETERS * 2 + 2 * numbers * 4
    assert (optimizer.flops, optimizer.bytes) == (14 * numbers, 7 * 4 * numbers)


def test_an_engine_that_does_not_tell_its_prefill_leaves_it_open() -> None:
    stats = EngineStats(steps=4, prefilled_tokens=3, generated_tokens=8, step_s=3.0)
    prefill, decode, *_ = work().table([stats], SECONDS, 0, 50.0, None)
    assert (prefill.seconds, prefill.share, prefill.bound) == (None, None, "")
    assert prefill.bytes == PARAMETERS * 4 + 3 * CACHED  # one pass for the one prompt
    assert decode.seconds == 3.0 and "prefill" in decode.operation


def test_a_run_that_did_nothing() -> None:
    for row in Work(ARCH, 4).table([], {}, 0, 0.0, Machine(1.0, 1.0)):
        assert (row.flops, row.bytes, row.bound) == (0, 0, "")


def test_the_balance_of_a_machine() -> None:
    assert Machine(989e12, 3.35e12).balance == pytest.approx(295.2, abs=0.1)  # an H100, as its maker says
