"""Order of prepared weights that are multiplied in bf16: NVFP4 and bf16 ones, for Hopper.

Panels of 32 rows, k blocks of 128 and units of 8 rows are those of `layout`; lane l reads row l / 4
of a unit. A step of a wgmma has 16 elements of k, the groups that share an NVFP4 scale. Of step s a
lane has the pairs k = 16 s + 2 (l % 4) + {0, 1}, then + 8: a register each of the A operand.

bf16, a block of 8 KB [unit (4), vector (4), lane (32), step (2), pair (2)] of registers: vector v
has the steps 2 v and 2 v + 1.

NVFP4, a block of 2 KB [unit (4), lane (32), word (4)]: word w has the pairs of the steps 2 w and
2 w + 1, four, the even element of each in its lower half, the odd one 16 bits above. Magnitudes and
signs are where `MAGNITUDE_BITS` and `SIGN_BITS` say: a shift brings the first ones to bits 6 to 8,
signs to bit 15, where the low bits of the exponent, the top one of the mantissa and the sign of a
bf16 are. That bf16, subnormal or not, is the value times 2^-126.

NVFP4 scales, eight bytes for each row of a block [row (32), group (8)], e4m3 as in the checkpoint.
"""

from __future__ import annotations

WGMMA_K = 16  # bf16 elements of a step
GROUP = 16  # that share an NVFP4 scale: a step
STEPS = 8  # of a k block
PAIRS = 4  # of a word
MAGNITUDE_BITS = (6, 3, 0, 9)  # the lowest, of each pair's even element
SIGN_BITS = (15, 12, 13, 14)
ODD = 16  # bits from an even element to its odd neighbour
TARGET_MAGNITUDE, TARGET_SIGN = 6, 15
PATTERN_EXPONENT = -126
# Scales are multiplied by that: a product of both is then a bf16 that is not subnormal, exactly.
SCALE_EXPONENT = 112
