"""Harnesses play members: what they ask is the episode, what they say is the verdict."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollyard.serve.choices import _logprobs
from rollyard.types import FinishReason, Reply, Reward, VersionSpan
from tests.serve.double import TOKEN, V0, Served, serving, until

ASK = {"model": "policy", "messages": [{"role": "user", "content": "?"}]}


async def ask(served: Served, session: dict[str, str], /, **more: Any) -> Any:
    return await served.http.post("/v1/chat/completions", json=ASK | more, headers=session)


def clients(served: Served) -> list[int]:
    """How many wait for each question."""
    sessions = served.service.sessions
    assert sessions is not None
    return [question.clients for session in sessions._going.values() for question in session.asking]


async def ended(served: Served, which: int = 0) -> Reward | None:
    return (await asyncio.wait_for(served.run.episodes[which], 5)).verdict


async def test_a_harness_plays_a_member(tmp_path: Path) -> None:
    async with serving(tmp_path, serve__episodes=True) as served:
        session = await served.play()
        told = (await ask(served, session, logprobs=True)).json()
        (choice,) = told["choices"]
        assert choice["message"] == {"role": "assistant", "content": "hello"} and choice["finish_reason"] == "stop"
        assert choice["token_ids"] == [1, 2, 7] and choice["versions"] == [{"step": 0, "incarnation": 0, "tokens": 3}]
        assert [(each["token"], each["logprob"]) for each in choice["logprobs"]["content"]] == [
            ("he", -0.5),
            ("llo", -0.5),
            ("", -0.5),
        ]
        assert told["usage"] == {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}
        history = [*ASK["messages"], choice["message"], {"role": "user", "content": "="}]  # type: ignore[misc]
        about = (await ask(served, session, messages=history)).json()["rollyard"]
        assert about["prompt_token_ids"] == [4, 7, 1, 2, 7, 5, 7] and (about["turn"], about["matched"], about["rendered"]) == (
            2,
            1,
            0,
        )
        path = f"/v1/sessions/{session['X-Rollyard-Session']}"
        assert (await served.http.get(path)).json()["turns"] == 2
        for _ in range(2):
            for odd in ({"value": 1e300}, {"value": 1.0, "parts": {"x": -1e300}}, {"value": None, "parts": {"x": 1.0}}):
                assert (await served.http.post(f"{path}/reward", json=odd)).status_code == 400
            assert (await served.http.post(f"{path}/reward", json={"value": 0.5, "parts": {"x": 1.0}})).json() == {"ok": True}
        assert (await served.http.post(f"{path}/reward", json={"value": 1.0})).status_code == 410
        assert await ended(served) == Reward(0.5, {"x": 1.0})
        told = (await served.http.get("/v1/status")).json()["sessions"]
        assert (told["judged"], told["going"], told["matched"]) == (1, 0, 1)


@pytest.mark.parametrize(
    ("path", "says", "verdict"),
    [
        ("reward", {"value": None}, None),
        ("failure", {"problem": "the tool broke"}, Reward(None, problem="the tool broke")),
    ],
)
async def test_other_ends(tmp_path: Path, path: str, says: object, verdict: Reward | None) -> None:
    async with serving(tmp_path, serve__episodes=True) as served:
        session = await served.play()
        where = f"/v1/sessions/{session['X-Rollyard-Session']}/{path}"
        assert (await served.http.post(where, json=says)).status_code == 200
        assert await ended(served) == verdict


async def test_a_harness_that_does_nothing_has_no_verdict(tmp_path: Path) -> None:
    async with serving(tmp_path, serve__episodes=True, serve__idle_s=0.1) as served:
        session = await served.play()
        assert (await ask(served, session)).status_code == 200
        verdict = await ended(served)
        assert verdict is not None and verdict.value is None and "did nothing for 0.1 s" in verdict.problem
        told = await ask(served, session)
        assert told.status_code == 410 and "did nothing" in told.json()["error"]["message"]


async def test_sessions_of_groups_and_of_keys(tmp_path: Path) -> None:
    async with serving(tmp_path, serve__episodes=True) as served:
        await served.run.submit(["?", "="])
        served.run.admit(2, size=2)
        one = await served.http.post("/v1/sessions", json={"group": 1, "key": "k", "wait_s": 2})
        assert one.json()["text"] == "=" and one.json()["token_ids"] == [5]
        assert (await served.http.post("/v1/sessions", json={"group": 1, "key": "k"})).json() == one.json()
        assert (await served.http.post("/v1/sessions", json={"group": 1})).status_code == 201
        told = await served.http.post("/v1/sessions", json={"group": 1})
        assert told.status_code == 429 and told.json()["error"]["code"] == "no_member"
        served.run.batch.put_nowait(None)
        told = await served.http.post("/v1/sessions", json={"group": 1, "wait_s": 5})
        assert told.status_code == 410 and told.json()["error"]["code"] == "over"
        counts = (await served.http.get("/v1/status")).json()["sessions"]
        assert (counts["waiting"], counts["going"]) == (2, 2)


async def test_a_member_that_was_dropped_takes_its_session_along(tmp_path: Path) -> None:
    """Also while its answer is being written."""
    async with serving(tmp_path, serve__episodes=True) as served:
        session = await served.play()
        served.run.policy.may.clear()
        asking = asyncio.create_task(ask(served, session))
        await until(lambda: served.run.policy.asked)
        busy = await served.http.post(f"/v1/sessions/{session['X-Rollyard-Session']}/reward", json={"value": 1.0})
        assert busy.status_code == 409 and busy.json()["error"]["code"] == "busy"
        served.run.episodes[0].cancel()
        assert (await asyncio.wait_for(asking, 5)).json()["error"]["code"] == "session_over"


async def test_an_answer_that_nobody_heard_is_there_when_it_is_asked_for_again(tmp_path: Path) -> None:
    """Clients give up and try again by themselves: that is no second turn of the episode."""
    async with serving(tmp_path, serve__episodes=True) as served:
        session = await served.play()
        served.run.policy.may.clear()
        hung_up = asyncio.create_task(ask(served, session))
        await until(lambda: served.run.policy.asked)
        hung_up.cancel()
        await asyncio.wait((hung_up,))
        again = asyncio.create_task(ask(served, session))
        await until(lambda: clients(served) == [1])
        served.run.policy.may.set()
        assert (await again).json()["rollyard"]["turn"] == 1 and len(served.run.policy.asked) == 1
        assert (await ask(served, session)).json()["rollyard"]["turn"] == 2, "that one was heard"


@pytest.mark.parametrize("stream", [False, True])
async def test_the_same_asked_by_several_at_a_time_is_several_turns(tmp_path: Path, stream: bool) -> None:
    async with serving(tmp_path, serve__episodes=True) as served:
        session = await served.play()
        served.run.policy.says = [(1, 7), (2, 7), (3, 7)]
        told = await asyncio.gather(*(ask(served, session, stream=stream) for _ in range(3)))
        texts = [each.text.replace('": "', '":"') for each in told]
        assert ['"content":"hello"' in text for text in texts].count(True) == 1
        assert len({text[text.index('"content":"') :][:14] for text in texts}) == 3
        assert served.run.policy.says == []


@pytest.mark.parametrize("headers", [{"X-Stainless-Retry-Count": "1"}, {"Idempotency-Key": "k"}])
async def test_who_says_that_it_asks_again_has_no_turn_of_its_own(tmp_path: Path, headers: dict[str, str]) -> None:
    """Although nobody has seen it hang up, as behind a proxy."""
    async with serving(tmp_path, serve__episodes=True) as served:
        session = await served.play()
        served.run.policy.may.clear()
        both = [asyncio.create_task(ask(served, session | headers)) for _ in range(2)]
        await until(lambda: clients(served) == [2])
        served.run.policy.may.set()
        assert [(await each).json()["rollyard"]["turn"] for each in both] == [1, 1] and len(served.run.policy.asked) == 1


async def test_what_was_refused_may_be_asked_again(tmp_path: Path) -> None:
    async with serving(tmp_path, serve__episodes=True) as served:
        session = await served.play()
        served.run.policy.says = [(), (1, 7)]
        assert (await ask(served, session)).status_code == 400
        assert (await ask(served, session)).status_code == 200


async def test_who_hangs_up_while_it_waits_for_a_member_takes_none(tmp_path: Path) -> None:
    async with serving(tmp_path, serve__episodes=True) as served:
        told: list[Any] = []
        received = iter([{"type": "http.request", "body": b'{"wait_s": 5.0}', "more_body": False}])
        hangs_up = asyncio.Event()

        async def receive() -> Any:
            for message in received:
                return message
            await hangs_up.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            told.append(message)

        headers = [(b"host", b"localhost"), (b"content-length", b"15"), (b"content-type", b"application/json")]
        headers.append((b"authorization", f"Bearer {TOKEN}".encode()))
        scope = {"type": "http", "method": "POST", "path": "/v1/sessions", "headers": headers, "query_string": b""}
        waiting = asyncio.create_task(served.app(scope | {"root_path": "", "app": served.app}, receive, send))
        await asyncio.sleep(0)
        hangs_up.set()
        await asyncio.wait_for(waiting, 4)
        assert told[0]["status"] == 408
        await served.run.submit(["?"])
        served.run.admit(1)
        assert (await served.http.post("/v1/sessions", json={"wait_s": 1.0})).status_code == 201


async def test_streams_are_as_openai_has_them(tmp_path: Path) -> None:
    async with serving(tmp_path, serve__episodes=True) as served:
        session = await served.play()
        told = await ask(served, session, stream=True, stream_options={"include_usage": True})
        *events, done = told.text.strip().split("\n\n")
        pieces = [json.loads(event.removeprefix("data: ")) for event in events]
        assert done == "data: [DONE]" and told.headers["content-type"].startswith("text/event-stream")
        assert {piece["object"] for piece in pieces} == {"chat.completion.chunk"} and len({piece["id"] for piece in pieces}) == 1
        assert [piece["choices"][0]["delta"] for piece in pieces[:2]] == [{"role": "assistant", "content": "hello"}, {}]
        assert pieces[1]["choices"][0]["finish_reason"] == "stop" and pieces[2]["usage"]["completion_tokens"] == 3


def test_bytes_of_a_part_of_a_character_are_not_made_up() -> None:
    texts = {1: "h", 2: "\N{REPLACEMENT CHARACTER}"}
    session: Any = SimpleNamespace(ask=SimpleNamespace(decode=lambda ids: texts[ids[0]]))
    found = _logprobs(session, Reply((1, 2), "", FinishReason.STOP, (-0.5, -0.5), (VersionSpan(V0, V0, 2),)))
    assert [each.bytes for each in found] == [[104], None]


async def test_texts_and_token_ids_go_on_too(tmp_path: Path) -> None:
    async with serving(tmp_path, serve__episodes=True) as served:
        session = await served.play()
        told = (
            await served.http.post(
                "/v1/completions", json={"model": "policy", "prompt": "?", "n": 2, "logprobs": 0}, headers=session
            )
        ).json()
        assert [choice["text"] for choice in told["choices"]] == ["hello"] * 2 and told["rollyard"]["turn"] == 2
        assert told["choices"][0]["logprobs"]["text_offset"] == [0, 2, 5]
        more = {"model": f"policy:{session['X-Rollyard-Session']}", "prompt": "?hello="}
        assert (await served.http.post("/v1/completions", json=more)).json()["rollyard"]["prompt_token_ids"] == [4, 1, 2, 7, 5]
        ids = {"model": "policy", "prompt": [6, 6], "max_tokens": 3, "stop": "?"}
        await served.http.post("/v1/completions", json=ids, headers=session)
        asked = served.run.policy.asked[-1]
        assert (asked.prompt_ids, asked.max_tokens, asked.stop) == ((6, 6), 3, ("?",))


WRONG: list[dict[str, Any]] = [
    {"temperature": 0.5},
    {"top_p": 0.9},
    {"presence_penalty": 1.0},
    {"max_tokens": 10},
    {"max_tokens": 3, "max_completion_tokens": 4},
    {"seed": 3},
    {"top_logprobs": 3},
    {"model": "gpt-4o"},
    {"messages": []},
    {"messages": [{"role": "user", "content": None}]},
    {"stop": "<eos>"},
    {"stop": [""]},
    {"n": 0},
    {"stream_options": {"include_usage": True}},
    {"model": "policy:other"},
]


async def test_what_cannot_be_trained_on_is_refused_in_one_error(tmp_path: Path) -> None:
    async with serving(tmp_path, serve__episodes=True) as served:
        session = await served.play()
        for wrong in WRONG:
            told = await ask(served, session, **wrong)
            assert told.status_code in (400, 404) and told.json()["error"]["message"], (wrong, told.text)
        assert not served.run.policy.asked
        assert (await ask(served, session, temperature=1.0, top_p=1, presence_penalty=0.0, user="me")).status_code == 200


async def test_limits_of_an_episode_are_errors_that_harnesses_know(tmp_path: Path) -> None:
    async with serving(tmp_path, serve__episodes=True) as served:
        session = await served.play()
        served.run.policy.says = [()]
        assert (await ask(served, session)).json()["error"]["code"] == "context_length_exceeded"
    async with serving(tmp_path, serve__episodes=True) as served:
        assert (await ask(served, {})).json()["error"]["code"] == "session"
        assert (await ask(served, {"X-Rollyard-Session": "none"})).status_code == 404
    async with serving(tmp_path) as served:
        told = await served.http.post("/v1/sessions", json={})
        assert told.status_code == 409 and "--serve.episodes" in told.text
