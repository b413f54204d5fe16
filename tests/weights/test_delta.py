"""What changed between two versions, there and back: bit for bit, whatever the bits."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollyard.errors import WeightSyncError
from rollyard.model.folder import infos
from rollyard.weights.delta import Scan, apply, changed
from rollyard.weights.flat import fill, views
from rollyard.weights.layout import Layout

BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
ODD = {  # zeros of both signs, infinities, quiet and signalling NaNs with payloads, subnormals
    torch.float32: [0, -(2**31), 0x7F800000, 0x7FC00001, 0x7F800001, -1, 1],
    torch.bfloat16: [0, -(2**15), 0x7F80, 0x7FC1, 0x7F81, -1, 1],
    torch.float16: [0, -(2**15), 0x7C00, 0x7E01, 0x7C01, -1, 1],
}
Tensors = dict[str, torch.Tensor]


@st.composite
def versions(draw: st.DrawFn) -> tuple[Tensors, Tensors]:
    """The same tensors twice; any share of their numbers differs, to any bits."""
    before: Tensors = {}
    after: Tensors = {}
    for number, size in enumerate(draw(st.lists(st.one_of(st.integers(0, 9), st.integers(0, 5000)), min_size=1, max_size=6))):
        dtype = draw(st.sampled_from(sorted(BITS, key=str)))
        dice = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
        bits = BITS[dtype]
        old = torch.randint(torch.iinfo(bits).min, torch.iinfo(bits).max, (size,), dtype=bits, generator=dice)
        odd = torch.tensor(ODD[dtype], dtype=torch.int64).to(bits)
        fresh = odd[torch.randint(len(odd), (size,), generator=dice)]
        differs = torch.rand(size, generator=dice) < draw(st.sampled_from([0.0, 0.001, 0.05, 0.5, 1.0]))
        before[str(number)], after[str(number)] = old.view(dtype), torch.where(differs, fresh, old).view(dtype)
    return before, after


def flat(tensors: Tensors) -> tuple[torch.Tensor, Layout]:
    layout = Layout.of(infos(tensors))
    buffer = torch.zeros(layout.size, dtype=torch.uint8)
    fill(views(buffer, layout), tensors.items())
    return buffer, layout


def same(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))


def bring(
    frames: Sequence[torch.Tensor | None], there: torch.Tensor, sent: torch.Tensor, buckets: Sequence[tuple[int, int]]
) -> None:
    for number, (frame, (start, end)) in enumerate(zip(frames, buckets, strict=True), start=1):
        if frame is None:
            there[start:end] = sent[start:end]
        else:
            assert len(frame) < end - start  # or it would have travelled as it is
            apply(frame, there[start:end], number)


@settings(max_examples=60, deadline=None)
@given(versions(), st.sampled_from([64, 1024, 2**20]))
def test_what_changed_makes_the_next_version_bit_for_bit(pair: tuple[Tensors, Tensors], bucket: int) -> None:
    before, after = pair
    sender, layout = flat(before)
    there, buckets = sender.clone(), layout.buckets(bucket)
    scan = Scan(sender, layout, buckets)
    frames = list(scan.frames(after.items()))
    wanted, _ = flat(after)
    assert same(sender, wanted)
    bring(frames, there, sender, buckets)
    assert same(there, wanted)
    bits = [
        (old.view(BITS[old.dtype]), new.view(BITS[old.dtype])) for old, new in zip(before.values(), after.values(), strict=True)
    ]
    assert scan.numbers == sum(len(old) for old, _ in bits)
    assert scan.unchanged == sum(int((old == new).sum()) for old, new in bits)


def test_a_few_of_many_are_few_bytes() -> None:
    """By hand: 300,000 words are 5 blocks; 3 changed words are 5 x 4 + 3 x 4 bytes and a checksum of 8."""
    before = {"a": torch.zeros(300_000, dtype=torch.bfloat16)}
    after = {"a": before["a"].clone()}
    after["a"][torch.tensor([0, 65_536, 299_999])] = 1.0
    sender, layout = flat(before)
    (frame,) = Scan(sender, layout, layout.buckets(2**20)).frames(after.items())
    assert frame is not None and len(frame) == 40
    assert frame.view(torch.int32)[:5].tolist() == [1, 1, 0, 0, 1]
    assert frame.view(torch.int16)[10:16].tolist() == [0, 0, 299_999 % 65_536 - 65_536, *[0x3F80] * 3]


def test_a_version_without_changes_is_empty() -> None:
    tensors = {"a": torch.randn(1000), "b": torch.randn(7).to(torch.float16)}
    sender, layout = flat(tensors)
    frames = list(Scan(sender, layout, layout.buckets(1024)).frames(tensors.items()))
    assert [frame is not None and len(frame) for frame in frames] == [0] * len(layout.buckets(1024))


@pytest.mark.parametrize("at", [0, 5, -1])
def test_a_frame_that_changed_on_the_way_is_refused(at: int) -> None:
    before = {"a": torch.zeros(4000)}
    after = {"a": torch.where(torch.arange(4000) % 100 == 0, 1.0, 0.0)}
    sender, layout = flat(before)
    there = sender.clone()
    (frame,) = Scan(sender, layout, layout.buckets(2**20)).frames(after.items())
    assert frame is not None
    frame[at] ^= 4
    with pytest.raises(WeightSyncError, match="what changed in bucket 7 arrived changed"):
        apply(frame, there, 7)
    assert not there.any()


def test_tensors_that_are_parts_of_another() -> None:
    """Their memory begins where it likes, and need not be in one piece."""
    whole = torch.arange(64 * 33, dtype=torch.float32).to(torch.bfloat16).view(64, 33)
    before = {"a": torch.zeros(33, 64, dtype=torch.bfloat16), "b": torch.zeros(2110, dtype=torch.bfloat16)}
    after = {"a": whole.t(), "b": whole.view(-1)[1:2111]}
    sender, layout = flat(before)
    list(Scan(sender, layout, layout.buckets(4096)).frames(after.items()))
    assert all(torch.equal(tensor, after[name]) for name, tensor in views(sender, layout).items())


def test_where_words_differ() -> None:
    old = torch.zeros(16, dtype=torch.int16)
    new = old.clone()
    new[torch.tensor([0, 3, 4, 15])] = torch.tensor([1, -1, 2, 3], dtype=torch.int16)
    assert changed(new, old).tolist() == [0, 3, 4, 15]
