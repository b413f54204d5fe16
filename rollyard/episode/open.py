"""What plays the episodes of a run: in this process, or in processes that may be lost."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from rollyard.config import Config, EnvironmentConfig
from rollyard.episode.host import Order
from rollyard.episode.load import SHIPPED, check_environment, load_environment
from rollyard.episode.stage import Player, Stage
from rollyard.episode.workers import InWorkers
from rollyard.errors import ConfigError
from rollyard.model.architecture import Architecture
from rollyard.pool import Launch
from rollyard.protocols.rollouts import Environment
from rollyard.settle import Surroundings

if TYPE_CHECKING:
    from rollyard.model.tokenizer import Tokenizer

__all__ = ["Player", "environment_of", "open_player"]


def environment_of(config: Config, given: Environment | None) -> Environment | None:
    """The environment given directly, or the one that is named; None where prompts are answered once.

    Raises ConfigError, also for both, and for options that nobody heeds.
    """
    plays = config.environment
    if plays.memory_mib and (given is not None or plays.name in SHIPPED or not plays.workers):
        problem = "it plays in the run's own process, which has no limit"
        raise ConfigError(problem, where="environment.memory_mib", remedy="leave it out, or name FILE.py:NAME, with workers")
    if plays.workers > 1 and (given is not None or plays.name in SHIPPED):
        what = "an environment that is given directly" if given is not None else plays.name
        problem = f"{what} plays in the run's own process, and no workers are started"
        raise ConfigError(problem, where="environment.workers", remedy="leave it out, or name FILE.py:NAME")
    if given is not None and plays.name:
        problem = f"an environment is given directly, and {plays.name} is named"
        raise ConfigError(problem, where="environment.name", remedy="leave one of them out")
    if given is not None:
        return check_environment(given, type(given).__name__)
    if plays.name:
        return load_environment(plays.name)
    if plays != EnvironmentConfig():
        problem = "options of an environment are given, and nobody plays with the policy"
        raise ConfigError(problem, where="environment.name", remedy="name one, or leave them out")
    return None


def open_player(
    config: Config,
    given: Environment | None,
    tokenizer: Tokenizer,
    folder: Path,
    launch: Launch,
    scratch: Path,
    closing: AsyncExitStack,
) -> Player | None:
    """What plays episodes, if they are played: in worker processes where the environment is a user's and named.

    Args:
        given: the environment, where it is not named.
        folder: of the model.
        launch: starts a child of this process.
        scratch: the run's folder.
        closing: closes what is opened, and removes what was written for the processes.
    """
    environment, plays, rollout = environment_of(config, given), config.environment, config.rollout
    if environment is None:
        return None
    vocabulary, most, limit_s = Architecture.from_folder(folder).vocab_size, rollout.max_tokens, plays.limit_s
    if given is not None or plays.name in SHIPPED or not plays.workers:
        return Stage(environment, tokenizer, vocabulary, most, plays.turns, limit_s)
    tokens = scratch.resolve() / "environment.tokens.json"
    around = Surroundings.here(scratch.resolve() / "environment.log", plays.memory_mib)
    closing.callback(tokens.unlink, missing_ok=True)
    tokenizer.save(tokens)
    order = Order(plays.name, str(tokens), str(folder.resolve()), vocabulary, most, plays.turns, limit_s, around)
    at_once = rollout.group_size * rollout.groups_per_step * (rollout.max_staleness + 1)
    player = InWorkers(launch, order, plays.workers, -(-at_once // plays.workers))
    closing.push_async_callback(player.close)
    player.start()
    return player
