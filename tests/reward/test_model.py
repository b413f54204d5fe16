"""A reward model: the same number for a text in whatever batch, each asker its own, and what becomes of a process that dies."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForSequenceClassification

import rollyard
from rollyard.combinations import check as check_combinations
from rollyard.config import Config, RewardModelConfig
from rollyard.errors import ConfigError, ScoringError
from rollyard.model.tokenizer import Tokenizer
from rollyard.place import child
from rollyard.place.inline import DeviceThread
from rollyard.reward.batched import Batched
from rollyard.reward.budget import next_batch
from rollyard.reward.classifier import Asked, Classifier, Row, check_folder
from rollyard.reward.model import RemoteModel
from rollyard.types import Activity, Completion, FinishReason, Prompt
from tests.reward.classifiers import classifier_folder
from tests.reward.hosts import Lengths
from tests.small import children, config, share_of_a
from tests.workers import FakeLauncher, Hung

TEXTS = ["a", "3+4=7", "a much longer text than the others, padded to", "b!", "middle of them"]


def asked(text: str, prompt: str = "what?") -> Asked:
    return Asked((), prompt, text)


def pair(text: str) -> tuple[Prompt, Completion]:
    return Prompt(0, 0, (2,), "what?"), Completion(0, 0, (2,), (0.0,), (), FinishReason.STOP, text)


# ------------------------------------------------------------------------------------------------- which batch


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(40, 100))
def test_batches_fit_their_budget_and_nobody_waits_for_ever(lengths, budget):
    waiting, done = list(enumerate(lengths)), []
    while waiting:
        chosen = next_batch([length for _, length in waiting], budget)
        assert 0 in chosen and list(chosen) == sorted(set(chosen))
        batch = [waiting[place] for place in chosen]
        assert max(length for _, length in batch) * len(batch) <= budget
        waiting = [each for place, each in enumerate(waiting) if place not in chosen]
        done += [number for number, _ in batch]
    assert sorted(done) == list(range(len(lengths)))


@pytest.mark.parametrize(
    ("lengths", "budget", "chosen"),
    [([3, 9, 8, 2], 18, (0, 3)), ([9, 3, 8, 2], 18, (0, 2)), ([5], 5, (0,)), ([2, 2, 2], 4, (0, 1)), ([1, 4, 1], 12, (0, 1, 2))],
)
def test_what_is_alike_goes_together(lengths, budget, chosen):
    assert next_batch(lengths, budget) == chosen


# ------------------------------------------------------------------------------------------------ what it says


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {}),  # no pad token, as many have it
        ("llama", {"pad_token_id": 0}),
        ("llama", {"pad_token_id": 1}),  # the end-of-sequence token, which the chat template writes
        ("llama", {"pad_token_id": -1}),  # as Llama's first configs had it: no token at all
        ("qwen2", {}),
        ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4}),
        ("bert", {"pad_token_id": 0, "type_vocab_size": 2}),
    ],
)
@pytest.mark.parametrize("chat", [False, True])
def test_in_a_batch_and_alone_and_as_transformers_says(tmp_path, family, settings, chat):
    folder = classifier_folder(tmp_path, family, chat=chat, **settings)
    classifier = Classifier(RewardModelConfig(folder=str(folder)), "cpu")
    rows = [classifier.row(asked(text)) for text in TEXTS]
    together, alone = classifier.judge(rows), [classifier.judge([row])[0] for row in rows]
    assert together == pytest.approx(alone, abs=2e-5)
    assert classifier.judge(rows[::-1]) == pytest.approx(alone[::-1], abs=2e-5)
    theirs = AutoModelForSequenceClassification.from_pretrained(folder)
    with torch.inference_mode():
        expected = [theirs(torch.tensor([row.ids])).logits.item() for row in rows]
    assert alone == pytest.approx(expected, abs=2e-5)
    assert len({round(value, 3) for value in alone}) == len(TEXTS)  # a model that says the same of all would pass


def test_padded_on_the_wrong_side_or_read_at_padding_it_would_say_something_else(tmp_path):
    """What the test above guards against is visible with these models."""
    theirs = AutoModelForSequenceClassification.from_pretrained(classifier_folder(tmp_path, pad_token_id=60))
    row = [5, 6, 7, 8]
    with torch.inference_mode():
        right, wrong, left = (theirs(torch.tensor([ids])).logits.item() for ids in (row, [*row, 61, 61], [61, 61, *row]))
    assert abs(right - wrong) > 1e-2 and abs(right - left) > 1e-2


def test_a_vocabulary_that_is_used_up_is_judged_one_by_one(tmp_path):
    classifier = Classifier(RewardModelConfig(folder=str(classifier_folder(tmp_path, vocab_size=44))), "cpu")
    rows = [Row(tuple(range(44)), (0,) * 44), Row((5, 6), (0, 0))]
    assert classifier.judge(rows) == [classifier.judge([row])[0] for row in rows]


def test_the_text_is_that_of_the_template(tmp_path):
    folder = classifier_folder(tmp_path, chat=True)
    classifier, tokenizer = Classifier(RewardModelConfig(folder=str(folder)), "cpu"), Tokenizer(folder)
    assert tokenizer.decode(classifier.row(asked("five", "2+3=")).ids) == "user=2+3=assistant=five"
    conversation = Asked(({"role": "system", "content": "add"}, {"role": "user", "content": "2+3="}), "system: add...", "five")
    assert tokenizer.decode(classifier.row(conversation).ids) == "system=adduser=2+3=assistant=five"
    assert classifier.row(asked("five", "2+3=")).ids.count(1) == 2  # each message ends, and nothing begins after them


def test_a_template_that_refuses_is_no_verdict(tmp_path):
    folder = classifier_folder(tmp_path, chat=True)
    (folder / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    classifier = Classifier(RewardModelConfig(folder=str(folder)), "cpu")
    with pytest.raises(ScoringError, match="refuses this conversation: roles must alternate"):
        classifier.row(asked("five"))


def test_without_a_template_one_follows_the_other_or_both_are_a_pair(tmp_path):
    folder = classifier_folder(tmp_path)
    classifier, tokenizer = Classifier(RewardModelConfig(folder=str(folder)), "cpu"), Tokenizer(folder)
    assert tokenizer.decode(classifier.row(asked("five", "2+3=")).ids) == "2+3=five"


@pytest.mark.parametrize(
    ("settings", "label", "value"),
    [
        ({"num_labels": 3}, "LABEL_1", lambda logits: logits.softmax(-1)[1]),
        ({"num_labels": 2}, "0", lambda logits: logits.softmax(-1)[0]),
        ({"num_labels": 3, "problem_type": "multi_label_classification"}, "2", lambda logits: logits.sigmoid()[2]),
        ({"num_labels": 3, "problem_type": "regression"}, "LABEL_2", lambda logits: logits[2]),
        ({"num_labels": 1}, "", lambda logits: logits[0]),
    ],
)
def test_labels(tmp_path, settings, label, value):
    folder = classifier_folder(tmp_path, **settings)
    model = RewardModelConfig(folder=str(folder), label=label)
    check_folder(model)
    classifier = Classifier(model, "cpu")
    row = classifier.row(asked("abc"))
    with torch.inference_mode():
        logits = AutoModelForSequenceClassification.from_pretrained(folder)(torch.tensor([row.ids])).logits[0]
    assert classifier.judge([row]) == pytest.approx([float(value(logits))], abs=1e-6)


def test_what_cannot_be_judged_is_refused_before_it_is(tmp_path):
    classifier = Classifier(RewardModelConfig(folder=str(classifier_folder(tmp_path)), token_budget=100), "cpu")
    with pytest.raises(ScoringError, match=r"134 tokens are more than the reward model takes \(128\)"):
        classifier.row(asked("x" * 129))
    with pytest.raises(ScoringError, match=r"125 tokens are more than reward.model.token_budget \(100\)"):
        classifier.row(asked("x" * 120))
    with pytest.raises(ScoringError, match="no token"):
        classifier.row(asked("", ""))


def test_folders_that_hold_no_classifier(tmp_path):
    for folder, content, problem in (
        (tmp_path / "absent", None, "there is no folder .*absent "),
        (tmp_path, None, "has no config.json"),
        (tmp_path, "{", "config.json cannot be read: Expecting"),
        (tmp_path, "[]", "config.json holds no JSON object"),
    ):
        if content is not None:
            (folder / "config.json").write_text(content)
        with pytest.raises(ConfigError, match=problem):
            check_folder(RewardModelConfig(folder=str(folder)))
    two = classifier_folder(tmp_path / "two", num_labels=2)
    with pytest.raises(ConfigError, match=r"2 labels: LABEL_0, LABEL_1 \(say which one is the reward\)"):
        check_folder(RewardModelConfig(folder=str(two)))
    with pytest.raises(ConfigError, match=r"no label 'good' \(one of: LABEL_0, LABEL_1\)"):
        check_folder(RewardModelConfig(folder=str(two), label="good"))
    settings = json.loads((two / "config.json").read_text())
    (two / "config.json").write_text(json.dumps(settings | {"architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(ConfigError, match="holds LlamaForCausalLM, which is no sequence classifier"):
        check_folder(RewardModelConfig(folder=str(two), label="0"))


def test_a_head_that_is_missing_is_not_made_up(tmp_path):
    from safetensors.torch import load_file, save_file

    folder = classifier_folder(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors["score.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"has no score\.weight"):
        Classifier(RewardModelConfig(folder=str(folder)), "cpu")


# ------------------------------------------------------------------------------------------- batch after batch


class Slow(Lengths):
    """Keeps what it was given, and fails when it is told to."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.failing = ""

    def judge(self, rows: Sequence[Row]) -> list[float]:
        self.batches.append([len(row.ids) for row in rows])
        if self.failing:
            raise RuntimeError(self.failing)
        return super().judge(rows)


@pytest.fixture
def device():
    thread = DeviceThread()
    yield thread
    thread.close()


async def test_everyone_gets_his_own_verdict(device):
    slow = Slow()
    model = Batched(slow, device, 32, 10.0, 60.0)
    lengths = [3, 30, 1, 16, 2, 15, 31, 4, 4, 4]
    rewards = await asyncio.gather(*(model.score(*pair("x" * length)) for length in lengths))
    assert [reward.value for reward in rewards] == lengths
    assert slow.batches == [[3, 1, 2, 4, 4, 4], [30], [16, 15], [31]]
    assert {span.activity for span in device.spans.drain()} == {Activity.SCORE}
    await model.close()


async def test_others_have_their_turn_on_the_device_between_batches(device):
    slow, turns = Slow(), []
    model = Batched(slow, device, 4, 10.0, 60.0)
    judge = slow.judge
    slow.judge = lambda rows: turns.append("judge") or judge(rows)  # type: ignore[method-assign]
    scoring = [asyncio.create_task(model.score(*pair("xxxx"))) for _ in range(3)]
    for _ in range(5):
        await device.run(turns.append, "engine")
    await asyncio.gather(*scoring)
    assert turns.count("judge") == 3 and turns != sorted(turns) and "engine" in turns[1:]
    await model.close()


async def test_failures_and_lateness_are_no_verdicts(device):
    slow = Slow()
    slow.failing = "out of memory"
    model = Batched(slow, device, 32, 0.2, 60.0)
    assert (await model.score(*pair("x"))).problem == "the reward model failed: RuntimeError: out of memory"
    slow.failing = ""
    slow.judge = lambda rows: [float("nan")]  # type: ignore[method-assign]
    assert (await model.score(*pair("x"))).problem == "the reward model says nan"
    gate = threading.Event()
    slow.judge = lambda rows: gate.wait() and [0.0]  # type: ignore[method-assign]
    late = await asyncio.gather(*(model.score(*pair("x")) for _ in range(2)))
    gate.set()
    assert [each.value for each in late] == [None, None]
    assert late[0].problem == "the reward model gave no verdict within 0.2 s"
    await model.close()


async def test_waiting_is_not_a_verdicts_own_time(device):
    """Neither for other batches, nor for what else the device does, such as a step of the trainer."""
    slow = Slow()
    slow.judge = lambda rows: time.sleep(0.02) or [1.0] * len(rows)  # type: ignore[method-assign, func-returns-value]
    model = Batched(slow, device, 4, 0.3, 60.0)
    step = asyncio.create_task(device.run(time.sleep, 0.5))
    await asyncio.sleep(0)
    rewards = await asyncio.gather(*(model.score(*pair("xxxx")) for _ in range(24)))
    assert [reward.value for reward in rewards] == [1.0] * 24
    await step
    await model.close()


async def test_whoever_waits_too_long_for_a_batch_ends_the_run(device):
    gate = threading.Event()
    held = asyncio.create_task(device.run(gate.wait))
    await asyncio.sleep(0)
    model = Batched(Slow(), device, 4, 10.0, 0.1)
    found = await asyncio.gather(*(model.score(*pair("xxxx")) for _ in range(3)), return_exceptions=True)
    assert [type(each) for each in found] == [ScoringError] * 3
    assert "a text waited 0.1 s, and its batch has not begun" in str(found[0])
    gate.set()
    await held
    assert (await model.score(*pair("xxx"))).value == 3.0  # nothing of those is left over
    await model.close()


# ------------------------------------------------------------------------------------------ in its own process


@asynccontextmanager
async def remote(target: str, **settings: object) -> AsyncIterator[RemoteModel]:
    """One that is served by a child which runs this function of tests.reward.hosts."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    launch = partial(child.launch, f"tests.reward.hosts:{target}", b"", name="reward model", environment=environment)
    model = RemoteModel(launch, RewardModelConfig(folder="m", **settings), 30.0)
    try:
        yield model
    finally:
        await model.close()
        assert not children("tests.reward.hosts")


async def test_a_process_that_is_lost_is_started_again_and_then_the_run_ends():
    async with remote("judging", restarts=1) as model:
        await model.start()
        rewards = await asyncio.gather(*(model.score(*pair("x" * length)) for length in (5, 1, 3)))
        assert [reward.value for reward in rewards] == [5, 1, 3]
        (process,) = children("tests.reward.hosts")
        os.kill(process, signal.SIGKILL)  # nobody asks just now: it is seen all the same
        async with asyncio.timeout(20):
            while children("tests.reward.hosts") in ([], [process]):  # noqa: ASYNC110 - processes set no events
                await asyncio.sleep(0.01)
        rewards = await asyncio.gather(*(model.score(*pair("x" * length)) for length in (2, 4)))
        assert [reward.value for reward in rewards] == [2, 4]
        with pytest.raises(ScoringError, match=r"the reward model's process was lost: .*ended with exit code 3"):
            await asyncio.gather(model.score(*pair("die")), model.score(*pair("x")))
        with pytest.raises(ScoringError, match="exit code 3"):
            await model.score(*pair("x"))
        assert Activity.RESTART in {span.activity for span in model.spans.drain()}


async def test_what_was_under_way_in_a_lost_process_is_asked_of_the_next():
    async with remote("judging", restarts=1) as model:
        await model.start()
        (process,) = children("tests.reward.hosts")
        os.kill(process, signal.SIGSTOP)
        asking = [asyncio.create_task(model.score(*pair("x" * length))) for length in (7, 2)]
        await asyncio.sleep(0.05)
        os.kill(process, signal.SIGKILL)
        assert [reward.value for reward in await asyncio.gather(*asking)] == [7, 2]


async def test_no_process_is_started_for_what_was_under_way_when_it_was_closed():
    async def answer(name: str, content: bytes) -> bytes:
        if name != "start":
            await asyncio.sleep(60)
        return b""

    launcher = FakeLauncher(answer)
    launch = partial(launcher.launch, "a:target", b"", name="reward model", environment={})
    model = RemoteModel(launch, RewardModelConfig(folder="m", restarts=3), 30.0)
    await model.start()
    asking = asyncio.create_task(model.score(*pair("x")))
    await asyncio.sleep(0)
    await model.close()
    async with asyncio.timeout(5):
        with pytest.raises(ScoringError, match="the reward model is closed"):
            await asking
        with pytest.raises(ScoringError, match="the reward model is closed"):
            await model.score(*pair("x"))
    assert [process.closed for process in launcher.started] == [True]


async def test_a_process_that_does_not_answer_at_all_is_no_missing_verdict():
    async def answer(name: str, content: bytes) -> bytes:
        if name != "start":
            raise Hung
        return b""

    launch = partial(FakeLauncher(answer).launch, "a:target", b"", name="reward model", environment={})
    model = RemoteModel(launch, RewardModelConfig(folder="m", limit_s=1, wait_s=7), 30.0)
    await model.start()
    with pytest.raises(ScoringError, match=r"process hangs: .* within 13 s"):
        await model.score(*pair("x"))
    await model.close()


async def test_a_model_that_cannot_be_read_there_is_a_users_mistake_here():
    async with remote("unreadable") as model:
        with pytest.raises(ConfigError, match=r"reward.model.folder: no such model"):
            await model.start()


def test_files_that_cannot_be_read(tmp_path):
    folder = classifier_folder(tmp_path)
    (folder / "model.safetensors").write_bytes(b"none")
    with pytest.raises(ConfigError, match=r"reward.model.folder: .* cannot be read"):
        Classifier(RewardModelConfig(folder=str(folder)), "cpu")


# ------------------------------------------------------------------------------------------------- whole runs


def small(tmp_path: Path, **changes: object) -> Config:
    folder = classifier_folder(tmp_path / "reward", vocab_size=64)
    return config(tmp_path / "run", **{"reward.model.folder": str(folder), "run.steps": 2, **changes})


@pytest.mark.parametrize("place", [pytest.param("own", marks=pytest.mark.slow), "colocated"])
def test_a_run_that_a_model_judges(tmp_path, place):
    changes = {"reward.model.place": place, "reward.model.weight": 0.5, "reward.model.token_budget": 64}
    run = rollyard.Run(small(tmp_path, **changes), reward={"right": share_of_a})
    classifier = Classifier(run.config.reward.model, "cpu")
    for step in run:
        for group in step.groups:
            for rollout in group.rollouts:
                parts, row = rollout.reward.parts, classifier.row(asked(rollout.completion.text, group.prompt.text))
                assert set(parts) == {"right", "reward_model"}
                assert parts["reward_model"] == pytest.approx(classifier.judge([row])[0], abs=1e-5)
                assert rollout.reward.value == pytest.approx(parts["right"] + 0.5 * parts["reward_model"], abs=1e-6)
    report = run.report
    assert report is not None and not report.finished.failed
    busy = {role: device.busy_ns for device in report.usage.devices for role in device.roles}
    assert busy["scorer" if place == "own" else "trainer"]["score"] > 0
    assert len(report.usage.devices) == (2 if place == "own" else 1)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"place.placement": "swap", "rollout.max_staleness": 1, "reward.model.place": "colocated"}, "in another process"),
        ({"reward.model.label": "3"}, "no label '3'"),
        ({"reward.model.weight": 0, "reward.weights": "0"}, "all weights are 0"),
    ],
)
def test_what_does_not_fit_is_told_before_anything_starts(tmp_path, changes, told):
    with pytest.raises(ConfigError, match=told):
        rollyard.Run(small(tmp_path, **changes))


def test_options_of_a_model_that_is_not_there():
    given = {"prompts": {"task": "sort"}, "reward": {"model": {"weight": 2}}}
    with pytest.raises(ConfigError, match="there is none"):
        check_combinations(Config.model_validate(given))
