"""FP8 quantisation with power-of-two scales: amax of a group, E8M0 scale rounded up, e4m3 codes.

The arithmetic of `dsv4.ops.quantize` on bf16 values, bit for bit, two of them in a register. A
group whose amax is not finite gets the scale 255 (NaN), the code NaN for every NaN or Inf in it,
and 0 for the rest.

The functions run while a kernel is traced: sequences are Python's, of registers.
"""

from __future__ import annotations

from collections.abc import Sequence

import cutlass
from cutlass import Float8E4M3FN, Float32, Int32, Uint16, Uint32, cute

E4M3_MAX = 448.0
E4M3_AMAX_FLOOR = 1e-4  # of a group: the scale of zeros is not zero
E8M0_NAN = 255
FP32_MANTISSA = 23  # bits
# 1.0 as an exponent of bf16, once in each half of a register.
_BF16X2_EXPONENT = 0x00800080
_BF16X2_NAN = 0x7FC07FC0


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
    largest = pairs[0]
    for pair in pairs[1:]:
        largest = _amax_bf16x2(largest, pair)
    offset = lanes // 2
    while offset:
        largest = _amax_bf16x2(largest, cute.arch.shuffle_sync_bfly(largest, offset))
        offset //= 2
    low, high = unpack_bf16(largest & 0x7FFF7FFF)
    return cute.arch.fmax(low, high, nan=True)


def _amax_bf16x2(a: Uint32, b: Uint32) -> Uint32:
    """max(|a|, |b|) in each half, with the product of their signs: one instruction."""
    return cute.arch.inline_ptx(
        "max.NaN.xorsign.abs.bf16x2 {$w0}, {$r0}, {$r1};",
        write_only_types=[Uint32],
        read_only_args=[a, b],
    )


def e8m0_scale_e4m3(amax: Float32, floor: float = E4M3_AMAX_FLOOR) -> Int32:
    """E8M0 byte of the least power of two that amax / 448 does not exceed, at least 2^-22 or what
    another `floor` of amax gives.

    Read from the bits: log2 in floating point is off by one at exact powers of two.
    """
    ratio = cute.arch.fmax(amax, Float32(floor), nan=True) * Float32(1 / E4M3_MAX)
    # A mantissa that is not zero carries into the exponent; a NaN carries to 256.
    exponent = (ratio.bitcast(Uint32) + ((1 << FP32_MANTISSA) - 1)) >> FP32_MANTISSA
    return cutlass.min(Int32(exponent), Int32(E8M0_NAN))


def quantize_e4m3(pairs: Sequence[Uint32], scale: Int32) -> cute.Tensor:
    """e4m3 codes in registers of bf16 pairs over an E8M0 scale, an even number of pairs.

    The quotient is exact, or so small that its code is 0.
    """
    return _e4m3_codes(divide_e8m0(pairs, scale))


def split_e4m3(pairs: Sequence[Uint32], scale: Int32) -> tuple[cute.Tensor, cute.Tensor]:
    """e4m3 codes c0 and c1 of bf16 pairs over an E8M0 scale, an even number of pairs: each value is
    scale * (c0 + c1 / 16) but for what lies below 2^-14 scale."""
    quotients = divide_e8m0(pairs, scale)
    codes = _e4m3_codes(quotients)
    # Exact: c0 is within half of its last place.
    rest = _e4m3_codes([(q - c) * Float32(16.0) for q, c in zip(quotients, unpack_e4m3(codes))])
    return codes, rest


def e4m3_terms(values: Sequence[Float32], terms: int) -> list[Uint32]:
    """Words of four e4m3 codes each: four values, and with two `terms` what is left of them.

    c0 + c1 is a value of up to eight bits but for what lies below 2^-10, and any other within
    2^-8 of it. Unlike in `split_e4m3`, sums of products with both terms may share an accumulator.
    """
    first = (
        "cvt.rn.f16x2.f32 a, {$r1}, {$r0}; cvt.rn.f16x2.f32 b, {$r3}, {$r2}; "
        "cvt.rn.satfinite.e4m3x2.f16x2 c, a; cvt.rn.satfinite.e4m3x2.f16x2 d, b; "
        "mov.b32 {$w0}, {c, d}; "
    )
    rest = (
        "cvt.rn.f16x2.e4m3x2 e, c; cvt.rn.f16x2.e4m3x2 f, d; "
        "sub.rn.f16x2 a, a, e; sub.rn.f16x2 b, b, f; "
        "cvt.rn.satfinite.e4m3x2.f16x2 c, a; cvt.rn.satfinite.e4m3x2.f16x2 d, b; "
        "mov.b32 {$w1}, {c, d}; "
    )
    words = cute.arch.inline_ptx(
        "{ .reg .b32 a, b, e, f; .reg .b16 c, d; " + first + (rest if terms == 2 else "") + "}",
        write_only_types=[Uint32] * terms,
        read_only_args=list(values),
    )
    return list(words) if terms == 2 else [words]


def unpack_e4m3(codes: cute.Tensor) -> list[Float32]:
    """e4m3 codes in registers, an even number, exactly."""
    halves = cute.recast_tensor(codes, Uint16)
    values = []
    for i in range(cute.size(halves)):
        pair = cute.arch.inline_ptx(
            "cvt.rn.f16x2.e4m3x2 {$w0}, {$r0};",
            write_only_types=[Uint32],
            read_only_args=[halves[i]],
        )
        for half in (pair & 0xFFFF, pair >> 16):
            value = cute.arch.inline_ptx(
                "cvt.f32.f16 {$w0}, {$r0};",
                write_only_types=[Float32],
                read_only_args=[Uint16(half)],
            )
            values.append(value)
    return values


def divide_e8m0(pairs: Sequence[Uint32], scale: Int32) -> list[Float32]:
    """bf16 pairs over an E8M0 scale."""
    reciprocal = reciprocal_bf16x2(scale)
    return [x for pair in pairs for x in unpack_bf16(multiply_bf16x2(pair, reciprocal))]


def reciprocal_bf16x2(scale: Int32) -> Uint32:
    """1 / 2^(scale - 127) in both halves of a register."""
    # Scales of bf16 values lie far below 254; that of NaN is divided by as if it were infinite.
    return Uint32(cutlass.max(254 - scale, Int32(0)) * _BF16X2_EXPONENT)


def _e4m3_codes(values: Sequence[Float32]) -> cute.Tensor:
    """Values rounded to e4m3, an even number."""
    wide = cute.make_rmem_tensor(len(values), Float32)
    for i, value in enumerate(values):
        wide[i] = value
    codes = cute.make_rmem_tensor(len(values), Float8E4M3FN)
    codes.store(wide.load().to(Float8E4M3FN))
    return codes


def scale_bf16x2(byte: Int32) -> Uint32:
    """2^(byte - 127) in both halves of a register, NaN for 255, exactly."""
    # 2^-127 is subnormal, and NaN is not infinity: either needs the first bit of the mantissa.
    is_end = (byte + 1) & 0xFF <= 1
    mantissa = cutlass.select_(is_end, Int32(_BF16X2_EXPONENT >> 1), Int32(0))
    return Uint32(byte * _BF16X2_EXPONENT | mantissa)


def scale_or_nan(words: Sequence[Uint32], scale: Uint32) -> Uint32:
    """A scale from `scale_bf16x2`, or NaN where one of the codes that it belongs to is NaN.

    Args:
        words: of four e4m3 codes each.
    """
    # No carry leaves a byte: only 0x7F, with either sign, reaches its first bit.
    sums = [(word & Uint32(0x7F7F7F7F)) + Uint32(0x01010101) for word in words]
    found = sums[0]
    for each in sums[1:]:
        found = found | each
    is_nan = found & Uint32(0x80808080) != 0
    return Uint32(cutlass.select_(is_nan, Uint32(_BF16X2_NAN), scale))


def dequantize_e4m3(codes: Uint32, scale: Uint32) -> tuple[Uint32, Uint32]:
    """Four e4m3 codes times a power of two in both halves of a register, as bf16 pairs, exactly.

    The code of NaN, 0x7F, becomes 480 times the scale: see `scale_or_nan`.
    """
    pairs = []
    # The product takes no immediate operand.
    bias = cute.arch.inline_ptx(
        f"mov.b32 {{$w0}}, {247 * _BF16X2_EXPONENT};", write_only_types=[Uint32]
    )
    for selector in (0x9180, 0xB3A2):
        # Codes with their signs in front of them: shifted, sign and exponent stand where bf16 has
        # them. Its exponent is then 120 too small, which a product makes good, for subnormal codes,
        # too.
        code = Uint32(cute.arch.prmt(codes, Uint32(0), selector))
        value = multiply_bf16x2((code << 4) & Uint32(0x87F087F0), bias)
        pairs.append(multiply_bf16x2(value, scale))
    return tuple(pairs)


def multiply_bf16x2(a: Uint32, b: Uint32) -> Uint32:
    """a b in each half, rounded to nearest even; subnormals are kept."""
    return cute.arch.inline_ptx(
        "mul.rn.bf16x2 {$w0}, {$r0}, {$r1};", write_only_types=[Uint32], read_only_args=[a, b]
    )


def unpack_e8m0(byte: Int32) -> Float32:
    """2^(byte - 127), and NaN for 255, exactly."""
    bits = byte << FP32_MANTISSA
    # 2^-127 is subnormal in fp32.
    bits = cutlass.select_(byte == 0, Int32(1 << (FP32_MANTISSA - 1)), bits)
    bits = cutlass.select_(byte == E8M0_NAN, Int32(0x7FC00000), bits)
    return Int32(bits).bitcast(Float32)
