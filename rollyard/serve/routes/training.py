"""A trainer elsewhere: its lease, its batches, and the weights that it publishes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Annotated, Any

from fastapi import APIRouter, Path, Request
from fastapi.responses import Response
from pydantic import TypeAdapter
from starlette.requests import ClientDisconnect

from rollyard.caller import Batch
from rollyard.errors import ConfigError
from rollyard.serve import records, weights
from rollyard.serve.asked import Leased, Served, Waits, bounded, refusals
from rollyard.serve.desk import Lease, Published, unsuited
from rollyard.serve.group import Offer
from rollyard.serve.refusals import Refused
from rollyard.serve.service import GROUP, Service
from rollyard.serve.settings import GIB
from rollyard.types import Sample, Sampling, TensorInfo

router = APIRouter(prefix="/v1", tags=["training"])
SAMPLE, SAMPLING = TypeAdapter(Sample), TypeAdapter(Sampling)
Step = Annotated[int, Path(ge=1, le=records.LARGEST_ID, description="version: one more than the batch's step")]
FILE = "application/octet-stream"


@router.post("/trainer", responses=refusals(409))
async def claim(service: Served, claimed: records.TrainerClaim) -> records.LeaseRecord:
    """Be the trainer: one has the lease, until it gives it back or is not heard for serve.lease_s."""
    service.check_open()
    return _told(service, service.desk.take(claimed.trainer, claimed.take_over))


@router.post("/trainer/renew", responses=refusals(409))
async def renew(service: Served, lease: Leased) -> records.LeaseRecord:
    """Still there: for a step that takes longer than the lease. Whatever else the trainer asks says so, too."""
    return _told(service, service.desk.renew(lease))


@router.delete("/trainer", responses=refusals(409))
async def leave(service: Served, lease: Leased) -> records.Ok:
    """Give the lease back."""
    service.desk.leave(lease)
    return records.Ok()


NONE: dict[int | str, dict[str, Any]] = {204: {"description": "none is ready yet: ask again"}}


@router.get("/batch", response_model=Batch, responses=NONE | refusals(409, 410))
async def batch(service: Served, lease: Leased, wait_s: Waits = 0.0) -> Response:
    """The batch that is to be trained on, as often as it is asked for, until weights were published for it."""
    found = await service.unless_draining(service.desk.next(lease, bounded(service, wait_s)))
    if found is None:
        return Response(status_code=204)
    return Response(await asyncio.to_thread(lambda: b"".join(json_of(found))), media_type="application/json")


def json_of(batch: Batch) -> Iterator[bytes]:
    """Piece by piece: making that of a whole batch at once would stop every thread until it is done."""
    yield b'{"step":%d,"groups":[' % batch.step
    yield from _listed(map(GROUP.dump_json, batch.groups))
    yield b'],"train":{"step":%d,"micro_batches":[' % batch.train.step
    for number, micro in enumerate(batch.train.micro_batches):
        yield b",[" if number else b"["
        yield from _listed(map(SAMPLE.dump_json, micro))
        yield b"]"
    yield b'],"sampling":%b}}' % SAMPLING.dump_json(batch.train.sampling)


def _listed(pieces: Iterable[bytes]) -> Iterator[bytes]:
    for number, piece in enumerate(pieces):
        yield b"," + piece if number else piece


@router.get("/weights", responses=refusals())
async def wanted(service: Served) -> records.Weights:
    """Which version is wanted, and what tensors it has to have (a tied head may be left out)."""
    step = service.desk.step
    tensors = [records.Tensor(name=name, shape=list(shape), dtype=dtype) for name, shape, dtype in service.rollouts.tensors]
    return records.Weights(version=service.rollouts.version.step, wanted=None if step is None else step + 1, tensors=tensors)


BODY = {"requestBody": {"required": True, "content": {FILE: {"schema": {"type": "string", "format": "binary"}}}}}


@router.put("/weights/{step}", openapi_extra=BODY, responses=refusals(409, 507))
async def upload(service: Served, lease: Leased, step: Step, request: Request) -> records.PublishedRecord:
    """Publish a safetensors file, which is the body. Its metadata may have `rollyard.stats`, a JSON object of numbers.

    All is looked at before anything changes. The same file may be sent again.
    """
    service.check_open()
    service.desk.expect(lease, step)
    most, quiet_s = int(service.config.serve.weights_gib * GIB), service.config.serve.body_s

    async def chunks() -> AsyncIterator[bytes]:
        """Who sends says that it is there."""
        async for chunk in weights.paced(request.stream(), quiet_s):
            service.desk.renew(lease)
            yield chunk

    with weights.draft(service.folder) as path:
        try:
            came = await weights.receive(chunks(), path, most, quiet_s)
        except ClientDisconnect:
            raise Refused(408, "the client has hung up", "gone") from None
        return await _published(service, lease, step, came)


@router.post("/weights/{step}/file", responses=refusals(409, 507))
async def from_file(service: Served, lease: Leased, step: Step, named: records.FileOfWeights) -> records.PublishedRecord:
    """Publish from a disk that both sides have. The file is copied first, and may be another one once this is answered."""
    service.check_open()
    service.desk.expect(lease, step)
    path = weights.below(service.config.serve.weights_folder, named.path)
    with weights.draft(service.folder) as draft:
        try:
            came = await service.desk.hold(lease, asyncio.to_thread(weights.copied, path, draft))
        except ConfigError as error:
            raise unsuited(error) from error
        return await _published(service, lease, step, came, named.stats)


@router.post("/weights/{step}/group", responses=refusals(409))
async def invite(service: Served, lease: Leased, step: Step, told: records.GroupOfWeights) -> records.InvitationRecord:
    """Be met in a torch process group: the trainer, rank 0 of two, then broadcasts each tensor in the order told here."""
    service.check_open()
    service.desk.expect(lease, step)
    sent = tuple(TensorInfo(each.name, tuple(each.shape), each.dtype) for each in told.tensors)
    invited = service.meeting.invite(Offer(lease, step, sent, told.stats), service.rollouts.tensors)
    return records.InvitationRecord(host=invited.host, port=invited.port, name=invited.name, limit_s=invited.limit_s)


@router.post("/weights/{step}/group/{name}", responses=refusals(404, 409))
async def from_group(
    service: Served, lease: Leased, step: Step, name: Annotated[str, Path(max_length=100)]
) -> records.PublishedRecord:
    """Publish what was sent there."""
    service.desk.renew(lease)
    digest = f"group {name}"
    if (before := service.desk.published(step, digest)) is not None:
        return _record(before)
    tensors, stats = await service.desk.hold(lease, service.unless_draining(service.meeting.arrived(name, step)))
    published = await service.desk.publish(lease, step, digest, lambda: tensors, stats)
    service.meeting.forget(name)
    return _record(published)


async def _published(
    service: Service, lease: str, step: int, came: weights.Upload, stats: dict[str, float] | None = None
) -> records.PublishedRecord:
    try:
        known = await asyncio.to_thread(weights.stats_of, came.path) if stats is None else stats
    except ConfigError as error:
        raise unsuited(error) from error
    return _record(await service.desk.publish(lease, step, came.digest, lambda: weights.read(came.path), known))


def _record(published: Published) -> records.PublishedRecord:
    step, incarnation = published.version
    return records.PublishedRecord(step=step, incarnation=incarnation, again=published.again)


def _told(service: Service, lease: Lease) -> records.LeaseRecord:
    return records.LeaseRecord(lease=lease.id, seconds=service.config.serve.lease_s, version=service.rollouts.version.step)
