"""How the run stands, for people, programs and Prometheus."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response

from rollyard.serve.asked import Served, refusals
from rollyard.serve.records import Health, SessionCounts, StatusRecord
from rollyard.serve.service import Service
from rollyard.watch.prometheus import CONTENT_TYPE, Figures, exposition

router = APIRouter(tags=["status"])


@router.get("/healthz", response_model=Health, responses={503: {"model": Health, "description": "it does not serve"}})
async def health(service: Served) -> JSONResponse:
    """Whether the service serves. Asked without a token."""
    going = not (service.draining.is_set() or service.cause)
    state = "failed" if service.cause else "stopping" if service.draining.is_set() else service.rollouts.status().state
    return JSONResponse(Health(ok=going, state=state).model_dump(), 200 if going else 503)


TEXT: dict[int | str, dict[str, Any]] = {
    200: {"description": "text of Prometheus", "content": {"text/plain": {"schema": {"type": "string"}}}}
}


@router.get("/metrics", response_class=Response, responses=TEXT | refusals())
async def metrics(service: Served) -> Response:
    """The run as Prometheus reads it, the newest step's metrics among it."""
    found = await asyncio.to_thread(_exposition, service)
    return Response(found, media_type=CONTENT_TYPE)


def _exposition(service: Service) -> bytes:
    found, config = service.rollouts.status(), service.config
    rows = service.metrics.rows()
    about = {"model": config.model.path, "placement": config.place.placement, "engine": config.engine.kind}
    return exposition(
        Figures(
            run=config.run.name,
            state="failed" if service.cause else found.state,
            about=about,
            step=found.version.step,
            planned=config.run.steps,
            version=found.version.step,
            tokens=found.tokens,
            admitted=found.admitted,
            trained=found.trained,
            dropped={str(reason): count for reason, count in found.dropped.items()},
            live_groups=found.live,
            metrics=rows[-1] if rows else {},
        )
    )


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
        tokens_per_s=found.tokens_per_s,
        engines=list(found.engines),
        model=service.model,
        cursor=service.cursor,
        sessions=None if service.sessions is None else SessionCounts(**asdict(service.sessions.counts)),
    )
