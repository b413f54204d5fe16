"""How the run stands, for people, programs and Prometheus."""

from __future__ import annotations

from dataclasses import asdict

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from rollyard.serve.asked import Served, refusals
from rollyard.serve.records import Health, SessionCounts, StatusRecord

router = APIRouter(tags=["status"])


@router.get("/healthz", response_model=Health, responses={503: {"model": Health, "description": "it does not serve"}})
async def health(service: Served) -> JSONResponse:
    """Whether the service serves. Asked without a token."""
    going = not (service.draining.is_set() or service.cause)
    state = "failed" if service.cause else "stopping" if service.draining.is_set() else service.rollouts.status().state
    return JSONResponse(Health(ok=going, state=state).model_dump(), 200 if going else 503)


@router.get("/v1/status", responses=refusals())
async def status(service: Served) -> StatusRecord:
    """How the run stands, and the service around it."""
    found = service.rollouts.status()
    return StatusRecord(
        state="failed" if service.cause else found.state,
        cause=service.cause or found.cause,
        version=found.version.step,
        incarnation=found.version.incarnation,
        steps=service.config.run.steps,
        batch=service.desk.step,
        trainer=service.desk.trainer,
        live=found.live,
        waiting=found.waiting,
        admitted=found.admitted,
        trained=found.trained,
        dropped={str(reason): count for reason, count in found.dropped.items()},
        tokens=found.tokens,
        engines=list(found.engines),
        cursor=service.cursor,
        sessions=None if service.sessions is None else SessionCounts(**asdict(service.sessions.counts)),
    )
