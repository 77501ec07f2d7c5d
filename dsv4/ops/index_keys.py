"""Index keys in pages, in plain torch: rounding, FP8 and FP4 keys (`kernels.kit.index_entry`)."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4.kernels.kit.index_entry import FP4_GROUP, SCALE_BYTES, IndexEntry, format_of
from dsv4.ops.pools import write_slots
from dsv4.ops.quantize import (
    decode_e4m3,
    e2m1_as_e4m3,
    hadamard,
    qdq_e2m1,
    quantize_e2m1,
    quantize_e2m1_as_e4m3,
)


def round_index(x: Tensor) -> Tensor:
    """Hadamard-transform index queries or keys [..., d], and round them to FP4 per 32 channels, as
    quantised checkpoints were trained (official inference/kernel.py)."""
    return qdq_e2m1(hadamard(x), FP4_GROUP)


def encode_index(x: Tensor) -> tuple[Tensor, Tensor]:
    """The same as codes [..., d] float8_e4m3fn and a scale [...] fp32 a row."""
    return quantize_e2m1_as_e4m3(hadamard(x), FP4_GROUP)


def pack_index(x: Tensor) -> tuple[Tensor, Tensor]:
    """The same as packed codes [..., d / 2] uint8 of e2m1 and E8M0 scales [..., d / 32] uint8."""
    codes, scales = quantize_e2m1(hadamard(x), FP4_GROUP)
    return codes.view(torch.uint8), scales.view(torch.uint8)


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


def packed_views(pool: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Packed codes [pages, P, d / 2] and scales [pages, P, d / 32], uint8, of pages of FP4 keys.

    Args:
        pool: [pages, P, d / 2 + d / 32] uint8, each page contiguous.
        dim: d.
    """
    pages, size, _ = pool.shape
    entry, stride, offset = IndexEntry(dim, "fp4"), pool.stride(0), pool.storage_offset()
    found = []
    for row in (entry.code_bytes, entry.scale_bytes):
        found.append(pool.as_strided((pages, size, row), (stride, row, 1), offset))
        offset += size * row
    return tuple(found)


def read_keys(pool: Tensor, dim: int, pages: Tensor, places: Tensor) -> Tensor:
    """Keys [..., d] fp32 at `places` [...] of `pages` [...] of FP8 or FP4 keys; as FP8 keys hold
    them, whatever their format."""
    if format_of(dim, pool.shape[2]) == "fp4":
        codes, scales = (view[pages, places] for view in packed_views(pool, dim))
        return decode_index(*e2m1_as_e4m3(codes, scales))
    codes, scales = key_views(pool)
    # torch indexes bytes, not float8.
    found = codes.view(torch.uint8)[pages, places].view(torch.float8_e4m3fn)
    return decode_index(found, scales[pages, places])


def write_keys(keys: Tensor, slots: Tensor, pool: Tensor, *, is_rounded: bool) -> None:
    """Round rotated keys [N, d], and write them to slots [N] of pages [pages, P, .]; what is not in
    the pool is not written."""
    if pool.dtype != torch.uint8:
        write_slots(round_index(keys) if is_rounded else keys, pool, slots)
    elif format_of(keys.shape[1], pool.shape[2]) == "fp4":
        for rows, view in zip(pack_index(keys), packed_views(pool, keys.shape[1])):
            write_slots(rows, view, slots)
    else:
        (codes, scales), (all_codes, all_scales) = encode_index(keys), key_views(pool)
        write_slots(codes.view(torch.uint8), all_codes.view(torch.uint8), slots)
        write_slots(scales.unsqueeze(-1), all_scales.unsqueeze(-1), slots)
