"""What somebody may send instead of what belongs there: bytes that are bent, cut, deep, huge, or of another kind."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

DEEP = (b"[" * 100_000, b'{"a":' * 20_000, b"[" * 900 + b"]" * 900)
ODD = (
    *DEEP,
    b"",
    b"null",
    b"\x00",
    b"\xff\xfe{}",
    b"9" * 5_000,
    b"1e999",
    b'"\\ud800"',
    b"-" * 70_000,
    b"NaN",
    b"\xef\xbb\xbf{}",
)

words = st.text(max_size=8) | st.sampled_from(
    ["", "..", "../../x", "/etc/passwd", "\x1b]0;x\x07", "a\0b", "\ud800", "nan", "1" * 400]
)
numbers = st.integers() | st.floats() | st.sampled_from([2**63, -(2**63) - 1, 10**400, 1e308])
values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | numbers | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=6,
)


def places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Each container below, with each of its keys."""
    for key in list(tree) if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ():
        yield tree, key
        yield from places(tree[key])


@st.composite
def bent(draw: st.DrawFn, valid: Any) -> Any:
    """What JSON can hold, with something in it that is of another kind, or not there."""
    root = [copy.deepcopy(valid)]
    holder, key = draw(st.sampled_from(list(places(root))))
    if draw(st.booleans()) and holder is not root:
        del holder[key]
    else:
        holder[key] = draw(values)
    return root[0] if root else None


@st.composite
def flipped(draw: st.DrawFn, valid: bytes) -> bytes:
    """Bytes of which some are others, or missing, or more."""
    content = bytearray(valid)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(content)))
        match draw(st.integers(0, 3)):
            case 0 if at < len(content):
                content[at] = draw(st.integers(0, 255))
            case 1:
                del content[at : at + draw(st.integers(1, 8))]
            case 2:
                content[at:at] = draw(st.binary(min_size=1, max_size=8))
            case _:
                del content[at:]
    return bytes(content)


def of_bytes(valid: bytes) -> st.SearchStrategy[bytes]:
    return flipped(valid) | st.binary(max_size=60) | st.sampled_from(ODD)


def of_json(valid: Any) -> st.SearchStrategy[bytes]:
    whole = bent(valid).map(lambda value: json.dumps(value).encode())
    return whole | of_bytes(json.dumps(valid).encode())


def fuzzed(few: int, many: int, **strategies: st.SearchStrategy[Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A property for both lanes: `few` examples in the ordinary one, `many` in the slow one."""

    def make(test: Callable[..., Any]) -> Callable[..., Any]:
        checks = [
            HealthCheck.too_slow,
            HealthCheck.data_too_large,
            HealthCheck.filter_too_much,
            HealthCheck.function_scoped_fixture,
        ]

        def under(examples: int) -> Callable[..., Any]:
            own = copy_of(test)
            return settings(max_examples=examples, suppress_health_check=checks, database=None)(given(**strategies)(own))

        test.__globals__[f"{test.__name__}_at_length"] = pytest.mark.slow(under(many))
        return under(few)

    return make


def copy_of(test: Callable[..., Any]) -> Any:
    import types

    made = types.FunctionType(test.__code__, test.__globals__, test.__name__, test.__defaults__, test.__closure__)  # type: ignore[attr-defined]
    made.__kwdefaults__, made.__annotations__, made.__qualname__ = test.__kwdefaults__, test.__annotations__, test.__qualname__  # type: ignore[attr-defined]
    made.__module__ = test.__module__
    return made
