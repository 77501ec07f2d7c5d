"""The tokenizer of a checkpoint and the layout of its chat prompts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import index
from os import PathLike
from typing import TypeVar

from tokenizers import Tokenizer as RawTokenizer
from tokenizers.decoders import DecodeStream

from dsv4.config.json_file import check_regular_file
from dsv4.loader.errors import CheckpointError, brief
from dsv4.loader.files import check_folder
from dsv4.quoting import quoted

T = TypeVar("T")

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"
THINK = "<think>"
THINK_END = "</think>"
_MAX_IDS = 1 << 32  # the library's ids are unsigned 32-bit integers
_CHAT_TOKENS = (BOS, EOS, USER, ASSISTANT, THINK, THINK_END)


def load_tokenizer(path: str | PathLike[str]) -> Tokenizer:
    """Read the `tokenizer.json` of a checkpoint folder.

    Raises:
        CheckpointError: there is no such folder; `tokenizer.json` is missing or not a tokenizer.
        TypeError: `path` is no path.
    """
    file = check_folder(path) / "tokenizer.json"
    try:
        check_regular_file(file)
        raw = _library(RawTokenizer.from_file, str(file))
    except FileNotFoundError:
        raise CheckpointError(f"checkpoint {path}: tokenizer.json is missing") from None
    except (OSError, ValueError) as error:
        prefix = "" if str(file) in str(error) else f"{file} is not a tokenizer: "
        raise CheckpointError(f"{prefix}{brief(error)}") from error
    return Tokenizer(raw)


def _library(call: Callable[..., T], *args: object, **options: object) -> T:
    """Call the `tokenizers` library.

    Raises:
        ValueError: it failed. It raises plain Exception for every reason, and BaseException where
            its own code panics.
    """
    try:
        return call(*args, **options)
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:
        raise ValueError(brief(error)) from error


class Tokenizer:
    """Text to token ids and back; `load_tokenizer` makes one.

    Args:
        raw: of the `tokenizers` library.
    """

    def __init__(self, raw: RawTokenizer) -> None:
        self.raw = raw

    @property
    def vocab_size(self) -> int:
        """Number of token ids, special tokens included."""
        return self.raw.get_vocab_size()

    @property
    def has_chat_tokens(self) -> bool:
        """Whether the vocabulary has the tokens that `chat_prompt` is made of."""
        return all(self.raw.token_to_id(token) is not None for token in _CHAT_TOKENS)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text; nothing is added, special tokens spelt out are recognised.

        Raises:
            CheckpointError: the vocabulary cannot express the text.
            TypeError: `text` is no str.
            ValueError: `text` is not valid Unicode: it holds half a surrogate pair.
        """
        if not isinstance(text, str):
            raise TypeError(f"text must be a str, got {type(text).__name__}")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise ValueError("text is not valid Unicode: it cannot be encoded as UTF-8") from None
        try:
            return _library(self.raw.encode, text, add_special_tokens=False).ids
        except ValueError as error:
            raise CheckpointError(
                f"tokenizer.json cannot encode this text: {brief(error)}"
            ) from error

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids; ids outside the vocabulary have none.

        Raises:
            TypeError: `ids` does not consist of integers.
        """
        try:
            known = [index(token) for token in ids if 0 <= token < _MAX_IDS]
        except TypeError:
            raise TypeError(f"ids must be a list of integers, got {quoted(ids)}") from None
        return self.raw.decode(known, skip_special_tokens=skip_special_tokens)

    def stream(self) -> TextStream:
        """Return a decoder for one continuation, token by token."""
        return TextStream(self)

    def chat_prompt(self, messages: Sequence[Mapping[str, str]], *, thinking: bool = False) -> str:
        """Lay out a conversation for the model to answer (official encoding/encoding_dsv4.py).

        The beginning-of-sentence token is part of the prompt. Tools are not laid out.

        Args:
            messages: objects with `role` ("system", "user" or "assistant") and `content`, the last
                from the user; reasoning of earlier answers left out.
            thinking: let the model reason before it answers.

        Raises:
            TypeError: a message is no mapping of strings.
            ValueError: the tokenizer has no chat tokens, a role is unknown or the last message is
                not the user's.
        """
        for number, message in enumerate(messages):
            texts = isinstance(message, Mapping) and {
                type(message.get(key)) for key in ("role", "content")
            }
            if texts != {str}:
                raise TypeError(
                    f"messages[{number}] must have a role and a content, both str, "
                    f"got {quoted(message)}"
                )
        if not self.has_chat_tokens:
            raise ValueError("this checkpoint's tokenizer has no chat tokens: give a plain prompt")
        if not messages or messages[-1]["role"] != "user":
            raise ValueError("the last message must have role 'user'")
        layouts = {
            "system": "{}",
            "user": USER + "{}" + ASSISTANT,
            "assistant": THINK_END + "{}" + EOS,
        }
        parts = [BOS]
        for message in messages:
            role, content = message["role"], message["content"]
            if role not in layouts:
                raise ValueError(f"role must be one of {', '.join(layouts)}, got {quoted(role)}")
            parts.append(layouts[role].replace("{}", content))
        return "".join([*parts, THINK if thinking else THINK_END])


class TextStream:
    """Text of a continuation as its tokens come, whole characters only.

    Each token costs the same, however long the continuation has become.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = DecodeStream(skip_special_tokens=True)
        self._held: list[int] = []  # tokens since the last text

    def feed(self, ids: Sequence[int]) -> str:
        """Take new tokens; return the text that they complete."""
        parts = []
        for token in ids:
            if not 0 <= token < _MAX_IDS:
                continue
            self._held.append(token)
            text = self._decoder.step(self._tokenizer.raw, token)
            if text is not None:
                parts.append(text)
                self._held.clear()
        return "".join(parts)

    def finish(self) -> str:
        """Return the text that was held back: tokens that end in the middle of a character."""
        text = self._tokenizer.decode(self._held)
        self._held.clear()
        return text
