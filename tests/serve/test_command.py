"""A service in its start, and at its end."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import httpx
import pytest

from rollyard.errors import ConfigError, RunFailed
from rollyard.journal.folder import RunFolder, make_folder
from rollyard.journal.journal import Journal, RunRecord
from rollyard.journal.reader import has_lives
from rollyard.layers import resolve_tree
from rollyard.resume import BEGAN, Began
from rollyard.serve.command import _begun, _listening, _to_the_end
from rollyard.serve.server import Server
from rollyard.serve.settings import ServeConfig, check, check_folder
from rollyard.watch.terminal import QuietView
from tests.serve.double import TOKEN, batch, serving


def sorting(**options: object) -> ServeConfig:
    given = {name.replace("__", "."): value for name, value in options.items()}
    return resolve_tree(ServeConfig, check, preset="sort", environment={}, overrides=given).config


def begun(made: ServeConfig) -> Path:
    return _begun(made, None, lambda header: QuietView()).folder


def test_one_that_was_killed_in_its_start_can_be_started_again(tmp_path: Path) -> None:
    """Before anything is in the folder but its config; while its base policy is made; and while its engines load."""
    made = sorting(run__out=str(tmp_path / "run"))
    folder: RunFolder = make_folder(made.run_config)
    folder.release()
    assert begun(made) == folder.path
    Journal(folder.journal, RunRecord("run", "0", 0, 1, "{}")).close()
    assert has_lives(folder.journal) and begun(made) == folder.path
    folder.began.write_bytes(BEGAN.dump_json(Began({}, ("trainer",))))
    assert begun(made) == folder.path


def test_the_folder_of_another_run_is_left_alone(tmp_path: Path) -> None:
    made = sorting(run__out=str(tmp_path / "run"))
    folder = make_folder(made.run_config)
    folder.release()
    folder.began.write_bytes(BEGAN.dump_json(Began({}, ())))
    with pytest.raises(ConfigError, match="exists already"):
        begun(made)


@pytest.mark.parametrize("name", ["a" * 64, "localhost..", "a\0b"])
@pytest.mark.parametrize("option", ["serve__host", "serve__group_address", "weights__address"])
def test_what_no_machine_is_called_is_refused(option: str, name: str) -> None:
    with pytest.raises(ConfigError, match="no name of a machine") as refused:
        sorting(**{option: name})
    assert refused.value.where.startswith(option.replace("__", "."))


def test_what_is_wrong_with_where_it_listens_is_told_of_that_option() -> None:
    with pytest.raises(ConfigError, match=r"there is no address 'nowhere\.invalid'") as refused, _listening("nowhere.invalid", 0):
        pass
    assert refused.value.where == "serve.host"
    with (
        _listening("127.0.0.1", 0) as line,
        pytest.raises(ConfigError, match="listened on: Address already in use") as refused,
        _listening("127.0.0.1", line.getsockname()[1]),
    ):
        pass
    assert refused.value.where == "serve.port"


def test_a_folder_for_weights_has_to_be_there(tmp_path: Path) -> None:
    check_folder("")
    check_folder(str(tmp_path))
    with pytest.raises(ConfigError, match=r"serve\.weights_folder: there is no folder"):
        check_folder(str(tmp_path / "nowhere"))


async def test_one_whose_run_failed_does_not_wait_for_readers(tmp_path: Path) -> None:
    """With a batch out, and a stream open that would go on for ever; what is under way could take 30 seconds."""
    async with serving(tmp_path) as served, asyncio.timeout(10):
        served.run.batch.put_nowait(batch(0, 5))
        line = socket.create_server(("127.0.0.1", 0))
        ending = asyncio.create_task(_to_the_end(served.service, Server(served.app, served.service.config.serve), line))
        url, headers = f"http://127.0.0.1:{line.getsockname()[1]}", {"Authorization": f"Bearer {TOKEN}"}
        async with httpx.AsyncClient(base_url=url, headers=headers) as http, http.stream("GET", "/v1/groups/stream") as told:
            lines = aiter(told.aiter_lines())
            assert '"cursor":1' in await anext(lines)
            served.run.found.put_nowait(RunFailed("the engine burns"))
            assert [each async for each in lines] == []
        await ending
