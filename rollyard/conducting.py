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
    policy, schedule = _policy(config, stations), _schedule(config, stations, past)
    return Conductor(policy, schedule, rollover, version, config.place.placement, weights.retries, counts)


def _policy(config: Config, stations: Stations) -> RolloutPolicy:
    rollout = config.rollout
    return RolloutPolicy(
        group_size=rollout.group_size,
        groups_per_batch=rollout.groups_per_step,
        batches=config.run.steps,
        sampling=worker.sampling_of(config),
        window=stations.window,
        max_staleness=rollout.max_staleness,
        max_live_groups=rollout.max_live_groups,
        oversample=rollout.oversample,
        order=rollout.order,
        moves=rollout.moves,
        overtaking=rollout.overtaking,
        on_stale=rollout.on_stale,
        retries=rollout.retries,
        vocabulary=stations.vocabulary,
        faults=config.engine.faults,
        failures=config.engine.failures,
        min_scored=rollout.min_scored,
        give_up_after=rollout.give_up_after,
        seed=config.run.seed,
        exact=config.place.placement == "swap",
        turns=config.environment.turns if stations.player is not None else 0,
        filter=rollout.filter,
        refills=rollout.refills,
        mask_truncated=config.advantage.overlong == "mask",
    )


def _schedule(config: Config, stations: Stations, past: Past) -> Schedule:
    weights, evaluated = config.weights, past.counters.get("report", {}).get("evaluated")
    return Schedule(
        steps=config.run.steps,
        engines=len(stations.engines),
        evaluate=bool(stations.held_out),
        evaluate_every=config.eval.every,
        checkpoint_every=config.checkpoint.every,
        prove=weights.canary,
        restarts=config.place.restarts if stations.launch else 0,
        probe_every=weights.probe_every if weights.probe and config.place.apart else 0,
        evaluated=None if evaluated is None else WeightVersion(*evaluated),
    )


def _counted(past: Past, folder: RunFolder) -> Counts:
    """Of what has left for good."""
    if not past.lives:
        return Counts()
    return counts_before(past.counters.get("rollouts") or asdict(Counts()), *left(folder, past))
