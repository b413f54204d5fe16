"""A language model as judge, over real HTTP: what it is asked, how it is read, what comes of servers that fail."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

import rollyard
from rollyard.combinations import check as check_combinations
from rollyard.config import Config, JudgeConfig
from rollyard.errors import ConfigError, ScoringError
from rollyard.judges import build_judges
from rollyard.place.child import Children
from rollyard.place.inline import DeviceThread
from rollyard.reward.judge import Judge, check_parse, check_template, filled
from rollyard.reward.open import JUDGE, joined, open_functions
from rollyard.reward.reading import by_expression, compiled, only_number
from rollyard.types import Completion, FinishReason, Prompt
from tests.small import config
from tests.workers import FakeLauncher

TEMPLATE = "Q: {prompt} A: {completion} right: {answer}"


def pair(text: str, prompt: str = "2+3=", answer: str = "5") -> tuple[Prompt, Completion]:
    return Prompt(0, 0, (2,), prompt, {"answer": answer}), Completion(0, 0, (2,), (0.0,), (), FinishReason.STOP, text)


class Server:
    """Answers chats with what it is told, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[dict[str, object]] = []
        self.keys: list[str | None] = []
        self.answers: Callable[[str], str | int] = lambda text: "7"  # a status, or what the model writes
        self.finish = "stop"
        self.delay_s = 0.0
        self.url = ""
        self.running = self.most = 0

    async def chat(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.asked.append(body)
        self.keys.append(request.headers.get("Authorization"))
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(self.delay_s)
        self.running -= 1
        said = self.answers(body["messages"][-1]["content"])
        if isinstance(said, int):
            return web.json_response({"error": {"message": "told to fail"}}, status=said, headers={"Retry-After": "0"})
        choice = {"index": 0, "message": {"role": "assistant", "content": said}, "finish_reason": self.finish}
        return web.json_response({"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]})

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self.chat)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        try:
            yield
        finally:
            await runner.cleanup()


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    server = Server()
    async with server.serving():
        yield server


@asynccontextmanager
async def judging(server: Server, scratch: Path = Path(), **settings: object) -> AsyncIterator[Judge]:
    judge = {"url": (server.url,), "model": "m", "template": TEMPLATE, "scale": 0.5, "retries": 2, **settings}
    own = Config.model_validate({"prompts": {"task": "sort"}, "reward": {"judge": judge, "time_limit_s": 2}})
    children = Children(at_once=True)
    found = (await build_judges(own, DeviceThread(), None, children.launch, scratch)).scorers[JUDGE]
    assert isinstance(found, Judge)
    try:
        yield found
    finally:
        await found.close()
        await children.close()


# ------------------------------------------------------------------------------------------------ what is asked


async def test_it_is_asked_with_the_template_and_its_number_is_scaled(server, monkeypatch):
    monkeypatch.setenv("ROLLYARD_JUDGE_KEY", "secret")
    async with judging(server, max_tokens=9) as judge:
        assert (await judge.score(*pair("{five}"))).value == 3.5
    (asked,) = server.asked
    assert asked["messages"] == [{"role": "user", "content": "Q: 2+3= A: {five} right: 5"}]
    assert (asked["model"], asked["temperature"], asked["max_completion_tokens"]) == ("m", 0.0, 9)
    assert server.keys == ["Bearer secret"]


async def test_the_same_question_is_asked_once_also_at_the_same_time(server):
    server.delay_s = 0.05
    async with judging(server) as judge:
        rewards = await asyncio.gather(*(judge.score(*pair(text)) for text in ("a", "b", "a", "a")))
        rewards.append(await judge.score(*pair("b")))
        assert {reward.value for reward in rewards} == {3.5} and len(server.asked) == 2
        await judge.score(*pair("b", answer="6"))
    assert len(server.asked) == 3


async def test_who_gives_up_does_not_take_the_answer_from_others(server):
    server.delay_s = 0.1
    async with judging(server) as judge:
        first, second = (asyncio.create_task(judge.score(*pair("a"))) for _ in range(2))
        await asyncio.sleep(0.02)
        first.cancel()
        assert (await second).value == 3.5


async def test_no_more_are_under_way_than_there_may_be(server):
    server.delay_s = 0.01
    async with judging(server, concurrency=3) as judge:
        rewards = await asyncio.gather(*(judge.score(*pair(str(number))) for number in range(12)))
    assert {reward.value for reward in rewards} == {3.5} and server.most == 3


# ------------------------------------------------------------------------------------------------ what is not there


async def test_a_server_that_fails_is_asked_again_so_often(server):
    statuses = iter([500, 429])
    server.answers = lambda text: next(statuses, "8")
    async with judging(server) as judge:
        assert (await judge.score(*pair("a"))).value == 4
    assert len(server.asked) == 3
    server.answers = lambda text: 503
    async with judging(server) as judge:
        reward = await judge.score(*pair("b"))
    assert reward.value is None and "answered 503: told to fail (tried 3 times)" in reward.problem
    assert len(server.asked) == 6


async def test_a_refusal_is_not_repeated(server):
    server.answers = lambda text: 401
    async with judging(server) as judge:
        assert "answered 401" in (await judge.score(*pair("a"))).problem
    assert len(server.asked) == 1


async def test_what_takes_too_long_is_no_verdict(server):
    server.delay_s = 1.0
    async with judging(server, limit_s=0.2) as judge:
        reward = await judge.score(*pair("a"))
    assert reward.value is None and reward.problem


async def test_what_cannot_be_read_is_no_verdict_and_is_asked_again_later(server):
    server.answers = lambda text: "I would say 7 or 8."
    async with judging(server) as judge:
        reward = await judge.score(*pair("a"))
        assert reward.value is None
        assert reward.problem == "the judge's answer cannot be read by 'number': 'I would say 7 or 8.'"
        server.answers = lambda text: "1" + "0" * 39  # no float32
        assert "cannot be read" in (await judge.score(*pair("a"))).problem
        server.answers = lambda text: "7"
        assert (await judge.score(*pair("a"))).value == 3.5
        server.finish = "length"  # 1 of 10, perhaps
        assert "was cut after 64 tokens" in (await judge.score(*pair("b"))).problem


async def test_an_expression_that_never_ends_costs_its_own_verdict_and_holds_up_nobody(server, tmp_path):
    server.answers = lambda text: "1" * 64 + "x" if "A: slow" in text else "9 12"
    async with judging(server, tmp_path, parse=r"((?:\d+ ?)+)$", scale=1.0) as judge:
        reading = asyncio.create_task(judge.score(*pair("slow")))
        async with asyncio.timeout(20):
            while not reading.done():
                before = asyncio.get_running_loop().time()
                await asyncio.sleep(0.02)
                assert asyncio.get_running_loop().time() - before < 1
        assert (await reading).value is None and reading.result().problem.endswith("x' (no verdict within 2 s)")
        assert "(ValueError: could not convert" in (await judge.score(*pair("two"))).problem
        server.answers = lambda text: "so 7"
        assert (await judge.score(*pair("a"))).value == 7


async def test_processes_that_cannot_read_end_the_run_and_are_no_missing_verdicts(server, tmp_path):
    launcher = FakeLauncher(lambda name, content: asyncio.sleep(0), OSError("no room"))
    own = {"url": (server.url,), "model": "m", "parse": "(7)"}
    config_ = Config.model_validate({"prompts": {"task": "sort"}, "reward": {"judge": own}})
    judge = (await build_judges(config_, DeviceThread(), None, launcher.launch, tmp_path)).scorers[JUDGE]
    with pytest.raises(ScoringError, match="no room"):
        await judge.score(*pair("a"))
    await judge.close()


# ------------------------------------------------------------------------------------------------ pure parts


@pytest.mark.parametrize(
    ("parse", "text", "number"),
    [
        ("number", "8", 8),
        ("number", "Rating: 8.5.", 8.5),
        ("number", "8. Yes, 8!", 8),
        ("number", "-2", -2),
        ("number", "8/10", None),
        ("number", "none at all", None),
        ("number", "v2 or 1.2.3", None),
        ("number", "", None),
        (r"(?i)score: *([0-9.]+)", "Score: 3 ... no, score: 4", 4),
        (r"([0-9]+)/10", "8/10", 8),
        (r"verdict (\w+)", "verdict good", None),
        (r"(\d)?x", "x", None),
    ],
)
def test_reading(parse, text, number):
    check_parse(parse)
    if parse == "number":
        assert only_number(text) == number
    elif number is not None:
        assert by_expression("", text, parse) == number
    else:
        with pytest.raises(ValueError, match=r"matches nowhere|could not convert"):
            by_expression("", text, parse)


NONE = ["(", "(a{99999999999999})", "(" * 5000 + "a" + ")" * 5000]  # wrong, beyond Python's numbers, beyond its stack


@pytest.mark.parametrize("parse", [*NONE, "no group", "(a)(b)"])
def test_rules_that_cannot_be_used(parse):
    with pytest.raises(ConfigError, match=r"reward\.judge\.parse"):
        check_parse(parse)


@pytest.mark.parametrize("pattern", NONE)
def test_no_regular_expressions(pattern):
    with pytest.raises(ConfigError, match=r"reward\.pattern: .* is no regular expression") as raised:
        compiled(pattern, "reward.pattern")
    assert len(str(raised.value)) < 300


def test_the_template_shows_the_completion_and_what_the_prompts_have():
    check_template(JudgeConfig().template, set())
    check_template(TEMPLATE + " {{json}}", {"answer"})
    assert filled("{{{completion}}}", *pair("{x}")) == "{{x}}"
    for template in ("{prompt}", "{completion} {level}", "{completion:3}", "{completion!r}", "{completion} {", "{completion} {}"):
        with pytest.raises(ConfigError, match=r"reward\.judge\.template"):
            check_template(template, {"answer"})


@pytest.mark.parametrize(
    ("judge", "told"),
    [
        ({"url": ("http://a/v1",)}, "not the model"),
        ({"url": ("a/v1",), "model": "m"}, "is no address"),
        ({"model": "m"}, "there is none"),
        ({"url": ("http://a/v1",), "model": "m", "temperature": 1e-9}, "overflows"),
    ],
)
def test_combinations(judge, told):
    with pytest.raises(ConfigError) as raised:
        check_combinations(Config.model_validate({"prompts": {"task": "sort"}, "reward": {"judge": judge}}))
    assert told in str(raised.value)


async def test_beside_the_tasks_own_reward_and_before_a_run(tmp_path, server):
    changes = {"reward.judge.url": server.url, "reward.judge.model": "m", "reward.judge.template": TEMPLATE}
    own = config(tmp_path / "run", **changes, **{"reward.weights": "0"})
    functions = open_functions(own, None, Children().launch, tmp_path)  # a direct one: no process
    scorer = joined(own, functions, (await build_judges(own, DeviceThread(), None, Children().launch, tmp_path)).scorers)
    reward = await scorer.score(*pair("5"))
    assert reward.parts == {"exact_match": 1.0, "judge": pytest.approx(0.7)} and reward.value == pytest.approx(0.7)
    await scorer.close()
    with pytest.raises(ConfigError, match=r"\{level\} is nothing that the prompts have"):
        rollyard.Run(config(tmp_path / "other", **(changes | {"reward.judge.template": "{level} {completion}"})))
