"""Judges that are called right here: functions of ours that are quick and cannot hang."""

from __future__ import annotations

from collections.abc import Mapping

from rollyard.reward.function import RewardFunction, Takes
from rollyard.types import Completion, Prompt, Reward
from rollyard.verdict import cause_of, number_of


class Direct:
    """One function (protocols.Scorer).

    Args:
        name: of the judge.
        function: takes one completion at a time.
        settings: what it is given besides columns.
        max_tokens: of a completion.
    """

    def __init__(self, name: str, function: RewardFunction, settings: Mapping[str, object], max_tokens: int) -> None:
        self._name, self._function, self._settings, self._max_tokens = name, function, settings, max_tokens
        self._takes = Takes.of(function)

    async def score(self, prompt: Prompt, completion: Completion) -> Reward:
        """What it raises is a missing verdict, told with its cause."""
        arguments = {**self._takes.arguments(prompt, completion, self._max_tokens), **self._settings}
        try:
            value = self._function(prompt.text, completion.text, **arguments)
        except Exception as error:  # noqa: BLE001 - of whatever kind a column is
            return Reward(None, problem=cause_of(error))
        number, problem = number_of(value, self._name)
        return Reward(None, problem=problem) if number is None else Reward(number, {self._name: number})

    async def close(self) -> None:
        """Nothing is held."""
