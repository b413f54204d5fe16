"""What routes have in common: the service behind them, and what their documents say of refusals."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Header, Query, Request

from rollyard.serve.records import LARGEST_ID, Problem
from rollyard.serve.refusals import Refused
from rollyard.serve.service import Service
from rollyard.serve.sessions import Sessions

T = TypeVar("T")

TOLD = {
    400: "what is asked makes no sense",
    401: "the token is missing, or another one",
    403: "not from here, or not of this",
    404: "there is no such thing",
    408: "the body took too long",
    409: "not now: something else is wanted, or going on",
    410: "it is over",
    413: "the body is too long",
    421: "the service is not called so",
    422: "what was sent does not suit the run; nothing has changed",
    429: "come back after the seconds in Retry-After",
    503: "the service is being stopped, or the run has failed",
    507: "the disk has no room for what was sent",
}
ALWAYS = (400, 401, 403, 408, 413, 421, 422, 503)  # whatever is asked


def refusals(*more: int) -> dict[int | str, dict[str, Any]]:
    """What may be answered besides what was asked for."""
    return {status: {"model": Problem, "description": TOLD[status]} for status in sorted({*ALWAYS, *more})}


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


def _sessions(service: Annotated[Service, Depends(_service)]) -> Sessions:
    """Raises Refused where no harnesses play."""
    if service.sessions is None:
        problem, remedy = "no harnesses play here: prompts are answered once", "serve with --serve.episodes"
        raise Refused(409, problem, "no_episodes", remedy=remedy)
    return service.sessions


Served = Annotated[Service, Depends(_service)]
Played = Annotated[Sessions, Depends(_sessions)]
LEASE = "X-Rollyard-Lease"
Leased = Annotated[str, Header(alias=LEASE, min_length=1, max_length=100, description="of the trainer")]
Waits = Annotated[
    float, Query(alias="wait_s", ge=0, le=3600, allow_inf_nan=False, description="seconds to wait, at most serve.wait_s")
]
After = Annotated[int, Query(ge=0, le=LARGEST_ID, description="cursor to go on after; 0: from the beginning")]


def bounded(service: Service, wait_s: float) -> float:
    """What was asked for, at most what the service allows: who is not answered by then asks again."""
    return min(wait_s, service.config.serve.wait_s)


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """What comes of it. It is given up, and Refused raised, when the client hangs up meanwhile."""
    waiting, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait((waiting, gone), return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            raise Refused(408, "the client has hung up", "gone")
        return await waiting
    finally:
        waiting.cancel()
        gone.cancel()


async def _gone(request: Request) -> None:
    """Until the client has hung up."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
