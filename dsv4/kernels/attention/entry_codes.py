"""Common parts of kernels that multiply the codes of FP8 entries: scales of keys, and how far a
row's weights may grow before its reference follows."""

import cutlass
from cutlass import cute

from dsv4.kernels.kit.quant import E8M0_NAN, FP32_MANTISSA

# In log2: weights reach 2^(OFFSET + THRESHOLD) before their reference follows, just below 448.
OFFSET, THRESHOLD = 5.8, 3.0
# E8M0 of the least scale, 2^-100: a weight relative to scaled ones stays finite. What is scaled by
# less is 0 beside anything that is not.
LEAST_SCALE = 27


def load_scales(address):
    """Ask for the first four scales of an entry; zeros of address 0."""
    return cute.arch.inline_ptx(
        "mov.b32 {$w0}, 0; @{$r1} ld.global.nc.b32 {$w0}, [{$r0}];",
        write_only_types=[cutlass.Uint32],
        read_only_args=[address, address != 0],
    )


def scale_byte(scales: cutlass.Uint32) -> cutlass.Int32:
    """E8M0 of the first scale of four, which all groups share, at least that of `LEAST_SCALE`."""
    return cutlass.max(cutlass.Int32(scales & 0xFF), LEAST_SCALE)


def scale_of(byte: cutlass.Int32) -> cutlass.Float32:
    """The scale of a `scale_byte`."""
    bits = byte << FP32_MANTISSA
    bits = cutlass.select_(byte == E8M0_NAN, cutlass.Int32(0x7FC00000), cutlass.Int32(bits))
    return cutlass.Int32(bits).bitcast(cutlass.Float32)


def log2_of(scale: cutlass.Float32) -> cutlass.Float32:
    """Exponent of a power of two."""
    return cutlass.Float32((scale.bitcast(cutlass.Int32) >> FP32_MANTISSA) - 127)
