"""Numbers of the sampler's arithmetic, which kernels and torch implementation share bit for bit.

A token v of a row with logits x and the best one m is drawn as arg max of p / e:

- p = 2^t, t = ((x - m) * (1 / T)) * log2(e); 0 where t < `LEAST_EXPONENT`. With n the integer
  nearest to t and f = t - n it is 2^n times a polynomial in f, by Horner's rule.
- e ~ Exp(1) is -log(1 - u) of a uniform u: with 1 - u = m 2^k, m in [2/3, 4/3), it is
  2 artanh((1 - m) / (1 + m)) - k log(2), the first five terms of the series.
- u is word c[v % 4] of a Philox block, refined by the next one of the block, c':
  u = (c + c' 2^-32) 2^-32, in [`LEAST_UNIFORM`, `MOST_UNIFORM`].
- The block of counter (v / 4, low and high half of the position, 0) under the halves of the seed as
  key is that of Philox 4x32-10 (Salmon, Moraes, Dror, Shaw 2011).

Every operation is one of fp32, rounded to nearest by itself: sums and products are not fused, and
quotients are products with an inverse. So a device needs nothing but IEEE arithmetic for equal
bits.

Imports neither torch nor cutlass.
"""

from __future__ import annotations

PHILOX_ROUNDS = 10
PHILOX_FACTORS = 0xD2511F53, 0xCD9E8D57
PHILOX_STEPS = 0x9E3779B9, 0xBB67AE85  # of the key, by round
PHILOX_WORDS = 4  # of a block

TEMPERATURE_FLOOR = 1e-5  # official inference/generate.py
LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453
# 2^f on [-1/2, 1/2], coefficients from f^6 down; off by 1e-7 of it, and exact at 0.
EXP2_COEFFICIENTS = (
    0.00015453163359779865, 0.0013390863314270973, 0.009618083015084267, 0.055503569543361664,
    0.24022650718688965, 0.6931471824645996, 1.0,
)  # fmt: skip
ROUNDER = 1.5 * 2**23  # a sum with it has no binary places
LEAST_EXPONENT = -64.0  # of a p above 0: its token would never win
# 2 artanh(s) / s, coefficients from s^8 down.
ARTANH_COEFFICIENTS = (2 / 9, 2 / 7, 2 / 5, 2 / 3, 2.0)
TWO_THIRDS_BITS = 0x3F2AAAAB  # of 2/3 in fp32
LEAST_UNIFORM = 2.0**-64  # positive: p / e is finite
MOST_UNIFORM = 1 - 2.0**-24  # below 1: e is finite, so that p / e > 0 where p is

# Unit of a probability where top_k or top_p look at it: sums are those of integers, exact in any
# order. What p has below it is rounded to nearest.
MASS_BITS = 44
MASS_ROUNDER = 2.0 ** (23 - MASS_BITS)  # a sum of it and less has MASS_BITS binary places
