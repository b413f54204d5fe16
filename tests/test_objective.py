"""What is learnt from a batch, as options say it together."""

from __future__ import annotations

from typing import Any

import pytest

from rollyard.config import Config
from rollyard.errors import ConfigError
from rollyard.layers import resolve
from rollyard.objective import correction_of, has_values, options_of, told

APART: dict[str, Any] = {"place.placement": "separate"}
STALE: dict[str, Any] = {"place.placement": "async", "rollout.max_staleness": 2}


def config(**options: Any) -> Config:
    return resolve(environment={}, overrides={"prompts.task": "sort"} | options).config


@pytest.mark.parametrize(
    ("options", "correction"),
    [
        ({}, "none"),
        (APART, "none"),
        (STALE, "truncate"),
        (APART | {"engine.kind": "vllm"}, "truncate"),
        ({"rollout.oversample": 4, "rollout.max_staleness": 1}, "truncate"),
        (STALE | {"train.correction": "none"}, "none"),
        ({"train.correction": "mask"}, "mask"),
    ],
)
def test_what_auto_is(options: dict[str, Any], correction: str) -> None:
    """Corrected is what may be stale, or what another engine wrote; what is named stays as it is."""
    made = config(**options)
    assert correction_of(made) == options_of(made).correction == correction
    assert made.train.correction == options.get("train.correction", "auto")  # the tree itself is never rewritten


@pytest.mark.parametrize(
    ("options", "where", "says"),
    [
        ({"train.correction_cap": 3.0}, "train.correction_cap", "auto is none: nothing is stale"),
        ({"train.correction": "none", "train.correction_level": "sequence"}, "train.correction_level", "nothing is corrected"),
        (STALE | {"train.correction_floor": 0.5}, "train.correction_floor", "use --train.correction mask"),
        (
            {"train.correction": "mask", "train.correction_floor": 2.0},
            "train.correction_floor",
            "use less than train.correction_cap",
        ),
        ({"train.minibatches": 33}, "train.minibatches", "use at most 32"),
        ({"train.kl_kind": "k1"}, "train.kl_kind", "add --train.kl"),
        ({"train.value_clip": 0.1}, "train.value_clip", "use --advantage.kind gae"),
        ({"train.value_clip": 0.1, "advantage.kind": "gae"}, "train.value_clip", "add --train.minibatches 2"),
        (STALE | {"train.clip_high": 0.28}, "train.clip_high", "truncate (auto) and one step a batch the ratio is 1"),
        ({"train.loss": "cispo", "train.correction": "mask", "train.clip_low": 1.0}, "train.clip_low", "correction mask and one"),
        (APART | {"train.adapter": "a.py:f", "train.kl": 0.1}, "train.kl", "keeps no reference policy"),
        (APART | {"train.adapter": "a.py:f", "train.minibatches": 2}, "train.minibatches", "takes one step on each batch"),
    ],
)
def test_what_does_not_go_together(options: dict[str, Any], where: str, says: str) -> None:
    with pytest.raises(ConfigError) as raised:
        config(**options)
    assert raised.value.where == where and says in str(raised.value)


@pytest.mark.parametrize(
    "options",
    [
        {"train.clip_high": 0.28},
        STALE | {"train.clip_high": 0.28, "train.minibatches": 2},
        STALE | {"train.clip_high": 0.28, "train.correction": "none"},
        {"train.value_clip": 0.1, "advantage.kind": "gae", "train.minibatches": 2},
    ],
)
def test_what_is_heeded_is_taken(options: dict[str, Any]) -> None:
    config(**options)


def test_it_is_told() -> None:
    assert told(config(), 1000) == "ppo"
    assert told(config(**STALE), 1000) == "ppo, truncate at 2 (auto)"
    masked = {"train.correction": "mask", "train.correction_floor": 0.5, "train.correction_level": "sequence"}
    made = config(**masked | {"train.loss": "gspo", "train.minibatches": 4, "advantage.kind": "gae"})
    assert told(made, 1000) == "gspo, mask by rows at 0.5 and 2, 4 minibatches, a value head" and has_values(made)
    assert told(config(**STALE | {"exchange.folder": "shared"}), 1000) == "", "another job trains, and has options of its own"
    shared = APART | {"train.kl": 0.01, "train.shard": True, "place.train": 2}
    assert told(config(**shared), 5_400_000) == "ppo, KL 0.01 (k3) to the first policy, 2,700,000 bytes beside each trainer"
