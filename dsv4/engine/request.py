"""A request of the engine, and what a step reports of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from dsv4.engine.sampler import RowSampling


class Output(NamedTuple):
    """Result of one engine step for one request."""

    request: int
    tokens: list[int]  # new tokens, in order, the stop token included
    finished: bool  # no more will come


@dataclass
class Request:
    """A request's tokens and, while it runs, its place in the cache.

    Whatever is not cached can be computed again from `tokens`, which is all that a request keeps
    when it gives up its blocks.
    """

    id: int
    tokens: list[int]  # prompt and continuation
    end: int  # length of `tokens` at which it is finished
    stop_tokens: frozenset[int]
    sampling: RowSampling
    slot: int | None = None
    drafts: list[int] = field(default_factory=list)  # candidates for the tokens after `tokens`
