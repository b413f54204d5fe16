"""One rollout as text: each token in the colour of the weights that wrote it, or of how likely it was."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from itertools import takewhile

from rich.text import Text

from rollyard.inspect.detail import Detail
from rollyard.inspect.show import when
from rollyard.inspect.words import Words
from rollyard.texts import visible
from rollyard.types import VersionSpan

PALETTE = ("cyan", "yellow", "magenta", "green", "blue", "red")  # of versions, one after the other
LIKELY = ((0.9, "green"), (0.5, "cyan"), (0.1, "yellow"), (0.01, "magenta"), (0.0, "red"))  # at least this probable
COLOURS = ("version", "logprob")


def picture(shown: Detail, words: Words | None, why: str, colour: str) -> Iterator[Text]:
    """Lines, and texts of several lines.

    Args:
        words: the tokenizer; where there is none (`why`), ids stand for tokens.
        colour: one of `COLOURS`.
    """
    yield from _head(shown)
    if words is None and shown.token_ids:
        yield Text(f"token ids, for want of a tokenizer: {why}", "dim")
    if shown.token_ids:
        yield _legend(shown, colour)
    tokens = _Tokens(shown, words, colour)
    if not shown.turns:
        yield from _part(f"prompt, {len(shown.prompt.token_ids)} tokens", _shown(shown.prompt.text, "dim"))
        yield from _part(f"completion, {len(shown.token_ids)} tokens, {shown.row.finish or 'not finished'}", tokens(0, None))
    else:
        yield from _turns(shown, words, tokens)
    if words is None and shown.text:
        yield from _part("as text", _shown(shown.text))


def _head(shown: Detail) -> Iterator[Text]:
    row = shown.row
    fate = f"trained in step {row.step}" if row.trained else f"taken for step {row.step}" if row.step else "under way"
    if row.dropped is not None:
        fate = f"dropped, {row.dropped}: {row.cause}"
    yield _shown(f"group {row.group}, member {row.member}, life {row.life}, row {shown.prompt.row}: {fate}", "bold")
    value = "no verdict" if row.reward is None else f"{row.reward:g}"
    parts = ", ".join(f"{name} {part:g}" for name, part in shown.verdict.parts.items())
    problem = f": {shown.verdict.problem}" if shown.verdict.problem else ""
    yield _shown(f"reward {value}" + (f" ({parts})" if parts else "") + problem)
    if shown.logprobs:
        total = math.fsum(shown.logprobs)
        mean = total / len(shown.logprobs)
        ended = "not finished" if shown.finished_at is None else f"finished {when(shown.finished_at)}"
        yield Text(f"{ended}; logprob {total:.2f} nats, {mean:.3f} a token")
    if shown.prompt.columns:
        yield _shown(f"columns {json.dumps(shown.prompt.columns, ensure_ascii=False)}", "dim")


def _shown(text: str, style: str = "") -> Text:
    """What others have written: rich would leave out some of what drives a terminal, and say nothing."""
    return Text(visible(text), style)


def _part(name: str, text: Text) -> Iterator[Text]:
    yield Text(f"── {name}", "bold")
    yield text


def _legend(shown: Detail, colour: str) -> Text:
    """What the colours say; also which tokens each version wrote, for who sees none."""
    if colour == "logprob":
        return Text("  ").join(Text(f"■ p ≥ {least:g}", style) for least, style in LIKELY)
    entries, at, styles = [], 0, _styles(shown.spans)
    for span in shown.spans:
        told = f"■ version {span.version.step}: tokens {at + 1}-{at + span.tokens}"
        if span.oldest_kv != span.version:
            told += f" (keys and values from {span.oldest_kv.step})"
        entries.append(Text(told, styles[span.version.step]))
        at += span.tokens
    return Text("  ").join(entries)


def _styles(spans: Sequence[VersionSpan]) -> dict[int, str]:
    versions = dict.fromkeys(span.version.step for span in spans)
    return {version: PALETTE[index % len(PALETTE)] for index, version in enumerate(versions)}


class _Tokens:
    """Some of a rollout's tokens as one coloured text."""

    def __init__(self, shown: Detail, words: Words | None, colour: str) -> None:
        texts = words.split(shown.token_ids) if words else [f"{id_} " for id_ in shown.token_ids]
        self._texts = [visible(text) for text in texts]
        styles = _styles(shown.spans)
        if colour == "version":
            self._styles = [styles[span.version.step] for span in shown.spans for _ in range(span.tokens)]
        else:
            self._styles = [_likely(logprob) for logprob in shown.logprobs]

    def __call__(self, start: int, stop: int | None) -> Text:
        return Text.assemble(*zip(self._texts[start:stop], self._styles[start:stop], strict=False))


def _likely(logprob: float) -> str:
    probability = math.exp(min(logprob, 0.0)) if logprob == logprob else 0.0
    return next(style for least, style in LIKELY if probability >= least)


def _turns(shown: Detail, words: Words | None, tokens: _Tokens) -> Iterator[Text]:
    before: tuple[int, ...] = ()
    written = 0
    for number, turn in enumerate(shown.turns, 1):
        kept = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(before, turn.prompt_ids, strict=False)))
        new, cut = turn.prompt_ids[kept:], len(before) - kept
        told = f"turn {number}: {len(new)} tokens more to read" + (f", the last {cut} before them taken away" if cut else "")
        text = "".join(words.split(new)) if words else " ".join(map(str, new))
        yield from _part(told, _shown(text, "dim"))
        yield from _part(f"answer {number}, {turn.tokens} tokens, {turn.finish}", tokens(written, written + turn.tokens))
        before = (*turn.prompt_ids, *shown.token_ids[written : written + turn.tokens])
        written += turn.tokens
