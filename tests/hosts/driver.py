"""A run, as a process of its own: says each step, and where its hosts are by then. Argument: a file with its config, as JSON."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import rollyard
from rollyard.errors import RollyardError
from tests.rewards import share_of_a

PACE_S = 0.25  # seconds a verdict takes: steps take time, and no CPU


def paced(prompt: str, completion: str, **columns: object) -> float:
    time.sleep(PACE_S)
    return share_of_a(prompt, completion)


def say(what: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def main() -> None:
    config = rollyard.Config.model_validate_json(Path(sys.argv[1]).read_text())
    run = rollyard.Run(config, reward=paced)
    try:
        for step in run:
            say({"step": step.step, "nodes": {host: list(nodes) for host, nodes in run.nodes.items()}})
    except RollyardError as error:
        say({"error": str(error)})
        sys.exit(1)


if __name__ == "__main__":
    main()
