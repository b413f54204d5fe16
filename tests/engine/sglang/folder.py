"""Writes the model of the contract suite, for real servers: the first two steps of running the suite against SGLang.

    python -m tests.engine.sglang.folder /tmp/contract
    for port in 30000 30001; do python -m sglang.launch_server --model-path /tmp/contract --port $port --dtype float32 \
        --attention-backend triton --sampling-backend pytorch --mem-fraction-static 0.3 --incremental-streaming-output \
        --enable-deterministic-inference --enable-memory-saver & done
    SGLANG_URL="http://127.0.0.1:30000 http://127.0.0.1:30001" python -m pytest tests/engine/contract -k sglang-real

Two servers, since the suite compares two engines. They must run on this machine: weights travel as folders of it.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.engine.contract.model import WINDOW, model_folder

OWN_TOKENS = 6  # of its context that a server keeps for itself


def roomy(folder: Path, parent: Path) -> Path:
    """The same model in a new folder, with a context so long that the suite's window is left of it."""
    copied = parent / f"{folder.name}-roomy"
    shutil.copytree(folder, copied, dirs_exist_ok=True)
    path = copied / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"max_position_embeddings": WINDOW + OWN_TOKENS}))
    return copied


def main(target: Path) -> None:
    with TemporaryDirectory() as scratch:
        made = roomy(model_folder(Path(scratch)), Path(scratch))
        shutil.copytree(made, target)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
