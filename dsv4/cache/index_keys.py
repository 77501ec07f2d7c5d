"""Index keys of one layer, in blocks that requests take as they grow."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4.kernels.kit.index_entry import INDEX_FORMATS, MODEL_FORMAT, IndexEntry
from dsv4.ops.index_keys import write_keys
from dsv4.quoting import quoted


def check_index_format(name: object) -> None:
    """Refuse what is no format of index keys.

    Raises:
        ValueError: the message names the argument.
    """
    if name not in INDEX_FORMATS:
        raise ValueError(f"index_format must be one of {INDEX_FORMATS}, got {quoted(name)}")


class IndexKeyPool:
    """Keys of the entries of one layer; a key has its entry's slot.

    Attributes:
        data: [pages, size, dim]; or [pages, size, bytes] uint8 of FP4 or FP8 keys
            (`dsv4.kernels.kit.index_entry`), in which keys rounded to FP4 lie without loss.
        is_packed: whether these are FP4 or FP8 keys; key_format: which.

    Args:
        pages, size: pages, keys of each.
        dtype: of the model's activations.
        is_rounded: whether keys are Hadamard-transformed and rounded to FP4, in bfloat16 models as
            FP4 or FP8 keys.
        key_format: of those, "fp4" or "fp8".

    Raises:
        ValueError: there is no such format, or the channels are no whole groups of it.
    """

    def __init__(
        self,
        pages: int,
        size: int,
        dim: int,
        dtype: torch.dtype,
        is_rounded: bool,
        device: torch.device | str,
        key_format: str = MODEL_FORMAT,
    ) -> None:
        self.is_rounded = is_rounded
        self.is_packed = is_rounded and dtype == torch.bfloat16
        self.key_format = key_format
        if self.is_packed:
            entry = IndexEntry(dim, key_format)
            stride = entry.page_bytes(size)
            storage = torch.zeros(pages * stride, dtype=torch.uint8, device=device)
            self.data = storage.as_strided((pages, size, entry.bytes), (stride, entry.bytes, 1))
        else:
            self.data = torch.zeros(pages, size, dim, dtype=dtype, device=device)

    def insert(self, keys: Tensor, slots: Tensor) -> None:
        """Round and write keys [N, dim], rotated, to slots [N] int32; what has none is dropped."""
        write_keys(keys, slots, self.data, is_rounded=self.is_rounded)

    @property
    def rounding(self) -> dict[str, bool]:
        """How `compress` rounds what it writes here."""
        return {"is_index": True, "is_rounded": self.is_rounded}
