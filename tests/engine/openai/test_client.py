"""Tries, waits, limits and routing, on a virtual clock."""

from __future__ import annotations

import asyncio
from collections import Counter
from datetime import UTC, datetime
from random import Random
from typing import Any

import httpx
import pytest

from rollyard.engine.openai.failure import ServerError, Voice, retry_after
from rollyard.engine.openai.limits import Limits
from rollyard.errors import ConfigError, EngineError
from rollyard.types import Sampling
from tests.engine.openai.virtual import A, B, Network, bad, client, good, now, script, virtually

FOUR = Sampling(4)
SECRET = "sk-very-secret-0123456789"


async def failure(network: Network, **limits: Any) -> tuple[ServerError, float]:
    """The error of one completion, and when it came."""
    async with client(network, **limits) as asking:
        with pytest.raises(ServerError) as caught:
            await asking.complete("a", FOUR)
    return caught.value, now()


# -------------------------------------------------------------------------------------------------------- tries


def test_a_call_is_tried_until_it_is_answered_with_full_jitter_between() -> None:
    async def work() -> None:
        network = script(bad(500), bad(503), httpx.ConnectError("refused"), good("4"))
        async with client(network, seed=7, backoff_s=0.5) as asking:
            assert (await asking.complete("2+2=", FOUR)).text == "4"
        dice = Random(7)
        waits = [dice.uniform(0, 0.5), dice.uniform(0, 1.0), dice.uniform(0, 2.0)]
        assert network.times == pytest.approx([0.0, waits[0], sum(waits[:2]), sum(waits)])

    virtually(work())


def test_the_wait_before_a_try_has_an_upper_bound() -> None:
    async def work() -> None:
        network = script(bad(500))
        _, end = await failure(network, tries=40, backoff_s=1.0, backoff_most_s=3.0, total_s=1e6)
        assert len(network.asked) == 40
        gaps = [after - before for before, after in zip(network.times, network.times[1:], strict=False)]
        assert 2.5 < max(gaps) <= 3.0
        assert end == network.times[-1], "no wait after the last try"

    virtually(work())


@pytest.mark.parametrize("status", [408, 409, 429, 500, 502, 503, 504, 529])
def test_these_are_tried_again_but_not_for_ever(status: int) -> None:
    async def work() -> None:
        network = script(bad(status, "busy"))
        error, _ = await failure(network, tries=3)
        assert len(network.asked) == 3
        assert str(error) == f"server {A} answered {status}: busy (tried 3 times)"
        assert (error.server, error.status, error.message, error.retryable) == (A, status, "busy", True)

    virtually(work())


@pytest.mark.parametrize("status", [300, 400, 401, 403, 404, 413, 422])
def test_these_are_never_tried_again(status: int) -> None:
    async def work() -> None:
        network = script(bad(status, "wrong", x_should_retry="true"))
        error, end = await failure(network)
        assert len(network.asked) == 1
        assert str(error) == f"server {A} answered {status}: wrong"
        assert isinstance(error, EngineError)
        assert not error.retryable
        assert end == 0

    virtually(work())


@pytest.mark.parametrize("answer", [bad(429, "pay", "insufficient_quota"), bad(500, "pay", x_should_retry="false")])
def test_what_waiting_does_not_help_is_not_tried_again(answer: httpx.Response) -> None:
    async def work() -> None:
        network = script(answer)
        await failure(network)
        assert len(network.asked) == 1

    virtually(work())


@pytest.mark.parametrize("status", [429, 503])
def test_the_time_that_a_server_names_is_kept(status: int) -> None:
    async def work() -> None:
        network = script(bad(status, retry_after="7"), bad(status, retry_after_ms="1500"), good())
        async with client(network) as asking:
            await asking.complete("a", FOUR)
        assert network.times == pytest.approx([0.0, 7.0, 8.5])

    virtually(work())


def test_a_date_to_come_back_at() -> None:
    today = datetime(2026, 5, 3, 10, 0, 0, tzinfo=UTC)
    for header, seconds in (
        ("Sun, 03 May 2026 10:01:30 GMT", 90.0),
        ("Sun, 03 May 2026 09:00:00 GMT", 0.0),
        ("Sunday, 03-May-26 10:00:05 GMT", 5.0),
        ("2.5", 2.5),
        ("soon", None),
        ("-3", None),
        ("nan", None),
        ("", None),
    ):
        assert retry_after({"retry-after": header}, today) == seconds, header
    assert retry_after({"retry-after-ms": "250", "retry-after": "9"}, today) == 0.25


def test_who_must_wait_longer_than_a_call_may_take_is_told_at_once() -> None:
    async def work() -> None:
        network = script(bad(429, "later", retry_after="3600"))
        error, end = await failure(network, total_s=60.0)
        assert (len(network.asked), end, error.status) == (1, 0.0, 429)

    virtually(work())


def test_others_wait_for_a_named_time_too() -> None:
    async def work() -> None:
        network = script(bad(429, retry_after="5"), good())
        async with client(network) as asking, asyncio.TaskGroup() as group:
            group.create_task(asking.complete("a", FOUR))
            await asyncio.sleep(1)
            group.create_task(asking.complete("b", FOUR))
        assert network.times == pytest.approx([0.0, 5.0, 5.0])

    virtually(work())


@pytest.mark.parametrize(
    "answer",
    [
        httpx.Response(200, html="<p>Welcome</p>"),
        httpx.Response(200, text="{}", headers={"content-type": ""}),
        httpx.Response(200, content=b"{nonsense", headers={"content-type": "application/json"}),
        httpx.Response(200, json={"choices": "none"}),
        httpx.Response(200, json=[1]),
        good(token_ids=[1, 2], logprobs={"token_logprobs": [-1.0]}),
        good(token_ids=["1"]),
    ],
)
def test_what_cannot_be_used_counts_as_a_failure(answer: httpx.Response) -> None:
    async def work() -> None:
        network = script(answer)
        error, _ = await failure(network, tries=2)
        assert len(network.asked) == 2
        assert error.status == 200
        assert "cannot be used" in str(error)

    virtually(work())


def test_a_call_is_bounded_in_time_whatever_happens() -> None:
    async def never(host: str, body: dict[str, Any]) -> httpx.Response:
        await asyncio.sleep(1e9)
        raise AssertionError

    async def work() -> None:
        error, end = await failure(Network(never), total_s=20.0)
        assert end == 20.0
        assert str(error) == f"server {A} gave no whole answer within 20 s"
        assert error.retryable

    virtually(work())


def test_time_in_the_queue_counts_and_a_place_is_given_back() -> None:
    async def slow(host: str, body: dict[str, Any]) -> httpx.Response:
        await asyncio.sleep(8)
        return good()

    async def work() -> None:
        network = Network(slow)
        async with client(network, per_server=1, total_s=10.0) as asking:
            ended = await asyncio.gather(*(asking.complete("a", FOUR) for _ in range(3)), return_exceptions=True)
            assert [type(one).__name__ for one in ended] == ["Piece", "ServerError", "ServerError"]
            assert (await asking.complete("a", FOUR)).text == "yes"
        assert network.times == [0.0, 8.0, 10.0]

    virtually(work())


# ------------------------------------------------------------------------------------------------- what is said


def test_an_event_that_cannot_be_read_is_no_error_in_the_servers_words() -> None:
    voice = Voice(A, SECRET)
    assert voice.event_error(b'{"error": "full"}') is not None
    for unreadable in (b'{"error": ', b'{"error": ' + b"[" * 99_999):
        assert voice.event_error(unreadable) is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"error": {"message": "too long", "type": "t", "code": 400}}', "too long"),
        (b'{"object": "error", "message": "flat", "type": "BadRequest", "code": 400}', "flat"),
        (b'{"error": "just text"}', "just text"),
        (b'{"detail": "of a framework"}', "of a framework"),
        (b"<h1>Bad\n\x1b[31mgateway</h1>", "<h1>Bad [31mgateway</h1>"),
        (b"", "nothing"),
        (b"x" * 5000, "x" * 500),
        (b"[" * 99_999, "[" * 500),
    ],
)
def test_the_servers_own_words_are_passed_on(content: bytes, message: str) -> None:
    async def work() -> None:
        error, _ = await failure(script(httpx.Response(400, content=content)))
        assert error.message == message

    virtually(work())


def test_a_bad_key_gives_one_clear_error_without_the_key() -> None:
    async def work() -> None:
        network = script(bad(401, f"Incorrect API key provided: {SECRET}", "invalid_api_key"))
        async with client(network, key=SECRET) as asking:
            with pytest.raises(ServerError) as caught:
                await asking.complete("a", FOUR)
        assert str(caught.value) == f"server {A} answered 401: Incorrect API key provided: ***"
        assert len(network.asked) == 1
        assert network.headers[0]["authorization"] == f"Bearer {SECRET}"
        assert caught.value.__cause__ is None
        assert SECRET not in repr(asking._exchange.servers.all)

    virtually(work())


@pytest.mark.parametrize("key", ["sk-1\n", "sk 1\x00", " sk", "schlüssel"])
def test_a_key_that_no_header_may_have_is_refused_unseen(key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        client(script(good()), key=key)
    assert "sk" not in str(caught.value) and "schl" not in str(caught.value)


@pytest.mark.parametrize("address", ["localhost:8000", "ftp://a/v1", "http://", "http://me:pw@a/v1", "http://a/v1?key=pw"])
def test_an_address_that_cannot_be_used_is_refused(address: str) -> None:
    with pytest.raises(ConfigError) as caught:
        client(script(good()), address)
    assert "pw" not in str(caught.value)


def test_a_server_named_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="named twice"):
        client(script(good()), A, A)


@pytest.mark.parametrize(
    "wrong", [{"tries": 0}, {"per_server": -1}, {"total_s": 0}, {"requests_per_s": -1}, {"burst_s": float("nan")}]
)
def test_limits_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Limits(**wrong)


# ------------------------------------------------------------------------------------------------------- limits


async def starts(calls: int, tokens: int, **limits: Any) -> list[float]:
    """When so many calls that come at once are made; each asks for `tokens`."""
    network = script(good())
    async with client(network, **limits) as asking:
        await asyncio.gather(*(asking.complete((5,) * (tokens - 4), FOUR) for _ in range(calls)))
    return network.times


def test_requests_a_second() -> None:
    assert virtually(starts(9, 10, requests_per_s=4, burst_s=0)) == pytest.approx([n / 4 for n in range(9)])
    # A second's allowance at once, one request that goes into debt, then the rate.
    with_burst = virtually(starts(9, 10, requests_per_s=4, burst_s=1))
    assert with_burst == pytest.approx([0, 0, 0, 0, 0, 0.25, 0.5, 0.75, 1.0])


def test_tokens_a_minute() -> None:
    # 600 a minute are 10 a second; each call asks for 30.
    assert virtually(starts(5, 30, tokens_per_minute=600, burst_s=0)) == pytest.approx([0, 3, 6, 9, 12])


def test_no_span_of_time_sees_more_than_the_rate_allows() -> None:
    times = virtually(starts(200, 10, requests_per_s=20, burst_s=2))
    for begin in times:
        for span in (0.5, 1.0, 5.0):
            assert sum(begin <= time < begin + span for time in times) <= 20 * (span + 2) + 1
    assert times[-1] == pytest.approx((200 - 1 - 40) / 20), "and the rate is used"


def test_unused_allowance_is_kept_up_to_its_bound() -> None:
    async def work() -> None:
        network = script(good())
        async with client(network, requests_per_s=2, burst_s=1) as asking:
            await asyncio.sleep(100)
            await asyncio.gather(*(asking.complete("a", FOUR) for _ in range(4)))
        assert network.times == pytest.approx([100, 100, 100, 100.5])

    virtually(work())


def test_every_try_counts_against_the_rate() -> None:
    async def work() -> None:
        network = script(bad(500))
        await failure(network, requests_per_s=0.1, burst_s=0, tries=3)
        assert network.times == pytest.approx([0, 10, 20])

    virtually(work())


def test_a_text_is_charged_what_it_turned_out_to_be() -> None:
    async def work() -> None:
        answer = {"choices": [{"text": "b"}], "usage": {"total_tokens": 65}}
        network = script(httpx.Response(200, json=answer))
        async with client(network, tokens_per_minute=60, burst_s=0) as asking:
            await asking.complete("a", FOUR)  # 5 asked: a third of a token for each character, rounded up
            await asking.complete("a", FOUR)
        assert network.times == pytest.approx([0, 65])

    virtually(work())


def test_requests_at_a_server_are_bounded_and_served_in_order() -> None:
    order: list[int] = []

    async def slow(host: str, body: dict[str, Any]) -> httpx.Response:
        order.append(body["prompt"][0])
        await asyncio.sleep(1)
        return good()

    async def work() -> None:
        network = Network(slow)
        async with client(network, per_server=3) as asking:
            await asyncio.gather(*(asking.complete((n,), FOUR) for n in range(10)))
            assert asking.slots == 3
        assert network.most_open == 3
        assert order == list(range(10))
        assert now() == 4

    virtually(work())


# ------------------------------------------------------------------------------------------------------ routing


def test_the_least_loaded_server_is_asked_by_tokens_not_by_requests() -> None:
    async def slow(host: str, body: dict[str, Any]) -> httpx.Response:
        await asyncio.sleep(100)
        return good()

    async def work() -> None:
        network = Network(slow)
        async with client(network, A, B) as asking, asyncio.TaskGroup() as group:
            for tokens in (1000, 100, 300, 500, 50, 200):
                group.create_task(asking.complete((1,) * (tokens - 4), FOUR))
                await asyncio.sleep(0.01)
        # a: 1000            b: 100 400 900 950; then a has 1000 and b 950
        assert [host for _, host in network.asked] == ["a", "b", "b", "b", "b", "b"]

    virtually(work())


def test_equal_servers_take_turns() -> None:
    async def work() -> None:
        network = script(good())
        async with client(network, A, B) as asking:
            for _ in range(6):
                await asking.complete("a", FOUR)
        assert Counter(host for _, host in network.asked) == {"a": 3, "b": 3}

    virtually(work())


def test_a_dead_server_is_routed_around_and_taken_back_when_it_lives() -> None:
    alive = False

    async def serve(host: str, body: dict[str, Any]) -> httpx.Response:
        if host == "a" and not alive:
            await asyncio.sleep(0.01)
            raise httpx.ConnectError("refused")
        await asyncio.sleep(0.1)
        return good(host)

    async def work() -> None:
        nonlocal alive
        network = Network(serve)
        async with client(network, A, B, per_server=4, aside_s=2.0, aside_most_s=60.0) as asking:
            answers = await asyncio.gather(*(asking.complete("a", FOUR) for _ in range(1000)))
            assert {answer.text for answer in answers} == {"b"}
            took = now()
            # All places there fail, once; from then on there is one trial after 2, 4, 8, 16 s.
            early = [time for time, host in network.asked if host == "a"]
            assert 25 < took < 27, "the other one was never idle"
            assert len([time for time in early if time == 0]) == 4
            assert len([time for time in early if time > 0]) <= 4
            alive = True
            await asyncio.sleep(60)
            answers = await asyncio.gather(*(asking.complete("a", FOUR) for _ in range(100)))
            assert Counter(answer.text for answer in answers)["a"] > 40

    virtually(work())


def test_when_all_are_dead_each_call_fails_after_its_tries() -> None:
    async def work() -> None:
        network = script(httpx.ConnectError("refused"))
        async with client(network, A, B, tries=3) as asking:
            ended = await asyncio.gather(*(asking.complete("a", FOUR) for _ in range(50)), return_exceptions=True)
        assert all(isinstance(one, ServerError) and "cannot be reached: refused (tried 3 times)" in str(one) for one in ended)
        assert len(network.asked) == 150

    virtually(work())


def test_a_busy_server_sends_its_requests_to_the_other() -> None:
    async def serve(host: str, body: dict[str, Any]) -> httpx.Response:
        return bad(429, retry_after="1000") if host == "a" else good(host)

    async def work() -> None:
        network = Network(serve)
        async with client(network, A, B) as asking:
            answers = [await asking.complete("a", FOUR) for _ in range(20)]
        assert {answer.text for answer in answers} == {"b"}
        assert [host for _, host in network.asked].count("a") == 1
        assert now() < 1

    virtually(work())


@pytest.mark.parametrize("seed", range(20))
def test_places_are_never_lost_nor_given_twice(seed: int) -> None:
    """Calls that end well, fail, hang and are cancelled, at random."""
    dice = Random(seed)

    async def serve(host: str, body: dict[str, Any]) -> httpx.Response:
        await asyncio.sleep(dice.choice([0.0, 0.1, 3.0]))
        return dice.choice([good(), good(), bad(500), bad(429, retry_after="1"), bad(400)])

    async def call(asking: Any) -> None:
        try:
            async with asyncio.timeout(dice.choice([0.0, 0.05, 2.0, 1e6])):
                await asyncio.sleep(dice.random() * 5)
                await asking.complete("a" * dice.randrange(1, 99), FOUR)
        except (TimeoutError, ServerError):
            pass

    async def work() -> None:
        network = Network(serve)
        async with client(network, A, B, per_server=3, total_s=30.0, tries=3) as asking:
            await asyncio.gather(*(call(asking) for _ in range(150)))
            assert network.most_open == 6
            assert [(server.in_flight, server.tokens) for server in asking._exchange.servers.all] == [(0, 0), (0, 0)]

    virtually(work())
