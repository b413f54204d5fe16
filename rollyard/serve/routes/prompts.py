"""Prompts come, and finished groups go."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query
from fastapi.responses import Response, StreamingResponse
from pydantic import TypeAdapter

from rollyard.errors import ConfigError
from rollyard.serve import records
from rollyard.serve.asked import After, Served, Waits, bounded, refusals
from rollyard.serve.desk import unsuited
from rollyard.serve.records import LARGEST_ID, Accepted, DroppedPrompt, FinishedGroup, Groups, Ok, Submission
from rollyard.serve.service import Record

router = APIRouter(prefix="/v1", tags=["rollouts"])
LINE: TypeAdapter[FinishedGroup | DroppedPrompt] = TypeAdapter(FinishedGroup | DroppedPrompt)
NDJSON, EVENTS = "application/x-ndjson", "text/event-stream"


@router.post("/prompts", status_code=202, responses=refusals(409, 429))
async def submit(service: Served, submission: Submission) -> Accepted:
    """Submit prompts: all of them, or none. What was accepted is sure to be asked, also after the service was killed.

    With a `key`, the same may be sent again and again; it is submitted once.
    """
    wait_s = bounded(service, submission.wait_s)
    prompts = await asyncio.to_thread(records.given, submission.prompts)
    found = await service.unless_draining(service.submit(prompts, submission.key or "", wait_s))
    return Accepted(ids=list(found))


@router.post("/prompts/end", responses=refusals(409))
async def end(service: Served) -> Ok:
    """No more prompts come: the last batches are made of those that there are, and then the run ends."""
    service.check_open()
    try:
        service.rollouts.end_of_prompts()
    except ConfigError as error:
        raise unsuited(error) from error
    return Ok()


@router.get("/groups", response_model=Groups, responses=refusals())
async def groups(
    service: Served,
    after: After = 0,
    limit: Annotated[int, Query(ge=1, le=256, description="groups at most")] = 64,
    wait_s: Waits = 0.0,
) -> Response:
    """What became of prompts, after a cursor, in order: groups that were finished, and prompts that were dropped.

    Each comes at least once. What a later life of the run did anew comes again, with a later cursor; the last one counts.
    """
    found = await service.outcomes(after, limit, bounded(service, wait_s))
    rows = b",".join(map(_line, found))
    cursor = found[-1][0] if found else after
    return Response(b'{"groups":[' + rows + b'],"cursor":' + str(cursor).encode() + b"}", media_type="application/json")


STREAM: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "one a line, or (with `Accept: text/event-stream`) one an event, whose id is its cursor",
        "content": {
            NDJSON: {"schema": LINE.json_schema(ref_template="#/components/schemas/{model}")},
            EVENTS: {"schema": {"type": "string"}},
        },
    }
}


@router.get("/groups/stream", response_class=StreamingResponse, responses=STREAM | refusals())
async def stream(
    service: Served,
    after: After = 0,
    accept: Annotated[str, Header()] = NDJSON,
    last_event_id: Annotated[
        int | None, Header(ge=0, le=LARGEST_ID, description="as readers of events send it: instead of `after`")
    ] = None,
) -> StreamingResponse:
    """The same as they come, until the run is over or the service stopped.

    A reader that is slow gets them later, one that is gone goes on after its last cursor; neither keeps anybody else waiting.
    """
    service.check_open()
    begin = after if last_event_id is None else last_event_id
    events = EVENTS in accept
    return StreamingResponse(_pages(service.stream(begin), events), media_type=EVENTS if events else NDJSON)


async def _pages(found: AsyncIterator[list[Record]], events: bool) -> AsyncIterator[bytes]:
    """One by one: as long as a reader has not taken one, it is not given the next."""
    async for page in found:
        for record in page:
            line = _line(record)
            yield b"id: %d\nevent: outcome\ndata: %b\n\n" % (record[0], line) if events else line + b"\n"


def _line(record: Record) -> bytes:
    return b'{"cursor":' + json.dumps(record[0]).encode() + b"," + record[1] + b"}"
