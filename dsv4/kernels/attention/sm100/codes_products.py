"""Products of FP8 codes, and of rotated columns in bf16, of a pair of CTAs: operands by descriptor.

A key tile lies in each CTA as spans of 32 codes, [key, code], and one span of 32 rotated values.
Either product of QK steps through columns, a span at a time; those of PV through keys.
"""

import cutlass.cute as cute
from cutlass import Int32

from dsv4.kernels.attention.sm100.codes_context import CodesSmem
from dsv4.kernels.attention.sm100.plan_1cta import KEYS
from dsv4.kernels.attention.sm100.plan_codes import (
    CODE_BYTES,
    CODE_SPAN,
    HALF_CODES,
    HALF_ROPE,
    HALVES,
    ROPE_SPAN,
    SPANS,
    STAGE_BYTES,
    CodesPlan2Cta,
)
from dsv4.kernels.kit.swizzle import SPAN_BYTES
from dsv4.kernels.kit.tcgen05 import multiply_pair, pair_operand

STEP_BYTES = 32  # of K of a product
ROPE_KEYS = 16  # of a product of bf16
Q_STEP = STEP_BYTES // 4  # TMEM columns
SPAN_BOX = KEYS * CODE_SPAN  # bytes of a span of a key tile
SPAN_GROUPS = (4, 3)  # spans of a CTA that one product of PV takes: N is at most 256


def multiply_keys(
    plan: CodesPlan2Cta, smem: CodesSmem, sums: cute.Pointer, q: cute.Pointer, stage
) -> None:
    """S = Q K^T of a tile over the scales of its keys, two partial sums of each: the lower lanes of
    Q have the columns of CTA 0, and multiply its tile; one thread calls this.

    Args:
        sums, q: first columns.
        stage: of the tile.
    """
    start = Int32(smem.kv_start.toint()) + stage * STAGE_BYTES
    columns = HALVES * KEYS
    codes = pair_operand(start, CODE_SPAN)
    for term in range(plan.terms):
        for span in range(SPANS):
            a = q + (term * HALF_CODES // 4 + span * Q_STEP)
            multiply_pair(sums, a, codes + (span * SPAN_BOX), columns, term + span > 0)
    rope = pair_operand(start + CODE_BYTES, ROPE_SPAN)
    for step in range(ROPE_SPAN // STEP_BYTES):
        a = q + (plan.q_rope_column + step * Q_STEP)
        multiply_pair(sums, a, rope + (step * STEP_BYTES), columns, True, "bf16")


def multiply_values(
    plan: CodesPlan2Cta, smem: CodesSmem, sums: cute.Pointer, stage, p_stage, accumulate
) -> None:
    """O += P V of a tile, or = without `accumulate`; one thread calls this.

    Args:
        sums: first column of O: 224 of codes, then 32 of rotated columns.
        stage, p_stage: of the tile and of its weights.
    """
    start = Int32(smem.kv_start.toint()) + stage * STAGE_BYTES
    weights = Int32(smem.p_start.toint()) + p_stage * plan.p_bytes
    codes = pair_operand(start, CODE_SPAN, SPAN_BOX)
    code_weights = pair_operand(weights, KEYS)
    first = 0
    for spans in SPAN_GROUPS:
        columns = spans * CODE_SPAN
        for term in range(plan.terms):
            for step in range(KEYS // STEP_BYTES):
                a = code_weights + (term * plan.p_code_bytes + step * STEP_BYTES)
                b = codes + (first * SPAN_BOX + step * STEP_BYTES * CODE_SPAN)
                adds = accumulate if term + step == 0 else True
                target = sums + first * CODE_SPAN
                multiply_pair(target, a, b, HALVES * columns, adds, is_mn_major=True)
        first += spans
    rope = pair_operand(start + CODE_BYTES, ROPE_SPAN, 0)
    rope_weights = pair_operand(weights + plan.terms * plan.p_code_bytes, SPAN_BYTES)
    for step in range(KEYS // ROPE_KEYS):
        a = rope_weights + (step * STEP_BYTES)
        b = rope + (step * ROPE_KEYS * ROPE_SPAN)
        adds = accumulate if step == 0 else True
        target = sums + HALF_CODES
        multiply_pair(target, a, b, HALVES * HALF_ROPE, adds, "bf16", True)
