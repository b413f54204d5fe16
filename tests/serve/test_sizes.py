"""The service shares its loop with the run: what grows with a request does not stop it."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollyard.serve import answers, weights
from rollyard.types import FinishReason, Reply, VersionSpan
from tests.serve.double import V0, serving


class Measured(str):
    """A text that knows how often it was measured."""

    times = 0

    def __len__(self) -> int:
        Measured.times += 1
        return super().__len__()


def test_each_token_of_an_answer_is_measured_once() -> None:
    ids = (0, 1, 2) * 100
    session: Any = SimpleNamespace(ask=SimpleNamespace(decode=lambda tokens: Measured("x" * tokens[0])))
    reply = Reply(ids, "", FinishReason.STOP, (-1.0,) * len(ids), (VersionSpan(V0, V0, len(ids)),))
    found = answers._text_logprobs(session, reply)
    assert found.text_offset[:7] == [0, 0, 1, 3, 3, 4, 6] and found.text_offset[-1] == 298
    assert Measured.times <= len(ids)
    assert answers._text_logprobs(session, Reply((), "", FinishReason.LENGTH, (), ())).text_offset == []


async def test_the_document_is_made_before_the_first_request(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        assert served.app._app.openapi_schema


async def test_an_upload_is_written_and_hashed_in_large_pieces_beside_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients send what a socket takes at a time: 64 KiB."""
    pieces, threads, write = [bytes([number]) * 2**16 for number in range(200)], list[int](), weights._keep

    def keep(piece: bytes, *more: Any) -> None:
        threads.append(threading.get_ident())
        write(piece, *more)

    async def coming() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece

    monkeypatch.setattr(weights, "_keep", keep)
    came = await weights.receive(coming(), tmp_path / "w", 2**30, 5.0)
    assert came.path.read_bytes() == b"".join(pieces) and came.digest == sha256(b"".join(pieces)).hexdigest()
    assert len(threads) <= 4 and threading.get_ident() not in threads
