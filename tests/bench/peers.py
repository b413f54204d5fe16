"""Peers that are scripts of a few lines, on the real protocol."""

from __future__ import annotations

import sys
from pathlib import Path

from rollyard.bench.peer import FOLDER, Command

HEAD = f"""
import os, sys, time
sys.path.insert(0, {str(FOLDER / "peers")!r})
from protocol import Channel, serve
channel = Channel()

def load(**asked):
    print("loading", asked["model"])
    return {{"versions": {{"fake": "1.0"}}}}

"""
TAIL = "\nserve(channel, {name: value for name, value in list(globals().items()) if name in ('load', 'generate', 'step')})\n"


def script(folder: Path, body: str, *, tail: str = TAIL) -> Command:
    """A peer whose handlers are the functions that `body` defines."""
    path = folder / "peer_fake.py"
    path.write_text(HEAD + body + tail)
    return Command("fake", Path(sys.executable), path)
