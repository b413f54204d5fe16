"""Where tensors lie, and in which pieces they travel: by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollyard.errors import WeightSyncError
from rollyard.types import TensorInfo
from rollyard.weights.layout import Layout, compare

A = TensorInfo("a", (3, 5), "torch.float32")  # 60 bytes, to 64
B = TensorInfo("b", (40,), "torch.bfloat16")  # 80 bytes, to 128
C = TensorInfo("c", (), "torch.float32")  # 4 bytes, to 64


def test_tensors_begin_at_cache_lines() -> None:
    layout = Layout.of([A, B, C])
    assert [(place.info.name, place.offset, place.size) for place in layout.places] == [
        ("a", 0, 60),
        ("b", 64, 80),
        ("c", 192, 4),
    ]
    assert layout.size == 256


def test_buckets_are_ranges_of_bytes() -> None:
    assert Layout.of([A, B, C]).buckets(100) == ((0, 64), (64, 128), (128, 192), (192, 256))
    assert Layout.of([A, B, C]).buckets(1000) == ((0, 256),)
    assert Layout.of([]).buckets(64) == ()


@given(st.lists(st.integers(0, 500), max_size=6), st.integers(1, 2000))
def test_buckets_cover_everything_once(sizes: list[int], most: int) -> None:
    layout = Layout.of([TensorInfo(str(i), (size,), "torch.float32") for i, size in enumerate(sizes)])
    covered = [byte for start, end in layout.buckets(most) for byte in range(start, end)]
    assert covered == list(range(layout.size))
    assert all(end - start <= max(most, 64) for start, end in layout.buckets(most))


def test_a_format_that_no_engine_decodes_with_is_refused() -> None:
    with pytest.raises(WeightSyncError, match=r"a is torch\.int8"):
        Layout.of([TensorInfo("a", (1,), "torch.int8")])


def test_both_sides_have_the_same_tensors() -> None:
    compare([A, B], [B, A])
    with pytest.raises(WeightSyncError, match=r"only on one side: b, c$"):
        compare([A, B], [A, C])
    with pytest.raises(WeightSyncError, match=r"a was sent as \[5, 3\] float32, and the engine has \[3, 5\] float32"):
        compare([TensorInfo("a", (5, 3), "torch.float32")], [A])
    with pytest.raises(WeightSyncError, match=r"a was sent as .* bfloat16"):
        compare([TensorInfo("a", (3, 5), "torch.bfloat16")], [A])
