"""Inputs of one forward pass: its requests, positions and cache blocks."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from dsv4.ops.step_indices import (
    StepIndexTensors,
    completed_entries,
    last_valid,
    rows_of,
    token_positions,
    valid_tokens,
)

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Step:
    """One forward pass over B cached requests with up to C new tokens each, padded to [B, C].

    Prefill, chunked prefill, single-token decode and the verification of drafts are all this: new
    tokens that follow `starts` cached ones. Nothing is read back to the host and no shape depends
    on the contents, so a step of fixed (B, C, capacity) can be captured in a CUDA graph. Values
    derived from the tensors are computed once
    per Step object: after the tensors are refilled in place, a new Step is built over them.

    Attributes:
        slots: [B] int64, row of the request in the state cache; -1 = padding row. No two rows share
            a slot.
        starts: [B] int64, position of the request's first new token.
        lens: [B] int64, valid new tokens, 0..C; 0 for padding rows. The valid ones come first.
        block_table: [B, max_blocks] int64, physical cache block of every `block_size` original
            tokens; -1 = none.
        chunk: C.
        capacity: every position of the step is below it; bounds the compressed entries that are
            considered.
        indices: what follows from the tensors, where one launch has made it, for entries of
            `ratios` positions; None: each is made when it is first asked for.

    Raises:
        ValueError: a tensor has another shape or dtype; the message names it.
    """

    slots: Tensor
    starts: Tensor
    lens: Tensor
    block_table: Tensor
    chunk: int
    capacity: int
    # Not of a step that `replace` makes of this one: it has other requests.
    indices: StepIndexTensors | None = field(default=None, init=False, repr=False, compare=False)
    ratios: tuple[int, ...] = field(default=(), init=False, repr=False, compare=False)
    _derived: dict[Hashable, object] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        shape = self.slots.shape
        if len(shape) != 1:
            raise ValueError(f"slots must be [B], got {list(shape)}")
        for name in ("slots", "starts", "lens", "block_table"):
            tensor = getattr(self, name)
            if tensor.dtype != torch.int64:
                raise ValueError(f"{name} must be int64, got {tensor.dtype}")
            if name == "block_table":
                if tensor.dim() != 2 or tensor.shape[0] != shape[0]:
                    raise ValueError(
                        f"block_table must be [{shape[0]}, max_blocks], got {list(tensor.shape)}"
                    )
            elif tensor.shape != shape:
                raise ValueError(f"{name} must be {list(shape)}, got {list(tensor.shape)}")
        if self.chunk < 1:
            raise ValueError(f"chunk must be at least 1, got {self.chunk}")
        if self.capacity < 1:
            raise ValueError(f"capacity must be at least 1, got {self.capacity}")

    def having(self, indices: StepIndexTensors, ratios: tuple[int, ...]) -> Step:
        """The same step with `indices`, for entries of `ratios` positions."""
        step = replace(self)
        object.__setattr__(step, "indices", indices)
        object.__setattr__(step, "ratios", ratios)
        return step

    @property
    def batch(self) -> int:
        """B."""
        return self.slots.shape[0]

    @cached_property
    def offsets(self) -> Tensor:
        """[C] int64: 0 .. C-1."""
        return torch.arange(self.chunk, device=self.starts.device)

    @cached_property
    def positions(self) -> Tensor:
        """[B, C] int64: absolute position of every token, padding included."""
        return token_positions(self.starts, self.chunk)

    @cached_property
    def valid(self) -> Tensor:
        """[B, C] bool: tokens that exist."""
        return valid_tokens(self.slots, self.lens, self.chunk)

    @cached_property
    def requests(self) -> tuple[Tensor, Tensor, Tensor]:
        """`slots`, `starts` and `lens` as operators take them: [B] int32 each."""
        if self.indices is not None:
            return tuple(self.indices.requests)
        return tuple(x.to(torch.int32) for x in (self.slots, self.starts, self.lens))

    @cached_property
    def request_ids(self) -> Tensor:
        """[B * C] int32: the row b of every token, -1 for padding."""
        if self.indices is not None:
            return self.indices.request_ids.flatten()
        return rows_of(self.valid).flatten()

    @cached_property
    def token_positions(self) -> Tensor:
        """[B * C] int32: `positions` as operators take them."""
        if self.indices is not None:
            return self.indices.positions.flatten()
        return self.positions.flatten().to(torch.int32)

    @cached_property
    def pages(self) -> Tensor:
        """[B, max_blocks] int32: `block_table` as operators take it."""
        return self.block_table.to(torch.int32) if self.indices is None else self.indices.pages

    @cached_property
    def live_tokens(self) -> Tensor:
        """[1] int32: number of leading tokens of [B * C] behind which all are padding."""
        return last_valid(self.valid) if self.indices is None else self.indices.live_tokens

    def completed(self, ratio: int, block: int) -> Tensor:
        """[B, K] int32: slots of the K entries of `ratio` positions per request that may end within
        the step, from starts // ratio on; -1: the step does not reach its end, or the request has
        no block. Blocks have `block` positions."""
        if self.indices is not None:
            return self.indices.completed[self.ratios.index(ratio)]
        return self.derive(_completed, ratio, block)

    def visible(self, ratio: int) -> Tensor:
        """[B * C] int32: entries of `ratio` positions that are complete at each token."""
        if self.indices is not None:
            return self.indices.visible[self.ratios.index(ratio)].flatten()
        return self.derive(_visible, ratio)

    def derive(
        self, function: Callable[Concatenate[Step, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Return `function(self, ...)`, computed once: layers of one kind share index arithmetic.

        What is shared is known by the function and its arguments together, so that nothing is ever
        taken for the result of other arithmetic.

        Args:
            function: of a module, not a lambda or a bound method: a new object each time would
                share nothing.
            args, kwargs: hashable; the result depends on them and on the step alone.
        """
        key = (function, args, tuple(sorted(kwargs.items())))
        if key not in self._derived:
            self._derived[key] = function(self, *args, **kwargs)
        return self._derived[key]


def _completed(step: Step, ratio: int, block: int) -> Tensor:
    given = step.starts, step.lens, step.block_table
    return completed_entries(*given, step.chunk, ratio, block)


def _visible(step: Step, ratio: int) -> Tensor:
    return ((step.positions + 1) // ratio).flatten().to(torch.int32)
