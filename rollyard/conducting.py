"""What the conductor of a run goes by: its rules, its schedule, and what earlier lives counted."""

from __future__ import annotations

from dataclasses import asdict

from rollyard import worker
from rollyard.conductor import Conductor
from rollyard.config import Config
from rollyard.journal.folder import RunFolder
from rollyard.journal.recover import Past
from rollyard.place.mode import Schedule
from rollyard.resume import left
from rollyard.rollout.policy import RolloutPolicy
from rollyard.rollout.recovery import counts_before
from rollyard.rollout.state import Counts
from rollyard.stations import Stations
from rollyard.types import WeightVersion


def conductor_of(config: Config, stations: Stations, version: WeightVersion, past: Past, folder: RunFolder) -> Conductor:
    """The conductor of one life of a run.

    Args:
        version: that the life begins with.
        past: what earlier lives left.
        folder: of the run.
    """
    rollover, counts, weights = worker.rollover_of(config), _counted(past, folder), config.weights
    policy = policy_of(config, stations.window, episodes=stations.player is not None)
    evaluated = past.counters.get("report", {}).get("evaluated")
    schedule = schedule_of(
        config,
        len(stations.engines),
        evaluate=bool(stations.held_out),
        restarts=config.place.restarts if stations.launch else 0,
        evaluated=None if evaluated is None else WeightVersion(*evaluated),
    )
    return Conductor(policy, schedule, rollover, version, config.place.placement, weights.retries, counts)


def policy_of(config: Config, window: int, *, episodes: bool = False) -> RolloutPolicy:
    """The rules of a run's rollouts.

    Args:
        window: tokens of prompt and completion at most.
        episodes: an environment plays with the policy.
    """
    rollout = config.rollout
    return RolloutPolicy(
        group_size=rollout.group_size,
        groups_per_batch=rollout.groups_per_step,
        batches=config.run.steps,
        sampling=worker.sampling_of(config),
        window=window,
        max_staleness=rollout.max_staleness,
        max_live_groups=rollout.max_live_groups,
        oversample=rollout.oversample,
        order=rollout.order,
        moves=rollout.moves,
        overtaking=rollout.overtaking,
        on_stale=rollout.on_stale,
        retries=rollout.retries,
        faults=config.engine.faults,
        failures=config.engine.failures,
        min_scored=rollout.min_scored,
        give_up_after=rollout.give_up_after,
        seed=config.run.seed,
        exact=config.place.placement == "swap",
        turns=config.environment.turns if episodes else 0,
        filter=rollout.filter,
        refills=rollout.refills,
        mask_truncated=config.advantage.overlong == "mask",
    )


def schedule_of(
    config: Config, engines: int, *, evaluate: bool, restarts: int, evaluated: WeightVersion | None = None
) -> Schedule:
    """When what is done in a run.

    Args:
        engines: at its start.
        evaluate: there are held-out prompts.
        restarts: times that each engine is started again.
        evaluated: the version that an earlier life evaluated last.
    """
    weights = config.weights
    return Schedule(
        steps=config.run.steps,
        engines=engines,
        evaluate=evaluate,
        evaluate_every=config.eval.every,
        checkpoint_every=config.checkpoint.every,
        prove=weights.canary,
        restarts=restarts,
        probe_every=weights.probe_every if weights.probe and config.place.apart else 0,
        evaluated=evaluated,
    )


def _counted(past: Past, folder: RunFolder) -> Counts:
    """Of what has left for good."""
    if not past.lives:
        return Counts()
    return counts_before(past.counters.get("rollouts") or asdict(Counts()), *left(folder, past))
