"""A judge behind an HTTP address: it is sent a completion, and answers with a number.

POST {"prompt": "2+3=", "completion": "5", "columns": {"answer": "5"}}
200  {"reward": 1.0}        or {"reward": null, "problem": "why there is none"}
"""

from __future__ import annotations

import asyncio
import json
import random
from typing import Final

import httpx

from rollyard.config import RemoteConfig
from rollyard.errors import ScoringError, TimeLimitExceeded
from rollyard.reward.cache import Cache
from rollyard.types import Completion, Prompt, Reward
from rollyard.verdict import number_of

CONNECT_S: Final = 10.0
RETRYABLE: Final = frozenset({408, 425, 429})  # and all from 500 on
OK: Final = 200
LONGEST: Final = 2**20  # bytes of an answer
SHOWN: Final = 200  # characters of an answer that a problem shows
WAIT_S, MOST_S = 0.25, 8.0  # before the second try, doubled for each further one, up to this


class Remote:
    """One address (protocols.Scorer). What cannot be judged in time, or is no answer, is no verdict: the problem says why.

    Args:
        config: the address, and how often and how long it is tried.
        key: sent as a bearer token; empty where none is asked for.
        transport: of httpx, another one in tests.
    """

    def __init__(self, config: RemoteConfig, key: str = "", transport: httpx.AsyncBaseTransport | None = None) -> None:
        self._config, self._key = config, key
        self._shown = str(httpx.URL(config.url).copy_with(userinfo=b"", query=None))  # what may be a secret is left out
        self._cache = Cache(config.cache)
        self._gate = asyncio.Semaphore(config.concurrency)
        self._http = httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=CONNECT_S),  # calls are bounded as a whole
            limits=httpx.Limits(max_connections=config.concurrency, max_keepalive_connections=config.concurrency),
            headers={"Authorization": f"Bearer {key}"} if key else {},
            transport=transport,
        )

    async def score(self, prompt: Prompt, completion: Completion) -> Reward:
        """Never raises: whatever goes wrong is a missing verdict."""
        try:
            columns = dict(prompt.columns)
            body = json.dumps({"prompt": prompt.text, "completion": completion.text, "columns": columns}, sort_keys=True)
        except (TypeError, ValueError, RecursionError) as error:
            return Reward(None, problem=f"a column cannot be sent: {error}")
        try:
            return Reward(await self._cache.verdict(body, lambda: self._asked(body)))
        except (ScoringError, TimeLimitExceeded) as error:
            return Reward(None, problem=str(error))

    async def close(self) -> None:
        await self._cache.close()
        await self._http.aclose()

    async def _asked(self, body: str) -> float:
        """The number. Raises ScoringError or TimeLimitExceeded."""
        url, limit, last = self._shown, self._config.limit_s, ""
        async with self._gate:
            try:
                async with asyncio.timeout(limit):
                    for tries in range(1, self._config.retries + 2):
                        try:
                            return _number(url, await self._post(body))
                        except _Again as again:
                            last = str(again)
                            if tries <= self._config.retries:
                                await asyncio.sleep(again.pause_s(tries))
            except TimeoutError:
                told = f" (the last try: {last})" if last else ""
                raise TimeLimitExceeded(f"{url} gave no verdict within {limit:g} s{told}") from None
        raise ScoringError(f"{url} {last} (tried {self._config.retries + 1} times)")

    async def _post(self, body: str) -> bytes:
        """The content of an answer. Raises _Again where another try may help, ScoringError where none will."""
        url, headers = self._shown, {"Content-Type": "application/json"}
        try:
            async with self._http.stream("POST", self._config.url, content=body.encode(), headers=headers) as answer:
                content = b""
                async for piece in answer.aiter_bytes():
                    content += piece
                    if len(content) > LONGEST:
                        raise ScoringError(f"{url} answered more than {LONGEST} bytes")
            if self._key:  # an address may repeat what it was sent
                content = content.replace(self._key.encode(), b"***")
        except httpx.TransportError as error:
            raise _Again(f"was not reached: {type(error).__name__}: {error}") from None
        except httpx.HTTPError as error:
            raise ScoringError(f"{url}: {type(error).__name__}: {error}") from None
        status = answer.status_code
        if status in RETRYABLE or status >= 500:
            raise _Again(f"answered {status}: {_shown(content)}", answer.headers.get("Retry-After", ""))
        if status != OK:
            raise ScoringError(f"{url} answered {status}: {_shown(content)}")
        return content


class _Again(Exception):
    """A try that failed, and another may not. `after`: seconds that the server asks to wait, as a text."""

    def __init__(self, problem: str, after: str = "") -> None:
        super().__init__(problem)
        self._after = after

    def pause_s(self, tries: int) -> float:
        """Before the next try, after so many: longer each time, and not the same for all who failed together."""
        try:
            asked = float(self._after)
        except ValueError:
            asked = 0.0  # nothing, or a date
        asked = asked if asked > 0 else 0.0
        own: float = min(WAIT_S * 2 ** (tries - 1), MOST_S)
        return max(asked, own * (0.5 + random.random() / 2))


def _number(url: str, content: bytes) -> float:
    """Raises ScoringError for what is no answer, or says that there is no verdict."""
    try:
        answer = json.loads(content)
    except (ValueError, RecursionError):
        raise ScoringError(f"{url} answered what is no JSON: {_shown(content)}") from None
    if not isinstance(answer, dict) or "reward" not in answer:
        raise ScoringError(f'{url} answered without a "reward": {_shown(content)}')
    if answer["reward"] is None:
        raise ScoringError(f"{url} gave no verdict: {answer.get('problem', '')}")
    number, problem = number_of(answer["reward"], url)
    if number is None:
        raise ScoringError(problem)
    return number


def _shown(content: bytes) -> str:
    text = content.decode(errors="replace")
    return repr(text if len(text) <= SHOWN else text[:SHOWN] + "...")
