"""A request of the engine, and what a step reports of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from dsv4.cache.prefixes import Node
from dsv4.engine.logprobs import TokenLogprobs
from dsv4.engine.sampler import FAILED
from dsv4.engine.sampling_params import SamplingParams

Reason = Literal["stop", "length", "context", "failed"]


class Output(NamedTuple):
    """Result of one engine step for one request.

    Attributes:
        request: its id.
        tokens: new tokens, in order, the stop token included. Empty only where it failed.
        finished: no more will come.
        reason: "stop": a stop token; "length": as many tokens as it may have; "context": no room
            for another; "failed": no token could be chosen, every logit was minus infinity or one
            was NaN. None: not finished.
        logprobs: of each new token. None: not asked for.
    """

    request: int
    tokens: list[int]
    finished: bool
    reason: Reason | None = None
    logprobs: list[TokenLogprobs] | None = None

    def then(self, later: Output) -> Output:
        """One output of two."""
        logprobs = None if self.logprobs is None else self.logprobs + (later.logprobs or [])
        return later._replace(tokens=self.tokens + later.tokens, logprobs=logprobs)


@dataclass(eq=False)
class Request:
    """A request's tokens and, while it runs, its place in the cache.

    Whatever is not cached can be computed again from `tokens`, which is all that a request keeps
    when it gives up its blocks.

    Attributes:
        tokens: prompt and continuation, as far as they were read from the device.
        prompt: tokens of the prompt.
        end: length of `tokens` at which it is finished.
        seed: of its samples.
        pending: forwards in flight, each of which chooses at least one token.
        ahead: tokens that these choose, at most.
        decodes: its prompt is cached, or will be when the forwards in flight are done.
        prefix: how far its tokens are kept for others, or were found.
        is_over: finished or cancelled: what forwards in flight choose for it is dropped.
    """

    id: int
    tokens: list[int]
    prompt: int
    end: int
    stop_tokens: frozenset[int]
    sampling: SamplingParams
    seed: int
    slot: int | None = None
    pending: int = 0
    ahead: int = 0
    decodes: bool = False
    prefix: Node | None = None
    is_over: bool = False

    @property
    def has_more(self) -> bool:
        """Whether tokens are left to choose beside those that forwards in flight do."""
        return len(self.tokens) + self.pending < self.end

    def most_cached(self, more: int = 0) -> int:
        """Positions that are cached, at most, when forwards in flight have chosen their tokens and
        some `more`."""
        return min(len(self.tokens) - 1 + self.ahead + more, self.end - 1)

    def cut(self, tokens: list[int]) -> tuple[list[int], Reason | None]:
        """The new tokens that count, and why the request ends with them, if it does."""
        for index, token in enumerate(tokens):
            if token == FAILED:
                return tokens[:index], "failed"
            if token in self.stop_tokens:
                return tokens[: index + 1], "stop"
        is_complete = len(self.tokens) + len(tokens) == self.end
        return tokens, self._reason_of_end if is_complete else None

    @property
    def _reason_of_end(self) -> Reason:
        return "context" if self.sampling.max_new_tokens is None else "length"
