"""A task set of verifiers, and the harness that plays it: two turns of a conversation, in the very process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf
from openai import AsyncOpenAI
from verifiers.v1.runtimes import ProgramResult

__all__ = ["LettersHarness", "LettersTaskset"]


class LettersData(vf.TaskData):
    letter: str


class LettersTask(vf.Task[LettersData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=0.5)
    async def share(self, trace: vf.Trace) -> float:
        """Of the letter, in all that the policy wrote."""
        said = "".join(message.content or "" for message in trace.assistant_messages)
        return said.count(self.data.letter) / max(len(said), 1)

    @vf.reward
    async def even(self, trace: vf.Trace) -> float:
        return float(len(trace.assistant_messages[-1].content or "") % 2 == 0)

    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class LettersConfig(vf.TasksetConfig):
    broken: bool = False
    tools: bool = False


class LettersTaskset(vf.Taskset[LettersTask, LettersConfig]):
    def load(self) -> Iterator[LettersTask]:
        for letter in "abcdef":
            system = "break" if self.config.broken else "ask" if self.config.tools else "write"
            yield LettersTask(LettersData(prompt=f"{letter} {letter}", system_prompt=system, letter=letter), self.config.task)


class LettersHarness(vf.Harness[vf.HarnessConfig]):
    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> ProgramResult:
        messages: list[Any] = [
            {"role": "system", "content": data.system_prompt},
            {"role": "user", "content": data.prompt},
        ]
        if data.system_prompt == "break":
            raise RuntimeError("the harness is broken")
        about: dict[str, Any] = {}
        if data.system_prompt == "ask":
            about = {"tools": [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]}
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            for word in ("more", ""):
                said = await client.chat.completions.create(model=ctx.model, messages=messages, max_tokens=5, **about)
                messages.append({"role": "assistant", "content": said.choices[0].message.content})
                messages.append({"role": "user", "content": word})
        return ProgramResult(exit_code=0, stdout="", stderr="")
