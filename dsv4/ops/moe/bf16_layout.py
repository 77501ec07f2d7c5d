"""Layouts of NVFP4 and bf16 expert weights: as checkpoints store them, and in the order of the
kernels' reads (`dsv4/kernels/moe/bf16_layout.py` says which).

As in `layout`: same shape, dtype and bytes, in another order; any leading dimensions; CPU and CUDA.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4.kernels.moe.bf16_layout import GROUP, MAGNITUDE_BITS, ODD, PAIRS, SIGN_BITS, STEPS
from dsv4.kernels.moe.layout import K_BLOCK, PANEL_ROWS, UNIT_ROWS, UNITS
from dsv4.ops.moe.axes import check_whole, cut_into, inverse, reordered
from dsv4.ops.quantize import pack_e2m1, unpack_e2m1

HALVES, QUAD, PAIR = 2, 4, 2  # of a step's k, 8 elements each; lanes of a row; elements of a lane
VECTORS = 4  # of a lane's row in a k block of bf16

# Axes of a weight [panel, unit, row, k block, step, half, lane of the quad, element], and the order
# in which prepared codes have them; bf16 steps are cut once more: [.., vector, step, ..].
_NVFP4_ORDER = (0, 3, 1, 2, 6, 4, 5, 7)
_BF16_ORDER = (0, 3, 1, 4, 2, 7, 5, 6, 8)
_SCALE_ORDER = (0, 2, 1, 3)  # [panel, row, k block, group] and back


def prepare_nvfp4_codes(codes: Tensor) -> Tensor:
    """Prepared form of e2m1 codes [..., M, K / 2] uint8, two in a byte."""
    lead = codes.shape[:-2]
    nibbles = unpack_e2m1(codes).reshape(*lead, *_nvfp4_axes(codes))
    nibbles = reordered(nibbles, _NVFP4_ORDER).reshape(*lead, -1, PAIRS, PAIR)
    words = torch.zeros(nibbles.shape[:-2], dtype=torch.int32, device=codes.device)
    for pair, element, magnitude, sign in _places():
        nibble = nibbles[..., pair, element].int()
        words |= (nibble & 7) << magnitude | (nibble >> 3) << sign
    return words.view(torch.uint8).reshape(codes.shape)


def restore_nvfp4_codes(prepared: Tensor) -> Tensor:
    """Inverse of `prepare_nvfp4_codes`."""
    lead, axes = prepared.shape[:-2], _nvfp4_axes(prepared)
    words = prepared.contiguous().reshape(*lead, -1).view(torch.int32)
    shape = (*words.shape, PAIRS, PAIR)
    nibbles = torch.empty(shape, dtype=torch.uint8, device=prepared.device)
    for pair, element, magnitude, sign in _places():
        nibbles[..., pair, element] = (words >> magnitude & 7) | (words >> sign & 1) << 3
    nibbles = nibbles.reshape(*lead, *(axes[i] for i in _NVFP4_ORDER))
    nibbles = reordered(nibbles, inverse(_NVFP4_ORDER))
    rows, size = prepared.shape[-2:]
    return pack_e2m1(nibbles.reshape(*lead, rows, 2 * size)).view(prepared.dtype)


def prepare_nvfp4_scales(scale: Tensor) -> Tensor:
    """Prepared form of e4m3 scales [..., M, K / 16]."""
    cut = cut_into(scale.contiguous().view(torch.uint8), _scale_axes(scale))
    return reordered(cut, _SCALE_ORDER).reshape(scale.shape).view(scale.dtype)


def restore_nvfp4_scales(prepared: Tensor) -> Tensor:
    """Inverse of `prepare_nvfp4_scales`."""
    axes = _scale_axes(prepared)
    ordered = tuple(axes[i] for i in _SCALE_ORDER)
    cut = cut_into(prepared.contiguous().view(torch.uint8), ordered)
    return reordered(cut, inverse(_SCALE_ORDER)).reshape(prepared.shape).view(prepared.dtype)


def prepare_bf16(weight: Tensor) -> Tensor:
    """Prepared form of bf16 weights [..., M, K]."""
    cut = cut_into(weight, _bf16_axes(weight))
    return reordered(cut, _BF16_ORDER).reshape(weight.shape)


def restore_bf16(prepared: Tensor) -> Tensor:
    """Inverse of `prepare_bf16`."""
    axes = _bf16_axes(prepared)
    cut = cut_into(prepared, tuple(axes[i] for i in _BF16_ORDER))
    return reordered(cut, inverse(_BF16_ORDER)).reshape(prepared.shape)


def _places():
    """Pair, element, and where a word has its magnitude and its sign."""
    for pair in range(PAIRS):
        for element in range(PAIR):
            above = element * ODD
            yield pair, element, MAGNITUDE_BITS[pair] + above, SIGN_BITS[pair] + above


def _nvfp4_axes(codes: Tensor) -> tuple[int, ...]:
    rows, size = codes.shape[-2:]
    panels, blocks = _blocks(rows, 2 * size)
    return (panels, UNITS, UNIT_ROWS, blocks, STEPS, HALVES, QUAD, PAIR)


def _bf16_axes(weight: Tensor) -> tuple[int, ...]:
    panels, blocks = _blocks(*weight.shape[-2:])
    return (panels, UNITS, UNIT_ROWS, blocks, VECTORS, STEPS // VECTORS, HALVES, QUAD, PAIR)


def _scale_axes(scale: Tensor) -> tuple[int, ...]:
    rows, groups = scale.shape[-2:]
    panels, blocks = _blocks(rows, groups * GROUP)
    return (panels, PANEL_ROWS, blocks, STEPS)


def _blocks(rows: int, columns: int) -> tuple[int, int]:
    check_whole(rows, columns)
    return rows // PANEL_ROWS, columns // K_BLOCK
