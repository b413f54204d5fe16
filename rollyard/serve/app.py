"""The application: all routes, behind the guard."""

from __future__ import annotations

import re
from importlib import metadata
from typing import Any

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from rollyard.errors import ConfigError, RollyardError
from rollyard.serve.asked import LEASE
from rollyard.serve.desk import unsuited
from rollyard.serve.guard import Guard, own_names
from rollyard.serve.refusals import Refused
from rollyard.serve.routes import health, openai, prompts, sessions, training
from rollyard.serve.service import Service
from rollyard.serve.settings import MIB

JSON = re.compile(r"application/([a-z.-]+\+)?json\b", re.IGNORECASE)
AS_JSON = "send JSON, with the header `Content-Type: application/json`"
SEND_S = 60.0  # seconds that a client may leave what it is sent unread


def application(service: Service, token: str) -> Guard:
    """The ASGI application of a service.

    Args:
        token: that clients must give; empty: none.
    """
    app = FastAPI(
        title="Rollyard",
        summary="Rollouts for reinforcement learning on language models.",
        version=metadata.version("rollyard"),
        docs_url=None,  # their pages fetch scripts from elsewhere
        redoc_url=None,
        dependencies=[Depends(_known)],
    )
    app.state.service = service
    for each in (prompts, training, sessions, openai, health):
        app.include_router(each.router)
    app.add_exception_handler(Refused, _refused)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _of_http)
    app.add_exception_handler(RollyardError, _failed)
    if token:
        _tell_of_token(app)
    app.openapi()  # made once, and not while a request waits: the run does, too
    serve = service.config.serve
    return Guard(app, token, own_names(serve.host, serve.names), serve.body_mib * MIB, serve.body_s, SEND_S)


def _known(request: Request) -> None:
    """Raises Refused for a parameter that the path has not, which would be ignored otherwise."""
    route = request.scope["route"]
    assert isinstance(route, APIRoute)
    told = request.app.openapi()["paths"][route.path][request.method.lower()].get("parameters", ())
    named = {parameter["name"] for parameter in told if parameter["in"] == "query"}
    if unknown := [name for name in request.query_params if name not in named]:
        raise Refused(400, f"there is no parameter {unknown[0]!r}", "invalid", unknown[0])


def _answer(refused: Refused) -> JSONResponse:
    return JSONResponse(refused.content, refused.status, refused.headers)


async def _refused(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, Refused)
    return _answer(error)


async def _invalid(request: Request, error: Exception) -> JSONResponse:
    """What is wrong: of several kinds that it could have been, of that which it comes nearest to."""
    assert isinstance(error, RequestValidationError)
    first = max(error.errors(), key=lambda found: len(found["loc"]))
    place = ".".join(str(part) for part in first["loc"][1:])
    sent = request.headers.get("content-type", "")
    if first["loc"] == ("body",) and first["type"] != "missing" and not JSON.match(sent):
        return _answer(Refused(400, f"the body is sent as {sent or 'nothing'}", "invalid", "content-type", AS_JSON))
    if first["type"] == "missing" and place.lower() == LEASE.lower():
        return _answer(Refused(400, f"{place} is missing", "invalid", place, "POST /v1/trainer gives the lease"))
    return _answer(Refused(400, f"{place or 'the body'}: {first['msg']}", "invalid", place))


async def _of_http(request: Request, error: Exception) -> JSONResponse:
    """No such path, no such method, a body that is no JSON."""
    assert isinstance(error, HTTPException)
    refused = Refused(error.status_code, str(error.detail), "http")
    return JSONResponse(refused.content, refused.status, error.headers)


async def _failed(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RollyardError)
    if isinstance(error, ConfigError):
        return _answer(unsuited(error))
    return _answer(Refused(503, str(error), "failed"))


def _tell_of_token(app: FastAPI) -> None:
    """The document says that a token is needed, and where not."""
    make = app.openapi

    def document() -> dict[str, Any]:
        found = make()
        found.setdefault("components", {})["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        found["security"] = [{"token": []}]
        found["paths"]["/healthz"]["get"]["security"] = []
        return found

    app.openapi = document  # type: ignore[method-assign]
