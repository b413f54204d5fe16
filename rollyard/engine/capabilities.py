"""What each kind of engine can do, known before one is started."""

from __future__ import annotations

from rollyard.config import Config
from rollyard.errors import ConfigError
from rollyard.types import Capabilities

ALL = ("checkpoint", "shared_memory", "broadcast")

CAPABILITIES = {
    "embedded": Capabilities(keep=True, sleep=True, noise=True, transports=("in_place", *ALL)),
    "vllm": Capabilities(keep=True, transports=ALL),
    "openai": Capabilities(logprobs=False, truncation=False, token_ids=False, train=False),  # more, as its servers can
    "sglang": Capabilities(keep=True, truncation=False, transports=("checkpoint",)),  # sleep and noise as its server can
}


def check_capabilities(config: Config) -> None:
    """Raises ConfigError when a run asks for what engines of its kind cannot do."""
    kind, rollout = config.engine.kind, config.rollout
    able, transport = CAPABILITIES[kind], config.weights.transport
    if not able.truncation and (rollout.top_p < 1.0 or rollout.top_k):
        problem = f"{kind} reports logprobs from before top_p and top_k, which are not those of the tokens' distribution"
        where = "rollout.top_p" if rollout.top_p < 1.0 else "rollout.top_k"
        raise ConfigError(problem, where=where, remedy="use 1 and 0, which keep every token, or another engine")
    if transport not in ("auto", *able.transports):
        problem = f"{kind} takes no weights by {transport}"
        raise ConfigError(problem, where="weights.transport", remedy=f"one of: auto, {', '.join(able.transports)}")
