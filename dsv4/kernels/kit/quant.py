"""FP8 quantisation with power-of-two scales: amax of a group, E8M0 scale rounded up, e4m3 codes.

The arithmetic of `dsv4.ops.quantize`, bit for bit. A group whose amax is not finite gets the scale
255 (NaN), the code NaN for every NaN or Inf in it, and 0 for the rest.

The functions run while a kernel is traced: `values` are Python sequences of registers.
"""

from __future__ import annotations

from collections.abc import Sequence

import cutlass
from cutlass import Float8E4M3FN, Float32, Int32, Uint32, cute
from cutlass.cute.math import RoundingMode

E4M3_MAX = 448.0
E4M3_AMAX_FLOOR = 1e-4  # of a group: the scale of zeros is not zero
MANTISSA_BITS = 23  # of fp32
E8M0_NAN = 255


def pack_bf16(low: Float32, high: Float32) -> Uint32:
    """Two bf16 in a register, rounded to nearest even."""
    return cute.arch.inline_ptx(
        "cvt.rn.bf16x2.f32 {$w0}, {$r0}, {$r1};",
        write_only_types=[Uint32],
        read_only_args=[high, low],
    )


def unpack_bf16(pair: Uint32) -> tuple[Float32, Float32]:
    """Low and high bf16 of a register, exactly."""
    return (pair << 16).bitcast(Float32), (pair & Uint32(0xFFFF0000)).bitcast(Float32)


def amax_bf16(pairs: Sequence[Uint32], lanes: int) -> Float32:
    """Largest magnitude among the bf16 pairs of `lanes` neighbouring lanes, the same in all.

    A NaN wins.
    """
    largest = pairs[0] & 0x7FFF7FFF
    for pair in pairs[1:]:
        largest = _max_bf16x2(largest, pair & 0x7FFF7FFF)
    offset = lanes // 2
    while offset:
        largest = _max_bf16x2(largest, cute.arch.shuffle_sync_bfly(largest, offset))
        offset //= 2
    low, high = unpack_bf16(largest)
    return cute.arch.fmax(low, high, nan=True)


def _max_bf16x2(a: Uint32, b: Uint32) -> Uint32:
    return cute.arch.inline_ptx(
        "max.NaN.bf16x2 {$w0}, {$r0}, {$r1};", write_only_types=[Uint32], read_only_args=[a, b]
    )


def e8m0_scale_e4m3(amax: Float32) -> Int32:
    """E8M0 byte of the least power of two that amax / 448 does not exceed, at least 2^-22.

    Read from the bits: log2 in floating point is off by one at exact powers of two.
    """
    ratio = cute.arch.fmax(amax, Float32(E4M3_AMAX_FLOOR), nan=True) * Float32(1 / E4M3_MAX)
    # A mantissa that is not zero carries into the exponent; a NaN carries to 256.
    exponent = (ratio.bitcast(Uint32) + ((1 << MANTISSA_BITS) - 1)) >> MANTISSA_BITS
    return cutlass.min(Int32(exponent), Int32(E8M0_NAN))


def reciprocal_e8m0(scale: Int32) -> Float32:
    """1 / 2^(scale - 127), exactly; 0 for NaN. Scales of fp32 values divided by 448 are < 254."""
    return (cutlass.max(254 - scale, Int32(0)) << MANTISSA_BITS).bitcast(Float32)


def to_e4m3(values: Sequence[Float32]) -> cute.Tensor:
    """e4m3 codes in registers, rounded to nearest even, saturating; a multiple of four."""
    wide = cute.make_rmem_tensor(len(values), Float32)
    for i, value in enumerate(values):
        wide[i] = value
    codes = cute.make_rmem_tensor(len(values), Float8E4M3FN)
    codes.store(wide.load().to(Float8E4M3FN))
    return codes


def exact_square(x: Float32) -> Float32:
    """x * x, rounded: a plain product may be contracted with the addition that follows."""
    return cute.math.mul(x, x, rounding=RoundingMode.NEAREST_EVEN)
