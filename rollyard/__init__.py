"""Rollyard: rollout orchestration for reinforcement learning on language models.

The map, in the order data flows:

    types  events  protocols  config      what everything speaks
    prompts     1 what to ask             a resumable stream of prompts
    rollout     2 ask, K times            which request goes where; groups; staleness
    episode     2 in several turns        environments and tools that play with the policy
    reward      3 judge                   verdicts
    advantage   4 compare                 rewards of a group -> advantages
    batch       5 pack                    training rows under a token budget
    train       6 learn                   loss, optimizer
    weights     7 publish                 new weights to the engines
    engine      8 generate                token ids in, token ids and logprobs out
    model       the transformer that trainer and embedded engine share
    place       who generates and trains when, and where stations run
    journal  watch                        what happened; what is happening
    inspect  dashboard                    either of them looked at: in a terminal, in a browser
    chaos                                 faults on purpose
    conductor   rollout, placement and rollover as one pure state machine
    worker  warmup  evaluate  loop        stations, base policies, held-out scores, the run
    rollouts  trl                         the run under somebody else's training loop
    exchange  training                    the run as two jobs that share a folder
    rollouts  serve                       under another trainer: as a library, as a service
    plan                                  what a run would cost, simulated
    bench  cli                            speed beside peers; the command line

    run = rollyard.Run(rollyard.resolve(preset="sort").config)
    for step in run:
        print(step.step, step.reward_mean, len(step.groups))
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollyard.config import Config
    from rollyard.episode.transcript import Transcript
    from rollyard.errors import ConfigError, RollyardError, RunFailed
    from rollyard.layers import resolve
    from rollyard.loop import Run
    from rollyard.prompts.given import GivenPrompt
    from rollyard.rollouts import Rollouts, SyncRollouts
    from rollyard.types import Prompt, Reward
    from rollyard.watch.step import Step

__all__ = [
    "Config",
    "ConfigError",
    "GivenPrompt",
    "Prompt",
    "Reward",
    "Rollouts",
    "RollyardError",
    "Run",
    "RunFailed",
    "Step",
    "SyncRollouts",
    "Transcript",
    "resolve",
]

_FROM = {  # the others: errors
    "Config": "config",
    "GivenPrompt": "prompts.given",
    "Prompt": "types",
    "Reward": "types",
    "Rollouts": "rollouts",
    "Run": "loop",
    "Step": "watch.step",
    "SyncRollouts": "rollouts",
    "Transcript": "episode.transcript",
    "resolve": "layers",
}


def __getattr__(name: str) -> object:
    """Public names, loaded as they are asked for: a process that only judges does not need all the rest."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_FROM.get(name, 'errors')}"), name)
