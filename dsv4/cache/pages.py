"""Index keys of one layer, in blocks that requests take as they grow."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4.cache.step import Step


class Pages:
    """Entries of one layer: entry n of a request lies in its block n // entries_per_block.

    Attributes:
        data: [blocks + 1, entries_per_block, dim]; the last block swallows writes that must not
            happen.
    """

    def __init__(
        self,
        blocks: int,
        entries_per_block: int,
        dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.entries_per_block = entries_per_block
        self.data = torch.zeros(blocks + 1, entries_per_block, dim, dtype=dtype, device=device)

    def write(self, step: Step, first_entry: Tensor, values: Tensor, valid: Tensor) -> None:
        """Write entries first_entry[b] + k.

        Args:
            first_entry: [B] int64.
            values: [B, K, dim].
            valid: [B, K] bool; entries where it is False, or whose block is -1, are dropped.
        """
        entries = first_entry[:, None] + torch.arange(values.shape[1], device=values.device)
        blocks = self._blocks(step, entries)
        blocks = torch.where(valid, blocks, self._trash)
        self.data[blocks, entries % self.entries_per_block] = values.to(self.data.dtype)

    def all(self, step: Step, n: int) -> Tensor:
        """Return the first `n` entries of each request: [B, n, dim]. Undefined where they were
        never written.

        Raises:
            ValueError: the block table has no room for `n` entries.
        """
        columns = -(-n // self.entries_per_block)
        if columns > step.block_table.shape[1]:
            raise ValueError(
                f"{n} entries need {columns} blocks per request, "
                f"block_table has {step.block_table.shape[1]}: is capacity too large?"
            )
        blocks = step.block_table[:, :columns]
        blocks = torch.where(blocks < 0, self._trash, blocks)
        return self.data[blocks].flatten(1, 2)[:, :n]

    @property
    def _trash(self) -> int:
        return len(self.data) - 1

    def _blocks(self, step: Step, entries: Tensor) -> Tensor:
        """Physical blocks of the entries [B, n]; the trash block where the request has none."""
        columns = entries // self.entries_per_block
        inside = (columns >= 0) & (columns < step.block_table.shape[1])
        blocks = step.block_table.gather(1, torch.where(inside, columns, 0))
        return torch.where(inside & (blocks >= 0), blocks, self._trash)
