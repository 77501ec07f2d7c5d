"""Compressed entries of one layer as keys, in blocks that requests take as they grow."""

from __future__ import annotations

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

    def completed(self, step: Step) -> Tensor:
        """Slots [B, K] int32 of the K entries per request that may end within a step: from
        starts // ratio on; -1: the step does not reach its end, or the request has no block.

        The same for all layers of a kind.
        """
        return step.completed(self.ratio, self.size * self.ratio)
