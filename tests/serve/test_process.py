"""Real processes: `rollyard serve`, a trainer and harnesses that speak to it, and what is left when it is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from transformers import AutoModelForCausalLM

from rollyard.journal.reader import JournalReader
from rollyard.model.tokenizer import Tokenizer
from rollyard.prompts.given import GivenPrompt
from rollyard.serve.client import Client, ServiceError
from tests.serve.process import TOKEN, serving, started
from tests.sources import ROOT
from tests.tiny import TOOLS_TEMPLATE, tiny_folder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

SIZE, BATCH = 2, 2


def options_of(tmp_path: Path, **more: object) -> list[str]:
    values: dict[str, object] = {
        "model.path": tiny_folder(tmp_path, chat=True),
        "prompts.source": "given",
        "run.out": tmp_path / "run",
        "run.steps": 3,
        "rollout.group_size": SIZE,
        "rollout.groups_per_step": BATCH,
        "rollout.max_tokens": 6,
        "engine.slots": 8,
        "engine.kernels": "plain",
        "checkpoint.every": 1,
        "serve.port": 0,
        "watch.view": "plain",
    }
    return [f"--{name}={value}" for name, value in (values | {n.replace("__", "."): v for n, v in more.items()}).items()]


def moved(model: Any) -> Any:
    """As if it had been trained."""
    for parameter in model.parameters():
        parameter.data.add_(1e-3)
    return model


def test_a_service_that_was_killed_goes_on_where_it_was(tmp_path: Path) -> None:
    """Prompts that were accepted are asked once, groups that were streamed keep their cursors, and versions go on."""
    options = options_of(tmp_path, reward__function="unjudged")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "llama-tied-0")
    prompts = [GivenPrompt(text) for text in ("ab", "cd", "ef", "gh", "ij", "kl")]
    with serving(*options) as process, Client(process.url, TOKEN) as client:
        with pytest.raises(ServiceError, match="token"), Client(process.url) as stranger:
            stranger.status()
        assert client.submit(prompts, key="all") == (0, 1, 2, 3, 4, 5)
        trainer = client.trainer("mine")
        batches = trainer.batches()
        assert [group.id for group in next(batches).groups] == [0, 1]
        assert trainer.publish(moved(model), {"loss": 1.0}).step == 1
        assert [group.id for group in next(batches).groups] == [2, 3], "so the checkpoint is written"
        before = [next(found) for found in [client.groups()] for _ in range(4)]
        process.end(signal.SIGKILL)
    with serving(*options) as process, Client(process.url, TOKEN) as client:
        assert client.status()["version"] == 1 and client.submit(prompts, key="all") == (0, 1, 2, 3, 4, 5)
        after = [next(found) for found in [client.groups()] for _ in range(4)]
        assert [(cursor, group.id) for cursor, group in after] == [(cursor, group.id) for cursor, group in before]
        with client.trainer("mine") as trainer:
            for batch, ids in zip(trainer.batches(), ([2, 3], [4, 5]), strict=True):
                assert [group.id for group in batch.groups] == ids
                assert trainer.publish(moved(model)).step == batch.step + 1
        assert client.status()["version"] == 3
        assert process.end(signal.SIGTERM) == 0, process.said
    with JournalReader(tmp_path / "run" / "journal.sqlite") as journal:
        trained = list(journal.query("SELECT group_id, trained_step FROM lineage ORDER BY group_id"))
    assert [(id_, step) for id_, step in trained] == [(0, 0), (1, 0), (2, 1), (3, 1), (4, 2), (5, 2)]


def test_a_service_that_was_killed_in_its_start_is_started_again(tmp_path: Path) -> None:
    options = options_of(tmp_path, reward__function="unjudged")
    for there in ("config.toml", "journal.sqlite", "began.json"):
        process = started(*options)
        while not (tmp_path / "run" / there).exists() and process.poll() is None:
            time.sleep(0.01)
        process.kill()
        process.communicate()
    assert not (tmp_path / "run" / "service.sqlite").exists()
    with serving(*options) as going, Client(going.url, TOKEN) as client:
        assert client.submit([GivenPrompt("ab")]) == (0,)
        assert going.end(signal.SIGTERM) == 0, going.said


def test_harnesses_with_the_openai_client_are_a_source_of_training_data(tmp_path: Path) -> None:
    more = {"rollout__max_tokens": 40, "serve__episodes": True, "environment__limit_s": 300, "run__steps": 1}
    with serving(*options_of(tmp_path, **more)) as process, Client(process.url, TOKEN) as client:
        client.submit([GivenPrompt("ab", columns={"answer": "x"}), GivenPrompt("cd", columns={"answer": "y"})])
        spoken: list[list[int]] = []
        streamed: list[int] = []

        def harness(_: int) -> None:
            play = client.play()
            policy = openai.OpenAI(base_url=f"{process.url}/v1", api_key=TOKEN, default_headers=play.headers)
            assert [model.id for model in policy.models.list()] == ["policy"]
            history: list[Any] = [{"role": "user", "content": play.text}]
            wrote: list[int] = []
            for turn in range(2):
                answer = policy.chat.completions.create(model="policy", messages=history, logprobs=True)
                (choice,) = answer.choices
                assert choice.logprobs is not None and choice.logprobs.content is not None
                extra: Any = choice.model_extra
                assert len(choice.logprobs.content) == len(extra["token_ids"]) == answer.usage.completion_tokens  # type: ignore[union-attr]
                assert answer.model_extra["rollyard"]["matched"] == turn  # type: ignore[index]
                wrote += extra["token_ids"]
                history += [choice.message, {"role": "user", "content": "more"}]
            pieces = list(policy.chat.completions.create(model="policy", messages=history, stream=True))
            extras: list[Any] = [piece.choices[0].model_extra for piece in pieces]
            ids = [token for extra in extras for token in extra.get("token_ids", [])]
            assert len(pieces) > 2 or len(ids) <= 16, "an engine tells of 16 tokens at a time"
            text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
            assert text == Tokenizer(tmp_path / "llama-tied-0").decode(ids)
            streamed.append(len(pieces))
            wrote += ids
            assert pieces[-1].choices[0].finish_reason in ("stop", "length")
            named = openai.OpenAI(base_url=f"{process.url}/v1", api_key=TOKEN)
            last = named.completions.create(model=play.model, prompt="ab", max_tokens=2)
            wrote += last.choices[0].model_extra["token_ids"]  # type: ignore[index]
            with pytest.raises(openai.BadRequestError, match="temperature is 1 in this run"):
                policy.chat.completions.create(model="policy", messages=history, temperature=0.2)
            spoken.append(wrote)
            client.judge(play, float(len(wrote) % 2), {"even": 1.0})

        with ThreadPoolExecutor(SIZE * BATCH) as pool:
            list(pool.map(harness, range(SIZE * BATCH)))
        with client.trainer("mine") as trainer:
            (batch,) = [next(trainer.batches())]
        done = [rollout.completion for group in batch.groups for rollout in group.rollouts]
        assert sorted(list(each.token_ids) for each in done) == sorted(spoken), "what was said is what is trained on"
        assert all(len(each.turns) == 4 for each in done) and max(streamed) > 2
        for each in done:
            first, second, *_ = each.turns
            seen = first.prompt_ids + each.token_ids[: first.tokens]
            assert second.prompt_ids[: len(seen)] == seen
        assert process.end(signal.SIGTERM) == 0, process.said


TOOL: Any = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


def calling_folder(tmp_path: Path) -> Path:
    """A random model, nearly all of whose tokens are a whole call each."""
    calls = [f"<tool_call>{json.dumps({'name': 'look', 'arguments': {'at': at}})}</tool_call>" for at in range(400)]
    return tiny_folder(tmp_path / "calls", chat=TOOLS_TEMPLATE, words=[*'{}":_[]', *calls], window=1024)


def test_harnesses_that_call_tools(tmp_path: Path) -> None:
    """What is called is read, and the tool's results go on from the very tokens that called."""
    given = {"model__path": calling_folder(tmp_path), "serve__episodes": True, "environment__limit_s": 300, "run__steps": 1}
    with serving(*options_of(tmp_path, **given)) as process, Client(process.url, TOKEN) as client:
        client.submit([GivenPrompt("ab"), GivenPrompt("cd")])
        spoken: list[list[int]] = []

        def harness(_: int) -> None:
            play = client.play()
            policy = openai.OpenAI(base_url=f"{process.url}/v1", api_key=TOKEN, default_headers=play.headers)
            history: list[Any] = [{"role": "user", "content": play.text}]
            wrote: list[int] = []
            for turn in range(3):
                answer: Any = policy.chat.completions.create(model="policy", messages=history, tools=[TOOL])
                (choice,) = answer.choices
                wrote += choice.token_ids
                assert (answer.rollyard["matched"], answer.rollyard["rendered"]) == (turn, 0)
                calls = choice.message.tool_calls
                assert calls and {call.function.name for call in calls} == {"look"}
                results = [(call.id, json.loads(call.function.arguments)["at"]) for call in calls]
                assert len({id_ for id_, _ in results}) == len(results) and all(0 <= at < 400 for _, at in results)
                history += [choice.message, *({"role": "tool", "tool_call_id": id_, "content": f"{at}"} for id_, at in results)]
            with pytest.raises(openai.BadRequestError, match="nothing it writes is forced"):
                policy.chat.completions.create(model="policy", messages=history, tools=[TOOL], tool_choice="required")
            spoken.append(wrote)
            client.judge(play, 1.0)

        with ThreadPoolExecutor(SIZE * BATCH) as pool:
            list(pool.map(harness, range(SIZE * BATCH)))
        with client.trainer("mine") as trainer:
            batch = next(trainer.batches())
        done = [rollout.completion for group in batch.groups for rollout in group.rollouts]
        assert sorted(list(each.token_ids) for each in done) == sorted(spoken), "what was said is what is trained on"
        rows = [row for rows in batch.train.micro_batches for row in rows]
        assert len(rows) == SIZE * BATCH, "an episode is one row"
        assert process.end(signal.SIGTERM) == 0, process.said


def test_what_cannot_be_served_is_said_before_anything_loads(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    environment.pop("ROLLYARD_TOKEN", None)
    for more, told in (
        (["--serve.host=0.0.0.0"], "ROLLYARD_TOKEN"),
        (["--environment.limit_s=1", "--serve.episodes"], "serve.idle_s"),
    ):
        command = [sys.executable, "-m", "rollyard", "serve", *options_of(tmp_path), *more]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        assert ended.returncode == 2 and told in ended.stderr
