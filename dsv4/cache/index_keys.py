"""Index keys of one layer, in blocks that requests take as they grow."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4.kernels.kit.index_entry import IndexEntry
from dsv4.ops.index_keys import encode_index, key_views
from dsv4.ops.pools import write_slots


class IndexKeyPool:
    """Keys of the entries of one layer; a key has its entry's slot.

    Attributes:
        data: [pages, size, dim]; or [pages, size, dim + 4] uint8 of FP8 keys
            (`dsv4.kernels.kit.index_entry`), in which keys rounded to FP4 lie without loss.

    Args:
        pages, size: pages, keys of each.
        is_packed: whether keys are Hadamard-transformed, rounded to FP4 and stored as FP8 keys.
    """

    def __init__(
        self,
        pages: int,
        size: int,
        dim: int,
        dtype: torch.dtype,
        is_packed: bool,
        device: torch.device | str,
    ) -> None:
        self.is_packed = is_packed
        if is_packed:
            entry = IndexEntry(dim)
            stride = entry.page_bytes(size)
            storage = torch.zeros(pages * stride, dtype=torch.uint8, device=device)
            self.data = storage.as_strided((pages, size, entry.bytes), (stride, entry.bytes, 1))
        else:
            self.data = torch.zeros(pages, size, dim, dtype=dtype, device=device)

    def insert(self, keys: Tensor, slots: Tensor) -> None:
        """Write keys [N, dim], rotated, to slots [N] int32; what has none is dropped."""
        if self.is_packed:
            (codes, scales), (all_codes, all_scales) = encode_index(keys), key_views(self.data)
            rows = [codes.view(torch.uint8), scales.unsqueeze(-1)]
            targets = [all_codes.view(torch.uint8), all_scales.unsqueeze(-1)]
        else:
            rows, targets = [keys], [self.data]
        for row, target in zip(rows, targets, strict=True):
            write_slots(row, target, slots)
