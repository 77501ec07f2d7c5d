"""Tiles of FP4 keys: pages as they lie, codes made e4m3 on their way to registers.

A copy is a page of codes and scales as rows of 64 bytes, swizzled, so that the words which the
lanes of a warp load together lie in different banks. Lane 4 g + j has keys g and g + 8 of its
warp's 16; of each group of 32 channels it takes the word with channels 8 j .. 8 j + 7, four of
which a step's operand wants at k = 4 j, four at 16 + 4 j. Queries lie in that order, too: within a
step the tensor core's sum has none.

What the scales of a key's groups differ by goes into the exponents of its codes, by adding it to
the table that codes are looked up in. Multiplied by a power of two an operand's row gives the same
bits: the scale of the first group is the row's, as long as no code leaves the normal numbers. A key
with groups too far apart is given the codes that an FP8 key would have.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import Boolean, Float8E4M3FN, Float32, Int32, Int64, Uint32, cute
from cutlass.experimental.cuda.tensor_map import TensorMapL2Promotion, create_tensor_map_tiled

from dsv4.kernels.indexer.config import KERNEL_DIM, TILE_KEYS, IndexTopkConfig
from dsv4.kernels.indexer.context import Operands
from dsv4.kernels.indexer.plan import STEPS, KeyTile
from dsv4.kernels.kit.index_entry import WORD
from dsv4.kernels.kit.index_rounding import power_of_two, row_exponent
from dsv4.kernels.kit.swizzle import TENSOR_MAP_SWIZZLES, VECTOR_BYTES
from dsv4.kernels.kit.tma import tma_load

ROW_BYTES = KERNEL_DIM // 2  # of a key's codes
UNIT_KEYS = TILE_KEYS // 4  # of a warp
VECTOR_WORDS = VECTOR_BYTES // WORD
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# e4m3 codes of these magnitudes times 2^-5, and a step of the exponent in each of them; 0 has none.
TABLE_LOW, TABLE_HIGH = 0x14100800, 0x24201C18
STEP_LOW, STEP_HIGH = 0x08080800, 0x08080808
LEAST, MOST = -5, 6  # exponents that leave all codes normal and finite
BYTES = 0x01010101
SIGNS, MAGNITUDES = 0x80808080, 0x77777777
# Bytes of a word shifted left by 4, and of the word, that begin with the signs of its nibbles.
FIRST_SIGNS, LAST_SIGNS = 0x5140, 0x7362


class Fp4Ring(NamedTuple):
    """Views of the ring."""

    start: cute.Pointer  # of the pages


class Fp4Tiles:
    """Ring, copies and operands of tiles of a configuration's keys.

    Args:
        tile: of the plan.
    """

    def __init__(self, config: IndexTopkConfig, tile: KeyTile):
        self.page = config.page
        self.rows = config.page * config.row // ROW_BYTES
        self.tile = tile
        assert config.page * config.row % ROW_BYTES == 0, config.page

    def key_map(self, keys: cute.Tensor):
        """TMA descriptor of the pages as (byte of a row, row, page)."""
        return create_tensor_map_tiled(
            keys.iterator.toint(),
            cutlass.Uint8,
            [ROW_BYTES, self.rows, cutlass.max(Int32(keys.shape[0]), 1)],
            [ROW_BYTES // VECTOR_BYTES, Int64(keys.stride[0]) // VECTOR_BYTES],
            [ROW_BYTES, self.rows, 1],
            swizzle=TENSOR_MAP_SWIZZLES[ROW_BYTES],
            l2_promotion=TensorMapL2Promotion.none,
        )

    def views(self, storage, stages: int) -> Fp4Ring:
        """Views of the ring's shared memory."""
        return Fp4Ring(storage.keys.data_ptr())

    @staticmethod
    def source_word(vector, i: int):
        """Word of a query's codes, four channels each, that lies at word `i` of a vector of 16 of
        the other operand."""
        return vector // 2 * 2 * VECTOR_WORDS + 2 * i + vector % 2

    @cute.jit
    def load_part(
        self, operands: Operands, ring: Fp4Ring, full: cute.Pointer, key_map, stage, page, first,
        part,
    ):  # fmt: skip
        """A page of a tile."""
        target = stage * self.tile.stage_bytes + part * self.tile.part_bytes
        tma_load(key_map, ring.start + target, [0, 0, page], full)

    @cute.jit
    def decode(self, ring: Fp4Ring, fragment: cute.Tensor, stage, unit, lane) -> list[Float32]:
        """e4m3 codes of a thread's two keys as words [row, 16 k; step], and their scales."""
        first = unit * UNIT_KEYS
        part = ring.start + (stage * self.tile.stage_bytes + first // self.page * self.part_bytes)
        key = first % self.page + lane // 4
        words = cute.make_rmem_tensor((2, STEPS), Uint32)
        exponents = cute.make_rmem_tensor(2, Uint32)
        for r in cutlass.range_constexpr(2):
            at = self.page * ROW_BYTES + (key + 8 * r) * WORD
            exponents[r] = load_word(part, at ^ ((at >> 3) & 0x30))
            for step in cutlass.range_constexpr(STEPS):
                vector = step ^ (lane // 8)
                at = (key + 8 * r) * ROW_BYTES + vector * VECTOR_BYTES + lane % 4 * WORD
                words[r, step] = load_word(part, at)
        above = [exponents_above(exponents[r]) for r in range(2)]
        if are_near(above) & is_plain(exponents[0]) & is_plain(exponents[1]):
            for step in cutlass.range_constexpr(STEPS):
                for r in cutlass.range_constexpr(2):
                    steps = (above[r] >> (8 * step)) & Uint32(0xFF)
                    low = Uint32(TABLE_LOW) + steps * Uint32(STEP_LOW)
                    high = Uint32(TABLE_HIGH) + steps * Uint32(STEP_HIGH)
                    put_codes(fragment, words[r, step], (low, high), r, step)
        else:
            for r in cutlass.range_constexpr(2):
                groups = [Int32((exponents[r] >> (8 * i)) & Uint32(0xFF)) for i in range(STEPS)]
                row = row_of(groups)
                for step in cutlass.range_constexpr(STEPS):
                    put_codes(fragment, words[r, step], rounded_table(groups[step] - row), r, step)
                exponents[r] = Uint32(row)
        return [power_of_two(Int32(exponents[r] & Uint32(0xFF))) for r in range(2)]

    @property
    def part_bytes(self) -> int:
        """Bytes between pages of a tile."""
        return self.tile.part_bytes


def load_word(start: cute.Pointer, offset) -> Uint32:
    """A word of shared memory."""
    pointer = cute.recast_ptr(start + cute.assume(offset, divby=WORD), dtype=Uint32)
    return cute.make_tensor(pointer, cute.make_layout(1))[0]


def exponents_above(exponents: Uint32) -> Uint32:
    """Bytes of how far the scales of a key's groups are above 2^-5 times the first one's, where
    they are in 0..11."""
    return exponents + Uint32(-LEAST * BYTES) - (exponents & Uint32(0xFF)) * Uint32(BYTES)


def are_near(above: list[Uint32]) -> Boolean:
    """Whether all bytes of the words are in 0..11."""
    upper = Uint32(0)
    for word in above:
        upper |= word | (word + Uint32((15 - MOST + LEAST) * BYTES))
    return (upper & Uint32(0xF0F0F0F0)) == 0


def is_plain(exponents: Uint32) -> Boolean:
    """Whether no difference to the first scale is so large that its byte looks small."""
    return (exponents & Uint32(0xFF)) - Uint32(MOST - LEAST) <= Uint32(255 - 2 * (MOST - LEAST))


def row_of(groups: list[Int32]) -> Int32:
    """Exponent of the scale that an FP8 key has."""
    top = groups[0]
    for group in groups[1:]:
        top = cutlass.max(top, group)
    return row_exponent(top)


def rounded_table(shift: Int32) -> tuple[Uint32, Uint32]:
    """e4m3 codes of the magnitudes of e2m1 times 2^shift, rounded."""
    # A group may lie further below the row's scale than an exponent reaches.
    factor = power_of_two(cutlass.max(shift, Int32(-126)) + 127)
    wide = cute.make_rmem_tensor(len(E2M1_VALUES), Float32)
    for i, value in enumerate(E2M1_VALUES):
        wide[i] = Float32(value) * factor
    codes = cute.make_rmem_tensor(len(E2M1_VALUES), Float8E4M3FN)
    codes.store(wide.load().to(Float8E4M3FN))
    words = cute.recast_tensor(codes, Uint32)
    return words[0], words[1]


def put_codes(fragment: cute.Tensor, word: Uint32, table: tuple, row: int, step: int) -> None:
    """Eight codes of e2m1 as e4m3, where the operand has them.

    Args:
        table: e4m3 codes of the magnitudes, two words.
        row: 0 or 1, of the thread's.
    """
    magnitudes = word & Uint32(MAGNITUDES)
    shifted = word << 4
    low, high = table
    for half, (selector, signs) in enumerate(
        ((magnitudes, FIRST_SIGNS), (magnitudes >> 16, LAST_SIGNS))
    ):
        codes = Uint32(cute.arch.prmt(low, high, selector))
        sign = Uint32(cute.arch.prmt(shifted, word, signs))
        fragment[row + 2 * half, step] = codes | (sign & Uint32(SIGNS))
