"""Layouts of expert weights: as checkpoints store them, and in the order of the kernels' reads.

A prepared tensor has the shape, the dtype and the bytes of the released one, in another order
(`dsv4/kernels/moe/layout.py` says which), so that it takes the released one's place in memory, and
its inverse gives back every byte. The forms of Hopper differ in the scales of FP4 groups:

* "packed": the least exponent of a row's four groups of a k block, and how far each is above it;
  only where no group is more than `MAX_SPREAD` above, and every exponent is of a normal number;
* "row_packed": the same by the least exponent of the whole row, so that a tile's sums are
  multiplied by it once, at their end; only where no group is more than `MAX_SPREAD` above that, and
  a row has two k blocks, which hold a half of the exponent each;
* "raw": the four exponents, whatever they are; the kernels then sum every 32 elements by
  themselves.

A group without values has the exponent that the official quantiser gives it, `EMPTY_EXPONENT`
(model.py's floor of the largest magnitude, 6 * 2^-126), far below all others. It fits both packed
forms: a distance of its own stands for it, and zeros stay zeros whatever their group's scale is.

"tiled" is the form of Blackwell, whatever the scales are. On Hopper NVFP4 and bf16 weights have one
form, "packed": see `bf16_layout`.

All functions take any leading dimensions, run on CPU and CUDA, and never synchronise.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4.kernels.moe.config import FOLDED_FORMS
from dsv4.kernels.moe.layout import (
    ATOM_LANES,
    FP4_GROUPS,
    K_BLOCK,
    MAX_SPREAD,
    PANEL_ROWS,
    ROW_BLOCKS,
    STEPS,
    TILE_ROWS,
    UNIT_ROWS,
    UNITS,
)
from dsv4.ops.moe import bf16_layout
from dsv4.ops.moe.axes import check_whole, cut_into, inverse, reordered
from dsv4.ops.quantize import NVFP4_BLOCK, pack_e2m1, unpack_e2m1

QUAD = 4  # lanes that share a row, and elements or bytes of a lane that lie side by side
HALVES = 2  # of a step's k, 16 elements each
LEAST_EXPONENT, LARGEST_EXPONENT = 1, 254  # of normal numbers
EMPTY_EXPONENT, EMPTY_DISTANCE = LEAST_EXPONENT, 15  # of a group without values
TILED = "tiled"
FORMS = (*FOLDED_FORMS, "raw")

# Axes of a weight [panel, unit, row, k block, step, half, lane of the quad, element], and the order
# in which prepared FP4 and FP8 codes have them. FP8 steps are cut once more: [.., pair, step, ..].
# Of FP4 whose scales fold into codes the axes are [.., k block, lane of the quad, step, half,
# element].
_FP4_ORDERS = {
    **dict.fromkeys(FOLDED_FORMS, (0, 3, 1, 2, 4, 5, 6, 7)), "raw": (0, 3, 1, 2, 6, 4, 5, 7)
}  # fmt: skip
_FP8_ORDER = (0, 3, 1, 4, 2, 7, 5, 6, 8)
# By dtype, what Hopper multiplies in bf16, and its inverse.
_MULTIPLIED_IN_BF16 = {
    torch.uint8: (bf16_layout.prepare_nvfp4_codes, bf16_layout.restore_nvfp4_codes),
    torch.bfloat16: (bf16_layout.prepare_bf16, bf16_layout.restore_bf16),
}


def prepare_codes(codes: Tensor, form: str) -> Tensor:
    """Prepared form of e2m1 codes [..., M, K / 2], two in a byte, int8 (FP4) or uint8 (NVFP4), or
    of e4m3 or bf16 ones [..., M, K]."""
    is_fp4 = codes.dtype in (torch.int8, torch.uint8)
    if form == TILED and codes.dtype != torch.bfloat16:
        return _tile(codes, K_BLOCK // (2 if is_fp4 else 1))
    if codes.dtype in _MULTIPLIED_IN_BF16:
        return _MULTIPLIED_IN_BF16[codes.dtype][0](codes)
    return prepare_fp4_codes(codes, form) if is_fp4 else prepare_fp8_codes(codes)


def restore_codes(prepared: Tensor, form: str) -> Tensor:
    """Inverse of `prepare_codes`."""
    is_fp4 = prepared.dtype in (torch.int8, torch.uint8)
    if form == TILED and prepared.dtype != torch.bfloat16:
        return _untile(prepared, K_BLOCK // (2 if is_fp4 else 1))
    if prepared.dtype in _MULTIPLIED_IN_BF16:
        return _MULTIPLIED_IN_BF16[prepared.dtype][1](prepared)
    return restore_fp4_codes(prepared, form) if is_fp4 else restore_fp8_codes(prepared)


def _tile(codes: Tensor, row_bytes: int) -> Tensor:
    """Blocks of 128 rows, one behind the other."""
    axes = _tile_axes(codes, row_bytes)
    ordered = reordered(cut_into(codes.contiguous().view(torch.uint8), axes), _TILED)
    return ordered.reshape(codes.shape).view(codes.dtype)


def _untile(prepared: Tensor, row_bytes: int) -> Tensor:
    axes = _tile_axes(prepared, row_bytes)
    ordered = tuple(axes[i] for i in _TILED)
    cut = reordered(cut_into(prepared.contiguous().view(torch.uint8), ordered), _TILED)
    return cut.reshape(prepared.shape).view(prepared.dtype)


# [tile, row, block, byte] and back; of scales [tile, row / 32, lane, atom, group], and back.
_TILED = (0, 2, 1, 3)
_ATOM = (0, 3, 2, 1, 4)


def _tile_axes(codes: Tensor, row_bytes: int) -> tuple[int, ...]:
    rows, size = codes.shape[-2:]
    check_whole(rows, size // row_bytes * K_BLOCK + size % row_bytes, TILE_ROWS)
    return (rows // TILE_ROWS, TILE_ROWS, size // row_bytes, row_bytes)


def prepare_fp4_codes(codes: Tensor, form: str) -> Tensor:
    """Prepared form of e2m1 codes [..., M, K / 2], two in a byte."""
    nibbles = cut_into(unpack_e2m1(codes), _fp4_axes(codes.shape[-2], 2 * codes.shape[-1], form))
    ordered = reordered(nibbles, _FP4_ORDERS[form]).flatten(-2)
    magnitudes, signs = ordered & 7, ordered >> 3
    low = magnitudes[..., 0::2] | signs[..., :QUAD] << 3
    high = magnitudes[..., 1::2] | signs[..., QUAD:] << 3
    return (low | high << 4).reshape(codes.shape).view(codes.dtype)


def restore_fp4_codes(prepared: Tensor, form: str) -> Tensor:
    """Inverse of `prepare_fp4_codes`."""
    rows, columns = prepared.shape[-2], 2 * prepared.shape[-1]
    axes, order = _fp4_axes(rows, columns, form), _FP4_ORDERS[form]
    ordered = [axes[i] for i in order]
    bytes_ = prepared.contiguous().view(torch.uint8)
    bytes_ = bytes_.reshape(*prepared.shape[:-2], *ordered[:-2], QUAD)
    low, high = bytes_ & 0xF, bytes_ >> 4
    magnitudes = torch.stack((low & 7, high & 7), -1).flatten(-2)
    signs = torch.cat((low >> 3, high >> 3), -1)
    nibbles = (magnitudes | signs << 3).unflatten(-1, (HALVES, QUAD))
    nibbles = reordered(nibbles, inverse(order))
    return pack_e2m1(nibbles.reshape(*prepared.shape[:-2], rows, columns)).view(prepared.dtype)


def prepare_fp8_codes(codes: Tensor) -> Tensor:
    """Prepared form of e4m3 codes [..., M, K]."""
    axes = _fp8_axes(*codes.shape[-2:])
    ordered = reordered(cut_into(codes.contiguous().view(torch.uint8), axes), _FP8_ORDER)
    return ordered.reshape(codes.shape).view(codes.dtype)


def restore_fp8_codes(prepared: Tensor) -> Tensor:
    """Inverse of `prepare_fp8_codes`."""
    axes = _fp8_axes(*prepared.shape[-2:])
    ordered = tuple(axes[i] for i in _FP8_ORDER)
    cut = cut_into(prepared.contiguous().view(torch.uint8), ordered)
    cut = reordered(cut, inverse(_FP8_ORDER))
    return cut.reshape(prepared.shape).view(prepared.dtype)


def fits_packed(scale: Tensor, form: str = "packed") -> Tensor:
    """Whether E8M0 scales [..., M, K / 32] of a tensor can be "packed" or "row_packed", if groups
    of `EMPTY_EXPONENT` have no values: a boolean, on its device."""
    groups = scale.view(torch.uint8).int()
    if form == "packed":
        groups = groups.unflatten(-1, (-1, FP4_GROUPS))
    elif scale.shape[-1] < ROW_BLOCKS * FP4_GROUPS:
        return torch.zeros((), dtype=torch.bool, device=scale.device)
    is_empty = groups == EMPTY_EXPONENT
    low = groups.masked_fill(is_empty, LARGEST_EXPONENT).amin(-1)
    high = groups.masked_fill(is_empty, LEAST_EXPONENT).amax(-1)
    is_normal = (low >= LEAST_EXPONENT) & (high <= LARGEST_EXPONENT)
    return (is_normal & (high - low <= MAX_SPREAD)).all()


def prepare_scales(scale: Tensor, form: str) -> Tensor:
    """Prepared form of E8M0 scales [..., M, K / 32] of FP4, packed only if `fits_packed` says so,
    or of e4m3 ones [..., M, K / 16] of NVFP4."""
    if scale.dtype == torch.float8_e4m3fn:
        return tile_scales(scale) if form == TILED else bf16_layout.prepare_nvfp4_scales(scale)
    return prepare_fp4_scales(scale, form)


def restore_scales(prepared: Tensor, form: str) -> Tensor:
    """Inverse of `prepare_scales`."""
    if prepared.dtype == torch.float8_e4m3fn:
        is_tiled = form == TILED
        return untile_scales(prepared) if is_tiled else bf16_layout.restore_nvfp4_scales(prepared)
    return restore_fp4_scales(prepared, form)


def prepare_fp4_scales(scale: Tensor, form: str) -> Tensor:
    """Prepared form of E8M0 scales [..., M, K / 32]; packed only if `fits_packed` says so."""
    if form == TILED:
        return tile_scales(scale)
    ordered = reordered(cut_into(scale.contiguous().view(torch.uint8), _scale_axes(scale)), _SCALE)
    if form in FOLDED_FORMS:
        fold = _fold_rows if form == "row_packed" else _fold_blocks
        ordered = fold(ordered)
    return ordered.reshape(scale.shape).view(scale.dtype)


def restore_fp4_scales(prepared: Tensor, form: str) -> Tensor:
    """Inverse of `prepare_fp4_scales`."""
    if form == TILED:
        return untile_scales(prepared)
    axes = _scale_axes(prepared)
    ordered = cut_into(prepared.contiguous().view(torch.uint8), tuple(axes[i] for i in _SCALE))
    if form in FOLDED_FORMS:
        unfold = _unfold_rows if form == "row_packed" else _unfold_blocks
        ordered = unfold(ordered)
    return reordered(ordered, _SCALE).reshape(prepared.shape).view(prepared.dtype)


def _fold_blocks(exponents: Tensor) -> Tensor:
    """Bytes of "packed" words of exponents [.., k block, row, group]."""
    low = _least(exponents, -1)
    above = _distances(exponents, low[..., None])
    even, odd = above[..., 0::2], above[..., 1::2]
    return torch.stack((*(even | odd << 4).unbind(-1), torch.zeros_like(low), low), -1)


def _unfold_blocks(words: Tensor) -> Tensor:
    pairs, low = words[..., :2], words[..., 3:]
    return _exponents(torch.stack((pairs & 0xF, pairs >> 4), -1).flatten(-2), low)


def _fold_rows(exponents: Tensor) -> Tensor:
    """Bytes of "row_packed" words of exponents [.., k block, row, group]."""
    low = _least(exponents, (-3, -1))  # [.., row]
    above = _distances(exponents, low[..., None, :, None])
    halves = torch.stack((low & 0xF, low >> 4), -2)  # [.., half, row]
    blocks = torch.arange(exponents.shape[-3], device=exponents.device) % ROW_BLOCKS
    first, last = above[..., :-1], above[..., -1]
    last = last << 4 | halves.index_select(-2, blocks)
    return torch.cat((first, last[..., None]), -1)


def _unfold_rows(words: Tensor) -> Tensor:
    first, last = words[..., :-1], words[..., -1]
    low = last[..., 0, :] & 0xF | last[..., 1, :] << 4
    above = torch.cat((first, (last >> 4)[..., None]), -1)
    return _exponents(above, low[..., None, :, None])


def _least(exponents: Tensor, dims: int | tuple[int, ...]) -> Tensor:
    """The least one of groups with values; of none, theirs: zeros times a large scale and that of
    an activation would be NaN."""
    low = exponents.masked_fill(exponents == EMPTY_EXPONENT, LARGEST_EXPONENT).amin(dims)
    return low.masked_fill(exponents.amax(dims) == EMPTY_EXPONENT, EMPTY_EXPONENT)


def _distances(exponents: Tensor, low: Tensor) -> Tensor:
    return (exponents - low).masked_fill(exponents == EMPTY_EXPONENT, EMPTY_DISTANCE)


def _exponents(distances: Tensor, low: Tensor) -> Tensor:
    return (distances + low).masked_fill(distances == EMPTY_DISTANCE, EMPTY_EXPONENT)


def tile_scales(scale: Tensor) -> Tensor:
    """Atoms of the scales of 128 rows, [..., M, K / 32] E8M0 or [..., M, K / 16] e4m3."""
    axes = _atom_axes(scale)
    ordered = reordered(cut_into(scale.contiguous().view(torch.uint8), axes), _ATOM)
    return ordered.reshape(scale.shape).view(scale.dtype)


def untile_scales(prepared: Tensor) -> Tensor:
    """Inverse of `tile_scales`."""
    axes = tuple(_atom_axes(prepared)[i] for i in _ATOM)
    cut = cut_into(prepared.contiguous().view(torch.uint8), axes)
    return reordered(cut, _ATOM).reshape(prepared.shape).view(prepared.dtype)


_SCALE = (0, 2, 1, 3)  # [panel, row, k block, group] and back


def _fp4_axes(rows: int, columns: int, form: str) -> tuple[int, ...]:
    check_whole(rows, columns)
    panels, blocks = rows // PANEL_ROWS, columns // K_BLOCK
    inner = (QUAD, STEPS, HALVES) if form in FOLDED_FORMS else (STEPS, HALVES, QUAD)
    return (panels, UNITS, UNIT_ROWS, blocks, *inner, QUAD)


def _fp8_axes(rows: int, columns: int) -> tuple[int, ...]:
    check_whole(rows, columns)
    panels, blocks = rows // PANEL_ROWS, columns // K_BLOCK
    return (panels, UNITS, UNIT_ROWS, blocks, STEPS // 2, 2, HALVES, QUAD, QUAD)


def _scale_axes(scale: Tensor) -> tuple[int, ...]:
    rows, groups = scale.shape[-2:]
    check_whole(rows, groups * K_BLOCK // FP4_GROUPS)
    return (rows // PANEL_ROWS, PANEL_ROWS, groups // FP4_GROUPS, FP4_GROUPS)


def _atom_axes(scale: Tensor) -> tuple[int, ...]:
    rows, groups = scale.shape[-2:]
    group = NVFP4_BLOCK if scale.dtype == torch.float8_e4m3fn else K_BLOCK // FP4_GROUPS
    check_whole(rows, groups * group, TILE_ROWS)
    parts = TILE_ROWS // ATOM_LANES
    return (rows // TILE_ROWS, parts, ATOM_LANES, groups // FP4_GROUPS, FP4_GROUPS)
