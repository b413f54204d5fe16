from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from rollyard.model.attention import (
    HAS_FLASH,
    LEAST_FULL,
    BranchAttention,
    PaddedAttention,
    Tree,
    buckets,
    packed_attention,
)

CPU = torch.device("cpu")
KINDS = [pytest.param(PaddedAttention, id="padded")] + [pytest.param(BranchAttention, id="branch")] * HAS_FLASH
TREES = st.builds(Tree, st.integers(1, 30), st.lists(st.integers(1, 20), max_size=6).map(tuple))


def plain(q: Tensor, k: Tensor, v: Tensor, trees: list[Tree]) -> Tensor:
    """Softmax attention written out, one token and one head at a time, over the places of its own past."""
    out, first = torch.zeros_like(q), 0
    share = q.shape[1] // k.shape[1]
    for tree in trees:
        trunk = list(range(first, first + tree.trunk))
        first += tree.trunk
        parts = [([], trunk)]
        for branch in tree.branches:
            parts.append((trunk, list(range(first, first + branch))))
            first += branch
        for before, own in parts:
            for number, token in enumerate(own):
                past = before + own[: number + 1]
                for head in range(q.shape[1]):
                    scores = k[past, head // share] @ q[token, head] / q.shape[2] ** 0.5
                    out[token, head] = scores.softmax(-1) @ v[past, head // share]
    return out


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15)
@given(st.lists(TREES, min_size=1, max_size=4), st.sampled_from([(4, 4), (4, 2), (3, 1)]))
def test_equals_plain_attention_with_gradients(kind, trees: list[Tree], heads: tuple[int, int]) -> None:
    tokens = sum(tree.tokens for tree in trees)
    generator = torch.Generator().manual_seed(tokens)
    ours = [torch.randn(tokens, count, 8, generator=generator).requires_grad_() for count in (heads[0], heads[1], heads[1])]
    theirs = [tensor.detach().double().requires_grad_() for tensor in ours]
    direction = torch.randn(tokens, heads[0], 8, generator=generator)
    out, expected = kind(trees, CPU)(0, *ours), plain(*theirs, trees)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    (out * direction).sum().backward()
    (expected * direction).sum().backward()
    for tensor, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(tensor.grad.double(), reference.grad, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_branch_far_likelier_than_its_trunk_and_the_other_way(kind) -> None:
    """Scores of hundreds: one of the two parts has no weight, and neither overflows."""
    trees = [Tree(3, (2, 4))]
    q, k, v = (torch.randn(9, 1, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
    q = q * 100
    out, expected = kind(trees, CPU)(0, q, k, v), plain(q.double(), k.double(), v.double(), trees)
    assert out.isfinite().all()
    torch.testing.assert_close(out.double(), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16(kind) -> None:
    trees = [Tree(5, (3, 6)), Tree(4)]
    whole = [torch.randn(18, heads, 8, generator=torch.Generator().manual_seed(heads)) for heads in (4, 2, 2)]
    short = [tensor.bfloat16().requires_grad_() for tensor in whole]
    exact = [tensor.detach().double().requires_grad_() for tensor in short]
    out, expected = kind(trees, CPU)(0, *short), plain(*exact, trees)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), expected, rtol=0.02, atol=0.02)
    out.sum().backward()
    expected.sum().backward()
    for tensor, reference in zip(short, exact, strict=True):
        torch.testing.assert_close(tensor.grad.double(), reference.grad, rtol=0.05, atol=0.05)


@given(st.lists(st.integers(1, 500), min_size=1, max_size=60))
def test_buckets_hold_each_sequence_once_and_are_full(lengths: list[int]) -> None:
    counts = np.asarray(lengths, dtype=np.int64)
    found = buckets(counts)
    assert sorted(np.concatenate(found).tolist()) == list(range(len(lengths)))
    assert all(counts[members].min() >= LEAST_FULL * counts[members].max() for members in found)


@pytest.mark.parametrize("kind", KINDS)
def test_the_fused_kernel_runs_with_grouped_queries_in_both_directions(kind) -> None:
    q, k, v = (torch.randn(12, heads, 8, requires_grad=True) for heads in (4, 2, 2))
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        kind([Tree(5), Tree(2, (5,))], CPU)(0, q, k, v).sum().backward()
    names = {event.key for event in trace.key_averages()}
    kernel = "aten::_scaled_dot_product_flash_attention_for_cpu"
    assert {kernel, f"{kernel}_backward"} <= names


def test_the_kind_belongs_to_the_device() -> None:
    assert isinstance(packed_attention([Tree(3, (2,))]), BranchAttention if HAS_FLASH else PaddedAttention)
    assert isinstance(packed_attention([Tree(3, (2,))], "meta"), PaddedAttention)


def test_an_empty_part_is_refused() -> None:
    for trees in ([], [Tree(3), Tree(0)], [Tree(3, (1, 0))]):
        with pytest.raises(ValueError, match="at least one token"):
            packed_attention(trees)
