from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from rollyard.model.attention import LEAST_FULL, PackedAttention, buckets


def plain(q: Tensor, k: Tensor, v: Tensor, lengths: list[int]) -> Tensor:
    """Softmax attention written out, one sequence and one head at a time."""
    out, start = torch.zeros_like(q), 0
    share = q.shape[1] // k.shape[1]
    for length in lengths:
        part = slice(start, start + length)
        for head in range(q.shape[1]):
            scores = q[part, head] @ k[part, head // share].T / q.shape[2] ** 0.5
            scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
            out[part, head] = scores.softmax(-1) @ v[part, head // share]
        start += length
    return out


@settings(max_examples=25)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.sampled_from([(4, 4), (4, 2), (3, 1)]))
def test_equals_plain_attention_with_gradients(lengths: list[int], heads: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(sum(lengths))
    tokens = sum(lengths)
    ours = [torch.randn(tokens, count, 8, generator=generator).requires_grad_() for count in (heads[0], heads[1], heads[1])]
    theirs = [tensor.detach().double().requires_grad_() for tensor in ours]
    direction = torch.randn(tokens, heads[0], 8, generator=generator)
    out, expected = PackedAttention(lengths)(0, *ours), plain(*theirs, lengths)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    (out * direction).sum().backward()
    (expected * direction).sum().backward()
    for tensor, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(tensor.grad.double(), reference.grad, rtol=1e-4, atol=1e-5)


@given(st.lists(st.integers(1, 500), min_size=1, max_size=60))
def test_buckets_hold_each_sequence_once_and_are_full(lengths: list[int]) -> None:
    counts = np.asarray(lengths, dtype=np.int64)
    found = buckets(counts)
    assert sorted(np.concatenate(found).tolist()) == list(range(len(lengths)))
    assert all(counts[members].min() >= LEAST_FULL * counts[members].max() for members in found)


def test_the_fused_kernel_runs_with_grouped_queries_in_both_directions() -> None:
    q, k, v = (torch.randn(12, heads, 8, requires_grad=True) for heads in (4, 2, 2))
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        PackedAttention([5, 7])(0, q, k, v).sum().backward()
    names = {event.key for event in trace.key_averages()}
    kernel = "aten::_scaled_dot_product_flash_attention_for_cpu"
    assert {kernel, f"{kernel}_backward"} <= names


def test_an_empty_sequence_is_refused() -> None:
    for lengths in ([], [3, 0]):
        with pytest.raises(ValueError, match="at least one token"):
            PackedAttention(lengths)
