"""`Rollouts`: a run whose trainer is the code that calls."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import rollyard
from rollyard import caller
from rollyard.caller import Batch, Dropped
from rollyard.config import Config
from rollyard.errors import ConfigError, RollyardError, RunFailed
from rollyard.prompts.given import GivenPrompt
from rollyard.weights.given import GivenWeights, Weights
from tests.rewards import share_of_a
from tests.tiny import tiny_folder

SIZE, BATCH = 2, 3


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("model"))


def given(model: Path, out: Path, **changes: object) -> Config:
    """Of a small run with submitted prompts."""
    values: dict[str, Any] = {
        "model.path": str(model),
        "prompts.source": "given",
        "run.out": str(out),
        "run.steps": 2,
        "rollout.group_size": SIZE,
        "rollout.groups_per_step": BATCH,
        "rollout.max_tokens": 6,
        "engine.slots": 8,
        "engine.kernels": "plain",
    }
    named = {name.replace("__", "."): value for name, value in changes.items()}
    return rollyard.resolve(environment={}, overrides=values | named).config


def moved(model: PreTrainedModel) -> PreTrainedModel:
    """As if it had been trained."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 1e-3)
    return model


async def test_submitted_prompts_are_batched_in_order_and_what_is_published_writes_the_next(
    model_folder: Path, tmp_path: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    prompts = ["ab", [{"role": "user", "content": "cd"}], GivenPrompt(token_ids=[3, 4, 5], columns={"answer": "x"})]
    texts = [each for each in prompts if not isinstance(each, list)]  # the model has no chat template
    async with rollyard.Rollouts(given(model_folder, tmp_path / "run"), reward=share_of_a) as rollouts:
        assert await rollouts.submit([*texts, "ef"]) == (0, 1, 2)
        assert await rollouts.submit(["gh", "ij", "kl"]) == (3, 4, 5)
        seen = []
        async for batch in rollouts.batches():
            seen.append([group.id for group in batch.groups])
            for group in batch.groups:
                written = {span.version.step for rollout in group.rollouts for span in rollout.completion.spans}
                assert written == {batch.step} and len(group.rollouts) == SIZE
            assert {(sample.group, sample.member) for sample in batch.train.samples} == {
                (group.id, member) for group in batch.groups for member in range(SIZE)
            }
            version = await rollouts.publish(moved(model), {"loss": 0.25})
            assert version.step == batch.step + 1 == rollouts.status().version.step
    assert seen == [[0, 1, 2], [3, 4, 5]]
    assert rollouts.report is not None and not rollouts.report.finished.failed
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [(row["train/loss"], row["train/grad_norm"], row["train/tokens"] > 0) for row in rows] == [(0.25, None, True)] * 2
    (checkpoint,) = (tmp_path / "run" / "checkpoints").iterdir()
    stored = AutoModelForCausalLM.from_pretrained(checkpoint).state_dict()
    assert all(torch.equal(stored[name], tensor) for name, tensor in model.state_dict().items())


async def test_who_asks_for_a_batch_without_having_published_is_told_so(model_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing was published for it"), pytest.warns(RuntimeWarning, match="batch 0"):
        async with rollyard.Rollouts(given(model_folder, tmp_path / "run"), reward=share_of_a) as rollouts:
            await rollouts.submit(["ab", "cd", "ef"])
            async for _ in rollouts.batches():
                pass
    assert rollouts.report is not None and rollouts.report.finished.failed
    assert "nothing was published" in rollouts.report.finished.cause and rollouts.report.prompts.dropped == {"stopped": BATCH}


def test_without_async_the_run_has_a_thread_of_its_own(model_folder: Path, tmp_path: Path) -> None:
    config = given(model_folder, tmp_path / "run")
    with rollyard.Rollouts.sync(config, reward=share_of_a) as rollouts:
        model = AutoModelForCausalLM.from_pretrained(rollouts.model)
        assert rollouts.submit(["ab", "cd", "ef", "gh"]) == (0, 1, 2, 3)
        rollouts.end_of_prompts()
        seen = []
        for batch in rollouts.batches():
            seen.append(len(batch.groups))
            rollouts.publish(moved(model))
        assert rollouts.status().trained == 4
    assert seen == [BATCH, 1], "the last batch is made of what there is"
    assert rollouts.report is not None and not rollouts.report.finished.failed
    with pytest.raises(ConfigError, match="not going on"):
        rollouts.submit(["ab"])


async def test_an_exception_in_the_block_makes_a_failed_run_with_its_report(model_folder: Path, tmp_path: Path) -> None:
    config = given(model_folder, tmp_path / "run")
    with pytest.raises(ZeroDivisionError), pytest.warns(RuntimeWarning, match="batch 0 .3 prompts. was handed out"):
        async with rollyard.Rollouts(config, reward=share_of_a) as rollouts:
            await rollouts.submit(["ab", "cd", "ef", "gh"])
            async for _ in rollouts.batches():
                raise ZeroDivisionError("of mine")
    report = rollouts.report
    assert report is not None and report.finished.failed
    assert report.finished.cause == "the caller failed: ZeroDivisionError: of mine"
    assert report.prompts.dropped == {"stopped": report.prompts.admitted} and rollouts.status().state == "failed"
    assert json.loads((tmp_path / "run" / "report.json").read_text())["finished"]["failed"] is True


async def test_who_leaves_early_stops_the_run_and_what_was_published_is_saved(model_folder: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    config = given(model_folder, tmp_path / "run", run__steps=5)
    with pytest.warns(RuntimeWarning, match="batch 1 .* dropped as stopped"):
        async with rollyard.Rollouts(config, reward=share_of_a) as rollouts:
            await rollouts.submit(["ab"] * 9)
            async for batch in rollouts.batches():
                if batch.step == 1:
                    break
                await rollouts.publish(moved(model))
    report = rollouts.report
    assert report is not None and not report.finished.failed and report.finished.cause == "left by the caller"
    assert report.prompts.trained == BATCH and report.prompts.dropped == {"stopped": report.prompts.admitted - BATCH}
    (checkpoint,) = (tmp_path / "run" / "checkpoints").iterdir()
    stored = AutoModelForCausalLM.from_pretrained(checkpoint).state_dict()
    assert all(torch.equal(stored[name], tensor) for name, tensor in model.state_dict().items())


async def test_a_cancelled_block_is_left_and_no_failure(model_folder: Path, tmp_path: Path) -> None:
    rollouts = rollyard.Rollouts(given(model_folder, tmp_path / "run"), reward=share_of_a)
    waiting = asyncio.Event()

    async def going() -> None:
        async with rollouts:
            waiting.set()
            async for _ in rollouts.batches():  # no prompt ever comes
                raise AssertionError

    task = asyncio.create_task(going())
    await waiting.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert rollouts.report is not None and not rollouts.report.finished.failed


async def test_weights_that_do_not_suit_are_told_and_others_may_follow(model_folder: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    async with rollyard.Rollouts(given(model_folder, tmp_path / "run", run__steps=1), reward=share_of_a) as rollouts:
        with pytest.raises(ConfigError, match="no batch is out"):
            await rollouts.publish(model)
        await rollouts.submit(["ab", "cd", "ef"])
        async for _ in rollouts.batches():
            with pytest.raises(ConfigError, match="only on one side"):
                await rollouts.publish({"model.norm.weight": torch.zeros(64)})
            with pytest.raises(ConfigError, match="nothing is told of 'speed'"):
                await rollouts.publish(model, {"speed": 1.0})
            for odd in (float("nan"), "0.5", None, 10**5000, torch.ones(2), 1j):
                with pytest.raises(ConfigError, match="loss is "):
                    await rollouts.publish(model, {"loss": odd})  # type: ignore[dict-item]
            with pytest.raises(ConfigError, match="a list says no numbers by name"):
                await rollouts.publish(model, [("loss", 1.0)])  # type: ignore[arg-type]
            assert rollouts.version.step == 0
            await rollouts.publish(model, {"loss": torch.tensor(0.5)})  # type: ignore[dict-item]
            with pytest.raises(ConfigError, match="no batch is out"):
                await rollouts.publish(model)
    assert rollouts.report is not None and not rollouts.report.finished.failed


async def test_who_submits_waits_while_many_wait_and_never_for_itself(model_folder: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    config = given(model_folder, tmp_path / "run", prompts__waiting=2, run__steps=4)
    async with rollyard.Rollouts(config, reward=share_of_a) as rollouts:
        most = 0

        async def submitting() -> None:
            nonlocal most
            for _ in range(4 * BATCH):
                await rollouts.submit(["ab"])
                most = max(most, rollouts.status().waiting)

        task = asyncio.create_task(submitting())
        async for batch in rollouts.batches():
            if batch.step == 1:
                await asyncio.sleep(0.05)
                with pytest.raises(ConfigError, match="2 prompts wait, and none is asked until batch 1 is published"):
                    await rollouts.submit(["cd"])
            await rollouts.publish(moved(model))
        await task
    assert most == 2
    assert rollouts.report is not None and rollouts.report.prompts.trained == 4 * BATCH


async def test_of_every_prompt_it_is_told_what_became_of_it(model_folder: Path, tmp_path: Path) -> None:
    model, seen = AutoModelForCausalLM.from_pretrained(model_folder), {}
    with pytest.warns(RuntimeWarning, match="batch 1"):
        async with rollyard.Rollouts(given(model_folder, tmp_path / "run", run__steps=3), reward=share_of_a) as rollouts:

            async def following() -> None:
                async for outcome in rollouts.outcomes():
                    told = ("dropped", outcome.reason) if isinstance(outcome, Dropped) else ("finished", "")
                    seen.setdefault(getattr(outcome, "id", None) or getattr(outcome, "prompt", 0), []).append(told)

            task = asyncio.create_task(following())
            await asyncio.sleep(0)
            await rollouts.submit([GivenPrompt("a" * 300), *["ab"] * (2 * BATCH)])
            async for batch in rollouts.batches():
                if batch.step == 1:
                    break
                await rollouts.publish(moved(model))
    await task
    assert seen[0] == [("dropped", "context")]
    assert all(seen[id_] == [("finished", "")] for id_ in range(1, BATCH + 1))
    assert all(seen[id_] == [("finished", ""), ("dropped", "stopped")] for id_ in range(BATCH + 1, 2 * BATCH + 1))


async def test_groups_come_as_they_are_finished(model_folder: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    seen: list[int] = []
    async with rollyard.Rollouts(given(model_folder, tmp_path / "run"), reward=share_of_a) as rollouts:

        async def following() -> None:
            async for group in rollouts.groups():
                assert len(group.rollouts) == SIZE and None not in group.rewards
                seen.append(group.id)

        task = asyncio.create_task(following())
        await rollouts.submit(["ab"] * 2 * BATCH)
        async for batch in rollouts.batches():
            assert {group.id for group in batch.groups} <= set(seen)
            await rollouts.publish(moved(model))
    await task
    assert sorted(seen) == list(range(2 * BATCH))


def rows(batch: Batch) -> list[tuple[object, ...]]:
    return [(sample.group, sample.member, sample.token_ids, sample.spans) for sample in batch.train.samples]


async def test_a_run_that_is_resumed_asks_again_what_was_live(model_folder: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    config = given(model_folder, tmp_path / "run", run__steps=3, checkpoint__every=1, **{"prompts.waiting": 100})

    def save(folder: Path) -> None:
        (folder / "mine.txt").write_text("an optimizer")

    with pytest.warns(RuntimeWarning, match="batch 1"):
        async with rollyard.Rollouts(config, reward=share_of_a, save=save) as rollouts:
            await rollouts.submit(["ab", "cd", "ef", "gh", "ij", "kl", "not admitted"])
            async for batch in rollouts.batches():
                if batch.step == 1:
                    taken = batch
                    break
                await rollouts.publish(moved(model))
    with pytest.raises(ConfigError, match="or its resume"):
        rollyard.Run.resume(tmp_path / "run", reward=share_of_a)
    async with rollyard.Rollouts.resume(tmp_path / "run", reward=share_of_a, save=save) as again:
        assert (again.model / "mine.txt").read_text() == "an optimizer"
        model = AutoModelForCausalLM.from_pretrained(again.model)
        assert again.version.step == 1 and again.next_prompt == 6
        assert await again.submit(["mn", "op", "qr"]) == (6, 7, 8)
        seen = []
        async for batch in again.batches():
            seen.append([group.id for group in batch.groups])
            if batch.step == 1:
                assert rows(batch) == rows(taken), "its rollouts are used again"
            await again.publish(moved(model))
    assert seen == [[3, 4, 5], [6, 7, 8]]
    assert again.report is not None and again.report.prompts.trained == 9 and len(again.report.lives.begun) == 2


@pytest.mark.parametrize(
    ("options", "where"),
    [
        ({"place.placement": "swap", "rollout.max_staleness": 1}, "place.placement"),
        ({"place.train": 2}, "place.train"),
        ({"place.runtime": "ray"}, "place.runtime"),
        ({"train.kl": 0.1}, "train.kl"),
        ({"advantage.kind": "gae"}, "advantage.kind"),
        ({"weights.what": "lora"}, "weights.what"),
        ({"prompts.held_out": 3}, "prompts.held_out"),
        ({"prompts.task": "sort"}, "prompts.task"),
    ],
)
def test_what_does_not_go_with_a_caller_is_refused_at_once(
    model_folder: Path, tmp_path: Path, options: dict[str, object], where: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        rollyard.Rollouts(given(model_folder, tmp_path / "run", **options), reward=share_of_a)
    assert refused.value.where == where and not (tmp_path / "run").exists()


def test_a_run_by_itself_is_given_no_prompts(model_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="use rollyard"):
        rollyard.Run(given(model_folder, tmp_path / "run"), reward=share_of_a)


def slowly(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Copying weights waits: set when it has begun, and to be set for it to go on."""
    began, go_on, take = threading.Event(), threading.Event(), GivenWeights.take

    def slow(self: GivenWeights, weights: Weights) -> None:
        began.set()
        assert go_on.wait(20)
        take(self, weights)

    monkeypatch.setattr(GivenWeights, "take", slow)
    return began, go_on


@pytest.mark.parametrize("cut", ["cancelled", "stopped"])
async def test_a_publish_that_is_cut_while_it_copies_counts(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: str
) -> None:
    """What is in the policy is the version that it is called, and so is the checkpoint."""
    began, go_on = slowly(monkeypatch)
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    async with rollyard.Rollouts(given(model_folder, tmp_path / "run", run__steps=3), reward=share_of_a) as rollouts:
        await rollouts.submit(["ab"] * BATCH)
        assert await rollouts.next_batch() is not None
        publishing = asyncio.create_task(rollouts.publish(moved(model)))
        await asyncio.to_thread(began.wait, 20)
        if cut == "cancelled":
            publishing.cancel()
        else:
            rollouts.stop("enough")
        await asyncio.sleep(0.05)
        go_on.set()
    report = rollouts.report
    assert report is not None and not report.finished.failed and report.prompts.trained == BATCH
    assert rollouts.version.step == 1
    (checkpoint,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert checkpoint.name.endswith("1")
    stored = AutoModelForCausalLM.from_pretrained(checkpoint).state_dict()
    assert all(torch.equal(stored[name], tensor) for name, tensor in model.state_dict().items())
    await asyncio.gather(publishing, return_exceptions=True)


async def test_a_publish_that_comes_too_late_changes_nothing(model_folder: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    with pytest.warns(RuntimeWarning, match="batch 0"):
        async with rollyard.Rollouts(given(model_folder, tmp_path / "run"), reward=share_of_a) as rollouts:
            await rollouts.submit(["ab"] * BATCH)
            assert await rollouts.next_batch() is not None
            rollouts.stop("enough")
            with pytest.raises(RunFailed, match="the run ended meanwhile: enough"):
                await rollouts.publish(moved(model))
    assert rollouts.version.step == 0 and rollouts.report is not None and rollouts.report.finished.cause == "enough"


async def test_weights_that_do_not_suit_do_not_keep_a_stopped_run(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, go_on = slowly(monkeypatch)
    with pytest.warns(RuntimeWarning, match="batch 0"):
        async with rollyard.Rollouts(given(model_folder, tmp_path / "run"), reward=share_of_a) as rollouts:
            await rollouts.submit(["ab"] * BATCH)
            assert await rollouts.next_batch() is not None
            publishing = asyncio.create_task(rollouts.publish({}))
            await asyncio.to_thread(began.wait, 20)
            rollouts.stop("enough")
            go_on.set()
            with pytest.raises(ConfigError, match="only on one side"):
                await publishing
    assert rollouts.version.step == 0 and rollouts.report is not None


async def test_a_reader_who_is_far_behind_is_told_and_holds_no_more(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(caller, "LAG", 4)
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    async with rollyard.Rollouts(given(model_folder, tmp_path / "run", run__steps=3), reward=share_of_a) as rollouts:
        await rollouts.submit(["ab"] * 3 * BATCH)
        stream = rollouts.groups()
        first = asyncio.create_task(anext(stream))
        async for _ in rollouts.batches():
            await rollouts.publish(moved(model))
        await first
        assert max(map(len, rollouts._caller._streams)) <= 5
        with pytest.raises(RollyardError, match="more than 4 groups behind"):
            await anext(stream)


async def test_speed_is_that_of_the_run_also_when_it_is_over(model_folder: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    async with rollyard.Rollouts(given(model_folder, tmp_path / "run", run__steps=1), reward=share_of_a) as rollouts:
        await rollouts.submit(["ab"] * BATCH)
        async for _ in rollouts.batches():
            await rollouts.publish(model)
    speed = rollouts.status().tokens_per_s
    await asyncio.sleep(0.02)
    assert rollouts.status().tokens_per_s == speed > 0


async def test_a_run_that_has_nothing_left_to_do_says_so(model_folder: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    async with rollyard.Rollouts(given(model_folder, tmp_path / "run", run__steps=1), reward=share_of_a) as rollouts:
        await rollouts.submit(["ab"] * BATCH)
        async for _ in rollouts.batches():
            await rollouts.publish(model)
    async with rollyard.Rollouts.resume(tmp_path / "run", reward=share_of_a) as again:
        assert [batch async for batch in again.batches()] == []
        assert again.status().state == "finished" and "has all its 1 steps" in again.finished
        with pytest.raises(ConfigError, match="the run has ended"):
            await again.submit(["ab"])


async def test_a_batch_that_nobody_has_taken_is_a_wait_and_no_training(model_folder: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    async with rollyard.Rollouts(given(model_folder, tmp_path / "run", run__steps=1), reward=share_of_a) as rollouts:
        await rollouts.submit(["ab"] * BATCH)
        async with asyncio.timeout(20):
            while rollouts._caller._offered is None:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.4)
        began = time.monotonic()
        batch = await rollouts.next_batch()
        assert batch is not None
        time.sleep(0.2)  # noqa: ASYNC251 - trains without giving way to the event loop
        await rollouts.publish(model)
        whole = time.monotonic() - began + 0.1
    report = rollouts.report
    assert report is not None
    (device,) = report.usage.devices
    assert device.wait_ns["caller"] / 1e9 > 0.39 and report.phases.unaccounted_s > 0.39
    assert 0.2 <= device.busy_ns["train"] / 1e9 < whole and 0.2 <= report.phases.train_s < whole
    status = rollouts.status()
    assert status.tokens_per_s == pytest.approx(report.generation_tokens_per_s)


async def test_what_is_asked_of_a_run_that_has_not_begun_or_begins_twice(model_folder: Path, tmp_path: Path) -> None:
    config = given(model_folder, tmp_path / "run")
    rollouts = rollyard.Rollouts(config, reward=share_of_a)
    async with asyncio.timeout(5):
        for ask in (rollouts.next_batch(), anext(rollouts.batches()), anext(rollouts.groups()), anext(rollouts.outcomes())):
            with pytest.raises(ConfigError, match="the run has not begun"):
                await ask
        for sent in (rollouts.submit(["ab"]), rollouts.publish({})):
            with pytest.raises(ConfigError):
                await sent
    assert not (tmp_path / "run").exists()
    async with rollouts:
        with pytest.raises(ConfigError, match="entered before"):
            await rollouts.__aenter__()
