"""Texts of others in messages of ours."""

from __future__ import annotations

import ast
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import JsonValue, TypeAdapter, ValidationError

from rollyard.texts import DEEPEST, counted, in_a_line, not_json, once
from tests.sources import modules, nodes, text


@pytest.mark.parametrize(
    ("content", "told"),
    [(b'{"a": [1, "x"]}', "a.1: Input should be a valid integer"), (b"3", "Input should be an object"), (b"{", "Invalid JSON")],
)
def test_of_pydantic_s_errors_the_first_is_told_in_a_line_and_no_link(content: bytes, told: str) -> None:
    with pytest.raises(ValidationError) as error:
        TypeAdapter(dict[str, list[int]]).validate_json(content)
    found = in_a_line(error.value)
    assert found.startswith(told) and "http" not in found and "\n" not in found


def test_no_message_quotes_such_an_error_as_it_is() -> None:
    for path in modules():
        for node in nodes(path) if "ValidationError" in text(path) else ():
            if isinstance(node, ast.ExceptHandler) and node.type is not None and "ValidationError" in ast.unparse(node.type):
                handled = "".join(map(ast.unparse, node.body))
                assert "{error}" not in handled and "str(error)" not in handled, path


PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters())
VALUES = st.recursive(PLAIN, lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters()), inner), max_leaves=20)


@given(VALUES)
def test_what_json_says_every_reader_gives_back(value: Any) -> None:
    if not_json(value):
        return
    said = json.dumps(value, allow_nan=False)
    assert json.loads(said) == value
    assert TypeAdapter(JsonValue).validate_json(said.encode()) == value
    assert json.loads(TypeAdapter(JsonValue).dump_json(value)) == value


def nested(levels: int) -> object:
    value: object = 1
    for _ in range(levels):
        value = [value]
    return value


def inside_itself() -> object:
    value: dict[str, object] = {}
    value["again"] = value
    return value


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ({"a": [float("nan")]}, "nan, which is no number"),
        ({"a": {"b": float("-inf")}}, "-inf, which is no number"),
        (["\ud800"], "half a character"),
        ({"a": {"\ud800": 1}}, "half a character"),
        ({"a": {1: 2}}, "the name 1, which is no text"),
        ({"a": b"x"}, "a bytes"),
        (nested(DEEPEST + 1), "levels"),
        (nested(100_000), "levels"),
        (inside_itself(), "levels"),
    ],
)
def test_what_json_has_no_words_for_is_told(value: object, why: str) -> None:
    assert why in not_json(value)


def test_what_is_as_deep_as_it_may_be_and_a_tuple_are_fine() -> None:
    assert not not_json(nested(DEEPEST)) and not not_json({"a": (1, "b", None, True, 0.5)}) and not not_json(10**4000)
    assert "thousands of digits" in not_json([10**5000])


def test_a_name_that_comes_twice_and_a_count_that_is_none() -> None:
    assert json.loads('{"a": {"b": 1, "c": [{"b": 2}]}}', object_pairs_hook=once) == {"a": {"b": 1, "c": [{"b": 2}]}}
    with pytest.raises(ValueError, match="'b' comes twice"):
        json.loads('{"a": [{"b": 1, "b": 1}]}', object_pairs_hook=once)
    assert json.loads(f"[-3, {2**63}]", parse_int=counted) == [-3, 2**63]
    with pytest.raises(ValueError, match="400 digits"):
        json.loads("9" * 400, parse_int=counted)
