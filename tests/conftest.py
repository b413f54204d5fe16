"""What every test shares: one torch thread, no network, and nothing of the user's: neither options nor cache."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadFileScheduling

# Read by the libraries when they are first imported, which no test module does before this file has run.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# Compiled once, not by each process that a test starts and by each lane, also where nobody else keeps what was compiled.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
for variable in [name for name in os.environ if name.startswith("ROLLYARD_")]:
    del os.environ[variable]

# Machines differ in speed: a slow example is no failure, and the time limit of each test bounds the whole.
settings.register_profile("rollyard", deadline=None)
settings.load_profile("rollyard")


TOGETHER = "tests/engine/contract/"  # its files share engines, some of which take long to start


class ByFile(LoadFileScheduling):
    """What `--dist loadfile` does, and one folder is one file."""

    def _split_scope(self, nodeid: str) -> str:
        return TOGETHER if nodeid.startswith(TOGETHER) else super()._split_scope(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile | None:
    return ByFile(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[None]:
    """Base policies made by one test serve the others of this session, and nobody else; kernels stay until they change."""
    folder = tmp_path_factory.mktemp("cache")
    assert pytestconfig.cache is not None
    kept = pytestconfig.cache.mkdir("kernels")
    kept.chmod(0o700)
    (folder / "kernels").symlink_to(kept)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROLLYARD_CACHE", str(folder))
        yield


@pytest.fixture(autouse=True)
def _one_torch_thread() -> Iterator[None]:
    """Tiny models are fastest on one thread; a test that changes the number gives it back."""
    yield
    if (torch := sys.modules.get("torch")) is not None and torch.get_num_threads() != 1:
        torch.set_num_threads(1)
