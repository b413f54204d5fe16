"""The addresses of the dashboard, see docs/dashboard.md. All are GET, and nothing that is asked changes anything.

Who asks is a browser of this machine: the name in the address has to be that of this machine (another name that leads here is
how a page from elsewhere would read what is answered), and what a run wrote is data, never a page.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from fastapi import Depends, FastAPI, Query, Request
from fastapi import Path as InPath
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, PlainTextResponse, Response
from fastapi.sse import EventSourceResponse, ServerSentEvent
from fastapi.staticfiles import StaticFiles
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, model_validator
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware

from rollyard.dashboard import told
from rollyard.dashboard.events import events
from rollyard.dashboard.secure import HOSTS, Secure
from rollyard.dashboard.shown import Shown
from rollyard.errors import ConfigError, JournalError
from rollyard.inspect.select import Wanted
from rollyard.types import DropReason, FinishReason
from rollyard.watch.prometheus import CONTENT_TYPE

STATIC: Final = Path(__file__).with_name("static")
MOST: Final = 2**63 - 1
ROWS: Final = 1000  # of a page at most
WIDTH: Final = 8192  # columns of a timeline at most
TEXT: Final = 1000  # characters to look for at most
PAGES: Final = 32  # that are told what goes on, at once

Natural = Annotated[int, Field(ge=0, le=MOST)]
Id = Annotated[int, InPath(ge=0, le=MOST)]
Reward = Annotated[float, Field(allow_inf_nan=False)]
Reason = DropReason | Literal["", "any"]
Finish = FinishReason | Literal[""]


class Asked(BaseModel):
    """What may be asked of an address; anything else is refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Page(Asked):
    """Some rows of a list."""

    offset: Natural = 0
    limit: Annotated[int, Field(ge=1, le=ROWS)] = 50
    order: Literal["asc", "desc"] = "asc"
    step: Annotated[int, Field(ge=1, le=MOST)] | None = None
    min_reward: Reward | None = None
    max_reward: Reward | None = None
    reason: Reason = ""
    search: Annotated[str, Field(max_length=TEXT)] = ""

    def wanted(self, sort: str, **more: Any) -> Wanted:
        """The same in the words of `inspect`."""
        return Wanted(
            sort=sort,
            down=self.order == "desc",
            dropped=str(self.reason),
            step=self.step,
            text=self.search,
            least=self.min_reward,
            most=self.max_reward,
            limit=self.limit,
            offset=self.offset,
            **more,
        )


class GroupPage(Page):
    sort: Literal["id", "reward", "tokens", "lag", "step", "admitted"] = "id"


class RolloutPage(Page):
    sort: Literal["id", "reward", "tokens", "lag", "step", "finished"] = "id"
    finish: Finish = ""
    group: Natural | None = None


class Stretch(Asked):
    """Of the timeline, in nanoseconds from the start of the run."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    start: Natural = Field(0, alias="from")
    to: Natural = MOST
    width: Annotated[int, Field(ge=1, le=WIDTH)] = 1000

    @model_validator(mode="after")
    def _forwards(self) -> Stretch:
        if self.start >= self.to:
            raise ValueError("`from` lies before `to`")
        return self


class After(Asked):
    """Steps beyond this one."""

    after: Natural = 0


class Since(Asked):
    """The last step that is known; the newest where nothing is said."""

    after: Natural | None = None


ADAPTERS: dict[Any, TypeAdapter[Any]] = {}


def answer(record: object, kind: Any = None) -> Response:
    """A record as JSON."""
    kind = kind or type(record)
    if kind not in ADAPTERS:
        ADAPTERS[kind] = TypeAdapter(kind)
    return Response(ADAPTERS[kind].dump_json(record, by_alias=True), media_type="application/json")


def problem(status: int, what: str, where: str, remedy: str) -> Response:
    """Why there is no answer."""
    response = answer(told.Problem(what, where, remedy))
    response.status_code = status
    return response


def make_app(shown: Shown) -> FastAPI:
    """All addresses of one run's dashboard. Whoever serves it sets `state.closing` before it waits for answers to end."""
    app = FastAPI(title="Rollyard dashboard", docs_url=None, redoc_url=None)
    app.state.closing = asyncio.Event()
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=list(HOSTS))
    app.add_middleware(Secure)
    _add_lists(app, shown)
    _add_numbers(app, shown)
    _add_live(app, shown)
    _add_problems(app)

    @app.get("/healthz")
    def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/metrics", response_class=PlainTextResponse)
    def metrics() -> Response:
        return Response(shown.metrics(), headers={"Content-Type": CONTENT_TYPE})

    @app.get("/", include_in_schema=False)
    def page() -> FileResponse:
        return FileResponse(STATIC / "index.html")

    app.mount("/static", StaticFiles(directory=STATIC, check_dir=False), name="static")
    return app


def _add_numbers(app: FastAPI, shown: Shown) -> None:
    @app.get("/api/overview", response_model=told.Overview)
    def overview() -> Response:
        return answer(shown.overview())

    @app.get("/api/steps", response_model=told.Steps)
    def steps(asked: Annotated[After, Query()]) -> Response:
        return answer(shown.steps(asked.after))

    @app.get("/api/timeline", response_model=told.Timeline)
    def timeline(asked: Annotated[Stretch, Query()]) -> Response:
        return answer(shown.timeline(asked.start, asked.to, asked.width))

    @app.get("/api/histograms", response_model=told.Histograms)
    def histograms() -> Response:
        return answer(shown.histograms())

    @app.get("/api/config", response_model=tuple[told.OptionShown, ...])
    def config() -> Response:
        return answer(shown.options(), tuple[told.OptionShown, ...])


def _add_live(app: FastAPI, shown: Shown) -> None:
    pages = 0

    async def room() -> AsyncIterator[None]:
        nonlocal pages
        if pages >= PAGES:
            raise HTTPException(503, f"{PAGES} pages are open already")
        pages += 1
        try:
            yield
        finally:
            pages -= 1

    @app.get("/api/live", response_class=EventSourceResponse, dependencies=[Depends(room)])
    async def live(asked: Annotated[Since, Query()]) -> AsyncIterator[ServerSentEvent]:
        async for event in events(shown, asked.after, app.state.closing):
            yield event


def _add_lists(app: FastAPI, shown: Shown) -> None:
    @app.get("/api/groups", response_model=told.GroupRows)
    def groups(asked: Annotated[GroupPage, Query()]) -> Response:
        return answer(shown.groups(asked.wanted(asked.sort)))

    @app.get("/api/groups/{group}", response_model=told.GroupShown)
    def group(group: Id) -> Response:
        return answer(shown.group(group))

    @app.get("/api/rollouts", response_model=told.RolloutRows)
    def rollouts(asked: Annotated[RolloutPage, Query()]) -> Response:
        return answer(shown.rollouts(asked.wanted(asked.sort, finish=str(asked.finish), group=asked.group)))

    @app.get("/api/rollouts/{group}/{member}", response_model=told.RolloutShown)
    def rollout(group: Id, member: Id) -> Response:
        return answer(shown.rollout(group, member))


def _add_problems(app: FastAPI) -> None:
    """One clear error, whatever is wrong."""

    @app.exception_handler(RequestValidationError)
    def unfit(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"][1:]) or request.url.path
        return problem(422, f"{first.get('input')!r:.200} does not fit", where, first["msg"].removeprefix("Value error, "))

    @app.exception_handler(ConfigError)
    def none(request: Request, error: ConfigError) -> Response:
        return problem(404, error.problem, error.where, error.remedy)

    @app.exception_handler(JournalError)
    @app.exception_handler(OSError)
    def unreadable(request: Request, error: Exception) -> Response:
        return problem(503, str(error), request.url.path, told.CHECK)

    @app.exception_handler(HTTPException)
    def other(request: Request, error: HTTPException) -> Response:
        return problem(error.status_code, str(error.detail), request.url.path, "docs/dashboard.md lists the addresses")
