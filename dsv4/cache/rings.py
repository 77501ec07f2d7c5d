"""Fixed-size state of every request, addressed by position."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4.cache.step import Step


class Ring:
    """The last `size` positions of every request: position p lives at index p mod size.

    Writing a position again overwrites it, so a rejected draft is rolled back by continuing at an
    earlier start; reading n positions after drafts of d tokens needs size >= n + d + 1. A reader
    asks for positions, never for "what is there": what an earlier request left is never looked at.

    Attributes:
        data: [rows + 1, size, *dims]; the last row swallows the writes of padding.
    """

    def __init__(
        self,
        rows: int,
        size: int,
        dims: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.size = size
        self.data = torch.zeros(rows + 1, size, *dims, dtype=dtype, device=device)

    def history(self, step: Step, n: int) -> Tensor:
        """Return the `n` positions before every request's start, oldest first: [B, n, *dims].

        Entries of negative positions are undefined, NaN included: the caller masks them.

        Raises:
            ValueError: the ring holds fewer than `n` positions.
        """
        if n > self.size:
            raise ValueError(f"history of {n} positions asked of a ring of {self.size}")
        rows, index = step.derive(_history_index, self._trash, self.size, n)
        return self.data[rows, index]

    def append(self, step: Step, values: Tensor) -> None:
        """Write the valid tokens of `values` [B, C, *dims], the last `size` of them."""
        rows, index = step.derive(_append_index, self._trash, self.size)
        self.data[rows, index] = values.to(self.data.dtype)

    def reset(self, rows: Tensor | list[int]) -> None:
        """Zero the given rows."""
        self.data[rows] = 0

    @property
    def _trash(self) -> int:
        return len(self.data) - 1


def _history_index(step: Step, trash: int, size: int, n: int) -> tuple[Tensor, Tensor]:
    """Row [B, 1] and index [B, n] of the positions before every request's start."""
    rows = torch.where(step.slots < 0, trash, step.slots)[:, None]
    back = torch.arange(-n, 0, device=rows.device)
    return rows, (step.starts[:, None] + back) % size


def _append_index(step: Step, trash: int, size: int) -> tuple[Tensor, Tensor]:
    """Row and index [B, C] that every token is written to; `trash` for those that are not."""
    # Of two tokens with the same index only the later may write: index_put leaves their order
    # open.
    kept = step.valid & (step.offsets >= step.lens[:, None] - size)
    rows = torch.where(kept, step.slots[:, None], trash)
    return rows, step.positions % size
