"""What a client asks and how it reads the answers, without a line: generators that yield requests and are sent responses.

So the two clients of `client.py`, one that blocks and one that does not, are the same but for who carries it out.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeVar

import httpx
from pydantic import TypeAdapter

from rollyard.caller import Batch, Dropped
from rollyard.errors import ConfigError, RollyardError
from rollyard.prompts.given import GivenPrompt, check_given, given_all
from rollyard.rollouts import Submitted
from rollyard.texts import clean, not_json
from rollyard.types import Group, Reward, WeightVersion
from rollyard.verdict import reward_of

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")

GROUP, DROPPED, BATCH = TypeAdapter(Group), TypeAdapter(Dropped), TypeAdapter(Batch)
LEASE: Final = "X-Rollyard-Lease"
SESSION: Final = "X-Rollyard-Session"
ASK_S: Final = 20.0  # seconds that one request waits for something to happen; then it is made again
TRIES: Final = 5  # at a request that did not get through
AGAIN_S: Final = 0.5  # before the second try; twice as long before each further one
AGAIN: Final = (429, 503)
SHOWN: Final = 200  # characters of an answer that nobody knows
INVITED: Final = ("host", "port", "name", "limit_s")  # of an invitation
PLAYED: Final = ("session", "group", "text", "messages", "columns")  # of a member to play


class ServiceError(RollyardError):
    """The service did not do what it was asked. `status`: of HTTP, 0 where it was not reached."""

    def __init__(self, problem: str, status: int = 0, code: str = "") -> None:
        super().__init__(problem)
        self.status, self.code = status, code
        self.retryable = status in (0, *AGAIN)


@dataclass(frozen=True, slots=True)
class Ask:
    """A request. `pause_s`: to be waited before it."""

    method: str
    path: str
    body: object = None  # JSON
    file: str = ""  # or what this file has
    params: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    pause_s: float = 0.0


Calls = Generator[Ask, httpx.Response | httpx.TransportError, T]


def asked(ask: Ask, until: float = -math.inf) -> Calls[httpx.Response]:
    """The answer that is no refusal. A request that did not get through is made again.

    Args:
        until: seconds of the monotonic clock; so long one is made again that is refused as too early.

    Raises ServiceError, and ConfigError for what cannot be sent.
    """
    if why := not_json(ask.body):
        raise ConfigError(f"what is to be sent is no JSON: {why}", where=ask.path, remedy="give texts and finite numbers")
    tries, pause = 0, AGAIN_S
    while True:
        found = yield ask
        if isinstance(found, httpx.TransportError):
            tries += 1
            if tries == TRIES:
                raise ServiceError(f"the service cannot be reached: {type(found).__name__}: {found}") from found
            wait = pause
            pause *= 2
        elif found.is_success:
            return found
        elif found.status_code in AGAIN and time.monotonic() < until:
            wait = min(_seconds(found), max(until - time.monotonic(), 0.0))
        else:
            raise _refused(found)
        ask = Ask(ask.method, ask.path, ask.body, ask.file, ask.params, ask.headers, wait)


def submit(prompts: Sequence[Submitted], key: str, wait_s: float) -> Calls[tuple[int, ...]]:
    """Submitted once, however often it had to be said. Raises ConfigError for what is no prompt."""
    given = given_all(prompts)
    for number, each in enumerate(given):
        check_given(number, each)
    body = {"prompts": [_prompt(each) for each in given], "key": key or secrets.token_hex(16)}
    found = yield from asked(Ask("POST", "/v1/prompts", body), time.monotonic() + wait_s)
    return _read(found, lambda found: tuple(found.json()["ids"]))


def end_of_prompts() -> Calls[None]:
    yield from asked(Ask("POST", "/v1/prompts/end"))


def status() -> Calls[dict[str, Any]]:
    found = yield from asked(Ask("GET", "/v1/status"))
    return _read(found, lambda found: dict(found.json()))


def outcomes(after: int) -> Calls[tuple[list[tuple[int, Group | Dropped]], int]]:
    """The next ones after a cursor, each with its own, and where to go on; none when none came for a while."""
    found = yield from asked(Ask("GET", "/v1/groups", params={"after": after, "wait_s": ASK_S}))
    told = _read(found, lambda found: dict(found.json()))
    return _read(found, lambda _: ([(each["cursor"], _outcome(each)) for each in told["groups"]], told["cursor"]))


def claim(trainer: str, over: bool, wait_s: float) -> Calls[str]:
    """The lease. Raises ServiceError when another trainer has it all that time."""
    until, body = time.monotonic() + wait_s, {"trainer": trainer, "take_over": over}
    pause = 0.0
    while True:
        try:
            found = yield from asked(Ask("POST", "/v1/trainer", body, pause_s=pause))
            return _read(found, lambda found: str(found.json()["lease"]))
        except ServiceError as error:
            if error.code != "leased" or time.monotonic() >= until:
                raise
            pause = min(1.0, max(until - time.monotonic(), 0.0))


def batch(lease: str) -> Calls[Batch | None]:
    """The batch to train on; None when no more come."""
    while True:
        try:
            found = yield from asked(Ask("GET", "/v1/batch", params={"wait_s": ASK_S}, headers={LEASE: lease}))
        except ServiceError as error:
            if error.code == "over":
                return None
            raise
        if found.status_code == httpx.codes.OK:
            return _read(found, lambda found: BATCH.validate_json(found.content))


def leave(lease: str) -> Calls[None]:
    yield from asked(Ask("DELETE", "/v1/trainer", headers={LEASE: lease}))


def renew(lease: str) -> Calls[None]:
    yield from asked(Ask("POST", "/v1/trainer/renew", headers={LEASE: lease}))


def upload(lease: str, step: int, file: str) -> Calls[WeightVersion]:
    found = yield from asked(Ask("PUT", f"/v1/weights/{step}", file=file, headers={LEASE: lease}))
    return _version(found)


def publish_file(lease: str, step: int, path: str, stats: Mapping[str, float]) -> Calls[WeightVersion]:
    body = {"path": path, "stats": dict(stats)}
    found = yield from asked(Ask("POST", f"/v1/weights/{step}/file", body, headers={LEASE: lease}))
    return _version(found)


def publish_group(
    lease: str, step: int, tensors: Mapping[str, Tensor], stats: Mapping[str, float], send: Callable[[Any], None]
) -> Calls[WeightVersion]:
    """`send` sends them to where it is invited."""
    told = [{"name": name, "shape": list(each.shape), "dtype": str(each.dtype)} for name, each in tensors.items()]
    path, headers = f"/v1/weights/{step}/group", {LEASE: lease}
    found = yield from asked(Ask("POST", path, {"tensors": told, "stats": dict(stats)}, headers=headers))
    invited = _read(found, lambda found: {name: found.json()[name] for name in INVITED})
    send(invited)
    found = yield from asked(Ask("POST", f"{path}/{invited['name']}", headers=headers))
    return _version(found)


def open_session(group: int | None, wait_s: float) -> Calls[dict[str, Any]]:
    """A member to play."""
    body = {"group": group, "key": secrets.token_hex(16), "wait_s": min(wait_s, ASK_S)}
    found = yield from asked(Ask("POST", "/v1/sessions", body), time.monotonic() + wait_s)
    return _read(found, lambda found: {name: found.json()[name] for name in PLAYED})


def judge(session: str, value: float | None, parts: Mapping[str, float]) -> Calls[None]:
    """Raises ConfigError for what is no finite number of float32."""
    verdict = reward_of(Reward(value, parts), "the harness", "")
    if verdict.problem:
        raise ConfigError(verdict.problem, where="judge", remedy="give numbers; fail() is for what cannot be judged")
    yield from asked(Ask("POST", f"/v1/sessions/{session}/reward", {"value": verdict.value, "parts": dict(verdict.parts)}))


def fail(session: str, problem: str) -> Calls[None]:
    yield from asked(Ask("POST", f"/v1/sessions/{session}/failure", {"problem": clean(problem)}))


def _prompt(given: GivenPrompt) -> dict[str, object]:
    found: dict[str, object] = {"columns": dict(given.columns)}
    if given.token_ids is not None:
        return found | {"token_ids": list(given.token_ids)}
    said = {"text": given.text} if given.messages is None else {"messages": [dict(message) for message in given.messages]}
    return found | said


def _outcome(told: Mapping[str, Any]) -> Group | Dropped:
    return GROUP.validate_python(told["group"]) if "group" in told else DROPPED.validate_python(told["dropped"])


def _version(found: httpx.Response) -> WeightVersion:
    told = _read(found, lambda found: dict(found.json()))
    return _read(found, lambda _: WeightVersion(told["step"], told["incarnation"]))


def _read(found: httpx.Response, read: Callable[[httpx.Response], T]) -> T:
    """What it says. Raises ServiceError for an answer that somebody else has given."""
    try:
        return read(found)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        problem = f"what answers there is no service of this version of Rollyard: {found.text[:SHOWN]!r}"
        raise ServiceError(problem, found.status_code) from error


def _refused(found: httpx.Response) -> ServiceError:
    try:
        error = found.json()["error"]
        return ServiceError(str(error["message"]), found.status_code, str(error["code"]))
    except (ValueError, KeyError, TypeError):
        return ServiceError(f"{found.status_code} {found.reason_phrase}: {found.text[:SHOWN]!r}", found.status_code)


def _seconds(found: httpx.Response) -> float:
    after = found.headers.get("retry-after", "1")
    return float(after) if after.isdecimal() else 1.0
