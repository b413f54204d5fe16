"""Answers that are streamed while they are written: what was told is never contradicted, or it is said."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollyard.serve.streamed import Streamed
from rollyard.serve.tools import OPEN, read
from tests.serve.double import Served, serving
from tests.serve.test_sessions import ask
from tests.serve.test_tools import CALLED, LOOK


def bytes_of(ids: Sequence[int]) -> str:
    """A tokenizer whose tokens are bytes."""
    return bytes(ids).decode("utf-8", "replace")


def test_of_what_may_begin_something_else_nothing_is_told() -> None:
    own = Streamed(bytes_of, ("</end>",), blank=False)
    found = []
    for byte in "hello </e\N{EURO SIGN}</end>x".encode():
        own.hear(len(own._ids), [byte])
        found.append(own.sure)
    assert found[5:8] == ["hello "] * 3 and found[9:12] == ["hello ", "hello ", "hello </e\N{EURO SIGN}"]
    assert found[-1] == "hello </e\N{EURO SIGN}", "what comes after an end is no text of the answer"


def test_blanks_before_a_call_come_to_nothing() -> None:
    own = Streamed(bytes_of, (OPEN,), blank=True)
    for byte in b"\n<tool_call>":
        own.hear(len(own._ids), [byte])
        assert own.sure == ""


def test_of_what_was_taken_back_nothing_is_left() -> None:
    own = Streamed(bytes_of, (), blank=False)
    own.hear(0, b"hello")
    own.hear(2, b"y")
    assert own.sure == "hey"
    own.hear(0, "\N{EURO SIGN}".encode()[:2])
    assert own.sure == ""
    own.hear(2, "\N{EURO SIGN}".encode()[2:])
    assert own.sure == "\N{EURO SIGN}"


CALL = '{"name": "f", "arguments": {}}'
PIECES = st.sampled_from(["<tool_call>", "</tool_call>", CALL, "</en", "</end>", " ", "\n", "x", "\N{EURO SIGN}"])


@given(st.lists(PIECES, max_size=8).map("".join), st.lists(st.integers(1, 9)), st.booleans())
def test_what_was_told_is_never_contradicted(text: str, lengths: list[int], stopped: bool) -> None:
    """Whatever comes, whichever way it ends: by a stop string, or not."""
    own, ids, sure = Streamed(bytes_of, ("</end>", OPEN), blank=True), text.encode(), [""]
    while len(own._ids) < len(ids):
        step = lengths.pop() if lengths else 3
        own.hear(len(own._ids), ids[len(own._ids) :][:step])
        sure.append(own.sure)
    whole = text.partition("</end>")[0] if stopped else text
    final = read("hermes", whole).content
    assert all(final.startswith(told) for told in sure)


async def told(served: Served, session: dict[str, str], **more: Any) -> list[dict[str, Any]]:
    found = await ask(served, session, stream=True, **more)
    return [json.loads(event.removeprefix("data: ")) for event in found.text.strip().split("\n\n") if event != "data: [DONE]"]


def texts(pieces: list[dict[str, Any]]) -> list[Any]:
    return [piece["choices"][0]["delta"].get("content") for piece in pieces]


async def test_tokens_come_as_they_are_written(tmp_path: Path) -> None:
    """The tokens themselves come with the end, when they are sure."""
    async with serving(tmp_path, serve__episodes=True) as served:
        session, policy = await served.play(), served.run.policy
        policy.heard, policy.says = [(0, (1,)), (1, (2, 6))], [(1, 2, 6, 4, 7)]
        first, _, rest, end = pieces = await told(served, session)
        assert texts(pieces) == ["he", "llo world", "?", None]
        assert [piece["choices"][0]["delta"].get("role") for piece in pieces] == ["assistant", None, None, None]
        assert "token_ids" not in first["choices"][0] and rest["choices"][0]["token_ids"] == [1, 2, 6, 4, 7]
        assert (
            end["choices"][0]["finish_reason"] == "stop"
            and end["rollyard"]["turn"] == 1
            and len({p["created"] for p in pieces}) == 1
        )
        policy.heard, policy.says = [(0, (1,))], [(1, 2, 7)]
        more = {"model": "policy", "prompt": "?", "stream": True}
        found = (await served.http.post("/v1/completions", json=more, headers=session)).text.split("\n\n")[:3]
        assert [json.loads(each.removeprefix("data: "))["choices"][0]["text"] for each in found] == ["he", "llo", ""]


async def test_calls_come_whole(tmp_path: Path) -> None:
    async with serving(tmp_path, serve__episodes=True) as served:
        session, policy = await served.play(), served.run.policy
        policy.heard, policy.says = [(0, (1, 8)), (2, (10,))], [(1, *CALLED)]
        pieces = await told(served, session, tools=[LOOK])
        assert texts(pieces) == ["he", None, None] and len(pieces[1]["choices"][0]["delta"]["tool_calls"]) == 1
        policy.heard, policy.says = [(0, (1, 8)), (2, (10,))], [(1, 8, 10, 1, 7)]  # never closed
        assert "".join(filter(None, texts(await told(served, session, tools=[LOOK])))).startswith("he<tool_call>{")


@pytest.mark.parametrize("written", [(1, 2, 7), (6, 7)])
async def test_what_was_taken_back_after_it_had_been_told_is_said(tmp_path: Path, written: tuple[int, ...]) -> None:
    """And the same asked again is no second turn."""
    async with serving(tmp_path, serve__episodes=True) as served:
        session, policy = await served.play(), served.run.policy
        policy.heard, policy.says = [(0, (1, 2)), (0, (written[0],))], [written]
        pieces = await told(served, session)
        if written == (1, 2, 7):
            assert texts(pieces)[:2] == ["hello", ""], "what was written anew is the same"
            return
        assert texts(pieces[:1]) == ["hello"] and pieces[1]["error"]["code"] == "taken_back"
        answer = (await ask(served, session)).json()
        assert answer["choices"][0]["message"]["content"] == " world" and answer["rollyard"]["turn"] == 1
        assert len(policy.asked) == 1


async def test_several_answers_are_streamed_one_after_the_other(tmp_path: Path) -> None:
    async with serving(tmp_path, serve__episodes=True) as served:
        session, policy = await served.play(), served.run.policy
        policy.heard, policy.says = [(0, (1,))], [(1, 2, 7), (1, 6, 7)]
        pieces = await told(served, session, n=2)
        found = ["", ""]
        for piece in pieces:
            found[piece["choices"][0]["index"]] += piece["choices"][0]["delta"].get("content", "")
        assert found == ["hello", "he world"]
