from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import TopKLogitsWarper, TopPLogitsWarper

from rollyard.model.kept import keep


def kept_ids(shares: list[float], top_p: float = 1.0, top_k: int = 0) -> list[int]:
    logits = keep(torch.tensor([shares]).log(), torch.tensor([top_p]), torch.tensor([top_k]))
    return logits[0].isfinite().nonzero().flatten().tolist()


def test_by_hand() -> None:
    shares = [0.1, 0.4, 0.3, 0.2]
    assert kept_ids(shares) == [0, 1, 2, 3]
    assert kept_ids(shares, top_k=2) == [1, 2]
    assert kept_ids(shares, top_p=0.65) == [1, 2]
    assert kept_ids(shares, top_p=0.75) == [1, 2, 3]
    assert kept_ids(shares, top_p=1e-6) == [1]
    # of the two that top_k left, the first holds 4/7 = 0.571
    assert kept_ids(shares, top_p=0.55, top_k=2) == [1]
    assert kept_ids(shares, top_p=0.6, top_k=2) == [1, 2]
    assert kept_ids(shares, top_k=9) == [0, 1, 2, 3]


def test_among_equals_the_lower_id_stays() -> None:
    assert kept_ids([0.25, 0.25, 0.25, 0.25], top_k=3) == [0, 1, 2]
    assert kept_ids([0.25, 0.25, 0.25, 0.25], top_p=0.4) == [0, 1]
    assert kept_ids([0.25, 0.25, 0.25, 0.25], top_p=0.5) == [0, 1]
    assert kept_ids([1 / 3000] * 3000, top_k=7) == list(range(7))


def test_rows_have_their_own_limits_and_what_stays_is_unchanged() -> None:
    logits = torch.randn(3, 9)
    kept = keep(logits, torch.tensor([1.0, 0.3, 1.0]), torch.tensor([0, 0, 1]))
    assert torch.equal(kept[0], logits[0])
    assert kept[2].isfinite().nonzero().flatten().tolist() == [logits[2].argmax().item()]
    assert torch.equal(kept[kept.isfinite()], logits[kept.isfinite()])
    assert keep(logits, None, None) is logits


@given(st.integers(0, 2**31), st.floats(0.05, 0.98), st.integers(1, 20))
def test_keeps_what_transformers_keeps(seed: int, top_p: float, top_k: int) -> None:
    logits = torch.randn(4, 20, generator=torch.Generator().manual_seed(seed)) * 2
    ours = keep(logits, torch.full((4,), top_p), torch.full((4,), top_k))
    theirs = TopPLogitsWarper(top_p)(None, TopKLogitsWarper(top_k)(None, logits))
    held = ours.softmax(-1).sort(descending=True).values.cumsum(-1)
    if (held - top_p).abs().min() > 1e-5:  # at the border itself, rounding decides
        assert torch.equal(ours.isfinite(), theirs.isfinite())
