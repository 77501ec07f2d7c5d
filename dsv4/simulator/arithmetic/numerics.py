"""Floating-point formats and the arithmetic of one warp, on numpy arrays of 32 lanes.

Registers are bit patterns; functions here take and return float arrays or bit patterns as named.
Fused multiply-add goes through double precision: exact product, one rounding of the sum to double
and one to single, which differs from a true fma only where the double lands on a rounding tie
(about one result in 2^29).
Approximate functions (ex2, lg2, rcp, rsqrt, sqrt, sin, cos, tanh) are computed correctly rounded,
or nearly so; an H200's are within 2 ulp of that (ex2, rcp, rsqrt, sqrt, division; lg2 too, or 2^-22
absolute near one), 2^-20.5 absolute (sin, cos up to pi) and 2^-11 relative (tanh).
"""

from __future__ import annotations

import numpy as np

u8, u16, u32, u64 = np.uint8, np.uint16, np.uint32, np.uint64
i8, i16, i32, i64 = np.int8, np.int16, np.int32, np.int64
f16, f32, f64 = np.float16, np.float32, np.float64

F32_NAN = 0x7FFFFFFF  # the canonical NaN that arithmetic produces
BF16_NAN = 0x7FFF


# --- packing -------------------------------------------------------------------------------------
def pack64(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """{low, high} 32-bit registers to one 64-bit register."""
    out = np.empty((*low.shape, 2), u32)
    out[..., 0] = low
    out[..., 1] = high
    return out.view(u64)[..., 0]


def pack32(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """{low, high} 16-bit registers to one 32-bit register."""
    out = np.empty((*low.shape, 2), u16)
    out[..., 0] = low
    out[..., 1] = high
    return out.view(u32)[..., 0]


def contiguous(a: np.ndarray) -> np.ndarray:
    """`a`, copied if a view with another element size would be impossible."""
    return a if a.flags.c_contiguous else np.ascontiguousarray(a)


def words(a: np.ndarray, dtype: type) -> np.ndarray:
    """Lanes by sub-words: [32] of a wide type to [32, n] of a narrow one."""
    return contiguous(a).view(dtype).reshape(len(a), -1)


# --- bf16, f16 -----------------------------------------------------------------------------------
def bf16_of_f32(x: np.ndarray) -> np.ndarray:
    """float32 [..] to bf16 bits, round to nearest even, NaN canonical."""
    bits = x.view(u32)
    out = ((bits + (u32(0x7FFF) + ((bits >> u32(16)) & u32(1)))) >> u32(16)).astype(u16)
    nan = x != x
    return np.where(nan, u16(BF16_NAN), out) if np.logical_or.reduce(nan, axis=None) else out


def bf16_of_f32_truncated(x: np.ndarray) -> np.ndarray:
    """float32 to bf16 bits, round towards zero."""
    out = (x.view(u32) >> u32(16)).astype(u16)
    nan = x != x
    return np.where(nan, u16(BF16_NAN), out) if np.logical_or.reduce(nan, axis=None) else out


def f32_of_bf16(bits: np.ndarray) -> np.ndarray:
    """bf16 bits to float32."""
    return (bits.astype(u32) << u32(16)).view(f32)


def f16_of_f32(x: np.ndarray) -> np.ndarray:
    """float32 to f16 bits, round to nearest even, NaN canonical."""
    out = x.astype(f16).view(u16)
    nan = x != x
    return np.where(nan, u16(0x7FFF), out) if nan.any() else out


def f16_of_f32_truncated(x: np.ndarray) -> np.ndarray:
    """float32 to f16 bits, round towards zero."""
    nearest = x.astype(f16)
    away = np.abs(nearest.astype(f32)) > np.abs(x)
    return np.where(x != x, u16(0x7FFF), nearest.view(u16) - away.astype(u16))


def finite(bits: np.ndarray, largest: int) -> np.ndarray:
    """f16 or bf16 bits with infinity replaced by the largest number (.satfinite)."""
    infinite = (bits & u16(0x7FFF)) == u16(largest + 1)
    return np.where(infinite, (bits & u16(0x8000)) | u16(largest), bits)


def f32_of_f16(bits: np.ndarray) -> np.ndarray:
    """f16 bits to float32."""
    return bits.view(f16).astype(f32)


def bf16x2_of_f32(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    """Two float32 arrays [..] to packed bf16, the first operand in the high half."""
    pair = np.empty((*low.shape, 2), f32)
    pair[..., 0] = low
    pair[..., 1] = high
    return bf16_of_f32(pair).view(u32)[..., 0]


def tf32_of_f32(x: np.ndarray, rounding: str, relu: bool, saturate: bool) -> np.ndarray:
    """float32 to tf32 bits; `rounding` is rna, rn or rz; `saturate` leaves no infinity."""
    if relu:
        x = np.maximum(x, f32(0)) + f32(0)
    bits = x.view(u32)
    if rounding == "rna":
        out = tf32_nearest(bits)
    else:
        if rounding == "rn":
            bits = bits + u32(0xFFF) + ((bits >> u32(13)) & u32(1))
        out = np.where(x != x, u32(0x7FFFE000), bits & u32(0xFFFFE000))
    infinite = (out & u32(0x7FFFFFFF)) == u32(0x7F800000)
    return np.where(infinite, out - u32(0x2000), out) if saturate else out


def tf32_nearest(bits: np.ndarray) -> np.ndarray:
    """float32 bits to tf32, ties away from zero; infinity and NaN lose their low bits."""
    special = (bits & u32(0x7F800000)) == u32(0x7F800000)
    return np.where(special, bits, bits + u32(0x1000)) & u32(0xFFFFE000)


# --- small formats -------------------------------------------------------------------------------
class SmallFloat:
    """A format of at most 8 bits: decoding by table, encoding by nearest table entry.

    Args: exponent and mantissa bits; `nan` and `inf` the codes (sign cleared) that are not finite.
    """

    def __init__(self, exponent: int, mantissa: int, *, nan: tuple[int, ...] = (), inf: int = -1):
        self.bits = 1 + exponent + mantissa
        self.sign = 1 << (exponent + mantissa)
        bias = (1 << (exponent - 1)) - 1
        codes = np.arange(self.sign)
        e, m = codes >> mantissa, codes & ((1 << mantissa) - 1)
        values = np.where(
            e == 0,
            m * 2.0 ** (1 - bias - mantissa),
            (m + (1 << mantissa)) * 2.0 ** (e.astype(f64) - bias - mantissa),
        )
        self.nan = min(nan) if nan else None
        finite = np.array([c not in nan and c != inf for c in codes])
        self.finite_max_code = int(codes[finite].max())
        self.magnitudes = values[: self.finite_max_code + 1]
        self.thresholds = (self.magnitudes[:-1] + self.magnitudes[1:]) / 2
        table = np.full(256, np.nan, f32)
        for code in range(256):
            c = code & (self.sign - 1)
            value = np.nan if c in nan else np.inf if c == inf else values[c]
            table[code] = -value if code & self.sign else value
        self.table = table

    def decode(self, codes: np.ndarray) -> np.ndarray:
        """Codes (integers, high bits ignored) to float32."""
        return self.table[codes & (2 * self.sign - 1)]

    def encode(self, x: np.ndarray, *, relu: bool = False) -> np.ndarray:
        """float32 to codes (uint8): nearest even, saturating to the largest finite value."""
        magnitude = np.abs(x.astype(f64))
        low = np.searchsorted(self.thresholds, magnitude, side="left")
        tie = (low < len(self.thresholds)) & (
            magnitude == self.thresholds[np.minimum(low, len(self.thresholds) - 1)]
        )
        codes = np.where(tie & (low % 2 == 1), low + 1, low)
        out = (codes | np.where(np.signbit(x), self.sign, 0)).astype(u8)
        if relu:
            out = np.where(np.signbit(x), u8(0), out)
        nan_code = self.nan if self.nan is not None else self.finite_max_code
        return np.where(x != x, u8(nan_code), out)


SMALL_FLOATS = {
    "e4m3": SmallFloat(4, 3, nan=(0x7F,)),
    "e5m2": SmallFloat(5, 2, nan=(0x7D, 0x7E, 0x7F), inf=0x7C),
    "e2m3": SmallFloat(2, 3),
    "e3m2": SmallFloat(3, 2),
    "e2m1": SmallFloat(2, 1),
}
# e5m2's NaN as conversions write it.
SMALL_FLOATS["e5m2"].nan = 0x7F


def f32_of_ue8m0(codes: np.ndarray) -> np.ndarray:
    """Exponent-only scale to float32; 255 is NaN."""
    wide = codes.astype(u32)
    bits = np.where(wide == 0, u32(0x00400000), wide << u32(23))
    return np.where(wide == 255, u32(F32_NAN), bits).astype(u32).view(f32)


def ue8m0_of_f32(x: np.ndarray, *, round_up: bool, saturate: bool) -> np.ndarray:
    """float32 to exponent-only scale, towards zero or up; what is too large to 254 or NaN."""
    bits = np.abs(x).view(u32)
    exponent = (bits >> u32(23)).astype(i32)
    if round_up:
        exponent += ((bits & u32(0x7FFFFF)) != 0) & (exponent > 0)
        exponent += (exponent == 0) & (bits > u32(0x00400000))
    return np.where(x != x, 255, np.minimum(exponent, 254 if saturate else 255)).astype(u8)


# --- arithmetic ----------------------------------------------------------------------------------
def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """float32 a * b + c, see the module's note on rounding."""
    return (a.astype(f64) * b + c).astype(f32)


def sum_to_odd(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """float64 a + b, an inexact sum made odd: rounding it again gives what the exact sum gives."""
    total = a + b
    shift = total - a
    error = (a - (total - shift)) + (b - shift)
    bits = total.view(i64)
    moved = (error != 0) & np.isfinite(total) & ((bits & 1) == 0)
    step = np.where((error > 0) == (total > 0), 1, -1)
    return np.where(moved, bits + step, bits).view(f64)


def narrow(x: np.ndarray, rounding: str) -> np.ndarray:
    """float64 to float32; `rounding` is rn, rz, rm, rp, or odd (inexact results end in a 1 bit)."""
    out = x.astype(f32)
    if rounding == "rm":
        return np.where(out > x, np.nextafter(out, f32(-np.inf)), out)
    if rounding == "rp":
        return np.where(out < x, np.nextafter(out, f32(np.inf)), out)
    if rounding in ("rz", "odd"):
        bits = out.view(u32) - (np.abs(out) > np.abs(x)).astype(u32)
        if rounding == "odd":
            bits = bits | ((bits.view(f32) != x) & (x == x)).astype(u32)
        return np.where(x != x, out, bits.view(f32))
    return out


def add_rounded(a: np.ndarray, b: np.ndarray, rounding: str) -> np.ndarray:
    """a + b of float32, or of an exact float64 product and a float32, in a rounding mode."""
    a, b = a.astype(f64), b.astype(f64)
    total = sum_to_odd(a, b)
    if rounding == "rm":  # an exact zero of operands that are not both +0
        total = np.where((total == 0) & (np.signbit(a) | np.signbit(b)), -0.0, total)
    return narrow(total, rounding)


def multiply_rounded(a: np.ndarray, b: np.ndarray, rounding: str) -> np.ndarray:
    """a * b of float32 in a rounding mode."""
    return narrow(a.astype(f64) * b, rounding)


def divide_rounded(a: np.ndarray, b: np.ndarray, rounding: str) -> np.ndarray:
    """a / b of float32 in a rounding mode: no inexact quotient is as close to a float32 as float64
    rounds."""
    return narrow(a.astype(f64) / b, rounding)


def reciprocal_rounded(a: np.ndarray, rounding: str) -> np.ndarray:
    """1 / a of float32 in a rounding mode."""
    return narrow(1 / a.astype(f64), rounding)


def root_rounded(a: np.ndarray, rounding: str) -> np.ndarray:
    """The square root of float32 in a rounding mode: as of quotients."""
    return narrow(np.sqrt(a.astype(f64)), rounding)


def fma_rounded(a: np.ndarray, b: np.ndarray, c: np.ndarray, rounding: str) -> np.ndarray:
    """a * b + c of float32, rounded once, in a rounding mode."""
    return add_rounded(a.astype(f64) * b, c, rounding)


def least(function, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """np.fmin or np.minimum of float32, -0 below +0."""
    out = function(a, b)
    if np.logical_and.reduce(out, axis=None):  # no zero among them
        return out
    return np.where(a == b, (a.view(u32) | b.view(u32)).view(f32), out)


def greatest(function, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """np.fmax or np.maximum of float32, +0 above -0."""
    out = function(a, b)
    if np.logical_and.reduce(out, axis=None):  # no zero among them
        return out
    return np.where(a == b, (a.view(u32) & b.view(u32)).view(f32), out)


def flush_half(x: np.ndarray) -> np.ndarray:
    """Numbers below f16's normal range, held in float32, to zero of the same sign (.ftz)."""
    return np.where(np.abs(x) < f32(2**-14), np.copysign(f32(0), x), x)


def flush(x: np.ndarray) -> np.ndarray:
    """Subnormal float32 to zero of the same sign (.ftz)."""
    small = np.abs(x) < f32(1.17549435e-38)
    # Nearly always there is none (zeros count, and stay what they are).
    return (
        np.where(small, np.copysign(f32(0), x), x) if np.logical_or.reduce(small, axis=None) else x
    )


def saturate(x: np.ndarray) -> np.ndarray:
    """Clamp to [0, 1], NaN to 0 (.sat)."""
    return np.fmin(np.fmax(x, f32(0)), f32(1))


def xorsign_abs(op, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """min or max of magnitudes, signed by the product of signs."""
    sign = (a.view(u32) ^ b.view(u32)) & u32(0x80000000)
    return (op(np.abs(a), np.abs(b)).view(u32) | sign).view(f32)


def to_integer(x: np.ndarray, rounding: str, dtype: type) -> np.ndarray:
    """Float to integer: `rounding` in rni rzi rmi rpi, saturating.

    NaN gives 0, but the sign bit alone where either side has 64 bits.
    """
    nan = x != x
    if nan.any() and (x.dtype == f64 or np.dtype(dtype).itemsize == 8):
        bits = 8 * np.dtype(dtype).itemsize
        sign = np.array(1 << (bits - 1), f"u{bits // 8}").view(dtype)
        return np.where(nan, sign, to_integer(np.where(nan, x.dtype.type(0), x), rounding, dtype))
    rounded = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}[rounding](x)
    info = np.iinfo(dtype)
    rounded = np.where(x != x, 0, rounded.astype(f64))
    low = np.clip(rounded, float(info.min), float(info.max))
    if info.max > 2**53:  # float(info.max) rounds up to a value the type does not hold
        big = rounded >= float(info.max)
        return np.where(big, info.max, np.where(big, 0, low).astype(dtype)).astype(dtype)
    return low.astype(dtype)


def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """A B^T in float64.

    The host's matrix product sums an element in an order that depends on its place and on the
    host's processor. In float64 that does not show in what is rounded to float32: an element has
    the same bits in any row of any tile, on any machine, as it has on a GPU.
    """
    return a.astype(f64) @ b.T.astype(f64)


def tanh(x: np.ndarray) -> np.ndarray:
    """float32 tanh."""
    return np.tanh(x.astype(f64)).astype(f32)


def exp2(x: np.ndarray) -> np.ndarray:
    """ex2.approx: float32 2^x, subnormal results kept."""
    return np.exp2(x)
