"""The tokenizer of a checkpoint and the layout of its chat prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path

from tokenizers import Tokenizer as RawTokenizer

from dsv4.loader.errors import CheckpointError, brief

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"
THINK = "<think>"
THINK_END = "</think>"
_CHAT_TOKENS = (BOS, EOS, USER, ASSISTANT, THINK, THINK_END)


def load_tokenizer(path: str | PathLike[str]) -> Tokenizer:
    """Read the `tokenizer.json` of a checkpoint folder.

    Raises:
        CheckpointError: `tokenizer.json` is missing or not a tokenizer.
    """
    file = Path(path) / "tokenizer.json"
    if not file.is_file():
        raise CheckpointError(f"checkpoint {path}: tokenizer.json is missing")
    try:
        return Tokenizer(RawTokenizer.from_file(str(file)))
    except Exception as error:  # the library raises plain Exception for every bad file
        raise CheckpointError(f"{file} is not a tokenizer: {brief(error)}") from error


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
        """Return the ids of a text; nothing is added, special tokens spelt out are recognised."""
        return self.raw.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids."""
        return self.raw.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def chat_prompt(self, messages: Sequence[Mapping[str, str]], *, thinking: bool = False) -> str:
        """Lay out a conversation for the model to answer (official encoding/encoding_dsv4.py).

        The beginning-of-sentence token is part of the prompt. Tools are not laid out.

        Args:
            messages: objects with `role` ("system", "user" or "assistant") and `content`, the last
                from the user; reasoning of earlier answers left out.
            thinking: let the model reason before it answers.

        Raises:
            ValueError: the tokenizer has no chat tokens, a role is unknown or the last message is
                not the user's.
        """
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
                raise ValueError(f"role must be one of {', '.join(layouts)}, got {role!r}")
            parts.append(layouts[role].replace("{}", content))
        return "".join([*parts, THINK if thinking else THINK_END])
