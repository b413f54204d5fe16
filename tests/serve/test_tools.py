"""Harnesses that call tools: what they are told of, what the policy calls, and how that goes on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollyard.errors import ConfigError
from rollyard.serve.openai import ChatRequest
from rollyard.serve.tools import DEEPEST, Call, Read, arguments_of, fit, read, unreadable
from tests.serve.double import CALL, AnyText, Served, serving
from tests.serve.test_sessions import ASK, ask

LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
CALLED = (8, 10, 9, 7)  # what the policy writes, as a text: <tool_call>CALL</tool_call>
END = 7

jsons: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


def call(name: str, arguments: object, ends: str = "</tool_call>") -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n{ends}"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("hello", Read("hello")),
        (call("f", {"a": 1}), Read("", (Call("f", '{"a": 1}'),))),
        ("Now.\n" + call("f", {}), Read("Now.\n", (Call("f", "{}"),))),
        (call("f", {}) + "\n" + call("g", {"b": "é"}), Read("", (Call("f", "{}"), Call("g", '{"b": "é"}')))),
        ('<tool_call>[{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]</tool_call>',)
        + (Read("", (Call("f", "{}"), Call("g", "{}"))),),
        ("<tool_call>[]</tool_call>", Read("<tool_call>[]</tool_call>")),
        (call("f", {}, ends=""), Read("", (Call("f", "{}"),))),  # a stop string has cut it off
        (call("f", {}) + "and so on", Read("and so on", (Call("f", "{}"),))),
        (call("f", {"a": "<tool_call></tool_call>"}), Read("", (Call("f", '{"a": "<tool_call></tool_call>"}'),))),
    ],
)
def test_calls_are_read(text: str, found: Read) -> None:
    assert read("hermes", text) == found
    assert read("none", text) == Read(text)


@pytest.mark.parametrize(
    "text",
    [
        call("f", {}) + "<tool_call>{",  # what can be read in part only
        call("f", {}, ends="and so on"),
        call("f", [1]),
        call("f", '{"a": 1}'),
        call("", {}),
        call(1, {}),  # type: ignore[arg-type]
        call("f", {"a": float("nan")}),
        call("f", {"a": "\ud800"}),
        '<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>',
        '<tool_call>{"name": "f"}</tool_call>',
        "<tool_call>",
        "<tool_call>" + "[" * 100_000,
        '<tool_call>{"name": "f", "arguments": ' + '{"a":' * 70 + "1" + "}" * 71 + "</tool_call>",
        '<tool_call>{"name": "f", "arguments": {"a": ' + "9" * 5000 + "}}</tool_call>",
    ],
)
def test_what_is_no_call_is_text(text: str) -> None:
    assert read("hermes", text) == Read(text)


@given(st.lists(st.tuples(st.text(min_size=1), st.dictionaries(st.text(), jsons, max_size=3)), min_size=1, max_size=3))
def test_what_was_read_may_be_sent_back(calls: list[tuple[str, dict[str, Any]]]) -> None:
    found = read("hermes", "Now." + "".join(call(*each) for each in calls))
    assert found.content == "Now." and [(each.name, arguments_of(each.arguments)) for each in found.calls] == calls


@given(st.lists(st.sampled_from(["<tool_call>", "</tool_call>", CALL, " ", "{", "]", "x"])).map("".join))
def test_no_text_is_lost(text: str) -> None:
    found = read("hermes", text)
    assert found.content == text if not found.calls else set(found.content) <= set(text)


def test_json_has_an_end() -> None:
    value: Any = 1
    for _ in range(DEEPEST):
        value = [value]
    assert fit(value) is value
    for wrong in ([value], {"\ud800": 1}, float("inf")):
        with pytest.raises(ValueError, match=r"levels|half a character|not JSON"):
            fit(wrong)
    for text in ("", "[1]", "NaN", "{", '{"a": 1} 2', "[" * 100_000):
        with pytest.raises(ValueError, match="JSON"):
            arguments_of(text)


async def said(served: Served, session: dict[str, str], /, **more: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The answer, and how it stands in the training data."""
    told = await ask(served, session, **({"tools": [LOOK]} | more))
    assert told.status_code == 200, told.text
    found = told.json()
    return found["choices"][0], found["rollyard"]


def result(choice: dict[str, Any], content: str = "=") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": choice["message"]["tool_calls"][0]["id"], "content": content}


async def test_a_call_and_what_the_tool_said_go_on_from_the_tokens_that_were_written(tmp_path: Path) -> None:
    async with serving(tmp_path, serve__episodes=True) as served:
        session, served.run.policy.says = await served.play(), [(1, *CALLED), CALLED, (3, 7)]
        choice, about = await said(served, session)
        assert about["prompt_token_ids"] == [5, 4, END] and choice["finish_reason"] == "tool_calls"
        assert choice["token_ids"] == [1, *CALLED]
        (one,) = choice["message"]["tool_calls"]
        assert choice["message"] == {"role": "assistant", "content": "he", "tool_calls": [one]}
        assert one["function"] == {"name": "look", "arguments": '{"at": "it"}'} and one["type"] == "function"
        history: list[Any] = [*ASK["messages"], choice["message"], result(choice)]  # type: ignore[misc]
        second, about = await said(served, session, messages=history)
        assert about["prompt_token_ids"] == [5, 4, END, 1, *CALLED, 5, END] and (about["matched"], about["rendered"]) == (1, 0)
        assert second["message"]["content"] is None and second["message"]["tool_calls"][0]["id"] != one["id"]
        # Clients that read arguments and write them again, and that have "" for nothing.
        back = json.loads(json.dumps(second["message"] | {"content": ""}))
        back["tool_calls"][0]["function"]["arguments"] = '{"at":"it"}'
        history += [back, result(second), {"role": "user", "content": "?"}]
        third, about = await said(served, session, messages=history)
        assert about["prompt_token_ids"][-9:] == [END, *CALLED, 5, END, 4, END] and about["matched"] == 2
        assert third["message"] == {"role": "assistant", "content": "hello"} and third["finish_reason"] == "stop"


async def test_a_history_with_other_tools_or_calls_is_another_one(tmp_path: Path) -> None:
    async with serving(tmp_path, serve__episodes=True) as served:
        session, served.run.policy.says = await served.play(), [CALLED]
        choice, _ = await said(served, session)
        history: list[Any] = [*ASK["messages"], choice["message"], result(choice)]  # type: ignore[misc]
        changed = json.loads(json.dumps(history))
        changed[1]["tool_calls"][0]["function"]["arguments"] = '{"at": true}'
        other = {"type": "function", "function": {"name": "other"}}
        for more in ({"tools": [LOOK, other]}, {"tools": None}, {"messages": changed}):
            _, about = await said(served, session, **({"messages": history} | more))
            assert (about["matched"], about["rendered"]) == (0, 1), more
        _, about = await said(served, session, messages=history)
        assert (about["matched"], about["rendered"]) == (1, 0)


STAY: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"tool_choice": "none"}),
    ({"serve__tool_parser": "none"}, {}),
    ({}, {"tools": []}),
]


@pytest.mark.parametrize(("options", "more"), STAY)
async def test_calls_that_nobody_asked_for_stay_text(tmp_path: Path, options: dict[str, Any], more: dict[str, Any]) -> None:
    async with serving(tmp_path, serve__episodes=True, **options) as served:
        session, served.run.policy.says = await served.play(), [CALLED]
        choice, about = await said(served, session, **more)
        assert choice["message"]["content"] == f"<tool_call>{CALL}</tool_call>" and choice["finish_reason"] == "stop"
        assert about["prompt_token_ids"] == [*([] if "tools" in more else [5]), 4, END], "tools are shown all the same"


async def test_streams_have_calls(tmp_path: Path) -> None:
    async with serving(tmp_path, serve__episodes=True) as served:
        session, served.run.policy.says = await served.play(), [CALLED]
        told = await ask(served, session, tools=[LOOK], stream=True)
        first, last = (json.loads(event.removeprefix("data: ")) for event in told.text.strip().split("\n\n")[:-1])
        (one,) = first["choices"][0]["delta"]["tool_calls"]
        assert one["index"] == 0 and one["function"]["name"] == "look" and last["choices"][0]["finish_reason"] == "tool_calls"


def test_a_result_says_of_which_tool_it_is() -> None:
    called = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    results = [{"role": "tool", "tool_call_id": id_, "content": "x"} for id_ in ("1", "2")]
    asked = ChatRequest.model_validate(ASK | {"messages": [{"role": "assistant", "tool_calls": [called]}, *results]})
    assert [each.get("name") for each in asked.plain] == [None, "f", None]


def bent(**function: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f"} | function}]}


def back(**message: Any) -> dict[str, Any]:
    return {"messages": [{"role": "assistant"} | message]}


def calling(arguments: str) -> dict[str, Any]:
    return back(tool_calls=[{"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}])


def nested(levels: int) -> Any:
    value: Any = {}
    for _ in range(levels):
        value = {"a": value}
    return value


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"tool_choice": "required"}, "nothing it writes is forced"),
    ({"tool_choice": {"type": "function", "function": {"name": "look"}}}, "nothing it writes is forced"),
    ({"parallel_tool_calls": False}, "nothing it writes is forced"),
    (bent(strict=True), "nothing it writes is forced"),
    ({"tools": {}}, "list"),
    ({"tools": [1]}, "tools.0"),
    ({"tools": [LOOK] * 129}, "128"),
    ({"tools": [{"type": "custom", "custom": {}}]}, "function"),
    (bent(name=""), "name"),
    (bent(name="f" * 300), "name"),
    (bent(parameters=[]), "parameters"),
    (bent(parameters=nested(100)), "levels"),
    (bent(parameters=nested(600)), "levels"),
    (bent(parameters={"a": "\ud800"}), "half a character"),
    (bent(description="\ud800"), "half a character"),
    (bent(other=1), "other"),
    ({"functions": [{"name": "f"}]}, "functions"),
    (back(), "content"),
    (back(tool_calls=[]), "tool_calls"),
    (back(tool_calls=[{"id": "1"}]), "tool_calls"),
    (calling("[1]"), "no JSON object"),
    (calling("{"), "no JSON"),
    (calling('{"a": "\\ud800"}'), "half a character"),
    (calling('{"a": ' * 5000), "JSON"),
    ({"messages": [{"role": "user", "content": "?", "tool_call_id": "1"}]}, "tool_call_id"),
    ({"messages": [{"role": "user", "content": "?", "tool_calls": []}]}, "tool_calls"),
    ({"messages": [{"role": "tool", "tool_call_id": "1"}]}, "content"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "half a character"),
    ({"stop": "\ud800"}, "half a character"),
]


async def test_what_cannot_be_done_is_one_error(tmp_path: Path) -> None:
    async with serving(tmp_path, serve__episodes=True) as served:
        session = await served.play()
        for wrong, told in WRONG:
            content = json.dumps(ASK | wrong)
            answer = await served.http.post(
                "/v1/chat/completions", content=content, headers=session | {"Content-Type": "application/json"}
            )
            assert answer.status_code == 400 and told in answer.json()["error"]["message"], (content[:200], answer.text[:500])
            assert len(answer.text) < 1000
        assert not served.run.policy.asked
        assert (await ask(served, session, tool_choice="auto", parallel_tool_calls=True, **bent(strict=False))).status_code == 200


class Odd(AnyText):
    """Of a model that has no text for <tool_call>."""

    def decode(self, ids: Sequence[int]) -> str:
        return super().decode([id_ for id_ in ids if id_ != 8])


class Llama(AnyText):
    """Whose template writes calls as JSON alone."""

    def chat(self, messages: Any, tools: Any = ()) -> tuple[int, ...]:
        return (11,)


class Blind(AnyText):
    """Whose template shows no calls, and says so."""

    def chat(self, messages: Any, tools: Any = ()) -> tuple[int, ...]:
        raise ConfigError("it shows no calls", where="model.path", remedy="none")


def test_a_form_that_would_never_be_read_is_said() -> None:
    ask: Any = AnyText()
    assert unreadable("hermes", ask, [LOOK]) == "" == unreadable("hermes", Blind(), [LOOK])  # type: ignore[arg-type]
    for other, told in ((Odd(), "no text for <tool_call>"), (Llama(), "another form")):
        found: Any = other
        assert told in unreadable("hermes", found, [LOOK]) and unreadable("none", found, [LOOK]) == ""


async def test_a_form_that_would_never_be_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AnyText, "chat", Llama.chat)
    async with serving(tmp_path, serve__episodes=True) as served:
        session = await served.play()
        told = await ask(served, session, tools=[LOOK])
        assert told.status_code == 400 and "serve.tool_parser none" in told.json()["error"]["message"]
        assert (await ask(served, session, tools=[LOOK], tool_choice="none")).status_code == 200
