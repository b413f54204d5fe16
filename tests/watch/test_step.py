from dataclasses import replace

from rollyard.watch.step import mean_reward
from rollyard.watch.timeline import PhaseSeconds
from tests.watch.records import STEP, group


def test_the_mean_is_over_members_that_have_a_verdict() -> None:
    assert STEP.reward_mean == (1.0 + 0.0 + 0.5 + 0.0) / 4
    assert mean_reward([group(0, (1, None), (1, None))]) is None
    assert mean_reward([]) is None


def test_a_group_is_flat_when_nothing_can_be_learned_from_it() -> None:
    assert STEP.flat_groups == 2  # the second and the third have one verdict each
    groups = (group(0, (1, 1.0), (1, 1.0)), group(1, (1, 1.0), (1, 0.9)), group(2, (1, None)))
    assert replace(STEP, groups=groups).flat_groups == 2


def test_speed_is_per_second_of_generation() -> None:
    assert STEP.tokens_per_s == 50 / 2.5
    assert STEP.seconds == 5.0
    assert replace(STEP, phases=PhaseSeconds(wall_s=1.0)).tokens_per_s == 0.0


def test_metrics_are_flat() -> None:
    assert STEP.to_metrics() == {
        "step": 1,
        "incarnation": 0,
        "reward_mean": 0.375,
        "groups": 3,
        "flat_groups": 2,
        "completion_tokens_mean": 5.0,  # (2 + 4 + 6 + 8 + 1 + 9) / 6
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
        "seconds": 5.0,
        "phase/generate_s": 2.5,
        "phase/tools_s": 0.0,
        "phase/score_s": 0.0,
        "phase/train_s": 2.0,
        "phase/sync_s": 0.0,
        "phase/eval_s": 0.0,
        "phase/checkpoint_s": 0.0,
        "phase/setup_s": 0.0,
        "phase/unaccounted_s": 0.5,
    }
