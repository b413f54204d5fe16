"""Whole runs of episodes, on real parts."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

import rollyard
from rollyard.episode.open import open_player
from rollyard.episode.transcript import Transcript
from rollyard.errors import ConfigError
from rollyard.journal.reader import JournalReader
from rollyard.types import FinishReason
from tests import small
from tests.tiny import tiny_folder
from tests.workers import FakeLauncher


class Talks:
    """Two turns of one conversation, then one of another; every third problem it fails, or leaves to the reward."""

    async def episode(self, ask, prompt):
        talk = Transcript(ask, prompt)
        first = await talk.answer(max_tokens=3)
        talk.add("cab=")
        second = await talk.answer()
        third = await ask((*prompt.token_ids, *second.token_ids[:2]), stop=("a",))
        full = await ask(prompt.token_ids * 64)
        assert full.finish is FinishReason.CONTEXT and not full.token_ids
        if prompt.id % 3 == 2 and not first.token_ids[0] % 2:
            raise LookupError("the tool is broken")
        return None if prompt.id % 3 == 1 else (first.text + second.text + third.text).count("a") / 10


def test_a_run_of_episodes(tmp_path, monkeypatch):
    """What the engine wrote in any turn, the trainer finds as likely: it sees each turn after what it was sampled after."""
    monkeypatch.setenv("ROLLYARD_CACHE", str(tmp_path / "cache"))
    changes = {"rollout.max_tokens": 6, "prompts.held_out": 3, "rollout.group_size": 4, "rollout.min_scored": 1}
    config = small.config(tmp_path / "run", **changes)
    run = rollyard.Run(config, reward=small.share_of_a, environment=Talks())
    steps = list(run)
    assert [step.step for step in steps] == [1, 2, 3, 4]
    done = [rollout.completion for step in steps for group in step.groups for rollout in group.rollouts]
    assert done and all(len(each.turns) == 4 for each in done)
    for step in steps:
        trained = [r.completion for group in step.groups for r in group.rollouts if r.reward.value is not None]
        assert step.train.tokens == sum(len(each.token_ids) for each in trained)
        assert step.train.logprob_gap_max < 1e-4
        assert step.phases.tools_s > 0
    for each in done:
        first, second, third, last = each.turns
        assert second.prompt_ids[: len(first.prompt_ids) + first.tokens] == first.prompt_ids + each.token_ids[: first.tokens]
        assert first.tokens <= 3 and third.prompt_ids[: len(first.prompt_ids)] == first.prompt_ids
        assert last.tokens == 0 and each.finish is FinishReason.CONTEXT
    causes = {r.reward.problem for step in steps for group in step.groups for r in group.rollouts}
    assert causes == {"", "LookupError: the tool is broken"}
    names = {name for step in steps for group in step.groups for r in group.rollouts for name in r.reward.parts}
    assert names == {"environment", "share_of_a"}
    with JournalReader(run.folder.journal) as journal:
        for step in steps:
            for group in step.groups:
                assert [r.completion.turns for r in journal.group(group.id).rollouts] == [
                    r.completion.turns for r in group.rollouts
                ]
        assert list(journal.query("SELECT samples, mean_reward IS NULL FROM evaluations")) == [(3, 0), (3, 0)]


def test_an_environment_may_be_all_the_judge_there_is(tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "ab"}\n{"prompt": "cd"}\n')
    options = {"prompts.path": str(prompts), "prompts.task": "", "prompts.held_out": 0, "model.path": str(tiny_folder(tmp_path))}
    config = small.config(tmp_path / "run", **options)

    async def episode(ask, prompt):
        return 1.0

    rollyard.Run(config, environment=episode)
    with pytest.raises(ConfigError, match="need a reward"):
        rollyard.Run(config)
    with pytest.raises(ConfigError, match=r"environment.name: there is no environment 'abacus'"):
        rollyard.Run(small.config(tmp_path / "run", **options, environment__name="abacus"))
    with pytest.raises(ConfigError, match=r"environment.name: an environment is given directly, and calculator is named"):
        rollyard.Run(small.config(tmp_path / "run", **options, environment__name="calculator"), environment=episode)
    with pytest.raises(ConfigError, match=r"environment.name: options of an environment are given, and nobody plays"):
        rollyard.Run(small.config(tmp_path / "run", **options, environment__turns=3), reward=small.share_of_a)
    many = small.config(tmp_path / "run", **options, environment__workers=4)
    with pytest.raises(ConfigError, match=r"environment.workers: an environment that is given directly plays in the run's own"):
        rollyard.Run(many, environment=episode)
    shipped = {"environment__name": "calculator", "environment__workers": 4}
    with pytest.raises(ConfigError, match=r"environment.workers: calculator plays in the run's own process"):
        rollyard.Run(small.config(tmp_path / "run", **options, **shipped))


class Tokens:
    """A tokenizer that can be written, and no more."""

    def save(self, path) -> None:
        path.write_text("{}")


async def test_what_is_written_for_the_processes_is_removed_with_them(tmp_path):
    async def answer(name, content):
        return b""

    (tmp_path / "own.py").write_text("async def episode(ask, prompt): ...")
    config = small.config(tmp_path / "run", environment__name=f"{tmp_path}/own.py:episode")
    launcher, folder, scratch = FakeLauncher(answer), tiny_folder(tmp_path), tmp_path / "scratch"
    scratch.mkdir()
    async with AsyncExitStack() as closing:
        assert open_player(config, None, Tokens(), folder, launcher.launch, scratch, closing) is not None
        await asyncio.sleep(0.01)
        assert [path.name for path in scratch.iterdir()] == ["environment.tokens.json"]
    assert [process.closed for process in launcher.started] == [True] and not list(scratch.iterdir())
