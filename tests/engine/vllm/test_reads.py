"""What a loader reads of tensors that lie in one piece of memory, and whether that is its share."""

from __future__ import annotations

import torch

from rollyard.engine.vllm.reads import Reads, beyond, share_bytes
from rollyard.types import Slice

MEMORY = torch.arange(100, dtype=torch.float32)
WHOLE = {"a": MEMORY[:24].view(4, 6), "b": MEMORY[24:30], "c": MEMORY[32:44].view(6, 2)}


def test_reads_are_seen_and_views_are_none() -> None:
    own, half = torch.zeros(2, 6), torch.zeros(4, 3)
    with Reads(WHOLE) as reads:
        own.copy_(WHOLE["a"].narrow(0, 2, 2))
        half.copy_(WHOLE["a"][:, 3:])
        WHOLE["b"].view(2, 3)
        torch.empty(2, 6, device="meta").copy_(WHOLE["c"].t())
        torch.zeros(3).add_(MEMORY[50:53])  # of none of them
    assert reads.found["a"] == [(Slice(0, 2, 4), Slice(1, 0, 6)), (Slice(0, 0, 4), Slice(1, 3, 6))]
    assert "b" not in reads.found
    assert reads.found["c"] == [(Slice(0, 0, 6), Slice(1, 0, 2))]


def test_a_read_beyond_the_share_is_named() -> None:
    share = {"a": Slice(0, 0, 2), "b": None, "c": Slice(1, 1, 2)}
    with Reads(WHOLE) as reads:
        WHOLE["a"][:2].clone()
        WHOLE["b"].clone()
        WHOLE["c"][:, 1:].clone()
    assert beyond(reads.found, share) == ""
    with reads:
        WHOLE["a"][1:3].clone()
    assert beyond(reads.found, share) == "a: its loader reads 1 to 3 of dimension 0, and its share is 0 to 2"
    assert share_bytes(WHOLE, share) == 4 * (12 + 6 + 6)
    assert share_bytes(WHOLE, {}) == 4 * (24 + 6 + 12)
