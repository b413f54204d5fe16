"""Whole runs, small and real: model, tokenizer, engine, trainer, files."""

from __future__ import annotations

import asyncio
import json
import os
import tomllib
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

import rollyard
from rollyard import builder, worker
from rollyard.engine.capabilities import CAPABILITIES
from rollyard.engine.remote import RemoteEngine
from rollyard.errors import CheckpointError, ConfigError, EngineLost, RunFailed
from rollyard.journal.reader import JournalReader
from rollyard.place.child import launch
from rollyard.watch.read import read_report
from tests.rewards import patient, share_of_answer
from tests.tiny import tiny_folder
from tests.traces import read_strictly
from tests.watch.page import compare


@pytest.fixture
def make(tmp_path, monkeypatch):
    """Config of a small run on a random model with a prompts file; `changes` are dotted options."""
    monkeypatch.setenv("ROLLYARD_CACHE", str(tmp_path / "cache"))
    folder = tiny_folder(tmp_path, chat=False)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{chr(97 + i)}bc=", "answer": chr(97 + i)}) + "\n" for i in range(12)))

    def make_(**changes):
        values = {
            "run.out": str(tmp_path / "run"),
            "run.steps": 3,
            "model.path": str(folder),
            "prompts.path": str(prompts),
            "prompts.held_out": 2,
            "rollout.group_size": 4,
            "rollout.groups_per_step": 2,
            "rollout.max_tokens": 6,
            "train.lr": 1e-3,
            "engine.slots": 3,
        }
        return rollyard.resolve(environment={}, overrides=values | {k.replace("__", "."): v for k, v in changes.items()}).config

    return make_


def test_a_run_and_all_that_it_leaves_behind(make):
    config = make(checkpoint__every=1)
    run = rollyard.Run(config, reward=share_of_answer)
    steps = list(run)
    assert [step.step for step in steps] == [1, 2, 3]
    for step in steps:
        assert len(step.groups) == 2 and all(len(group.rollouts) == 4 for group in step.groups)
        values = [reward for group in step.groups for reward in group.rewards]
        assert step.reward_mean == pytest.approx(sum(values) / 8)
        for group in step.groups:
            for rollout in group.rollouts:
                done = rollout.completion
                assert [span.version.step for span in done.spans] == [step.step - 1]
                assert rollout.reward.value == share_of_answer("", done.text, str(group.prompt.columns["answer"]))
        assert step.train.logprob_gap_max < 1e-4  # the engine's logprobs are the trainer's
        assert (step.train.fresh_gap_max, step.train.stale_gap_max) == (step.train.logprob_gap_max, None)  # all is of now
        assert step.train.ratio_mean == pytest.approx(1.0, abs=1e-4)
    assert run.report is not None
    report = json.loads((run.folder.path / "report.json").read_text())
    assert report["steps"] == 3 and (report["admitted"], report["trained"], report["dropped"]) == (6, 6, {})
    assert report["members"] == {"admitted": 24, "trained": 24, "dropped": {}}
    assert report["versions"] == [[0, 0], [1, 0], [2, 0], [3, 0]]
    assert report["placement"] == "colocated" and report["engine"] == "embedded"
    assert sum(report["phases"].values()) == pytest.approx(report["wall_s"], rel=1e-6)
    tokens = sum(len(r.completion.token_ids) for step in steps for group in step.groups for r in group.rollouts)
    assert report["generation_tokens"] == tokens
    trace = read_strictly(run.folder.path / "trace.json")
    assert trace.trained == {step.step: {group.id for group in step.groups} for step in steps} and not trace.left_out
    assert sum(each.args["tokens"] for each in trace.of("request")) == tokens
    assert report["reward"]["curve"] == [step.reward_mean for step in steps]
    assert report["eval"]["first"] is not None and report["eval"]["last"] is not None
    assert 0 < report["slots_busy"] <= 1
    assert read_report(run.folder.report) == run.report
    metrics = [json.loads(line) for line in (run.folder.path / "metrics.jsonl").read_text().splitlines()]
    assert [record["reward_mean"] for record in metrics] == report["reward"]["curve"]
    undocumented, unwritten = compare({name for record in metrics for name in record})
    assert (undocumented, unwritten) == ([], ["dropped/REASON"])  # nothing was dropped
    assert tomllib.loads((run.folder.path / "config.toml").read_text())["run"]["steps"] == 3
    assert sorted(path.name for path in (run.folder.path / "checkpoints").iterdir()) == ["step-000002", "step-000003"]
    last = run.folder.checkpoint(3)
    AutoModelForCausalLM.from_pretrained(last)
    AutoTokenizer.from_pretrained(last)
    with JournalReader(run.folder.journal) as journal:
        for step in steps:
            for group in step.groups:
                assert journal.group(group.id).rewards == group.rewards
                kept = journal.group(group.id).rollouts
                assert [r.completion.token_ids for r in kept] == [r.completion.token_ids for r in group.rollouts]


def test_the_same_seed_gives_the_same_run_whatever_the_slots(make, tmp_path):
    def rewards(slots, seed=0):
        config = make(engine__slots=slots, run__out=str(tmp_path / f"run-{slots}-{seed}"), run__seed=seed)
        steps = list(rollyard.Run(config, share_of_answer))
        return [[rollout.completion.token_ids for group in step.groups for rollout in group.rollouts] for step in steps]

    first = rewards(3)
    assert rewards(8) == first
    assert rewards(8, seed=1) != first


async def test_in_an_asynchronous_loop(make):
    async def judge(prompt, completion):
        await asyncio.sleep(0)
        return float(len(completion))

    steps = [step.step async for step in rollyard.Run(make(), reward=judge)]
    assert steps == [1, 2, 3]


def test_judging_goes_on_while_others_are_written_and_the_books_say_so(make):
    """Verdicts take far longer than tokens here: the first of a batch are hidden, the last are waited for."""
    rewards = {"slow": patient, "length": lambda prompt, completion: float(len(completion))}
    config = make(rollout__max_tokens=24, rollout__ignore_eos=True, engine__slots=1, prompts__held_out=0, reward__weights="1,0.5")
    run = rollyard.Run(config, rewards)
    steps = list(run)
    report = run.report
    assert report is not None and len(steps) == 3 and report.rewards.keys() == {"slow", "length"}
    for group in steps[0].groups:
        for reward in (rollout.reward for rollout in group.rollouts):
            assert reward.value == reward.parts["slow"] + 0.5 * reward.parts["length"]
    found = report.phases
    assert found.scoring_s >= found.scoring_hidden_s > 0 and found.score_s > 0
    assert found.scoring_s == pytest.approx(found.scoring_hidden_s + found.score_s, abs=0.05)
    assert sum(step.phases.scoring_s for step in steps) == pytest.approx(found.scoring_s, rel=0.2)
    assert not list(run.folder.path.glob("*.pickle"))


def test_a_short_last_batch_and_the_end_of_the_prompts(make):
    """10 prompts to train on, once, in batches of 4: 4, 4, 2."""
    config = make(prompts__epochs=1, rollout__groups_per_step=4, run__steps=50)
    run = rollyard.Run(config, reward=share_of_answer)
    assert [len(step.groups) for step in run] == [4, 4, 2]
    assert run.report is not None and run.report.finished.cause == "the prompts are used up"
    assert run.folder.checkpoint(3).is_dir() and not run.report.finished.failed


def test_a_reward_that_fails_now_and_then_is_counted_and_never_zero(make):
    calls = iter(range(10**6))

    def moody(prompt, completion):
        if next(calls) % 4 == 3:
            raise ValueError("no number in it")
        return 1.0

    run = rollyard.Run(make(prompts__held_out=0, reward__workers=1), reward=moody)
    steps = list(run)
    assert [step.reward_mean for step in steps] == [1.0, 1.0, 1.0]
    for step in steps:  # who has no verdict is not trained on
        members = [each for group in step.groups for each in group.rollouts]
        assert step.train.tokens == sum(len(each.completion.token_ids) for each in members if each.reward.value is not None)
        assert step.to_metrics()["tokens_per_prompt"] * 2 == sum(len(each.completion.token_ids) for each in members)
    report = run.report
    assert report is not None and report.members.dropped["no_verdict"] == report.members.admitted // 4
    with JournalReader(run.folder.journal) as journal:
        problems = {row[0] for row in journal.query("SELECT DISTINCT problem FROM verdicts WHERE value IS NULL")}
    assert problems == {"ValueError: no number in it"}


def test_a_reward_that_always_fails_ends_the_run_with_its_cause(make):
    def broken(prompt, completion):
        raise KeyError("answer")

    run = rollyard.Run(make(rollout__give_up_after=5), reward=broken)
    with pytest.raises(RunFailed, match=r"5 prompts in a row.*KeyError"):
        list(run)
    assert run.report is not None and run.report.finished.failed
    assert run.report.prompts.admitted == sum(run.report.prompts.dropped.values())
    assert json.loads(run.folder.report.read_text())["finished"]["failed"] is True


def test_leaving_the_loop_early_closes_everything(make):
    run = rollyard.Run(make(), reward=share_of_answer)
    for step in run:
        assert step.step == 1
        break
    assert run.report is not None and run.report.finished.cause == "left by the caller"
    assert run.report.prompts.admitted == run.report.prompts.trained + sum(run.report.prompts.dropped.values())


async def test_stopping_saves_what_was_learnt(make):
    run = rollyard.Run(make(run__steps=1000), reward=share_of_answer)
    async for step in run:
        if step.step == 2:
            run.stop("enough")
    assert run.report is not None and run.report.finished.cause == "enough" and not run.report.finished.failed
    assert run.folder.checkpoint(run.report.steps).is_dir()
    assert run.report.prompts.admitted == run.report.prompts.trained + run.report.prompts.dropped.get("stopped", 0)


def test_an_existing_folder_is_refused_and_replaced_only_when_it_is_a_run(make, tmp_path):
    list(rollyard.Run(make(run__steps=1), reward=share_of_answer))
    with pytest.raises(ConfigError, match="exists already"):
        rollyard.Run(make(), reward=share_of_answer)
    list(rollyard.Run(make(run__steps=1, run__overwrite=True), reward=share_of_answer))
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match="something else than a run"):
        rollyard.Run(make(run__out=str(precious), run__overwrite=True), reward=share_of_answer)
    assert (precious / "thesis.txt").exists()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"model__path": "/nowhere/model"}, "model.path"),
        ({"rollout__max_tokens": 256}, "leave no room for a prompt"),
        ({"engine__window": 300}, "more than the model's window"),
        ({"prompts__path": "/nowhere/prompts.jsonl"}, "cannot be read"),
        ({"train__limit_s": 60}, r"train\.limit_s: the trainer is in this process"),
    ],
)
def test_mistakes_are_told_before_anything_loads(make, changes, told):
    with pytest.raises(ConfigError, match=told):
        rollyard.Run(make(**changes), reward=share_of_answer)


def test_a_stop_string_that_no_text_can_hold_is_told(make):
    """The end of sequence has no text, so it would never be found: not silently."""
    with pytest.raises(ConfigError, match=r"rollout\.stop: the stop string '!<eos>' has a special token in it.*eos_token_id"):
        list(rollyard.Run(make(rollout__stop=["ok", "!<eos>"]), reward=share_of_answer))


def test_a_prompts_file_needs_a_reward(make):
    with pytest.raises(ConfigError, match="need a reward"):
        rollyard.Run(make())


def test_a_prompt_that_fills_the_window_is_dropped(make, tmp_path):
    path = tmp_path / "long.jsonl"
    texts = ["ab=", "a" * 20, "cd=", "ef="]
    path.write_text("".join(json.dumps({"prompt": text, "answer": "a"}) + "\n" for text in texts))
    config = make(prompts__path=str(path), prompts__held_out=0, prompts__epochs=1, rollout__groups_per_step=3, engine__window=20)
    run = rollyard.Run(config, reward=share_of_answer)
    assert [sorted(group.prompt.text for group in step.groups) for step in run] == [["ab=", "cd=", "ef="]]
    assert run.report is not None and run.report.prompts.dropped == {"context": 1}


def test_two_runs_never_share_a_folder(make):
    first = iter(rollyard.Run(make(run__steps=5), reward=share_of_answer))
    next(first)
    second = rollyard.Run(make(run__overwrite=True), reward=share_of_answer)
    with pytest.raises(ConfigError, match="a run is going on"):
        list(second)
    assert [step.step for step in first] == [2, 3, 4, 5]
    list(rollyard.Run(make(run__overwrite=True), reward=share_of_answer))


def test_a_failed_run_saves_what_it_had_learnt(make):
    judged = iter(range(10**6))

    def breaks_later(prompt, completion):
        if next(judged) >= 2 * 8 + 4:
            raise ValueError("gone")
        return float(len(completion))

    config = make(rollout__give_up_after=3, prompts__held_out=0, run__steps=50, reward__workers=1)
    run = rollyard.Run(config, reward=breaks_later)
    with pytest.raises(RunFailed):
        list(run)
    assert run.report is not None and run.report.steps == 2
    AutoModelForCausalLM.from_pretrained(run.folder.checkpoint(2))


def test_rewards_beyond_float32_are_no_verdict(make):
    run = rollyard.Run(make(rollout__give_up_after=3), reward=lambda prompt, completion: 1e308)
    with pytest.raises(RunFailed, match="no finite float32 number"):
        list(run)


def test_a_broken_model_leaves_no_folder_behind(make, tmp_path):
    config = make()
    weights = next((tmp_path / "llama-tied-0").glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:1000])
    run = rollyard.Run(config, reward=share_of_answer)
    with pytest.raises(ConfigError):
        list(run)
    assert not run.folder.path.exists()


async def test_a_disk_that_is_full_is_one_clear_error(make, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("rollyard.train.trainer.save", full)
    run = rollyard.Run(make(run__steps=1), reward=share_of_answer)
    told = r"checkpoints/step-000001 cannot be written: No space left on device$"  # not the name of a draft
    with pytest.raises(CheckpointError, match=told), pytest.warns(RuntimeWarning, match=rf"is not saved: .*{told}"):
        async for _ in run:
            pass
    assert run.report is not None and run.report.finished.failed


def test_an_engine_that_cannot_be_started_takes_those_before_it_along(make, monkeypatch):
    """The first is a process of its own: it is gone with the run, and so is the publisher's memory."""
    children, closed, there = [], [], asyncio.Event()

    async def launch_engine(config, id_, folder, start, injector):
        if id_ == "engine-1":
            await there.wait()
            raise EngineLost("there is no room for it")
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
        child = await launch("tests.place.hosts:helpful", b"", name=id_, environment=environment)
        children.append(child.pid)
        there.set()
        return RemoteEngine(id_, child, CAPABILITIES["embedded"], start_s=30, sync_s=30, drain_s=30)

    def build_publisher(*args, build=worker.build_publisher):
        publisher = build(*args)
        monkeypatch.setattr(publisher, "close", lambda close=publisher.close: closed.append(close()))
        return publisher

    monkeypatch.setattr(builder, "launch_engine", launch_engine)
    monkeypatch.setattr(worker, "build_publisher", build_publisher)
    run = rollyard.Run(make(place__placement="separate", place__generate=2), reward=share_of_answer)
    with pytest.raises(EngineLost, match="no room"):
        list(run)
    assert len(children) == len(closed) == 1 and not Path(f"/proc/{children[0]}").exists()
    assert run.report is not None and run.report.finished.failed


def test_a_station_that_fails_to_close_leaves_the_others_and_the_report_alone(make, monkeypatch):
    closed = []

    async def fails(self):
        raise OSError("the socket is gone")

    async def closes(self):
        closed.append(self)

    monkeypatch.setattr("rollyard.engine.embedded.engine.EmbeddedEngine.close", fails)
    monkeypatch.setattr("rollyard.train.trainer.ReferenceTrainer.close", fails)
    monkeypatch.setattr("rollyard.reward.combine.Combined.close", closes)
    run = rollyard.Run(make(run__steps=1), reward=share_of_answer)
    with pytest.warns(RuntimeWarning, match="OSError: the socket is gone") as warned:
        list(run)
    assert len(warned) == 2 and len(closed) == 1
    assert run.report is not None and not run.report.finished.failed and run.folder.report.exists()
