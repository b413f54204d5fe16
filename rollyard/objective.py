"""What the policy learns from a batch, as options say it together: what `auto` stands for, and what does not go together."""

from __future__ import annotations

from rollyard.config import Config, TrainConfig
from rollyard.errors import ConfigError

WEIGHED = ("correction_level", "correction_cap", "correction_floor")
VALUED = ("value_lr", "value_clip", "value_body")
CLIPPED = ("clip_low", "clip_high")
USUAL = TrainConfig()


def correction_of(config: Config) -> str:
    """How differences between engine and trainer are corrected: as named, or what `auto` stands for.

    Without staleness our own engine computes what the trainer computes, but for rounding.
    """
    if config.train.correction != "auto":
        return config.train.correction
    apart = config.rollout.max_staleness > 0 or not own_engine(config)
    return "truncate" if apart else "none"


def own_engine(config: Config) -> bool:
    """Do our own engines write, which compute what the trainer computes?"""
    return config.engine.kind == "embedded"


def options_of(config: Config) -> TrainConfig:
    """What a trainer is given: nothing is `auto` any more."""
    return config.train.model_copy(update={"correction": correction_of(config)})


def has_values(config: Config) -> bool:
    """Is there a value head?"""
    return config.advantage.kind == "gae"


def told(config: Config, size: int) -> str:
    """For the report. `size`: bytes of all that is trained of the policy. Example: ppo, truncate at 2 (auto).

    Nothing where another job trains: by what options, this one does not know.
    """
    if config.exchange.folder:
        return ""
    train, correction = config.train, correction_of(config)
    parts: list[str] = [train.loss]
    if correction != "none":
        level = "" if train.correction_level == "token" else " by rows"
        floor = f"{train.correction_floor:g} and " if correction == "mask" and train.correction_floor else ""
        auto = " (auto)" if train.correction == "auto" else ""
        parts.append(f"{correction}{level} at {floor}{train.correction_cap:g}{auto}")
    if train.minibatches > 1:
        parts.append(f"{train.minibatches} minibatches")
    if train.kl:
        each = -(-size // (config.place.train if train.shard else 1))
        parts.append(f"KL {train.kl:g} ({train.kl_kind}) to the first policy, {each:,} bytes beside each trainer")
    if has_values(config):
        parts.append("a value head")
    return ", ".join(parts)


def check_objective(config: Config) -> None:
    """Raises ConfigError for the first that does not hold."""
    _check_correction(config)
    train, rollout = config.train, config.rollout
    if train.minibatches > rollout.groups_per_step:
        problem = f"{train.minibatches} steps on whole prompts each, and a batch has {rollout.groups_per_step}"
        raise ConfigError(problem, where="train.minibatches", remedy=f"use at most {rollout.groups_per_step}")
    if train.kl_kind != USUAL.kl_kind and not train.kl:
        problem = "an estimator is named, and nothing is kept near a reference"
        raise ConfigError(problem, where="train.kl_kind", remedy="add --train.kl, such as 0.01, or leave it out")
    if not has_values(config) and (given := _given(train, VALUED)):
        problem = f"with advantage {config.advantage.kind} there is no value head"
        raise ConfigError(problem, where=f"train.{given}", remedy="use --advantage.kind gae, or leave it out")
    if train.minibatches == 1:
        _check_one_step(config)
    if train.adapter:
        _check_external(config)


def _check_correction(config: Config) -> None:
    train, correction = config.train, correction_of(config)
    if correction == "none" and (given := _given(train, WEIGHED)):
        why = (
            "auto is none: nothing is stale, and the engine is our own" if train.correction == "auto" else "nothing is corrected"
        )
        remedy = "use --train.correction truncate or mask, or leave it out"
        raise ConfigError(why, where=f"train.{given}", remedy=remedy)
    if correction == "truncate" and train.correction_floor:
        problem = "a weight that is truncated has no floor"
        raise ConfigError(problem, where="train.correction_floor", remedy="use --train.correction mask, or leave it out")
    if train.correction_floor >= train.correction_cap:
        problem = f"no weight is between {train.correction_floor:g} and {train.correction_cap:g}"
        raise ConfigError(problem, where="train.correction_floor", remedy="use less than train.correction_cap")


def _check_one_step(config: Config) -> None:
    """What is only felt from a batch's second optimizer step on."""
    train, correction = config.train, correction_of(config)
    if correction != "none" and (given := _given(train, CLIPPED)):
        auto = " (auto)" if train.correction == "auto" else ""
        problem = f"with correction {correction}{auto} and one step a batch the ratio is 1, and nothing is clipped"
        remedy = "add --train.minibatches 2 or more, or --train.correction none, or leave it out"
        raise ConfigError(problem, where=f"train.{given}", remedy=remedy)
    if train.value_clip != USUAL.value_clip:
        problem = "with one step a batch a value is what it was before, and nothing is clipped"
        raise ConfigError(problem, where="train.value_clip", remedy="add --train.minibatches 2 or more, or leave it out")


def _check_external(config: Config) -> None:
    """What the contract with a trainer of another stack does not have."""
    train = config.train
    for wanted, where, what in (
        (train.minibatches > 1, "train.minibatches", "takes one step on each batch"),
        (train.kl > 0, "train.kl", "keeps no reference policy"),
        (has_values(config), "advantage.kind", "has no value head"),
    ):
        if wanted:
            raise ConfigError(
                f"a trainer of another stack {what}", where=where, remedy="leave it out, or leave out train.adapter"
            )


def _given(train: TrainConfig, names: tuple[str, ...]) -> str:
    """The first of these options that is not as usual."""
    return next((name for name in names if getattr(train, name) != getattr(USUAL, name)), "")
