"""A operands in bf16 registers, of prepared weights: as they lie, or made from NVFP4
(`bf16_layout`)."""

from cutlass import BFloat16, Uint32, cute

from dsv4.kernels.kit.quant import multiply_bf16x2
from dsv4.kernels.moe.bf16_layout import (
    MAGNITUDE_BITS,
    PAIRS,
    SCALE_EXPONENT,
    SIGN_BITS,
    STEPS,
    TARGET_MAGNITUDE,
    TARGET_SIGN,
)
from dsv4.kernels.moe.layout import UNIT_ROWS, VECTOR_BYTES
from dsv4.kernels.moe.plan import ROW_SCALE_BYTES, WARPGROUP, Kind, ProductPlan
from dsv4.kernels.moe.sm90.context import Smem, scale_offset, weight_offset
from dsv4.kernels.moe.sm90.fragments import load_words

WARP = 32
WORDS = 4  # registers of a step
LANE_WORDS = VECTOR_BYTES // 4
PART_STEPS = 4  # of a fragment: two of them are what registers hold
PARTS = STEPS // PART_STEPS
MAGNITUDES = 0x01C001C0
SIGNS = 0x80008000
BF16X2_EXPONENT = 0x00800080  # 1 in both halves' exponents
EXPONENT_BIAS = MOST_EXPONENT = 127
CODE_EXPONENT = 120  # between the exponents' biases of bf16 and e4m3


class RowWords:
    """Registers of a k block of a lane's two rows, g and g + 8, as they lie in the ring.

    Args:
        warp: of the consumers.
    """

    def __init__(self, smem: Smem, plan: ProductPlan, stage, block, kind: Kind, warp, lane):
        self.kind = kind
        warpgroup, self.unit, self.lane = warp // WARPGROUP, warp % WARPGROUP, lane
        panels = [warpgroup + half * plan.panels for half in range(2)]
        self.starts = [smem.weight + weight_offset(plan, stage, p, kind, block) for p in panels]
        if kind.dtype == "nvfp4":
            size = ROW_SCALE_BYTES[kind.dtype]
            row = cute.assume((self.unit * UNIT_ROWS + lane // 4) * size, divby=size)
            self.codes = [self._vector(start, self.unit) for start in self.starts]
            self.scales = [
                load_words(smem.scale + scale_offset(plan, stage, p, kind, block) + row, size // 4)
                for p in panels
            ]

    def fragment(self, part: int) -> cute.Tensor:
        """The A operand of some of the steps: bf16 [8, 1, step]."""
        words = cute.make_rmem_tensor((WORDS, PART_STEPS), Uint32)
        for half in range(2):
            fill = self._decode if self.kind.dtype == "nvfp4" else self._load
            fill(words, half, part)
        values = cute.recast_tensor(words, BFloat16)
        layout = cute.make_layout(((2, 2, 2), 1, PART_STEPS), stride=((1, 2, 4), 0, 2 * WORDS))
        return cute.make_tensor(values.iterator, layout)

    def _load(self, words: cute.Tensor, half: int, part: int) -> None:
        """Two steps of a row are a vector."""
        for first in range(0, PART_STEPS, 2):
            vector = (part * PART_STEPS + first) // 2
            found = self._vector(self.starts[half], self.unit * (STEPS // 2) + vector)
            for i in range(2):
                words[half, first + i] = found[2 * i]
                words[2 + half, first + i] = found[2 * i + 1]

    def _decode(self, words: cute.Tensor, half: int, part: int) -> None:
        """Two steps of a row are a word of codes and two bytes of scales."""
        codes, scales = self.codes[half], self.scales[half]
        for first in range(0, PART_STEPS, 2):
            step = part * PART_STEPS + first
            pairs = spread_e2m1(codes[step // 2])
            for i, scale in enumerate(double_scales(scales[step // 4], step % 4)):
                words[half, first + i] = multiply_bf16x2(pairs[2 * i], scale)
                words[2 + half, first + i] = multiply_bf16x2(pairs[2 * i + 1], scale)

    def _vector(self, start: cute.Pointer, index) -> cute.Tensor:
        offset = cute.assume((index * WARP + self.lane) * VECTOR_BYTES, divby=VECTOR_BYTES)
        return load_words(start + offset, LANE_WORDS)


def spread_e2m1(word: Uint32) -> list[Uint32]:
    """Eight e2m1 codes of a word as pairs of bf16, times 2^-126."""
    pairs = []
    for pair in range(PAIRS):
        by_magnitude = TARGET_MAGNITUDE - MAGNITUDE_BITS[pair]
        by_sign = TARGET_SIGN - SIGN_BITS[pair]
        if by_magnitude == by_sign:
            pairs.append(shifted(word, by_sign) & Uint32(MAGNITUDES | SIGNS))
        else:
            magnitudes = shifted(word, by_magnitude) & Uint32(MAGNITUDES)
            pairs.append(magnitudes | shifted(word, by_sign) & Uint32(SIGNS))
    return pairs


def shifted(word: Uint32, by: int) -> Uint32:
    """A word moved towards its high bits, or by a negative number towards its low ones."""
    if by == 0:
        return word
    return word << by if by > 0 else word >> -by


def double_scales(word: Uint32, first: int) -> list[Uint32]:
    """Two e4m3 bytes of a word, from the `first` one on, times 2^`SCALE_EXPONENT`, each in both
    halves of a register, as bf16. There is no NaN among them."""
    # A byte with its sign in front of it, in each half: shifted, sign and exponent stand where bf16
    # has them. That is the value times 2^-120, of subnormal codes, too; one factor cannot hold the
    # rest.
    selector = 0x9180 + 0x2222 * (first // 2)
    halves = Uint32(cute.arch.prmt(word, Uint32(0), selector)) << 4
    pair = halves & Uint32(0x87F087F0)
    for exponent in (MOST_EXPONENT, SCALE_EXPONENT + CODE_EXPONENT - MOST_EXPONENT):
        pair = multiply_bf16x2(pair, constant((exponent + EXPONENT_BIAS) * BF16X2_EXPONENT))
    return [both(pair, half) for half in range(2)]


def constant(word: int) -> Uint32:
    """A register: a product of bf16 takes no immediate operand."""
    return cute.arch.inline_ptx(f"mov.b32 {{$w0}}, {word};", write_only_types=[Uint32])


def both(pair: Uint32, half: int) -> Uint32:
    """One half of a register in both. Products take it from where it is, so that this is no
    instruction, which a permutation of bytes would be."""
    one = ("low", "high")[half]
    return cute.arch.inline_ptx(
        "{.reg .b16 low, high; mov.b32 {low, high}, {$r0}; "
        "mov.b32 {$w0}, {" + one + ", " + one + "};}",
        write_only_types=[Uint32],
        read_only_args=[pair],
    )
