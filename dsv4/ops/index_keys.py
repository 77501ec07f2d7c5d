"""Index keys in pages, in plain torch: rounding, and FP8 keys (`dsv4.kernels.kit.index_entry`)."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4.kernels.kit.index_entry import FP4_GROUP, SCALE_BYTES
from dsv4.ops.quantize import decode_e4m3, hadamard, qdq_e2m1, quantize_e2m1_as_e4m3


def round_index(x: Tensor) -> Tensor:
    """Hadamard-transform index queries or keys [..., d], and round them to FP4 per 32 channels, as
    quantised checkpoints were trained (official inference/kernel.py)."""
    return qdq_e2m1(hadamard(x), FP4_GROUP)


def encode_index(x: Tensor) -> tuple[Tensor, Tensor]:
    """The same as codes [..., d] float8_e4m3fn and a scale [...] fp32 a row."""
    return quantize_e2m1_as_e4m3(hadamard(x), FP4_GROUP)


def decode_index(codes: Tensor, scales: Tensor) -> Tensor:
    """Values [..., d] fp32 of codes and scales."""
    return decode_e4m3(codes).mul_(scales.unsqueeze(-1))


def key_views(pool: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [pages, P, d] float8_e4m3fn and scales [pages, P] fp32 of pages of FP8 keys.

    Args:
        pool: [pages, P, d + 4] uint8, each page contiguous, pages at multiples of 16 bytes.
    """
    pages, size, row = pool.shape
    dim, stride = row - SCALE_BYTES, pool.stride(0)
    offset = pool.storage_offset()
    codes = pool.as_strided((pages, size, dim), (stride, dim, 1), offset)
    scales = pool.as_strided(
        (pages, size, SCALE_BYTES), (stride, SCALE_BYTES, 1), offset + size * dim
    )
    return codes.view(torch.float8_e4m3fn), scales.view(torch.float32).squeeze(-1)
