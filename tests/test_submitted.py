"""What is submitted to `Rollouts` and is no prompt."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import rollyard
from rollyard.errors import ConfigError
from rollyard.prompts.given import GivenPrompt
from tests.rewards import share_of_answer
from tests.test_rollouts import given
from tests.tiny import tiny_folder

BAD: list[tuple[Any, str]] = [
    ("", "it is empty"),
    (7, "a int is no prompt"),
    ([{"role": "user"}], "it is empty, or has what is no text"),
    (["ab"], "its messages are none"),
    ("a\ud800", "no text"),
    (GivenPrompt(), "not one of a text, messages and token ids"),
    (GivenPrompt("ab", messages=[{"role": "user", "content": "ab"}]), "not one of a text"),
    (GivenPrompt(token_ids=[3], messages=[{"role": "user", "content": "ab"}]), "not one of a text"),
    (GivenPrompt(token_ids=[]), "its token ids are none"),
    (GivenPrompt(token_ids=[49]), "from 0 to 48"),
    (GivenPrompt(token_ids=[True]), "its token ids are none"),
    (GivenPrompt("ab", columns={"answer": "b", "prompt": "c"}), "the column 'prompt' has the name"),
    (GivenPrompt("ab", columns={"answer": object()}), "its columns are no JSON"),
    (GivenPrompt("ab", columns={"answer": "b", "x": "\ud800"}), "its columns are no JSON: half a character"),
    (GivenPrompt("ab", columns={"answer": "b", "x": float("nan")}), "its columns are no JSON: nan"),
    (GivenPrompt("ab", columns={"answer": "b", "x": {1: 2}}), "its columns are no JSON: the name 1"),
    (GivenPrompt("ab", columns={"answer": "b", "x": json.loads("[" * 300 + "]" * 300)}), "its columns are no JSON: more than"),
    (GivenPrompt("ab", columns={1: "b"}), "columns of a prompt are a dict, or have names"),  # type: ignore[dict-item]
    (GivenPrompt("ab", columns=["answer"]), "columns of a prompt are a list"),  # type: ignore[arg-type]
    (GivenPrompt(token_ids=3), "its token ids are none"),  # type: ignore[arg-type]
    (GivenPrompt(7, token_ids=[3]), "no text"),  # type: ignore[arg-type]
    (GivenPrompt("\ud800", token_ids=[3]), "no text"),
    (GivenPrompt(messages=3), "its messages are none"),  # type: ignore[arg-type]
    (GivenPrompt(messages=[{"role": "user", "content": "ab", "name": "\ud800"}]), "its messages are no JSON: half a character"),
    (GivenPrompt("ab", columns={"solution": "b"}), "the reward needs a column 'answer'"),
]


async def test_what_is_no_prompt_is_told_and_nothing_of_its_call_is_taken(tmp_path: Path) -> None:
    good = GivenPrompt("ab", columns={"answer": "b"})
    async with rollyard.Rollouts(given(tiny_folder(tmp_path), tmp_path / "run"), reward=share_of_answer) as rollouts:
        for bad, message in BAD:
            bad = GivenPrompt(bad) if isinstance(bad, str) else bad
            bad = GivenPrompt(messages=bad) if isinstance(bad, list) else bad
            if isinstance(bad, GivenPrompt) and not bad.columns:
                bad = replace(bad, columns=good.columns)
            with pytest.raises(ConfigError, match=message):
                await rollouts.submit([good, bad])
        for alone in ("2+3=", good, {"role": "user", "content": "ab"}, None):
            with pytest.raises(ConfigError, match="no list of prompts"):
                await rollouts.submit(alone)  # type: ignore[arg-type]
        assert rollouts.status().waiting + rollouts.status().admitted == 0 == rollouts.next_prompt
        rollouts.end_of_prompts()
        with pytest.raises(ConfigError, match="ended before"):
            await rollouts.submit([good])
        assert [batch async for batch in rollouts.batches()] == []
    assert rollouts.report is not None and rollouts.report.finished.cause == "the prompts are used up"
