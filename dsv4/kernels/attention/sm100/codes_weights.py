"""Weights of FP8 keys as operands of the products with values: see `entry_codes`.

In log2, a row's maximum `m` is OFFSET below the largest score plus scale so far, or up to THRESHOLD
less, and what is stored of a key of score x and scale s is 2^(x - m) s, which stays below 448: as
e4m3 for its codes, and in bf16 for its rotated values, which have been divided by s. The row sum is
of 2^(x - m).
"""

import operator

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from dsv4.kernels.attention.entry_codes import log2_of
from dsv4.kernels.attention.gather_fp8 import store_vector
from dsv4.kernels.attention.sink_merge import RowState
from dsv4.kernels.attention.sm100.codes_context import (
    CODE_VECTORS,
    ROPE_VECTORS,
    CodesSmem,
    CodesThread,
    KeyScales,
)
from dsv4.kernels.attention.sm100.plan_2cta import HALF_KEYS
from dsv4.kernels.attention.sm100.plan_codes import CodesPlan2Cta
from dsv4.kernels.attention.softmax import exp2
from dsv4.kernels.kit.quant import e4m3_terms, pack_bf16
from dsv4.kernels.kit.reduce import tree
from dsv4.kernels.kit.swizzle import VECTOR_BYTES

# In log2: weights reach 2^(OFFSET + THRESHOLD), just below 448, before their reference follows,
# which costs more than a tile.
OFFSET, THRESHOLD = 1.8, 7.0


@cute.jit
def scale_scores(scores: cute.Tensor, scales: cute.Tensor):
    """Multiply scores by the scales of their keys."""
    for i in cutlass.range_constexpr(HALF_KEYS):
        scores[0, i] = scores[0, i] * scales[i]


@cute.jit
def thread_max(scores: cute.Tensor, tile_max: cute.Tensor):
    """tile_max[0] = largest of the thread's scores, by a short chain."""
    tile_max[0] = tree(cute.arch.fmax, [scores[0, i] for i in range(HALF_KEYS)])


@cute.jit
def exponentiate(scores: cute.Tensor, reference, row_sum: cute.Tensor, scale: cute.Tensor):
    """Replace scores by 2^(x - reference), and add these to the thread's row sum."""
    found = [exp2(scores[0, i] * scale[0] - reference[0]) for i in range(HALF_KEYS)]
    for i in cutlass.range_constexpr(HALF_KEYS):
        scores[0, i] = found[i]
    row_sum[0] = row_sum[0] + tree(operator.add, found)


def exceeds(rows: RowState, tile_max: cute.Tensor, keys: KeyScales) -> Boolean:
    """Whether a weight might be too large: by a bound, the exact maximum is seldom needed."""
    bound = tile_max[0] + log2_of(keys.largest)
    return bound - rows.row_max[0] > OFFSET + THRESHOLD


def wanted_max(scores: cute.Tensor, scale: cute.Tensor, keys: KeyScales) -> Float32:
    """The row maximum that the thread's scores ask for."""
    sums = [scores[0, i] * scale[0] + log2_of(keys.scales[i]) for i in range(HALF_KEYS)]
    return tree(cute.arch.fmax, sums) - OFFSET


def store_weights(
    plan: CodesPlan2Cta, smem: CodesSmem, stage: Int32, thread: CodesThread, weights: cute.Tensor,
    keys: KeyScales,
) -> None:  # fmt: skip
    """Write the thread's 32 weights of a tile, times the scales of their keys, and fence."""
    start = Int32(smem.p_start.toint()) + stage * plan.p_bytes
    values = [weights[0, i] * keys.scales[i] for i in range(HALF_KEYS)]
    for vector in range(CODE_VECTORS):
        first = vector * VECTOR_BYTES
        words = [e4m3_terms(values[first + i : first + i + 4], plan.terms) for i in (0, 4, 8, 12)]
        # The swizzle of a vector beside differs in its last bits alone.
        place = (start + thread.code_offset) ^ (vector * VECTOR_BYTES)
        for term in range(plan.terms):
            store_vector(place, term * plan.p_code_bytes, [word[term] for word in words])
    for vector in range(ROPE_VECTORS):
        first = vector * 8
        words = [pack_bf16(*values[first + i : first + i + 2]) for i in range(0, 8, 2)]
        place = (start + thread.rope_offset) ^ (vector * VECTOR_BYTES)
        store_vector(place, plan.terms * plan.p_code_bytes, words)
    # Products read them through the async proxy.
    cute.arch.fence_view_async_shared()
