"""Sampling options of a request."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from dsv4.engine.arguments import check_integer, check_number, check_token_ids
from dsv4.quoting import quoted

MAX_TEMPERATURE = 1e6  # far beyond what leaves anything of the logits; finite in float32
MAX_LOGIT_BIAS = 1024  # tokens of a request with a bias
MAX_LOGPROBS = 20  # alternatives of a token, as many as OpenAI's interface has
MAX_TOP_K = 1 << 31
MAX_PENALTY = 1e4


@dataclass(frozen=True)
class SamplingParams:
    """Sampling options of a request.

    A token is chosen from the model's logits in this order: `logit_bias` is added; tokens that
    occurred are penalised; at temperature 0 the best is taken; else logits are divided by the
    temperature, and of their probabilities those remain that `min_p` keeps, of these the `top_k`
    likeliest, of these the nucleus of `top_p`.

    Attributes:
        max_new_tokens: tokens to generate, at most; None: until an engine's context is full.
        temperature: 0 takes the likeliest token; above 0 samples, values under 1e-5 counting as
            1e-5; at most 1e6.
        top_p: sample from the smallest set of tokens whose probabilities sum to at least this much
            of what is left of them; in (0, 1].
        top_k: sample from so many likeliest tokens, of equal ones those with lower ids; 0: all.
        min_p: sample from tokens at least this many times as likely as the likeliest; in [0, 1].
        repetition_penalty: divides positive logits of tokens that the prompt or the continuation
            holds, and multiplies negative ones; above 0, 1 changes nothing.
        presence_penalty: taken off the logits of tokens that the continuation holds.
        frequency_penalty: taken off the logits of tokens, once per occurrence in the continuation.
        logit_bias: added to the logits of up to 1024 tokens; minus infinity bans one. Also of the
            end-of-sequence token: a request all of whose tokens are banned fails.
        logprobs: None, or how many alternatives of each new token are reported with their
            log-probabilities, 0 .. 20, beside its own; of the model's logits, before all of the
            above.
        seed: repeats a sampled continuation; None draws a fresh one from torch's default generator.
        stop_tokens: ids that end the continuation (and are part of it); None means the model's
            end-of-sequence ids.

    Raises:
        TypeError: a field is of another type; the message names it.
        ValueError: a field is out of range; the message names it.
    """

    max_new_tokens: int | None = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    logprobs: int | None = None
    seed: int | None = None
    stop_tokens: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.max_new_tokens is not None:
            check_integer("max_new_tokens", self.max_new_tokens, 1)
        check_number("temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        _check_positive("top_p", self.top_p, 1.0)
        check_integer("top_k", self.top_k, 0, MAX_TOP_K)
        check_number("min_p", self.min_p, 0.0, 1.0)
        _check_positive("repetition_penalty", self.repetition_penalty, MAX_PENALTY)
        for name in ("presence_penalty", "frequency_penalty"):
            check_number(name, getattr(self, name), -MAX_PENALTY, MAX_PENALTY)
        if self.logit_bias is not None:
            check_bias(self.logit_bias)
        if self.logprobs is not None:
            check_integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.seed is not None:
            check_integer("seed", self.seed, -(1 << 63), (1 << 63) - 1)
        if self.stop_tokens is not None:
            check_token_ids("stop_tokens", self.stop_tokens)

    @property
    def samples(self) -> bool:
        """Whether tokens are drawn."""
        return self.temperature > 0

    @property
    def adds_over_vocabulary(self) -> bool:
        """Whether probabilities are needed, to draw or to report."""
        return self.samples or self.logprobs is not None

    @property
    def penalizes(self) -> bool:
        """Whether a token depends on which came before."""
        return self.repetition_penalty != 1 or bool(self.presence_penalty or self.frequency_penalty)


class SamplingKind(NamedTuple):
    """The code that the rows of a forward need: host knowledge, part of a graph's identity.

    Rows get the same tokens whatever code runs beside what they need themselves.
    """

    greedy: bool = True  # no row samples
    nucleus: bool = False  # some row that samples has top_p < 1
    top_k: bool = False
    min_p: bool = False
    penalized: bool = False
    biased: bool = False
    logprobs: int | None = None  # alternatives of each token, 0 or all that any request may ask for

    @classmethod
    def of(cls, rows: Iterable[SamplingParams]) -> SamplingKind:
        """Return the kind of requests that share a forward."""
        rows = list(rows)
        drawn = [row for row in rows if row.samples]
        wanted = [row.logprobs for row in rows if row.logprobs is not None]
        return cls(
            greedy=not drawn,
            nucleus=any(row.top_p < 1 for row in drawn),
            top_k=any(row.top_k for row in drawn),
            min_p=any(row.min_p for row in drawn),
            penalized=any(row.penalizes for row in rows),
            biased=any(row.logit_bias for row in rows),
            logprobs=(MAX_LOGPROBS if any(wanted) else 0) if wanted else None,
        )


def _check_positive(name: str, value: object, high: float) -> None:
    check_number(name, value, 0.0, high)
    if value == 0:
        raise ValueError(f"{name} must be above 0, got {quoted(value)}")


def check_bias(bias: object, vocab_size: int | None = None) -> None:
    """Check what is added to logits, by token.

    Args:
        vocab_size: tokens are below it; None: not known yet.

    Raises:
        TypeError: no mapping of integers to numbers.
        ValueError: too many tokens, one outside the vocabulary, or a number out of range.
    """
    if not isinstance(bias, Mapping):
        raise TypeError(f"logit_bias must map token ids to numbers, got {quoted(bias)}")
    if len(bias) > MAX_LOGIT_BIAS:
        raise ValueError(f"logit_bias must have at most {MAX_LOGIT_BIAS} tokens, got {len(bias)}")
    for token, value in bias.items():
        last = None if vocab_size is None else vocab_size - 1
        check_integer("logit_bias: a token", token, 0, last)
        check_number(f"logit_bias[{token}]", value, -math.inf, MAX_TEMPERATURE)
