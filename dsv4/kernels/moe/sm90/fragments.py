"""A operands in registers, of prepared weights: e4m3 as they lie, or made from FP4 (`layout`)."""

from cutlass import Float32, Int32, Uint32, cute

from dsv4.kernels.kit.quant import unpack_e8m0
from dsv4.kernels.moe.layout import (
    FP4_GROUPS,
    STEP_HIGH,
    STEP_LOW,
    STEPS,
    TABLE_EXPONENT,
    TABLE_HIGH,
    TABLE_LOW,
    UNIT_ROWS,
    VECTOR_BYTES,
)
from dsv4.kernels.moe.plan import WARPGROUP, Kind, ProductPlan
from dsv4.kernels.moe.sm90.context import DTYPE, Smem, scale_offset, weight_offset

SIGNS = 0x80808080
MAGNITUDES = 0x77777777
EXPONENT_BITS = 0x7F800000
LOWER_EXPONENT_BITS, UPPER_EXPONENT_BITS = 0x07800000, 0x78000000
WORDS = 4  # of a step: 16 e4m3 codes of a thread
LANE_WORDS = VECTOR_BYTES // 4
WARP = 32
# Exponent of raw FP4 groups, whose codes stay as they are.
RAW_EXPONENT = -TABLE_EXPONENT


def permute(low: Uint32, high: Uint32, selector: Uint32) -> Uint32:
    """Bytes of two words by the lower four nibbles of a selector."""
    return cute.arch.inline_ptx(
        "prmt.b32 {$w0}, {$r0}, {$r1}, {$r2};",
        write_only_types=[Uint32],
        read_only_args=[low, high, selector],
    )


def decode_fp4(word: Uint32, low: Uint32, high: Uint32) -> tuple[Uint32, Uint32]:
    """Eight e4m3 codes of a word of FP4: those of the first four elements, of the others.

    Args:
        low, high: codes of the magnitudes 0 to 3, 4 to 7.
    """
    magnitudes = word & MAGNITUDES
    first = permute(low, high, magnitudes) | ((word << 4) & Uint32(SIGNS))
    second = permute(low, high, magnitudes >> 16) | (word & Uint32(SIGNS))
    return first, second


def load_words(source: cute.Pointer, count: int) -> cute.Tensor:
    """Words of shared memory by one load."""
    words = cute.make_rmem_tensor(count, Uint32)
    pointer = cute.recast_ptr(source, dtype=Uint32)
    cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(count)), words)
    return words


def make_fragment() -> cute.Tensor:
    """Registers of the A operand of a k block: words [of a step, step]."""
    return cute.make_rmem_tensor((WORDS, STEPS), Uint32)


def operand(fragment: cute.Tensor) -> cute.Tensor:
    """A fragment as wgmma takes it: e4m3 [16, 1, step]."""
    codes = cute.recast_tensor(fragment, DTYPE)
    layout = cute.make_layout(((4, 2, 2), 1, STEPS), stride=((1, 4, 8), 0, 4 * WORDS))
    return cute.make_tensor(codes.iterator, layout)


def load_fragment(smem: Smem, plan: ProductPlan, stage, block, kind: Kind, warp, lane):
    """The A operand of a k block, and its rows' scale words (g, g + 8) of FP4."""
    fragment = make_fragment()
    scales = fill_fragment(fragment, smem, plan, stage, block, kind, warp, lane)
    return operand(fragment), scales


def fill_fragment(
    fragment: cute.Tensor, smem: Smem, plan: ProductPlan, stage, block, kind: Kind, warp, lane
) -> list[Uint32]:
    """Load or decode a k block; its rows' scale words (g, g + 8) of FP4.

    Args:
        warp: of the consumers.
    """
    warpgroup, unit = warp // WARPGROUP, warp % WARPGROUP
    scales = []
    for panel in range(2):
        source = warpgroup + panel * plan.panels
        start = smem.weight + weight_offset(plan, stage, source, kind, block)
        if kind.dtype == "fp4":
            row = cute.assume((unit * UNIT_ROWS + lane // 4) * 4, divby=4)
            words = smem.scale + scale_offset(plan, stage, source, kind, block)
            scale = load_words(words + row, 1)[0]
            vector = cute.assume((unit * WARP + lane) * VECTOR_BYTES, divby=VECTOR_BYTES)
            words = load_words(start + vector, LANE_WORDS)
            above = Uint32(RAW_EXPONENT)
            if kind.is_folded:
                above = _above(scale, lane % FP4_GROUPS, plan.scales_rows_last(kind))
            low, high = TABLE_LOW + above * STEP_LOW, TABLE_HIGH + above * STEP_HIGH
            for step in range(STEPS):
                codes = decode_fp4(words[step], low, high)
                fragment[panel, step], fragment[2 + panel, step] = codes
            scales.append(scale)
        else:
            for half in range(2):
                vector = ((unit * 2 + half) * WARP + lane) * VECTOR_BYTES
                vector = cute.assume(vector, divby=VECTOR_BYTES)
                words = load_words(start + vector, LANE_WORDS)
                for i in range(2):
                    step = half * 2 + i
                    fragment[panel, step] = words[2 * i]
                    fragment[2 + panel, step] = words[2 * i + 1]
    return scales


def _above(scale: Uint32, group: Int32, is_row_packed: bool) -> Uint32:
    """How far a group of a packed word is above its common exponent."""
    place = 4 * group
    if is_row_packed:
        place = 8 * group + 4 * (group // (FP4_GROUPS - 1))
    return (scale >> Uint32(place)) & 0xF


def row_scale(even: Uint32, odd: Uint32) -> Float32:
    """2^(least exponent - 127) of a row, of words of an even and an odd k block."""
    return (((even >> 1) & LOWER_EXPONENT_BITS) | ((odd << 3) & UPPER_EXPONENT_BITS)).bitcast(
        Float32
    )


def packed_scale(word: Uint32) -> Float32:
    """2^(least exponent - 127) of a packed word, whose codes are times 2^-5."""
    return ((word >> 1) & EXPONENT_BITS).bitcast(Float32)


def raw_scale(word: Uint32, step: int) -> Float32:
    """E8M0 byte of a step as fp32."""
    return unpack_e8m0(Int32((word >> (8 * step)) & 0xFF))
