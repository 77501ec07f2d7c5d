"""Inputs of one forward pass: its requests, positions and cache blocks."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

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

    Raises:
        ValueError: a tensor has another shape or dtype; the message names it.
    """

    slots: Tensor
    starts: Tensor
    lens: Tensor
    block_table: Tensor
    chunk: int
    capacity: int
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
        return self.starts[:, None] + self.offsets

    @cached_property
    def valid(self) -> Tensor:
        """[B, C] bool: tokens that exist."""
        return (self.offsets < self.lens[:, None]) & (self.slots >= 0)[:, None]

    @cached_property
    def requests(self) -> tuple[Tensor, Tensor, Tensor]:
        """`slots`, `starts` and `lens` as operators take them: [B] int32 each."""
        return tuple(x.to(torch.int32) for x in (self.slots, self.starts, self.lens))

    @cached_property
    def request_ids(self) -> Tensor:
        """[B * C] int32: the row b of every token, -1 for padding."""
        rows = torch.arange(self.batch, device=self.starts.device)[:, None]
        return torch.where(self.valid, rows, -1).flatten().to(torch.int32)

    @cached_property
    def token_positions(self) -> Tensor:
        """[B * C] int32: `positions` as operators take them."""
        return self.positions.flatten().to(torch.int32)

    @cached_property
    def pages(self) -> Tensor:
        """[B, max_blocks] int32: `block_table` as operators take it."""
        return self.block_table.to(torch.int32)

    @cached_property
    def live_tokens(self) -> Tensor:
        """[1] int32: number of leading tokens of [B * C] behind which all are padding."""
        count = torch.arange(1, self.batch * self.chunk + 1, device=self.starts.device)
        return torch.where(self.valid.flatten(), count, 0).amax(0, keepdim=True).to(torch.int32)

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
