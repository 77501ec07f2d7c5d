"""Arithmetic of the sampler on the device: what `numbers` defines, bit for bit, and a bound."""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, Uint32, cute

from dsv4.kernels.kit.rms import NEAREST
from dsv4.kernels.sampling import numbers

NAN_KEY = 0x7FFFFFFF  # above that of infinity
INVERSE_BITS = 0x7F000000  # of 1 twice, as the exponent of a product with its inverse


def product(a: Float32, b: Float32) -> Float32:
    """a * b, rounded by itself: a plain product may be contracted with the sum that follows."""
    return cute.math.mul(a, b, rounding=NEAREST)


def inverse(a: Float32) -> Float32:
    """1 / a, rounded to nearest."""
    return cute.math.rcp(a, rounding=NEAREST)


def horner(coefficients: tuple[float, ...], x: Float32) -> Float32:
    """A polynomial, from its highest coefficient down, each operation rounded by itself."""
    total = Float32(coefficients[0])
    for coefficient in coefficients[1:]:
        total = product(total, x) + Float32(coefficient)
    return total


@cute.jit
def order_key(x: Float32) -> Int32:
    """Integer in the order of floats; NaN is above all others."""
    bits = x.bitcast(Int32)
    key = bits ^ ((bits >> 31) & Int32(0x7FFFFFFF))
    return Int32(cutlass.select_(x != x, Int32(NAN_KEY), key))


@cute.jit
def of_order_key(key: Int32) -> Float32:
    """The float of an order key."""
    return (key ^ ((key >> 31) & Int32(0x7FFFFFFF))).bitcast(Float32)


@cute.jit
def probability(exponent: Float32) -> Float32:
    """e^x of x <= 0, 0 where it is under 2^-64."""
    t = product(exponent, Float32(numbers.LOG2_E))
    is_none = t < Float32(numbers.LEAST_EXPONENT)
    t = cute.arch.fmax(t, Float32(numbers.LEAST_EXPONENT))
    shifted = t + Float32(numbers.ROUNDER)
    part = t - (shifted - Float32(numbers.ROUNDER))
    # The last places of the shifted number are the integer.
    power = ((shifted.bitcast(Int32) + 127) << 23).bitcast(Float32)
    found = product(horner(numbers.EXP2_COEFFICIENTS, part), power)
    return Float32(cutlass.select_(is_none, Float32(0.0), found))


@cute.jit
def exponential(word: Uint32, next_word: Uint32) -> Float32:
    """Exp(1) noise of a random word and the one that refines it."""
    refined = Float32(word) + product(Float32(next_word), Float32(2.0**-32))
    u = product(refined, Float32(2.0**-32))
    u = cute.arch.fmax(u, Float32(numbers.LEAST_UNIFORM))
    u = cute.arch.fmin(u, Float32(numbers.MOST_UNIFORM))
    rest = Float32(1.0) - u
    bits = rest.bitcast(Int32)
    k = (bits - numbers.TWO_THIRDS_BITS) >> 23
    m = (bits - (k << 23)).bitcast(Float32)
    is_small = k == 0
    above = cutlass.select_(is_small, u, Float32(1.0) - m)
    below = cutlass.select_(is_small, Float32(2.0) - u, Float32(1.0) + m)
    s = product(above, inverse(below))
    total = product(s, horner(numbers.ARTANH_COEFFICIENTS, product(s, s)))
    return total - product(Float32(k), Float32(numbers.LN_2))


@cute.jit
def inverse_bound(x: Float32) -> Float32:
    """At least 1 / x of a normal x > 0, at most 9 / 8 of it; 2^127 for 0."""
    return (Int32(INVERSE_BITS) - x.bitcast(Int32)).bitcast(Float32)


def philox(counter: tuple, key: tuple) -> tuple:
    """Philox 4x32-10: four words of a counter and two of a key give four."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(numbers.PHILOX_ROUNDS):
        first, second = (
            cute.arch.mul_wide(c, Uint32(factor))
            for c, factor in zip((c0, c2), numbers.PHILOX_FACTORS)
        )
        c0, c2 = Uint32(second >> 32) ^ c1 ^ k0, Uint32(first >> 32) ^ c3 ^ k1
        c1, c3 = Uint32(second), Uint32(first)
        k0, k1 = (k + Uint32(step) for k, step in zip((k0, k1), numbers.PHILOX_STEPS))
    return c0, c1, c2, c3
