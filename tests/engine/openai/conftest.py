"""Doubles of servers with one tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.embedded.serving import Reference
from tests.engine.openai.benches import Benches
from tests.tiny import tiny_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("tiny"), chat=True)


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder)


@pytest.fixture
def benches(folder: Path, reference: Reference) -> Benches:
    return Benches(folder, reference)
