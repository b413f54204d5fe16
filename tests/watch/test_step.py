from dataclasses import replace

import pytest

from rollyard.watch.metrics import RewardStats
from rollyard.watch.timeline import PhaseSeconds
from tests.watch.records import STEP, group


def test_the_mean_is_over_members_that_have_a_verdict() -> None:
    assert STEP.reward_mean == (1.0 + 0.0 + 0.5 + 0.0) / 4
    assert RewardStats.whole([group(0, (1, None), (1, None))]) == RewardStats.whole([]) == RewardStats(None, None, 0, 0)


def test_a_group_is_flat_when_nothing_can_be_learned_from_it() -> None:
    assert STEP.flat_groups == 2  # the second and the third have one verdict each
    groups = (group(0, (1, 1.0), (1, 1.0)), group(1, (1, 1.0), (1, 0.9)), group(2, (1, None)))
    assert replace(STEP, groups=groups).flat_groups == 1  # the last has no verdict that could be equal to another


def test_speed_is_per_second_of_generation() -> None:
    assert STEP.tokens_per_s == 50 / 2.5
    assert STEP.seconds == 5.0
    assert replace(STEP, phases=PhaseSeconds(wall_s=1.0)).tokens_per_s is None
    nothing = replace(STEP, tokens=0)  # it trained on what was written before
    assert nothing.tokens_per_s is None and nothing.to_metrics()["tokens_per_s"] is None


def test_metrics_are_flat() -> None:
    assert STEP.to_metrics() == {
        "step": 1,
        "incarnation": 0,
        "reward_mean": 0.375,
        "reward_std": pytest.approx(0.414578),  # squares 0.390625 + 0.140625 + 0.015625 + 0.140625 over 4
        "reward_min": 0.0,
        "reward_max": 1.0,
        "flat_groups": 2,
        "flat_share": 2 / 3,
        "unscored": 2,
        "reward/x/mean": 0.25,  # of 1, 0 and -0.25: it gave a number to a member whose verdict another reward kept back
        "reward/x/std": pytest.approx(0.540062),  # squares 0.5625 + 0.0625 + 0.25 over 3
        "reward/x/flat_share": 0.5,
        "groups": 3,
        "completion_tokens_mean": 5.0,  # (2 + 4 + 6 + 8 + 1 + 9) / 6
        "completion_tokens_p50": 4,
        "completion_tokens_p95": 9,
        "completion_tokens_max": 9,
        "completion_truncated_share": 0.0,
        "turns_mean": 1.0,
        "tokens_per_prompt": 10.0,
        "prompt_tokens_mean": 2.0,
        "tokens": 50,
        "tokens_per_s": 20.0,
        "weights_unchanged": None,
        "dropped": 3,
        "dropped/failed": 2,
        "dropped/context": 1,
        "train/loss": 0.5,
        "train/grad_norm": 2.0,
        "train/learning_rate": 1e-3,
        "train/tokens": 20,
        "train/entropy": 1.5,
        "train/clipped_share": 0.1,
        "train/ratio_mean": 1.0,
        "train/logprob_gap_mean": 0.0,
        "train/logprob_gap_max": 0.0,
        "train/kept_set_misses": 0.0,
        "train/ratio_p1": 1.0,
        "train/ratio_p99": 1.0,
        "train/truncated_share": 0.0,
        "train/kl": None,
        "train/value_loss": None,
        "train/thread_s": None,
        **dict.fromkeys(f"train/{age}_gap_{kind}" for age in ("fresh", "stale") for kind in ("mean", "max")),
        "seconds": 5.0,
        "phase/generate_s": 2.5,
        "phase/train_s": 2.0,
        **dict.fromkeys((f"phase/{name}_s" for name in ("tools", "score", "sync", "eval", "checkpoint", "setup")), 0.0),
        "phase/unaccounted_s": 0.5,
        "generating_s": 2.5,
        "scoring_s": 0.0,
        "scoring_hidden_s": 0.0,
        **dict.fromkeys(("driver_s", "driver_generating_s"), 0.0),
    }
