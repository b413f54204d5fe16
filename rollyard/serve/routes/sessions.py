"""Harnesses play members of groups: they open a session, ask by OpenAI's interface, and end it with a verdict."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Request

from rollyard.serve.asked import Played, Served, bounded, refusals, unless_gone
from rollyard.serve.records import Failure, Message, Ok, SessionClaim, SessionRecord, Verdict
from rollyard.serve.sessions import Ended, Session, failed
from rollyard.types import Reward

router = APIRouter(prefix="/v1/sessions", tags=["sessions"])
Id = Annotated[str, Path(alias="session", max_length=100)]


@router.post("", status_code=201, responses=refusals(409, 410, 429))
async def open_(service: Served, sessions: Played, claim: SessionClaim, request: Request) -> SessionRecord:
    """Open one: a member of a group, which is played by whoever has its session."""
    opening = sessions.open(claim.key or "", claim.group, bounded(service, claim.wait_s))
    return _record(await unless_gone(request, service.unless_draining(opening)))


@router.get("/{session}", responses=refusals(404, 409, 410))
async def look(sessions: Played, session: Id) -> SessionRecord:
    """How it stands."""
    return _record(sessions.of(session))


@router.post("/{session}/reward", responses=refusals(404, 409, 410))
async def reward(sessions: Played, session: Id, verdict: Verdict) -> Ok:
    """End it with a verdict, or (`value` null) have the configured rewards judge. The same may be said again."""
    judged = None if verdict.value is None else Reward(verdict.value, verdict.parts)
    sessions.end(session, Ended("judged", judged))
    return Ok()


@router.post("/{session}/failure", responses=refusals(404, 409, 410))
async def failure(sessions: Played, session: Id, told: Failure) -> Ok:
    """End it without a verdict, which is not 0."""
    sessions.end(session, failed(told.problem))
    return Ok()


def _record(session: Session) -> SessionRecord:
    prompt = session.prompt
    return SessionRecord(
        session=session.id,
        group=prompt.id,
        text=prompt.text,
        messages=[Message(role=each["role"], content=each["content"]) for each in prompt.messages],
        token_ids=list(prompt.token_ids),
        columns=dict(prompt.columns),
        turns=session.turns,
        matched=session.matched,
        rendered=session.rendered,
    )
