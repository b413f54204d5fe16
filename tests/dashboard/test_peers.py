"""Other users of a machine reach its loopback, and see nothing."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import httpx
import pytest

from rollyard.dashboard.app import make_app
from rollyard.dashboard.peers import Own, owner
from rollyard.dashboard.shown import Shown
from rollyard.journal.folder import RunFolder

TABLE = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     {me}        0 1 1 0 100 0 0 10 0
   1: 0100007F:C350 0100007F:1F90 01 00000000:00000000 00:00000000 00000000  {other}        0 2 1 0 20 4 30 10 -1
   2: 0100007F:1F90 0100007F:C350 01 00000000:00000000 00:00000000 00000000     {me}        0 3 1 0 20 4 30 10 -1
   3: 0100007F:C351 0100007F:1F90 01 00000000:00000000 00:00000000 00000000     {me}        0 4 1 0 20 4 30 10 -1
   4: 0100007F:C352 0100007F:1F90 01 00000000:00000000 00:00000000 00000000        0        0 4 1 0 20 4 30 10 -1
"""
HERE = ("127.0.0.1", 0x1F90)


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "tcp"
    path.write_text(TABLE.format(me=os.getuid(), other=os.getuid() + 1000))
    return path


@pytest.mark.parametrize(("port", "status"), [(0xC350, 403), (0xC351, 200), (0xC352, 200), (0xC353, 403)])
async def test_this_user_and_root_are_answered_and_nobody_else(table: Path, tmp_path: Path, port: int, status: int) -> None:
    app = Own(make_app(Shown(RunFolder(tmp_path))), table)
    transport = httpx.ASGITransport(app, client=("127.0.0.1", port))
    async with httpx.AsyncClient(transport=transport, base_url=f"http://127.0.0.1:{HERE[1]}") as client:
        for _ in range(2):
            assert (await client.get("/healthz")).status_code == status


async def refusal(table: Path, folder: Path, port: int) -> str:
    transport = httpx.ASGITransport(Own(make_app(Shown(RunFolder(folder))), table), client=("127.0.0.1", port))
    async with httpx.AsyncClient(transport=transport, base_url=f"http://127.0.0.1:{HERE[1]}") as client:
        answer = await client.get("/healthz")
    assert answer.status_code == 403
    return answer.text


async def test_whose_connection_is_not_told_hears_why(table: Path, tmp_path: Path) -> None:
    assert "another user" in await refusal(table, tmp_path, 0xC350)
    unknown = await refusal(table, tmp_path, 0xC353)
    assert "does not say whose connection this is" in unknown and "docs/dashboard.md" in unknown


async def test_a_table_that_cannot_be_read_is_said_and_lets_nobody_in(tmp_path: Path) -> None:
    unread = tmp_path / "folder"
    unread.mkdir()
    said = await refusal(unread, tmp_path, 0xC351)
    assert "cannot be looked up" in said and "Is a directory" in said and "docs/dashboard.md" in said


def test_the_system_says_who_holds_the_other_end() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        assert owner(client.getsockname(), server.getsockname()) == os.getuid()
        assert owner(("127.0.0.1", 1), server.getsockname()) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_of_another_user_it_says_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        ready, told = os.pipe()
        child = os.fork()
        if child == 0:
            os.setresuid(65534, 65534, 65534)
            line = socket.create_connection(server.getsockname())
            os.write(told, line.getsockname()[1].to_bytes(2, "big"))
            line.recv(1)
            os._exit(0)
        port = int.from_bytes(os.read(ready, 2), "big")
        assert owner(("127.0.0.1", port), server.getsockname()) == 65534
        server.accept()[0].close()
        os.waitpid(child, 0)
        os.close(ready)
        os.close(told)
