"""Quantisers of low-precision attention, group by group, as SageAttention and plain FP8 have them.

A group of rows shares one scale. Divisions are IEEE's: official kernels on a GPU divide to within 2
units in the last place. Formats are those of `dsv4.reference.quantize`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4.reference.quantize import E2M1_MAX, E4M3_MAX, round_e2m1, round_e4m3

#: Queries of a tile and of a warp, keys of a tile. The last: 128 channels beside fp16 accumulators.
GEOMETRIES = {"sm90": (64, 16, 128), "sm89": (128, 32, 64), "sm89, fp16": (128, 16, 64)}
#: Key that position p of 16 holds in the FP8 values that the tensor core reads.
V_ORDER = (0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15)


def query_group(granularity: str, row: int, geometry: str) -> int:
    """Group of a query."""
    block, warp, _ = GEOMETRIES[geometry]
    return {
        "per_head": 0,
        "per_row": row,
        "per_64": row // 64,
        "per_block": row // block,
        "per_warp": row // warp,
        "per_thread": row // warp * 8 + row % 8,
    }[granularity]


def key_group(granularity: str, row: int, geometry: str) -> int:
    """Group of a key."""
    block = GEOMETRIES[geometry][2]
    return {
        "per_head": 0,
        "per_row": row,
        "per_64": row // 64,
        "per_block": row // block,
        "per_warp": row // block,
        "per_thread": row // block * 4 + row % 8 // 2,
    }[granularity]


def quantize_group(x: Tensor, rule: str, levels: int = 127) -> tuple[Tensor, Tensor]:
    """Codes and scale of the rows [R, d] float32 of one group.

    Args:
        rule: "triton" and "triton_block" (halves away from zero; scale amax / levels, the former
            plus 1e-7), "cuda" (halves to even; amax at least 1e-7), or "fp8".
        levels: largest code: 127 of int8, 7 of int4.
    """
    amax = x.abs().max()
    if rule == "fp8":
        scale = amax / E4M3_MAX if amax > 0 else torch.ones(())
        return round_e4m3(x / scale), scale
    if rule == "cuda":
        amax = amax.clamp(min=1e-7)
        # torch divides a number by a tensor as number * (1 / x), which rounds twice.
        return torch.round(x * (torch.tensor(float(levels)) / amax)), amax / levels
    scale = amax / levels + (1e-7 if rule == "triton" else 0)
    if scale == 0:
        return torch.zeros_like(x), scale
    codes = x / scale
    return torch.trunc(codes + 0.5 * codes.sign()), scale


def quantize_rows(
    x: Tensor, groups: list[int], rule: str, levels: int = 127
) -> tuple[Tensor, Tensor]:
    """Codes [S, d] and the scale of each row [S], of rows [S, d] with a group each."""
    codes, scales = torch.empty_like(x), torch.empty(len(x))
    ids = torch.tensor(groups)
    for group in set(groups):
        codes[ids == group], scales[ids == group] = quantize_group(x[ids == group], rule, levels)
    return codes, scales


def quantize_values(
    v: Tensor, largest: float, is_smooth: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [S, d], scales [d] and means [d] of values [S, d], a scale for each channel.

    Statistics are those of the keys up to a multiple of 16, zeros where there is none; the mean is
    zero without smoothing. A channel of zeros has scale 0, where the official kernel makes NaN.
    """
    padded = torch.cat((v, v.new_zeros(-len(v) % 16, v.shape[1])))
    mean = padded.sum(0) / len(padded) if is_smooth else torch.zeros(v.shape[1])
    amax = (padded - mean).abs().amax(0)
    factor = torch.where(amax == 0, 0.0, torch.full_like(amax, largest) / amax)
    return round_e4m3((v - mean) * factor), amax / largest, mean


def quantize_fp4(x: Tensor) -> tuple[Tensor, Tensor]:
    """Values [..., n] on the e2m1 grid and e4m3 scales [..., n / 16] of 16 elements each."""
    blocks = x.unflatten(-1, (-1, 16))
    scale = round_e4m3(blocks.abs().amax(-1) / E2M1_MAX)
    inverse = torch.where(scale == 0, 0.0, 1 / scale)
    return round_e2m1(blocks * inverse[..., None]).flatten(-2), scale


def quantize_uint8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes 0 to 255 around 128 and the scale of a whole tensor; 1 of a tensor of zeros.

    What a hand-written FP8 kernel without FP8 instructions stores: 128 stands for zero.
    """
    amax = x.abs().max()
    scale = amax / E4M3_MAX if amax > 0 else torch.ones(())
    return (torch.round(x / scale / E4M3_MAX * 127) + 128).clamp(0, 255), scale
