"""Texts of others in messages of ours."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from pydantic import TypeAdapter, ValidationError

import rollyard
from rollyard.texts import in_a_line


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
    for path in Path(rollyard.__file__).parent.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if "ValidationError" in text else ():
            if isinstance(node, ast.ExceptHandler) and node.type is not None and "ValidationError" in ast.unparse(node.type):
                handled = "".join(map(ast.unparse, node.body))
                assert "{error}" not in handled and "str(error)" not in handled, path
