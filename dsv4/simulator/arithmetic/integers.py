"""Integer and bit arithmetic of one warp, on numpy arrays of 32 lanes."""

from __future__ import annotations

import numpy as np

from dsv4.simulator.arithmetic.numerics import contiguous, f64, i64, pack64, u8, u32, u64, words


def shift_left(a: np.ndarray, count: np.ndarray, bits: int) -> np.ndarray:
    """a << count with counts of `bits` and more giving 0."""
    out = a << np.minimum(count, bits - 1).astype(a.dtype)
    return np.where(count >= bits, a.dtype.type(0), out)


def shift_right(a: np.ndarray, count: np.ndarray, bits: int) -> np.ndarray:
    """Logical a >> count with counts of `bits` and more giving 0."""
    out = a >> np.minimum(count, bits - 1).astype(a.dtype)
    return np.where(count >= bits, a.dtype.type(0), out)


def shift_right_signed(a: np.ndarray, count: np.ndarray, bits: int) -> np.ndarray:
    """Arithmetic a >> count; `a` has a signed dtype."""
    return a >> np.minimum(count, bits - 1).astype(a.dtype)


def divide(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Integer division towards zero; x / 0 is all ones, as on hardware."""
    if a.dtype.kind == "u":
        quotient = a // np.where(b == 0, a.dtype.type(1), b)
        return np.where(b == 0, ~a.dtype.type(0), quotient)
    safe = np.where(b == 0, a.dtype.type(1), b)
    magnitude = np.abs(a.astype(f64)) // np.abs(safe.astype(f64)) if a.dtype.itemsize < 8 else None
    if magnitude is None:
        quotient = np.array([int(abs(x) // abs(y)) for x, y in zip(a.tolist(), safe.tolist())], i64)
    else:
        quotient = magnitude.astype(i64)
    quotient = np.where((a < 0) != (safe < 0), -quotient, quotient).astype(a.dtype)
    return np.where(b == 0, a.dtype.type(-1), quotient)


def remainder(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Integer remainder with the sign of the dividend; x % 0 is x."""
    return np.where(b == 0, a, a - divide(a, b) * b)


def multiply_high(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """High half of the product of two 16-, 32- or 64-bit integers."""
    if a.dtype.itemsize <= 4:
        wide = i64 if a.dtype.kind == "i" else u64
        bits = wide(8 * a.dtype.itemsize)
        return ((a.astype(wide) * b.astype(wide)) >> bits).astype(a.dtype)
    return np.array([(x * y) >> 64 for x, y in zip(a.tolist(), b.tolist())], a.dtype)


def find_nth_set(mask: np.ndarray, base: np.ndarray, offset: np.ndarray) -> np.ndarray:
    """fns: the `offset`-th set bit of mask from bit `base` on, downwards for negative offsets."""
    out = []
    for bits, start, nth in zip(mask.tolist(), base.tolist(), offset.tolist()):
        upwards = range(start, 32) if nth > 0 else range(start, -1, -1)
        places = [start] if nth == 0 else upwards
        found = [p for p in places if bits >> p & 1]
        index = max(abs(nth) - 1, 0)
        out.append(found[index] if index < len(found) else 0xFFFFFFFF)
    return np.array(out, u32)


def bit_mask(position: np.ndarray, width: np.ndarray, clamp: bool) -> np.ndarray:
    """bmsk: `width` ones from `position`; both modulo 32, or clamped to 32."""
    p, n = position.astype(u64), width.astype(u64)
    if clamp:
        p, n = np.minimum(p, u64(32)), np.minimum(n, u64(32))
    else:
        p, n = p & u64(31), n & u64(31)
    return (((u64(1) << n) - u64(1)) << p).astype(u32)


def extend_bits(x: np.ndarray, width: np.ndarray, clamp: bool) -> np.ndarray:
    """szext: the low `width` bits of 32-bit x, sign or zero extended as x is signed or not."""
    n = np.minimum(width, u32(32)) if clamp else width & u32(31)
    shift = (u32(32) - n).astype(i64)
    wide = x.astype(i64) << i64(32) << shift
    if x.dtype.kind == "u":
        wide = wide.view(u64)
    return (wide >> shift.astype(wide.dtype) >> wide.dtype.type(32)).astype(x.dtype)


def find_highest(x: np.ndarray) -> np.ndarray:
    """Index of the highest set bit of unsigned x, as uint32; 0xffffffff for 0."""
    wide = x.astype(u64)
    high = (wide >> u64(32)).astype(f64)
    low = (wide & u64(0xFFFFFFFF)).astype(f64)
    exponent = np.where(high > 0, np.frexp(high)[1] + 31, np.frexp(low)[1] - 1)
    return np.where(x == 0, u32(0xFFFFFFFF), exponent.astype(i64).astype(u32))


def reverse_bits(x: np.ndarray) -> np.ndarray:
    """Bit reversal of uint32 or uint64."""
    width = x.dtype.itemsize * 8
    bits = np.unpackbits(contiguous(x).view(u8).reshape(len(x), -1), axis=1, bitorder="little")
    return np.packbits(bits[:, ::-1], axis=1, bitorder="little").view(f"u{width // 8}")[:, 0]


def _field(x: np.ndarray, bits: int) -> np.ndarray:
    """Position or length of a bit field: past 255 the 32-bit forms wrap, the 64-bit forms clamp."""
    return x & u32(0xFF) if bits == 32 else np.minimum(x, u32(0xFF))


def extract_bits(x: np.ndarray, position: np.ndarray, length: np.ndarray) -> np.ndarray:
    """bfe: `length` bits of x from `position`, sign extended when x is signed."""
    bits = x.dtype.itemsize * 8
    pos, count = (_field(x, bits).astype(i64) for x in (position, length))
    out = []
    signed = x.dtype.kind == "i"
    for value, p, n in zip(x.tolist(), pos.tolist(), count.tolist()):
        unsigned = value % (1 << bits)
        field_bits = (unsigned >> p) & ((1 << n) - 1) if p < bits else 0
        if signed and n:
            top = (unsigned >> min(p + n - 1, bits - 1)) & 1
            if top:
                field_bits |= (-1 << min(n, max(bits - p, 0))) & ((1 << bits) - 1)
        out.append(field_bits % (1 << bits))
    return np.array(out, dtype=f"u{bits // 8}").view(x.dtype)


def insert_bits(a: np.ndarray, b: np.ndarray, position: np.ndarray, length: np.ndarray):
    """bfi: low `length` bits of a put into b at `position`."""
    bits = a.dtype.itemsize * 8
    p, n = (_field(x, bits).astype(u64) for x in (position, length))
    ones = np.where(n >= 64, ~u64(0), (u64(1) << np.minimum(n, u64(63))) - u64(1))
    mask = np.where(p >= bits, u64(0), ones << np.minimum(p, u64(63)))
    wide = (b.astype(u64) & ~mask) | ((a.astype(u64) << np.minimum(p, u64(63))) & mask)
    return wide.astype(a.dtype)


def funnel_shift(low: np.ndarray, high: np.ndarray, count: np.ndarray, left: bool, clamp: bool):
    """shf: shift the 64-bit {high, low}, give the high (left) or low (right) 32 bits."""
    n = np.minimum(count, u32(32)) if clamp else count & u32(31)
    wide = pack64(low, high)
    if left:
        return ((wide << n.astype(u64)) >> u64(32)).astype(u32)
    return (wide >> n.astype(u64)).astype(u32)


def select_bytes(a: np.ndarray, b: np.ndarray, selector: np.ndarray, mode: str) -> np.ndarray:
    """prmt in its special modes."""
    source = np.concatenate([words(a, u8), words(b, u8)], axis=1)
    base, k = (selector & u32(3)).astype(i64)[:, None], np.arange(4)[None, :]
    index = {
        "f4e": base + k,
        "b4e": (base - k) % 8,
        "rc8": base + 0 * k,
        "ecl": np.maximum(base, k),
        "ecr": np.minimum(base, k),
        "rc16": 2 * (base & 1) + k % 2,
    }[mode]
    return np.take_along_axis(source, index, axis=1).view(u32)[:, 0]


def add_wide(a: np.ndarray, b: np.ndarray, carry: np.ndarray, subtract: bool):
    """uint64 a + b + carry or a - b - borrow: the result and the carry or borrow out."""
    carry = carry.astype(u64)
    if subtract:
        out = a - b - carry
        return out, ((a < b) | ((a == b) & (carry == 1))).astype(i64)
    out = a + b + carry
    return out, ((out < a) | ((out == a) & (carry == 1))).astype(i64)


def permute_bytes(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    """prmt in its default mode: four bytes picked from {b, a}, bit 3 replicating the sign."""
    source = np.concatenate([words(a, u8), words(b, u8)], axis=1)
    nibbles = (selector[:, None] >> np.arange(0, 16, 4, dtype=u32)) & u32(15)
    picked = np.take_along_axis(source, (nibbles & u32(7)).astype(i64), axis=1)
    sign = np.where(picked & 0x80, u8(0xFF), u8(0))
    return np.where(nibbles & u32(8), sign, picked).astype(u8).view(u32)[:, 0]


def lookup3(a: np.ndarray, b: np.ndarray, c: np.ndarray, table: int) -> np.ndarray:
    """lop3: any bitwise function of three inputs."""
    out = np.zeros_like(a)
    for k in range(8):
        if table >> k & 1:
            term = (a if k & 4 else ~a) & (b if k & 2 else ~b) & (c if k & 1 else ~c)
            out = out | term
    return out
