"""Text to token ids and back, with the tokenizer of a model folder. Knows no torch."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollyard.errors import ConfigError
from rollyard.model.architecture import WHERE
from rollyard.texts import in_a_line
from rollyard.types import FinishReason

if TYPE_CHECKING:
    from tokenizers import Tokenizer as FastTokenizer


Message = Mapping[str, Any]
ANSWER = "the-answer-before"  # in its place
TOOL = "tool"  # the role of what a tool has said
CALLS = "tool_calls"  # in an answer, as OpenAI's interface has it


class Tokenizer:
    """The tokenizer of a Hugging Face folder. Raises ConfigError when the folder has none that is usable.

    Args:
        folder: of a model.
        where: the option that names it, for messages.
    """

    def __init__(self, folder: Path, where: str = WHERE) -> None:
        from transformers import AutoTokenizer  # heavy: only a process that reads text pays for it

        if not (folder / "tokenizer_config.json").is_file() and not (folder / "tokenizer.json").is_file():
            raise ConfigError(f"{folder} has no tokenizer", where=where, remedy="copy tokenizer.json there, and its config")
        try:
            self._full = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        except (OSError, ValueError, KeyError) as error:
            problem = f"the tokenizer in {folder} cannot be read: {error}"
            raise ConfigError(problem, where=where, remedy="fetch the model again") from error
        if not self._full.is_fast:
            raise ConfigError(f"the tokenizer in {folder} is not a fast one", where=where, remedy="convert it to tokenizer.json")
        self._fast: FastTokenizer = self._full.backend_tokenizer
        added = self._fast.get_added_tokens_decoder()
        self._special = {token_id: token.content for token_id, token in added.items() if token.special}
        self._mute = frozenset(self._special)
        unknown = getattr(self._fast.model, "unk_token", None) or self._full.unk_token
        self._unknown: int | None = self._fast.token_to_id(unknown) if unknown else None

    @property
    def has_chat_template(self) -> bool:
        return bool(self._full.chat_template)

    @property
    def separates(self) -> bool:
        """Whether it has a way of its own to put two texts together, as encoders do."""
        return self._full.sep_token is not None

    @property
    def typed(self) -> bool:
        """Whether the model is told which of two texts a token is of."""
        return "token_type_ids" in self._full.model_input_names

    @property
    def most_tokens(self) -> int:
        """What the model takes, as far as the tokenizer knows; else a number beyond all models."""
        return int(self._full.model_max_length)

    def encode(self, text: str, *, special: bool = True) -> tuple[int, ...]:
        """Ids of a text, with the special tokens that the tokenizer adds by itself unless `special` is False."""
        return tuple(self._fast.encode(text, add_special_tokens=special).ids)

    def unknown(self, text: str, ids: Sequence[int]) -> tuple[str, ...]:
        """Parts of a text that the tokenizer has no tokens for: whatever they are, one and the same stands for each.

        Args:
            ids: of the text, and perhaps of what a template put around it.
        """
        if self._unknown is None or self._unknown not in ids:
            return ()
        encoded = self._fast.encode(text, add_special_tokens=False)
        parts = [text[slice(*span)] for id_, span in zip(encoded.ids, encoded.offsets, strict=True) if id_ == self._unknown]
        return tuple(part for part in parts if part not in self._special.values())  # those that somebody wrote are meant

    def pair(self, first: str, second: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Ids of two texts put together as the tokenizer does it, and for each which text it is of."""
        encoded = self._fast.encode(first, second)
        return tuple(encoded.ids), tuple(encoded.type_ids)

    def chat(self, messages: Sequence[Message], tools: Sequence[Message] = (), *, answered: bool = False) -> tuple[int, ...]:
        """Ids of a conversation up to where the assistant's answer begins, or of one that ends with it (`answered`).

        Raises ConfigError without a template, for a conversation that it refuses, or for one of which it does not show the tools
        or the calls of tools.
        """
        if not self.has_chat_template:
            raise ConfigError("the tokenizer has no chat template", where=WHERE, remedy="give texts, or an instruct model")
        text = self._by_template(messages, tools, not answered)
        # The template writes its own special tokens.
        return tuple(self._fast.encode(text, add_special_tokens=False).ids)

    def chat_after(self, messages: Sequence[Message], tools: Sequence[Message] = ()) -> tuple[int, ...]:
        """Ids of what the template puts between an answer and the next one: the end of the first, and these messages.

        The answer itself is not rendered, so nothing that was sampled is tokenized again. Raises ConfigError without a
        template, or where it shows no answer.
        """
        if not self.has_chat_template:
            raise ConfigError("the tokenizer has no chat template", where=WHERE, remedy="give texts, or an instruct model")
        said = [{"role": "user", "content": "?"}, {"role": "assistant", "content": ANSWER}, *messages]
        _, found, after = self._by_template(said, tools, True).rpartition(ANSWER)
        if not found:
            problem = "the chat template shows no earlier answer"
            raise ConfigError(problem, where=WHERE, remedy="render whole conversations with `chat`")
        return self.encode(after, special=False)

    def _by_template(self, messages: Sequence[Message], tools: Sequence[Message], begins: bool) -> str:
        """Raises ConfigError for a conversation that the template refuses, or of which it leaves something out without a word."""
        text = self._rendered(messages, tools, begins)
        if tools and text == self._rendered_if(messages, (), begins):
            problem, remedy = "the chat template shows no tools", "use a model whose template does, or tell of them in a message"
            raise ConfigError(problem, where=WHERE, remedy=remedy)
        uncalled = [{name: value for name, value in message.items() if name != CALLS} for message in messages]
        if any(CALLS in message for message in messages) and text == self._rendered_if(uncalled, tools, begins):
            problem, remedy = "the chat template shows no earlier calls of tools", "send back answers as they were given"
            raise ConfigError(problem, where=WHERE, remedy=remedy)
        silent = [{**message, "content": ""} if message["role"] == TOOL else message for message in messages]
        if any(said["content"] for said in messages if said["role"] == TOOL) and text == self._rendered_if(silent, tools, begins):
            problem, remedy = "the chat template shows no results of tools here", "give them as messages of another role"
            raise ConfigError(problem, where=WHERE, remedy=remedy)
        return text

    def _rendered_if(self, messages: Sequence[Message], tools: Sequence[Message], begins: bool) -> str | None:
        """None: the template refuses it."""
        try:
            return self._rendered(messages, tools, begins)
        except ConfigError:
            return None

    def _rendered(self, messages: Sequence[Message], tools: Sequence[Message], begins: bool) -> str:
        """Raises ConfigError for a conversation that the template refuses."""
        said, given = [*map(dict, messages)], [*map(dict, tools)] or None
        try:
            return str(self._full.apply_chat_template(said, tools=given, tokenize=False, add_generation_prompt=begins))
        except Exception as error:  # a template is code of somebody else's, and may raise anything
            problem = f"the chat template refuses this conversation: {in_a_line(error)}"
            raise ConfigError(
                problem, where=WHERE, remedy="give roles in the order that it wants, and all that it asks for"
            ) from error

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids: special tokens left out, spaces as they are."""
        return self._fast.decode(list(ids), skip_special_tokens=True)

    def completion_text(self, ids: Sequence[int], stop: tuple[str, ...], finish: FinishReason) -> str:
        """Text of a completion, cut before its first stop string when that is what ended it."""
        text = self.decode(ids)
        if finish is not FinishReason.STOP:
            return text
        return text[: min((at for at in map(text.find, stop) if at >= 0), default=len(text))]

    def check_stop(self, stop: tuple[str, ...], where: str) -> None:
        """Raises ConfigError for a stop string that no text can hold: special tokens have none."""
        for text in stop:
            if found := next((word for word in self._special.values() if word in text), ""):
                problem = f"the stop string {text!r} has a special token in it, which has no text"
                remedy = (
                    f"leave {found} out: where eos_token_id of the model's generation_config.json has it, it ends a completion"
                )
                raise ConfigError(problem, where=where, remedy=remedy)

    @property
    def special(self) -> Collection[str]:
        """Tokens that have no text."""
        return self._special.values()

    def save(self, path: Path) -> None:
        """Write what encodes and decodes, for a process that does not want to wait for transformers. Raises OSError."""
        path.write_text(self._fast.to_str())

    def stream(self, stop: tuple[str, ...]) -> StopWatcher:
        """Watches one completion for stop strings, token by token."""
        return StopWatcher(self._fast, stop, self._mute)


class StopWatcher:
    """Sees a stop string as soon as it is complete in the text, also over token borders and split characters.

    Decodes the last few tokens at every push: tokenizers' own DecodeStream raises on byte-fallback tokenizers when a
    model writes broken UTF-8, and holds back text that is followed by half a character. Special tokens have no text, nor
    have ids that a model has beyond those of its tokenizer. A request that continues first feeds the tokens that it has
    already written.
    """

    __slots__ = ("_mute", "_stop", "_tail", "_tokenizer")

    def __init__(self, tokenizer: FastTokenizer, stop: tuple[str, ...], mute: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._mute = mute
        # A token with text has at least one byte, so these many hold any stop string, and one token before it.
        self._tail: deque[int] = deque(maxlen=1 + max((len(text.encode()) for text in stop), default=0))

    def feed(self, ids: Iterable[int]) -> None:
        """Tokens that were watched before, in an earlier part of the same completion."""
        self._tail.extend(token_id for token_id in ids if self._speaks(token_id))

    def push(self, token_id: int) -> bool:
        """Add one token. True when a stop string is complete: this token is the last that belongs to the completion."""
        if not self._stop or not self._speaks(token_id):
            return False
        self._tail.append(token_id)
        text = self._tokenizer.decode(list(self._tail))
        return any(stop in text for stop in self._stop)

    def _speaks(self, token_id: int) -> bool:
        """Has it a text? One that has none would push what has one out of the tail."""
        return token_id not in self._mute and self._tokenizer.id_to_token(token_id) is not None
