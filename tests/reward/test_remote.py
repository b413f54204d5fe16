"""A judge behind an address: what is sent, what is tried again, and what comes of answers that are none."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable

import httpx
import pytest

from rollyard.combinations import check
from rollyard.config import Config, RemoteConfig
from rollyard.errors import ConfigError
from rollyard.reward import remote
from rollyard.reward.cache import Cache
from rollyard.reward.remote import Remote
from rollyard.types import Completion, FinishReason, Prompt, Reward

URL = "http://me:secret@judge.test:8000/score?token=secret"
PROMPT = Prompt(0, 0, (1,), "2+3=", {"answer": "5"})
Answer = httpx.Response | Exception


def done(text: str = "5") -> Completion:
    return Completion(0, 0, (1,), (-1.0,), (), FinishReason.STOP, text)


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.setattr(remote, "WAIT_S", 0.001)


class Server:
    """Gives these answers in turn, the last one for ever."""

    def __init__(self, *answers: Answer, delay_s: float = 0.0) -> None:
        self.answers, self.delay_s = list(answers), delay_s
        self.asked: list[httpx.Request] = []
        self.running = self.most = 0

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(self.delay_s)
        finally:
            self.running -= 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return httpx.Response(answer.status_code, content=answer.content, headers=answer.headers)


def says(reward: object, **more: object) -> httpx.Response:
    return httpx.Response(200, content=json.dumps({"reward": reward, **more}))


async def scored(server: Server, *texts: str, key: str = "", url: str = URL, **changes: object) -> list[Reward]:
    judge = Remote(RemoteConfig(url=url, **changes), key, httpx.MockTransport(server))
    try:
        return await asyncio.gather(*(judge.score(PROMPT, done(text)) for text in texts or ("5",)))
    finally:
        await judge.close()


async def test_what_is_sent_and_what_comes_back():
    server = Server(says(0.5, more="ignored"))
    assert await scored(server, key="k", url="http://judge.test/score") == [Reward(0.5)]
    (request,) = server.asked
    assert json.loads(request.content) == {"prompt": "2+3=", "completion": "5", "columns": {"answer": "5"}}
    assert request.method == "POST" and request.headers["Authorization"] == "Bearer k"
    await scored(server, key="k")  # what the address says goes first
    assert server.asked[-1].headers["Authorization"].startswith("Basic")


BUSY = httpx.Response(429, headers={"Retry-After": "0"})


@pytest.mark.parametrize("fails", [BUSY, httpx.Response(503), httpx.ConnectError("refused"), httpx.ReadError("cut")])
async def test_what_may_pass_is_tried_again_so_often(fails):
    server = Server(fails, fails, says(1))
    assert await scored(server, retries=2) == [Reward(1.0)]
    server = Server(fails)
    (reward,) = await scored(server, retries=2)
    assert reward.value is None and len(server.asked) == 3 and "(tried 3 times)" in reward.problem
    assert str(getattr(fails, "status_code", "was not reached")) in reward.problem and "secret" not in reward.problem


NONE = [
    (says(None, problem="a tie"), "gave no verdict: a tie"),
    (says("1.0"), "returned '1.0'"),
    (says(True), ""),
    (says([1.0]), "no finite float32 number"),
    (httpx.Response(200, content="<html>"), "what is no JSON: '<html>'"),
    (httpx.Response(200, content="[" * 10**5), "what is no JSON: '[[["),
    (httpx.Response(200, content="[1]"), 'without a "reward"'),
    (httpx.Response(200, content='{"reward": NaN}'), "nan, which is no finite"),
    (httpx.Response(200, content='{"reward": 1e99}'), "no finite"),
    (httpx.Response(200, content=b" " * (remote.LONGEST + 1)), "more than 1048576 bytes"),
    (httpx.Response(404, content="no such page"), "answered 404: 'no such page'"),
    (httpx.Response(301, headers={"Location": "http://elsewhere/"}), "answered 301"),
]


@pytest.mark.parametrize(("answer", "told"), NONE, ids=range(len(NONE)))
async def test_what_is_no_answer_is_no_verdict_and_asked_once(answer, told):
    server = Server(answer)
    (reward,) = await scored(server)
    assert len(server.asked) == 1
    if told:
        assert reward.value is None and told in reward.problem and "secret" not in reward.problem
    else:
        assert reward == Reward(1.0)


async def test_all_tries_together_have_a_time_limit():
    server = Server(says(1.0), delay_s=60)
    (reward,) = await scored(server, limit_s=0.05)
    assert reward.problem == "http://judge.test:8000/score gave no verdict within 0.05 s"
    server = Server(httpx.Response(429, content="busy", headers={"Retry-After": "60"}))
    (reward,) = await scored(server, limit_s=0.05)
    assert "the last try: answered 429: 'busy'" in reward.problem


async def test_no_more_at_a_time_than_asked_for_and_each_question_once():
    server = Server(says(1.0), delay_s=0.01)
    assert await scored(server, *"abcdefgh", concurrency=3) == [Reward(1.0)] * 8
    assert server.most == 3
    server = Server(says(1.0), delay_s=0.01)
    assert await scored(server, *"aabba") == [Reward(1.0)] * 5 and len(server.asked) == 2
    server = Server(says(1.0))
    await scored(server, *"aabba", cache=0)
    assert len(server.asked) == 5


async def test_a_column_that_is_no_json():
    judge = Remote(RemoteConfig(url=URL), "", httpx.MockTransport(Server(says(1))))
    reward = await judge.score(Prompt(0, 0, (1,), "p", {"when": {1}}), done())
    assert reward.value is None and "set is not JSON serializable" in reward.problem
    await judge.close()


# ------------------------------------------------------------------------------------------------------- the cache


def asking(answers: dict[str, float | Exception]) -> tuple[list[str], Callable[[str], Callable[[], Awaitable[float]]]]:
    asked: list[str] = []

    def ask(question: str) -> Callable[[], Awaitable[float]]:
        async def answer() -> float:
            asked.append(question)
            await asyncio.sleep(0.001)
            found = answers[question]
            if isinstance(found, Exception):
                raise found
            return found

        return answer

    return asked, ask


async def test_a_cache_is_bounded_and_keeps_what_was_used_last():
    asked, ask = asking({"a": 1.0, "b": 2.0, "c": 3.0})
    cache = Cache(2)
    for question in "abacabc":
        await cache.verdict(question, ask(question))
    assert asked == ["a", "b", "c", "b", "c"]
    await cache.close()


async def test_a_failure_is_not_kept_and_reaches_all_who_waited():
    asked, ask = asking({"a": KeyError("x")})
    cache = Cache(9)
    found = await asyncio.gather(*(cache.verdict("a", ask("a")) for _ in range(3)), return_exceptions=True)
    assert [type(one) for one in found] == [KeyError] * 3 and asked == ["a"]
    with pytest.raises(KeyError):
        await cache.verdict("a", ask("a"))
    assert asked == ["a", "a"]


async def test_who_gives_up_waiting_takes_nothing_from_the_others():
    asked, ask = asking({"a": 1.0})
    cache = Cache(9)
    one, other = (asyncio.create_task(cache.verdict("a", ask("a"))) for _ in range(2))
    await asyncio.sleep(0)
    one.cancel()
    assert await other == 1.0 and asked == ["a"]
    await cache.close()


def test_options_of_an_address():
    for given, told in (({"url": "a/b"}, "is no address"), ({"retries": 1}, "there is none")):
        with pytest.raises(ConfigError) as raised:
            check(Config.model_validate({"prompts": {"task": "sort"}, "reward": {"remote": given}}))
        assert told in str(raised.value)
