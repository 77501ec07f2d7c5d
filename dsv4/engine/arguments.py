"""Checks of the engine's arguments; every message names the argument."""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from numbers import Real
from typing import TYPE_CHECKING

from torch import Tensor

from dsv4.quoting import quoted

if TYPE_CHECKING:
    from dsv4.cache.model_cache import ModelCache
    from dsv4.config.model_config import ModelConfig

MAX_DRAFT_TOKENS = 64
"""Most drafts per decode forward. All are computed, and far fewer are ever accepted in a row."""


def check_integer(name: str, value: object, low: int, high: int | None = None) -> int:
    """Return an integer in `low .. high`.

    Raises:
        TypeError: no integer; a bool is none.
        ValueError: out of range.
    """
    if isinstance(value, bool) or not hasattr(type(value), "__index__"):
        raise TypeError(f"{name} must be an integer, got {quoted(value)}")
    number = operator.index(value)
    if number < low:
        raise ValueError(f"{name} must be at least {low}, got {quoted(number)}")
    if high is not None and number > high:
        raise ValueError(f"{name} must be at most {high}, got {quoted(number)}")
    return number


def check_number(name: str, value: object, low: float, high: float) -> float:
    """Return a number in `low .. high`.

    Raises:
        TypeError: no real number; a bool is none.
        ValueError: out of range, or NaN.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {quoted(value)}")
    if not low <= value <= high:
        raise ValueError(f"{name} must be in {low:g} .. {high:g}, got {quoted(value)}")
    return value


def check_token_ids(name: str, ids: object, vocab_size: int | None = None) -> tuple[int, ...]:
    """Return a collection of token ids, which may be empty.

    Args:
        vocab_size: ids are below it; None: not known yet.

    Raises:
        TypeError: no collection of integers.
        ValueError: an id is negative or outside the vocabulary, which no token would ever equal.
    """
    if isinstance(ids, (str, bytes)) or not isinstance(ids, Collection):
        raise TypeError(f"{name} must be a tuple of integers, got {quoted(ids)}")
    high = None if vocab_size is None else vocab_size - 1
    return tuple(check_integer(f"{name}[{i}]", token, 0, high) for i, token in enumerate(ids))


def check_drafts(config: ModelConfig, num_draft_tokens: int) -> int:
    """Return a number of drafts per decode forward that the model can make.

    Raises:
        TypeError: no integer.
        ValueError: out of range, or the model has no MTP layer to draft with.
    """
    count = check_integer("num_draft_tokens", num_draft_tokens, 0, MAX_DRAFT_TOKENS)
    if count and not config.num_nextn_predict_layers:
        raise ValueError(f"num_draft_tokens must be 0: the model has no MTP layer, got {count}")
    return count


def check_prompt(prompt_ids: Sequence[int] | Tensor, vocab_size: int, name: str) -> list[int]:
    """Return a prompt as a list of ints.

    Raises:
        TypeError: it does not consist of integers.
        ValueError: it is empty, or an id is outside the vocabulary.
    """
    values = prompt_ids.tolist() if isinstance(prompt_ids, Tensor) else prompt_ids
    try:
        tokens = [_index(token) for token in values]
    except TypeError:
        raise TypeError(
            f"{name} must be a list or 1-D tensor of integers, got {_describe(prompt_ids)}"
        ) from None
    if not tokens:
        raise ValueError(f"{name} must hold at least one token, got none")
    for index, token in enumerate(tokens):
        if not 0 <= token < vocab_size:
            raise ValueError(f"{name}[{index}] must be in [0, {vocab_size}), got {quoted(token)}")
    return tokens


def check_length(
    prompt: int, max_new_tokens: int | None, max_context: int, cache: ModelCache
) -> int:
    """Return the length at which a request is finished, that of its prompt included.

    Args:
        max_new_tokens: None: as many as context and cache have room for.

    Raises:
        ValueError: they have no room for so many.
    """
    if max_new_tokens is None:
        end = min(max_context, cache.num_blocks * cache.block_size)
        if prompt >= end:
            raise ValueError(
                f"prompt_ids: got {prompt} tokens, context and cache leave room for at most "
                f"{end - 1} without max_new_tokens"
            )
        return end
    end = prompt + max_new_tokens
    if end > max_context:
        raise ValueError(
            f"prompt_ids: {prompt} tokens and max_new_tokens = {max_new_tokens} exceed the "
            f"context of {max_context}"
        )
    blocks = -(-end // cache.block_size)
    if blocks > cache.num_blocks:
        raise ValueError(
            f"prompt_ids: {prompt} tokens and max_new_tokens = {max_new_tokens} need {blocks} "
            f"cache blocks, the cache has {cache.num_blocks}"
        )
    return end


def _index(token: object) -> int:
    if isinstance(token, bool):
        raise TypeError
    return operator.index(token)


def _describe(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a {value.dtype} tensor of shape {list(value.shape)}"
    return quoted(value)
