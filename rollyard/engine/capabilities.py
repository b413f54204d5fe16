"""What each kind of engine can do, known before one is started."""

from __future__ import annotations

from rollyard.types import Capabilities

ALL = ("checkpoint", "shared_memory", "broadcast")

CAPABILITIES = {
    "embedded": Capabilities(keep=True, sleep=True, noise=True, transports=("in_place", *ALL)),
    "vllm": Capabilities(keep=True, transports=ALL),
    "sglang": Capabilities(keep=True, sleep=True, transports=("checkpoint", "broadcast")),
}
