"""Compressed entries of one layer as keys, in blocks that requests take as they grow."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dsv4.cache.formats import KeyPool, KvFormat
from dsv4.cache.step import Step


class EntryPool(KeyPool):
    """Entry n of a request lies in its block n // size; a page is a block.

    Args:
        blocks: blocks that all requests share.
        size: entries of a block.
        ratio: positions per entry.
    """

    def __init__(
        self,
        kv_format: KvFormat,
        blocks: int,
        size: int,
        ratio: int,
        device: torch.device | str,
    ) -> None:
        super().__init__(kv_format, blocks, size, device)
        self.ratio = ratio

    def completed(self, step: Step) -> CompletedEntries:
        """The entries that end within a step; the same for all layers of a kind."""
        return step.derive(_completed, self.ratio, self.size)


class CompletedEntries(NamedTuple):
    """The K entries per request that may end within a step.

    Attributes:
        positions: [B * K] int32, of their first tokens, which they are rotated by.
        slots: [B * K] int32; -1: the step does not reach its end, or the request has no block.
    """

    positions: Tensor
    slots: Tensor


def _completed(step: Step, ratio: int, size: int) -> CompletedEntries:
    count = -(-step.chunk // ratio)
    numbers = (step.starts // ratio)[:, None] + torch.arange(count, device=step.starts.device)
    inside = numbers // size < step.block_table.shape[1]
    complete = inside & ((numbers + 1) * ratio <= (step.starts + step.lens)[:, None])
    slots = _slots(step, torch.where(inside, numbers, 0), size)
    return CompletedEntries(
        positions=(numbers * ratio).flatten().to(torch.int32),
        slots=torch.where(complete, slots, -1).flatten(),
    )


def _slots(step: Step, entries: Tensor, size: int) -> Tensor:
    """Slots [B, n] int32 of entries [B, n]; -1 where the request has no block."""
    blocks = step.block_table.gather(1, entries // size)
    return torch.where(blocks < 0, -1, blocks * size + entries % size).to(torch.int32)
