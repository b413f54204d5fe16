"""The text of each token by itself, for people."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollyard.inspect.source import read_config, saved
from rollyard.journal.folder import RunFolder

NAME = "tokenizer.json"
MOST = 8  # tokens that one character is made of, at most
HALF = "\ufffd"


class Words:
    """Token ids as texts, with the tokenizer of a file."""

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer  # takes a while, which lists need not wait for

        self._tokenizer = Tokenizer.from_file(str(path))

    def split(self, ids: Sequence[int]) -> list[str]:
        """A text for each of `[tokens]`; they make up that of all. Of tokens that share a character, the last has it."""
        texts: list[str] = []
        waiting: list[int] = []
        before: list[int] = []  # decoders treat what comes first in their own way
        for id_ in ids:
            waiting.append(id_)
            text = self._after(before, waiting)
            if text.endswith(HALF) and len(waiting) < MOST:
                texts.append("")
                continue
            texts.append(text)
            before, waiting = waiting, []
        if waiting:
            texts[-1] = self._after(before, waiting)
        return texts

    def _after(self, before: list[int], ids: list[int]) -> str:
        return self._text(before + ids)[len(self._text(before)) :]

    def _text(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False)) if ids else ""


def words_of(folder: RunFolder) -> tuple[Words | None, str]:
    """The tokenizer of the run's model, or why there is none.

    Checkpoints have it, and so has the folder that the config names.
    """
    why = "the run has no checkpoint yet, and its model's folder no tokenizer.json"
    for path in _places(folder):
        if not path.is_file():
            continue
        try:
            return Words(path), ""
        except Exception as error:  # noqa: BLE001 - tokenizers has no class of its own for a file that is none
            why = f"{path} cannot be read: {error}"
    return None, why


def _places(folder: RunFolder) -> list[Path]:
    there = [path / NAME for path in saved(folder).values() if (path / NAME).is_file()]
    model: Any = (read_config(folder) or {}).get("model")
    path = model.get("path") if isinstance(model, dict) else None
    return [*there[-1:], *([Path(path) / NAME] if isinstance(path, str) and path and "\0" not in path else [])]
