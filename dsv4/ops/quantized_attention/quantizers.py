"""Quantisers of rows and columns in torch: codes and scales, with the official ones' rounding.

Divisions are IEEE's on all devices (`divided`); `dsv4.reference.lowp_quantizers` says the same
group by group.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dsv4.kernels.lowp.groups import FP4_BLOCK, V_ALIGN, V_ORDER, Groups
from dsv4.ops.quantize import E2M1_MAX, E2M1_VALUES, E4M3_MAX, decode_e4m3, pack_e2m1, unpack_e2m1

SUM_ROWS, SUM_CHAINS = 128, 8  # of `column_sums`
INT8_MAX = 127.0
SCALE_LANES, SCALE_WORD = 32, 4  # rows and scales of a row that the tensor core reads together
INT8_FLOOR = 1e-7  # of a scale (Triton), of a largest magnitude (CUDA)


def quantize_rows(x: Tensor, groups: Groups, quantizer: str) -> tuple[Tensor, Tensor]:
    """Code rows in int8, one scale per group.

    Args:
        x: [..., S, d] float32.
        groups: of the rows of a block; zeros fill the last block.
        quantizer: rounding: "triton" (scale amax / 127 + 1e-7, halves away from zero), "block" (the
            same without 1e-7), or "cuda" (scale max(amax, 1e-7) / 127, halves to even).

    Returns:
        codes [..., S, d] int8 and scales [..., blocks, groups] float32.
    """
    blocks = _in_groups(x, groups)
    amax = _amax(blocks)
    if quantizer == "cuda":
        amax = amax.clamp_min(INT8_FLOOR)
        scale = divided(amax, INT8_MAX)
        codes = (blocks * _spread(_over(INT8_MAX, amax))).round_()
    else:
        scale = divided(amax, INT8_MAX)
        if quantizer == "triton":
            scale = scale + INT8_FLOOR
        codes = blocks / _spread(scale)
        # 0 / 0 of a group of zeros.
        codes = codes.nan_to_num_(0.0) if quantizer == "block" else codes
        codes = (codes + codes.sign().mul_(0.5)).trunc_()
    codes = codes.clamp_(-128, 127).to(torch.int8)
    return codes.flatten(-5, -2)[..., : x.shape[-2], :], scale


def quantize_rows_fp8(x: Tensor, groups: Groups, is_per_head: bool) -> tuple[Tensor, Tensor]:
    """Code rows in e4m3, scale amax / 448, or 1 where all is zero; as `quantize_rows`.

    Args:
        is_per_head: whether all groups have the largest of their scales.
    """
    blocks = _in_groups(x, groups)
    amax = _amax(blocks)
    if is_per_head and amax.numel():
        amax = amax.amax((-1, -2), keepdim=True).expand_as(amax)
    scale = torch.where(amax == 0, 1.0, divided(amax, E4M3_MAX))
    codes = round_e4m3(blocks / _spread(scale))
    return codes.flatten(-5, -2)[..., : x.shape[-2], :], scale


def quantize_columns(
    x: Tensor, rows: int, largest: float, is_smooth: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Code values in e4m3, one scale per channel.

    Args:
        x: [..., S', d] float32, zeros from row `rows` on.
        rows: keys that there are; with zeros up to a multiple of 16 they make up the statistics.
        largest: code of the largest magnitude.
        is_smooth: whether the channels' means are taken off first, of padding too.

    Returns:
        codes [..., S', d] float8_e4m3fn, scales [..., d] and means [..., d] float32 or None. A
        channel of zeros has scale 0 and codes 0.
    """
    counted = -(-rows // V_ALIGN) * V_ALIGN
    seen, mean = x[..., :counted, :], None
    if is_smooth:
        mean = divided(column_sums(seen), max(counted, 1))
        x = x - mean.unsqueeze(-2)
        seen = x[..., :counted, :]
    amax = seen.abs().amax(-2) if counted else x.new_zeros(*x.shape[:-2], x.shape[-1])
    factor = torch.where(amax == 0, 0.0, _over(largest, amax))
    return round_e4m3(x * factor.unsqueeze(-2)), divided(amax, largest), mean


def quantize_fp4(x: Tensor) -> tuple[Tensor, Tensor]:
    """Code the last dimension in e2m1, one e4m3 scale per 16 elements: e4m3(amax / 6).

    Returns:
        codes [..., n] uint8 (0 to 15, not packed) and scales [..., n / 16] float8_e4m3fn.
    """
    blocks = x.unflatten(-1, (-1, FP4_BLOCK))
    scale = round_e4m3(divided(blocks.abs().amax(-1), E2M1_MAX))
    wide = decode_e4m3(scale)
    inverse = torch.where(wide == 0, 0.0, wide.reciprocal())
    return round_e2m1(blocks * inverse.unsqueeze(-1)).flatten(-2), scale


def column_sums(x: Tensor) -> Tensor:
    """Sums of rows [..., S, d] float32 -> [..., d], in the one order of all devices.

    Within every 128 rows halves are added; of these sums every eighth, one after the other; of the
    eight that are left halves again.
    """
    tiles = pad_rows(x, SUM_ROWS).unflatten(-2, (-1, SUM_ROWS))
    chains = pad_rows(_add_halves(tiles), SUM_CHAINS).unflatten(-2, (-1, SUM_CHAINS))
    total = x.new_zeros(*x.shape[:-2], SUM_CHAINS, x.shape[-1])
    for step in range(chains.shape[-3]):
        total = total + chains[..., step, :, :]
    return _add_halves(total)


def _add_halves(x: Tensor) -> Tensor:
    """Sum over the second-to-last dimension, a power of two, as a tree."""
    while x.shape[-2] > 1:
        low, high = x.chunk(2, -2)
        x = low + high
    return x.squeeze(-2)


def round_e4m3(x: Tensor) -> Tensor:
    """Nearest e4m3 codes, ties to even, saturating."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def round_e2m1(x: Tensor) -> Tensor:
    """Nearest e2m1 codes 0 to 15 as uint8, ties to the even code, saturating."""
    magnitude = x.abs().nan_to_num(E2M1_MAX)
    # Between neighbouring magnitudes; of a tie the even code is the lower one every other time.
    table = torch.tensor(E2M1_VALUES, device=x.device)
    middle = (table[1:] + table[:-1]) / 2
    code = torch.bucketize(magnitude.contiguous(), middle)
    is_tie = magnitude == middle[code.clamp(max=len(middle) - 1)]
    code = code + (is_tie & (code % 2 == 1))
    return (code + 8 * torch.signbit(x)).to(torch.uint8)


def decode_e2m1(codes: Tensor) -> Tensor:
    """Float32 values of e2m1 codes 0 to 15."""
    table = torch.tensor(E2M1_VALUES, device=codes.device)
    return torch.cat((table, -table))[codes.int()]


def pack_fp4(codes: Tensor) -> Tensor:
    """Bytes of pairs of codes, even elements in the low nibble."""
    return pack_e2m1(codes).view(torch.uint8)


def decode_fp4(packed: Tensor, scale: Tensor) -> Tensor:
    """Float32 values of packed codes [..., n / 2] with scales [..., n / 16]."""
    values = decode_e2m1(unpack_e2m1(packed)).unflatten(-1, (-1, FP4_BLOCK))
    return (values * decode_e4m3(scale.contiguous()).unsqueeze(-1)).flatten(-2)


def in_scale_order(scale: Tensor) -> Tensor:
    """Scales of a tile's rows [..., rows, n / 16] as the tensor core reads them, flat.

    The four of a row and 64 elements are a word; words of rows 32 apart, then of the next 64
    elements, lie beside each other, four at a time.
    """
    rows, blocks = scale.shape[-2:]
    words = scale.unflatten(-2, (-1, SCALE_LANES)).unflatten(-1, (-1, SCALE_WORD))
    # [rows / 32, 32, blocks / 4, 4] -> columns, four of them, 32, 4.
    columns = words.movedim(-2, -4).flatten(-4, -3)
    together = columns.unflatten(-3, (-1, _words_together(rows, blocks)))
    return together.transpose(-3, -2).flatten(-4)


def out_of_scale_order(scale: Tensor, rows: int) -> Tensor:
    """The inverse of `in_scale_order`, of tiles of so many rows: [..., rows, n / 16]."""
    blocks = scale.shape[-1] // rows
    shape = (-1, SCALE_LANES, _words_together(rows, blocks), SCALE_WORD)
    columns = scale.unflatten(-1, shape).transpose(-3, -2).flatten(-4, -3)
    words = columns.unflatten(-3, (-1, rows // SCALE_LANES)).movedim(-4, -2)
    return words.flatten(-2).flatten(-3, -2)


def _words_together(rows: int, blocks: int) -> int:
    """Words of scales that lie beside each other: 16 bytes, of small tiles all."""
    return min(4, rows // SCALE_LANES * blocks // SCALE_WORD)


def in_v_order(x: Tensor) -> Tensor:
    """Rows [..., S', d] in the order that the tensor core's registers ask for, within every 16."""
    order = torch.tensor(V_ORDER, device=x.device)
    return x.unflatten(-2, (-1, V_ALIGN)).index_select(-2, order).flatten(-3, -2)


def out_of_v_order(x: Tensor) -> Tensor:
    """The inverse of `in_v_order`."""
    order = torch.tensor(V_ORDER, device=x.device).argsort()
    return x.unflatten(-2, (-1, V_ALIGN)).index_select(-2, order).flatten(-3, -2)


def group_scales(scale: Tensor, groups: Groups, rows: int) -> Tensor:
    """Scale of every row [..., rows] of scales [..., blocks, groups]."""
    return scale.flatten(-2)[..., groups.group_of(torch.arange(rows, device=scale.device))]


def pad_rows(x: Tensor, block: int) -> Tensor:
    """[..., S, d] with zeros up to a multiple of `block` rows."""
    return F.pad(x, (0, 0, 0, -x.shape[-2] % block))


def divided(x: Tensor, number: float) -> Tensor:
    """x / number, rounded once: torch divides by a number on a GPU as x * (1 / number)."""
    return x / torch.full_like(x, number)


def _over(number: float, x: Tensor) -> Tensor:
    """number / x, rounded once: torch divides a number by a tensor as number * (1 / x)."""
    return torch.full_like(x, number) / x


def _in_groups(x: Tensor, groups: Groups) -> Tensor:
    """[..., S, d] -> [..., blocks, rounds, count, run, d]."""
    return pad_rows(x, groups.rows).unflatten(-2, (-1, *groups))


def _amax(blocks: Tensor) -> Tensor:
    """[..., blocks, rounds, count, run, d] -> [..., blocks, count]."""
    if not blocks.numel():
        return blocks.new_zeros(*blocks.shape[:-4], blocks.shape[-3])
    return blocks.abs().amax((-1, -2, -4))


def _spread(scale: Tensor) -> Tensor:
    """[..., blocks, count] -> [..., blocks, 1, count, 1, 1]."""
    return scale[..., None, :, None, None]
