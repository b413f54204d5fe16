"""`rollyard inspect RUN --web`: the dashboard of a run, whatever its state, until Ctrl-C."""

from __future__ import annotations

import json
import sys

from rollyard.dashboard.app import make_app
from rollyard.dashboard.serving import address, bound, serve
from rollyard.dashboard.shown import Shown
from rollyard.journal.folder import RunFolder


def web(folder: RunFolder, port: int, as_json: bool) -> int:
    """Serve it; returns the exit code. Raises ConfigError when the port cannot be used."""
    with bound(port) as line:

        def ready() -> None:
            where = address(line)
            told = json.dumps({"address": where}) if as_json else f"{where}   (Ctrl-C ends it)"
            sys.stdout.write(f"{told}\n")
            sys.stdout.flush()

        serve(make_app(Shown(folder)), line, ready)
    return 0
