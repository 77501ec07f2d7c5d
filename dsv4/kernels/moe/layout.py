"""Order of prepared weights in memory: that of the kernels' reads.

For Hopper ("packed", "row_packed" or "raw"), a weight [M, K] is cut into panels of 32 rows, a panel
into k blocks of 128. Two panels, of which a warpgroup has one each as the rows g and g + 8 of its
fragments, make the A operand of a wgmma, 16 bytes of a lane at a time. Units of 8 rows follow each
other in a block, one for each warp; lane l reads row l / 4 of a unit.

FP4, a block of 2 KB [unit (4), lane (32), step (4)] of words. Where scales fold into codes, word s
of lane l holds elements k = 32 (l % 4) + 8 s + {0 .. 7}, so that a lane has a group to itself, and
its table once a row and block. A product adds elements in any order, if both operands have the same
one: the word of a token's codes k = 32 i + 4 j + {0 .. 3} of a block lies at word 4 j + i there
(`interleaved_place`). "raw", whose groups are steps: word s of lane l holds elements
k = 32 s + 4 (l % 4) + {0, 1, 2, 3}, then + 16. Bits 4 j .. 4 j + 2 are the magnitude of a word's
element j; its sign is bit 8 j + 3 for the first four, bit 8 (j - 4) + 7 for the others: where they
are after a shift, or without one, in e4m3 codes.

FP4 scales, a word for each row of a block [row (32)]: "packed", the least exponent of the row's
four groups in bits 24 to 31, and how far each one is above it, 4 bits from bit 4 s on;
"row_packed", how far each one is above the least exponent of the whole row, a byte each of the
first three, bits 28 to 31 of the last, so that one instruction takes each out; in bits 24 to 27
the lower half of that exponent, in every second block from the second one on the upper half;
"raw", the four E8M0 bytes. A distance of 15 is that of a group without values.

FP8, a block of 4 KB [unit (4), half (2), lane (32), step (2), 16 k (2)] of words: the four codes
from k = 32 (2 half + step) + 16 (word) + 4 (l % 4) on. FP8 scales lie as in the checkpoint.

For Blackwell ("tiled"). A weight is cut into tiles of 128 rows, a tile into k blocks of 128, whose
rows follow each other: 64 bytes each of FP4, 128 of FP8, in the order of the checkpoint. The E8M0
bytes of an FP4 block's rows lie as the tensor core reads scales, [lane (32), row / 32 (4), group of
32 (4)] where the row is 32 (row / 32) + lane. FP8 scales lie as in the checkpoint. NVFP4 codes lie
as those of FP4; the e4m3 bytes of a block are two such atoms, each of a group of 16 of 64 elements.
"""

from __future__ import annotations

PANEL_ROWS = 32
UNIT_ROWS = 8
UNITS = PANEL_ROWS // UNIT_ROWS
K_BLOCK = 128
WGMMA_K = 32  # e4m3 elements of a step
STEPS = K_BLOCK // WGMMA_K
FP4_GROUPS = 4  # of a k block
WORD_CODES = 4  # e4m3
GROUP_WORDS = K_BLOCK // FP4_GROUPS // WORD_CODES  # of codes
VECTOR_BYTES = 16  # of a lane's load
TILE_ROWS = 128
ATOM_LANES = 32
ATOM_BYTES = TILE_ROWS * K_BLOCK // 32  # scales of an FP4 block, of half an NVFP4 one
ROW_BLOCKS = 2  # of a row, that hold a half each of its exponent in "row_packed" words
MAX_SPREAD = 11  # of the exponents of a packed word: e4m3 holds 0.5 * 2^-5 to 6 * 2^6
# e2m1 magnitudes as e4m3 codes, times 2^-5: 0, 0.5, 1, 1.5 and 2, 3, 4, 6.
TABLE_LOW, TABLE_HIGH = 0x14100800, 0x24201C18
TABLE_EXPONENT = -5
LIFT = 2.0**-TABLE_EXPONENT  # of products of folded codes
# A step of the exponent in each code of a table word; 0 has none.
STEP_LOW, STEP_HIGH = 0x08080800, 0x08080808


def interleaved_place(word):
    """Place of a k block's `word` of four codes of an activation beside folded FP4 weights."""
    return word % GROUP_WORDS * FP4_GROUPS + word // GROUP_WORDS


def interleaved_word(place):
    """Inverse of `interleaved_place`."""
    return place % FP4_GROUPS * GROUP_WORDS + place // FP4_GROUPS
