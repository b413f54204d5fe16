"""Texts of others in messages of ours."""

from __future__ import annotations

import ast

import pytest
from pydantic import TypeAdapter, ValidationError

from rollyard.texts import in_a_line
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
