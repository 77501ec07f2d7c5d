"""Fixed-size state of every request, addressed by position."""

from __future__ import annotations

import torch
from torch import Tensor


class Ring:
    """The last `size` positions of every request: position p lives at index p mod size.

    Writing a position again overwrites it, so a rejected draft is rolled back by continuing at an
    earlier start; reading n positions after drafts of d tokens needs size >= n + d + 1. A reader
    asks for positions, never for "what is there": what an earlier request left is never looked at.

    Attributes:
        data: [rows, size, *dims].
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
        self.data = torch.zeros(rows, size, *dims, dtype=dtype, device=device)

    def reset(self, rows: Tensor | list[int]) -> None:
        """Zero the given rows."""
        self.data[rows] = 0
