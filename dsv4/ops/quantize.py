"""Block quantisers of the official checkpoints and of the official forward pass.

Scales are powers of two, rounded up (official inference/kernel.py), so that a division by a scale
is exact and codes never exceed the largest value of their format. All functions run on CPU and CUDA
and never synchronise.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from dsv4.kernels.kit.index_entry import MIN_EXPONENT, TOP_SHIFT
from dsv4.quoting import quoted

E4M3_MAX = 448.0
E2M1_MAX = 6.0
E4M3_AMAX_FLOOR = 1e-4
E2M1_AMAX_FLOOR = 6 * 2.0**-126
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
NVFP4_BLOCK = 16


def qdq_e4m3(x: Tensor, block: int) -> Tensor:
    """Round `x` [..., n] to what FP8 with one power-of-two scale per `block` elements can hold.

    The official name is act_quant(inplace=True): activations use block 128, KV entries block 64.
    Returns the dtype of `x`.
    """
    blocks = _blocks(x, block)
    scale = _decode_exponent(_scale_exponent(blocks, E4M3_AMAX_FLOOR, E4M3_MAX))
    codes = (blocks / scale).clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return codes.float().mul_(scale).flatten(-2).to(x.dtype)


def qdq_e2m1(x: Tensor, block: int = 32) -> Tensor:
    """Round `x` [..., n] to what FP4 with one power-of-two scale per `block` elements can hold.

    Indexer queries and keys pass through it. Ties round to the even code, as the hardware does.
    Returns the dtype of `x`.
    """
    blocks = _blocks(x, block)
    scale = _decode_exponent(_scale_exponent(blocks, E2M1_AMAX_FLOOR, E2M1_MAX))
    return _round_e2m1(blocks / scale).mul_(scale).flatten(-2).to(x.dtype)


def quantize_e4m3(x: Tensor, block: int, *, uniform: bool = False) -> tuple[Tensor, Tensor]:
    """Quantise `x` [..., n] -> (codes [..., n] float8_e4m3fn, scales [..., n / block] e8m0).

    Args:
        uniform: whether all blocks of a row have the largest of their scales.
    """
    blocks = _blocks(x, block)
    exponent = _scale_exponent(blocks, E4M3_AMAX_FLOOR, E4M3_MAX)
    if uniform:
        exponent = exponent.amax(-2, keepdim=True).expand_as(exponent)
    codes = (blocks / _decode_exponent(exponent)).clamp_(-E4M3_MAX, E4M3_MAX)
    return codes.to(torch.float8_e4m3fn).flatten(-2), _as_e8m0(exponent.squeeze(-1))


def split_e4m3(x: Tensor, block: int, floor: float) -> tuple[Tensor, Tensor, Tensor]:
    """Split bfloat16 `x` [..., n] -> (c0, c1 [..., n] float8_e4m3fn, scales [..., n / block] e8m0),
    x = scale * (c0 + c1 / 16) but for what lies below 2^-14 scale.

    Args:
        floor: of the largest magnitude of a block.
    """
    blocks = _blocks(x.bfloat16(), block)
    exponent = _scale_exponent(blocks, floor, E4M3_MAX)
    values = blocks / _decode_exponent(exponent)
    first = values.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    # Exact: c0 is within half of its last place.
    rest = ((values - decode_e4m3(first)) * 16).clamp_(-E4M3_MAX, E4M3_MAX)
    second = rest.to(torch.float8_e4m3fn)
    return first.flatten(-2), second.flatten(-2), _as_e8m0(exponent.squeeze(-1))


def quantize_e2m1(x: Tensor, block: int = 32) -> tuple[Tensor, Tensor]:
    """Quantise `x` [..., n] -> (packed codes [..., n / 2] int8, scales [..., n / block] e8m0)."""
    blocks = _blocks(x, block)
    exponent = _scale_exponent(blocks, E2M1_AMAX_FLOOR, E2M1_MAX)
    values = _round_e2m1(blocks / _decode_exponent(exponent))
    magnitudes = torch.tensor(E2M1_VALUES, device=x.device)
    codes = torch.bucketize(values.abs(), magnitudes) + 8 * torch.signbit(values)
    return pack_e2m1(codes.to(torch.uint8).flatten(-2)), _as_e8m0(exponent.squeeze(-1))


def qdq_nvfp4(x: Tensor, whole: Tensor) -> Tensor:
    """Round `x` [..., n] to what NVFP4 can hold: `quantize_nvfp4`, decoded to float32."""
    blocks = _blocks(x, NVFP4_BLOCK)
    scale, inverse = _nvfp4_scales(blocks, whole)
    step = (scale.float() * whole.float()[..., None]).unsqueeze(-1)
    return _round_e2m1(blocks * inverse).mul_(step).flatten(-2)


def quantize_nvfp4(x: Tensor, whole: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise `x` [..., n] -> (packed codes [..., n / 2] uint8, scales [..., n / 16] e4m3).

    A block's scale is amax / 6 in units of `whole`, float32 and of leading dimensions of `x`;
    values are code * scale * whole. A block that is not finite has the scale NaN.
    """
    blocks = _blocks(x, NVFP4_BLOCK)
    scale, inverse = _nvfp4_scales(blocks, whole)
    values = _round_e2m1(blocks * inverse)
    magnitudes = torch.tensor(E2M1_VALUES, device=x.device)
    codes = torch.bucketize(values.abs(), magnitudes) + 8 * torch.signbit(values)
    # A NaN is above all magnitudes.
    codes = codes.to(torch.uint8).clamp_(max=15)
    return pack_e2m1(codes.flatten(-2)).view(torch.uint8), scale


def quantize_e2m1_as_e4m3(x: Tensor, block: int = 32) -> tuple[Tensor, Tensor]:
    """Round rows of `x` [..., n] as `qdq_e2m1` does -> (codes [..., n] float8_e4m3fn, scales [...]
    float32), one power of two a row.

    What the scales of a row's blocks differ by lies in the exponents of its codes: without loss
    within a factor of 2^14, else as e4m3 rounds the smaller blocks.
    """
    blocks = _blocks(x, block)
    exponent = _scale_exponent(blocks, E2M1_AMAX_FLOOR, E2M1_MAX)
    return _share_scale(_round_e2m1(blocks / _decode_exponent(exponent)), exponent)


def e2m1_as_e4m3(packed: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """What `quantize_e2m1_as_e4m3` gives, from packed codes [..., n / 2] int8 or uint8 and scales
    [..., n / block] e8m0 or their bytes."""
    values = _look_up(_e2m1_pairs(packed.device), packed)
    values = values.view(*scale.shape, 2 * packed.shape[-1] // scale.shape[-1])
    return _share_scale(values, scale.view(torch.uint8).unsqueeze(-1).to(torch.int32))


def dequantize_e4m3_blocks(
    weight: Tensor,
    scale: Tensor,
    block: tuple[int, int] = (128, 128),
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Decode an FP8 weight: `weight[o, i] * scale[o // block[0], i // block[1]]`.

    Args:
        weight: [..., out, in] float8_e4m3fn.
        scale: [..., ceil(out / block[0]), ceil(in / block[1])] float8_e8m0fnu, or float32 as in
            the Base checkpoints.
        block: rows and columns that share a scale.
        dtype: dtype of the result.
    """
    rows, columns = weight.shape[-2:]
    expected = (-(-rows // block[0]), -(-columns // block[1]))
    if scale.shape[-2:] != expected:
        raise ValueError(
            f"scale: got shape {quoted(scale.shape)}, a weight of shape {quoted(weight.shape)} in "
            f"blocks of {block} needs {expected} in its last two dimensions"
        )
    values, scale = decode_e4m3(weight), scale.float()
    if rows % block[0] or columns % block[1]:
        per_row = scale.repeat_interleave(block[0], -2)[..., :rows, :]
        values.mul_(per_row.repeat_interleave(block[1], -1)[..., :columns])
    else:
        tiles = values.unflatten(-1, (-1, block[1])).unflatten(-3, (-1, block[0]))
        tiles.mul_(scale[..., :, None, :, None])
    return values.to(dtype)


def dequantize_e2m1(packed: Tensor, scale: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Decode FP4: packed [..., n / 2] int8 or uint8, scale [..., n / group] -> [..., n].

    The group size follows from the shapes (32 for e8m0 scales, 16 for NVFP4's e4m3 scales).
    """
    elements, groups = 2 * packed.shape[-1], scale.shape[-1]
    if groups == 0 or elements % groups:
        raise ValueError(
            f"scale: got shape {quoted(scale.shape)}, its last dimension must divide the "
            f"{elements} elements of each row of packed {quoted(packed.shape)}"
        )
    values = _look_up(_e2m1_pairs(packed.device), packed)
    values = values.view(*packed.shape[:-1], groups, elements // groups)
    return values.mul_(scale.float().unsqueeze(-1)).flatten(-2).to(dtype)


def pack_e2m1(codes: Tensor) -> Tensor:
    """Pack codes 0..15 [..., n] into bytes [..., n / 2] int8, even elements in the low nibble."""
    if codes.shape[-1] % 2:
        raise ValueError(f"codes: needs an even last dimension, got shape {quoted(codes.shape)}")
    low, high = codes.to(torch.uint8).unflatten(-1, (-1, 2)).unbind(-1)
    return (low | (high << 4)).view(torch.int8)


def unpack_e2m1(packed: Tensor) -> Tensor:
    """Invert `pack_e2m1`: bytes [..., n / 2] -> codes 0..15 [..., n] uint8; bit 3 is the sign."""
    # Through uint8: shifting a negative int8 right would smear its sign over the high nibble.
    byte = packed.view(torch.uint8)
    return torch.stack((byte & 0xF, byte >> 4), -1).flatten(-2)


def hadamard(x: Tensor) -> Tensor:
    """Multiply the last dimension by the normalised Walsh-Hadamard matrix, natural order.

    [..., n] -> [..., n] in the dtype of `x`, computed in float32; n must be a power of two.
    """
    size = x.shape[-1]
    if size < 1 or size & (size - 1):
        raise ValueError(f"x: needs a power of two as last dimension, got shape {quoted(x.shape)}")
    y, half = x.float(), 1
    while half < size:
        low, high = y.unflatten(-1, (-1, 2, half)).unbind(-2)
        y = torch.stack((low + high, low - high), -2).flatten(-3)
        half *= 2
    return (y * size**-0.5).to(x.dtype)


def decode_e4m3(codes: Tensor) -> Tensor:
    """Float32 values of float8_e4m3fn codes, a new tensor."""
    if codes.device.type != "cpu":
        return codes.float()
    # torch converts float8 on the CPU one element at a time: the table is 7 times faster.
    return _look_up(_e4m3_values(), codes).view(codes.shape)


def _look_up(table: Tensor, codes: Tensor) -> Tensor:
    """Rows of `table` [256, ...] for one-byte codes, flattened."""
    return table.index_select(0, codes.view(torch.uint8).flatten().int())


@functools.cache
def _e4m3_values() -> Tensor:
    """[256] float32."""
    return torch.arange(256, dtype=torch.uint8, device="cpu").view(torch.float8_e4m3fn).float()


@functools.cache
def _e2m1_pairs(device: torch.device) -> Tensor:
    """[256, 2] float32: both values of every packed byte, copied to a GPU only once."""
    magnitudes = torch.tensor(E2M1_VALUES, device="cpu")
    values = torch.cat((magnitudes, -magnitudes))
    return values[
        unpack_e2m1(torch.arange(256, dtype=torch.uint8, device="cpu")[:, None]).int()
    ].to(device)


def _blocks(x: Tensor, block: int) -> Tensor:
    if block < 1 or x.shape[-1] % block:
        raise ValueError(
            f"x: needs a last dimension that is a multiple of block {block}, "
            f"got shape {quoted(x.shape)}"
        )
    return x.float().unflatten(-1, (x.shape[-1] // block, block))


def _scale_exponent(blocks: Tensor, floor: float, largest: float) -> Tensor:
    """Biased exponent of 2^ceil(log2(amax / largest)), int32 [..., 1].

    Read from the bits: log2 in floating point is off by one at exact powers of two.
    """
    amax = blocks.abs().amax(-1, keepdim=True).clamp_(min=floor)
    bits = amax.mul_(1 / largest).view(torch.int32)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0)
    # A NaN would carry into the sign bit and decode to -0.
    return exponent.clamp_(max=255).to(torch.int32)


def _nvfp4_scales(blocks: Tensor, whole: Tensor) -> tuple[Tensor, Tensor]:
    """Scales [..., blocks] e4m3 of `quantize_nvfp4`, and what elements are multiplied by to become
    codes, [..., blocks, 1]: 0 where the scale has become 0."""
    whole = whole.float()[..., None]
    amax = blocks.abs().amax(-1)
    ratio = amax * (E2M1_MAX * whole).reciprocal()
    ratio = torch.where(amax.isfinite(), ratio.clamp(max=E4M3_MAX), torch.nan)
    scale = ratio.to(torch.float8_e4m3fn)
    step = scale.float() * whole
    return scale, torch.where(step == 0, 0.0, step.reciprocal()).unsqueeze(-1)


def _share_scale(values: Tensor, exponent: Tensor) -> tuple[Tensor, Tensor]:
    """Values of e2m1 [..., blocks, block], overwritten, and biased exponents of their scales
    [..., blocks, 1] -> (codes [..., n] float8_e4m3fn, scales [...] float32)."""
    row = (exponent.amax(-2, keepdim=True) - TOP_SHIFT).clamp_(min=127 + MIN_EXPONENT)
    values = values.mul_(_decode_exponent((exponent - row).clamp_(min=-126) + 127))
    codes = values.clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).flatten(-2)
    return codes, _decode_exponent(row).flatten(-2).squeeze(-1)


def _decode_exponent(exponent: Tensor) -> Tensor:
    return (exponent << 23).view(torch.float32)


def _as_e8m0(exponent: Tensor) -> Tensor:
    return exponent.to(torch.uint8).view(torch.float8_e8m0fnu)


def _round_e2m1(x: Tensor) -> Tensor:
    """Nearest of 0, .5, 1, 1.5, 2, 3, 4, 6 with the sign of x, ties to the even code."""
    magnitude = x.abs().clamp_(max=E2M1_MAX)
    # Half-to-even: within a binade the even multiple of the step has the even code.
    step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    return torch.copysign(torch.round(magnitude / step) * step, x)
