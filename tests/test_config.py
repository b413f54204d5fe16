"""Layers, origins, and one clear error for each mistake."""

from __future__ import annotations

import pytest

from rollyard.config import Config
from rollyard.errors import ConfigError
from rollyard.layers import options, presets, resolve

TASK = {"prompts.task": "sort"}
SPARE = TASK | {"rollout.max_staleness": 1, "rollout.oversample": 4}
ALONE = TASK | {"rollout.group_size": 1, "rollout.min_scored": 1}
ASYNC = TASK | {"place.placement": "async", "rollout.max_staleness": 1}
APART = {"place.placement": "separate"}
LORA = TASK | {"weights.what": "lora"}
SHARDED = {"train.shard": True, "place.train": 2, "place.placement": "separate"}
SGLANG = {"engine.kind": "sglang", "engine.url": "http://127.0.0.1:30000", "place.placement": "separate"}
SHARED = TASK | {"exchange.folder": "x", "place.placement": "separate"}


def test_later_layers_win_and_are_named(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("[train]\nlr = 3e-5\nwarmup_steps = 7\n[rollout]\nstop = ['a', 'b']\n")
    found = resolve(
        preset="sort",
        file=file,
        environment={"ROLLYARD_TRAIN__WARMUP_STEPS": "9", "ROLLYARD_CACHE": "/elsewhere", "HOME": "/"},
        overrides={"rollout.group_size": "4"},
    )
    config = found.config
    assert (config.train.lr, config.train.warmup_steps, config.rollout.group_size) == (3e-5, 9, 4)
    assert config.rollout.stop == ("a", "b") and config.prompts.task == "sort"
    names = ("train.lr", "train.warmup_steps", "rollout.group_size", "prompts.task", "run.seed")
    origins = [found.origins[name] for name in names]
    assert origins == [f"file {file}", "environment", "command line", "preset sort", "default"]


def test_prompts_need_not_spare_decoding():
    """A small step needs no second option, and a large one of the two turns the limit off."""
    for values in ({"engine.step_tokens": 100}, {"engine.prefill_tokens": 2**31}):
        resolve(environment={}, overrides=TASK | values)


@pytest.mark.parametrize("kind", ["reinforce++", "gae"])
def test_a_group_of_one_is_compared_with_others(kind):
    resolve(environment={}, overrides=ALONE | {"advantage.kind": kind})


def test_text_values_are_converted():
    values = {"rollout.stop": "x,y", "train.betas": "0.8,0.9", "run.overwrite": "true", "train.lr": "1e-3"}
    config = resolve(environment={}, overrides=TASK | values).config
    assert config.rollout.stop == ("x", "y") and config.train.betas == (0.8, 0.9)
    assert config.run.overwrite is True and config.train.lr == 1e-3


@pytest.mark.parametrize(
    ("values", "where", "told"),
    [
        ({}, "prompts.path", "none is given"),
        (TASK | {"place.nodes": "spread"}, "place.nodes", "add --place.runtime ray"),
        (
            TASK | APART | {"place.nodes": "spread", "place.runtime": "ray", "weights.transport": "shared_memory"},
            "place.nodes",
            "--weights.transport broadcast",
        ),
        (TASK | {"prompts.path": "x.jsonl"}, "prompts.path", "prompts.path and prompts.task are given"),
        ({"prompts.path": "x.jsonl"}, "model.path", "need a model"),
        (TASK | {"rollout.gruop_size": 3}, "command line", "did you mean rollout.group_size?"),
        (TASK | {"group_size": 3}, "command line", "did you mean rollout.group_size?"),
        (TASK | {"rollout.group_size": "many"}, "rollout.group_size (command line)", "'many' does not fit"),
        (TASK | {"run.steps": True}, "run.steps (command line)", "give INT"),
        (TASK | {"engine.prefill_tokens": 0}, "engine.prefill_tokens (command line)", "greater than or equal to 1"),
        (TASK | {"train.lr": 0}, "train.lr (command line)", "greater than 0"),
        (TASK | {"train.lr": float("nan")}, "train.lr (command line)", "finite"),
        (TASK | {"weights.rollover": "later"}, "weights.rollover (command line)", "'auto', 'drain', 'abort' or 'keep'"),
        (TASK | {"rollout.group_size": 1, "rollout.min_scored": 1}, "rollout.group_size", "at least 2"),
        (TASK | {"lora.rank": 8}, "lora", "add --weights.what lora"),
        (LORA | {"lora.dropout": 0.1}, "lora.dropout", "use 0"),
        (LORA | {"lora.targets": "q_proj,all-linear"}, "lora.targets", "each linear once"),
        (LORA | {"lora.targets": "q_proj,q_proj"}, "lora.targets", "each linear once"),
        (LORA | {"lora.targets": "lm_head"}, "lora.targets (command line)", "'q_proj'"),
        (LORA | {"lora.targets": ""}, "lora.targets", "names no set of linears"),
        (LORA | SHARDED, "train.shard", "each rank has the frozen parameters"),
        (LORA | SGLANG, "weights.what", "embedded or vllm that is started by the run"),
        (LORA | SGLANG | {"engine.kind": "vllm"}, "weights.what", "embedded or vllm that is started by the run"),
        (TASK | {"rollout.min_scored": 9}, "rollout.min_scored", "at most 8"),
        (ALONE, "rollout.group_size", "grpo compares"),
        (ALONE | {"advantage.kind": "reinforce++_baseline"}, "rollout.group_size", "at least 2"),
        (ALONE | {"advantage.kind": "gae", "rollout.filter": "flat"}, "rollout.filter", "use none"),
        (TASK | {"rollout.group_size": 1, "advantage.kind": "gae"}, "rollout.min_scored", "at most 1"),
        (TASK | {"rollout.refills": 9}, "rollout.refills", "add --rollout.filter flat"),
        (TASK | {"advantage.lam": 0.9}, "advantage.lam", "add --advantage.kind gae"),
        (TASK | {"advantage.kind": "rloo", "advantage.std": "population"}, "advantage.std", "rloo divides by no"),
        (TASK | {"advantage.kind": "dr_grpo", "advantage.eps": 0.5}, "advantage.eps", "dr_grpo divides by no standard deviation"),
        (TASK | {"advantage.std": "none", "advantage.eps": 0.5}, "advantage.eps", "--advantage.std sample or population"),
        (TASK | {"advantage.kind": "gae", "advantage.std": "none", "advantage.eps": 0.5}, "advantage.eps", "leave it out"),
        (TASK | {"rollout.on_stale": "drop"}, "rollout.on_stale", "add --rollout.max_staleness 1 or more"),
        (
            ASYNC | {"rollout.on_stale": "drop", "rollout.overtaking": "never"},
            "rollout.on_stale",
            "use --rollout.overtaking allow",
        ),
        (
            TASK | {"reward.model.folder": "m", "reward.model.place": "colocated", "reward.model.restarts": 2},
            "reward.model.restarts",
            "use --reward.model.place own",
        ),
        (TASK | {"rollout.refills": 0, "rollout.filter": "flat"}, "rollout.refills (command line)", "greater than or equal to 1"),
        (TASK | APART | {"advantage.kind": "gae", "train.adapter": "a.py:f"}, "advantage.kind", "has no value head"),
        (TASK | {"rollout.temperature": 1e-300}, "rollout.temperature", "at least 0.001"),
        (TASK | {"run.seed": 2**70}, "run.seed (command line)", "less than"),
        (TASK | {"rollout.temperature": 0}, "rollout.temperature", "above 0"),
        (TASK | {"rollout.max_staleness": 1}, "rollout.max_staleness", "without prompts to spare"),
        (TASK | {"train.shard": True, "place.train": 2}, "train.shard", "placement colocated"),
        (TASK | {"train.shard": True, "place.placement": "swap", "rollout.max_staleness": 1}, "train.shard", "placement swap"),
        (TASK | {"train.shard": True, "place.placement": "separate"}, "train.shard", "--place.train 2 or more"),
        (TASK | {"rollout.oversample": 4}, "rollout.oversample", "add --rollout.max_staleness 1"),
        (TASK | {"rollout.oversample": 4, "place.placement": "separate"}, "rollout.oversample", "use 0 with placement separate"),
        (SPARE | {"place.placement": "swap"}, "rollout.oversample", "use 0 with placement swap"),
        (SPARE | {"rollout.oversample": 99}, "rollout.oversample", "use at most 32"),
        (SPARE | {"rollout.max_live_groups": 40}, "rollout.oversample", "leave out rollout.max_live_groups"),
        (SPARE | {"rollout.overtaking": "never"}, "rollout.oversample", "--rollout.overtaking allow"),
        (SPARE | {"rollout.on_stale": "drop"}, "rollout.oversample", "leave out the long answers"),
        (TASK | {"exchange.folder": "x"}, "place.placement", "use separate or async with exchange.folder"),
        (SHARED | {"weights.transport": "broadcast"}, "weights.transport", "do not travel by broadcast"),
        (SHARED | {"weights.delta": True}, "weights.delta", "whole folders"),
        (SHARED | {"weights.what": "lora"}, "weights.what", "no adapters"),
        (SHARED | SHARDED, "train.shard", "leave it out with exchange.folder"),
        (SHARED | {"exchange.limit_s": 0}, "exchange.limit_s (command line)", "greater than 0"),
        (TASK | {"place.nodes": "one"}, "place.nodes", "add --place.runtime ray"),
        (TASK | {"exchange.limit_s": 5}, "exchange.limit_s", "name the folder that both share"),
        (TASK | {"rollout.moves": 1}, "rollout.moves", "placement separate or async"),
        (TASK | {"warmup.heads": 3}, "warmup.width", "multiple of 6"),
        (TASK | {"weights.delta": True}, "weights.delta", "nothing travels"),
        (
            TASK | {"place.placement": "separate", "engine.kind": "sglang", "engine.url": ("http://a:1",), "weights.delta": True},
            "weights.delta",
            "sglang reads whole folders by itself",
        ),
        (TASK | {"run.name": "../../x"}, "run.name", "'../../x' is not the name of one folder"),
        (TASK | {"run.name": "a\\b"}, "run.name", "not the name of one folder"),
        (TASK | {"run.name": ".."}, "run.name", "not the name of one folder"),
        (TASK | {"run.name": ""}, "run.name", "not the name of one folder"),
        (TASK | {"run.name": "a\0b"}, "run.name", "not the name of one folder"),
        (TASK | {"run.name": "x" * 101}, "run.name", "101 characters, where 100 are the most"),
        (TASK | {"rollout.max_live_groups": 5}, "rollout.max_live_groups", "at least 32"),
    ],
)
def test_a_mistake_says_what_where_and_what_would_be_right(values, where, told):
    with pytest.raises(ConfigError) as raised:
        resolve(environment={}, overrides=values)
    assert raised.value.where == where and told in str(raised.value)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[train\n", "not valid TOML"),
        ("[train]\nlr = " + "[" * 99_999, "not valid TOML"),
        ("lr = 1\n", "stands outside any section"),
        ("train = 1\n", "train is a section"),
        ("[trian]\nlr = 1\n", "did you mean train.lr?"),
        ("[train.lr]\nvalue = 1\n", "train.lr"),
    ],
)
def test_a_broken_file_is_named(tmp_path, text, told):
    file = tmp_path / "run.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as raised:
        resolve(file=file, environment={})
    assert told in str(raised.value) and str(file) in str(raised.value)


def test_files_and_presets_that_are_not_there(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        resolve(file=tmp_path / "none.toml", environment={})
    with pytest.raises(ConfigError, match=r"one of: .*sort"):
        resolve(preset="srot", environment={})


def test_a_variable_with_an_unknown_name_is_an_error():
    with pytest.raises(ConfigError, match=r"did you mean train\.lr\?"):
        resolve(preset="sort", environment={"ROLLYARD_TRAIN__LRR": "1"})


@pytest.mark.parametrize("preset", presets())
def test_every_preset_is_valid(preset):
    assert resolve(preset=preset, environment={}).config.prompts.task


def _names(tree: dict[str, object], above: str = "") -> list[str]:
    below = (_names(v, f"{above}{k}.") if isinstance(v, dict) else [above + k] for k, v in tree.items())
    return [name for names in below for name in names]


def test_a_section_within_a_section_is_set_from_everywhere(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('[reward.model]\nfolder = "a"\nweight = 2\n[reward.judge]\nurl = ["http://a/v1"]\nmodel = "m"')
    environment = {"ROLLYARD_REWARD__MODEL__TOKEN_BUDGET": "64"}
    found = resolve(preset="sort", file=file, environment=environment, overrides={"reward.judge.url": "http://a/v1,http://b/v1"})
    model, judge = found.config.reward.model, found.config.reward.judge
    assert (model.folder, model.weight, model.token_budget) == ("a", 2, 64)
    assert judge.url == ("http://a/v1", "http://b/v1")
    assert found.origins["reward.model.token_budget"] == "environment" and found.origins["reward.model.dtype"] == "default"
    with pytest.raises(ConfigError, match=r"reward\.model\.weight \(command line\)"):
        resolve(preset="sort", environment={}, overrides={"reward.model.weight": "much"})
    with pytest.raises(ConfigError, match=r"no option 'reward\.model\.wight'.*did you mean reward\.model\.weight"):
        resolve(preset="sort", environment={}, overrides={"reward.model.wight": "1"})


def test_every_option_is_described():
    assert [option.name for option in options()] == _names(Config().model_dump())
    assert all(option.description and option.values for option in options())
