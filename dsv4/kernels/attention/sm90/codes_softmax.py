"""Softmax of scores over FP8 keys, and its weights as operands of the products with values.

A key's scale is that of its values, too: it goes into the weights. In log2, a row's reference is
the largest score plus scale so far, or up to THRESHOLD less, and weights are

    p      = 2^(score - reference + OFFSET)   for the rotated values, in bf16, and for the sum
    p * s  of the key's scale s, below 448    for the codes, in one e4m3 term or two

Products take 16 keys in the order in which a thread has them: a word of four codes has those of
columns 2 t, 2 t + 1, 2 t + 8, 2 t + 9 of lane t in the quad.
"""

import operator

import cutlass
from cutlass import cute

from dsv4.kernels.attention.entry_codes import OFFSET, THRESHOLD, log2_of
from dsv4.kernels.attention.sm90.codes_context import Smem
from dsv4.kernels.attention.sm90.heads_m_softmax import Rows, thread_maxima
from dsv4.kernels.attention.softmax import exp2
from dsv4.kernels.kit.kv_entry import GROUP
from dsv4.kernels.kit.quant import e4m3_terms, pack_bf16
from dsv4.kernels.kit.reduce import largest, quad_max, tree
from dsv4.kernels.kit.swizzle import SPAN_BYTES, VECTOR_BYTES
from dsv4.kernels.kit.wgmma import by_row

# In log2, of a weight without the scale of its key, which is 2^-100 at least; their sum stays
# finite, too.
MOST = 112.0
COLUMN_GROUPS = 8  # of eight keys, in a tile


def key_scales(smem: Smem, stage, lane) -> cute.Tensor:
    """Scales of a thread's keys [pair, column group]."""
    scales = cute.make_rmem_tensor((2, COLUMN_GROUPS), cutlass.Float32)
    start = smem.scales[None, stage].iterator + lane % 4 * 2
    for j in range(COLUMN_GROUPS):
        place = start + 8 * j
        pair = cute.make_ptr(cutlass.Float32, place.toint(), place.memspace, assumed_align=8)
        cute.autovec_copy(cute.make_tensor(pair, cute.make_layout(2)), scales[None, j])
    return scales


@cute.jit
def scale_scores(scores: cute.Tensor, scales: cute.Tensor):
    """Multiply sums over codes by the scales of their keys."""
    s = by_row(scores)
    for j in cutlass.range_constexpr(COLUMN_GROUPS):
        for c in cutlass.range_constexpr(2):
            for r in cutlass.range_constexpr(2):
                s[r, c, j] *= scales[c, j]


@cute.jit
def follow_maxima(
    scores: cute.Tensor, scales: cute.Tensor, rows: Rows, bias, is_gate: cutlass.Constexpr
):
    """Raise the references of rows whose weights would be too large; returns what is added to
    scores in the exponent of each row.

    Args:
        bias: of the branch, for each row.
    """
    s = by_row(scores)
    columns = [(c, j) for j in range(COLUMN_GROUPS) for c in range(2)]
    tile_max = cute.make_rmem_tensor(2, cutlass.Float32)
    row_scales = [rows.scale[r] for r in range(2)]
    thread_maxima(s, columns, tile_max, row_scales)
    bits = [scales[c, j].bitcast(cutlass.Int32) for c, j in columns]
    most = log2_of(cutlass.Int32(largest(bits)).bitcast(cutlass.Float32))
    rows.rescale.fill(1.0)
    # Bounds of what this thread's columns ask for: the exact maxima are seldom needed. NaN, of rows
    # and tiles without a score, is no excess.
    excess = [tile_max[r] + (most + bias[r]) - rows.row_max[r] for r in range(2)]
    if cute.arch.vote_any_sync(cute.arch.fmax(excess[0], excess[1]) > THRESHOLD):
        for r in cutlass.range_constexpr(2):
            own = [s[r, c, j] * rows.scale[r] + log2_of(scales[c, j]) for c, j in columns]
            new_max = quad_max(tree(cute.arch.fmax, own)) + bias[r]
            old = rows.row_max[r]
            exceeds = new_max > old + THRESHOLD
            new = cutlass.select_(exceeds, new_max, old)
            factor = cutlass.select_(exceeds, exp2(old - new), cutlass.Float32(1.0))
            rows.row_max[r], rows.rescale[r] = new, factor
            rows.row_sum[r] *= factor
    shifts = []
    for r in cutlass.range_constexpr(2):
        is_empty = rows.row_max[r] == -cutlass.Float32.inf
        reference = cutlass.select_(is_empty, cutlass.Float32(0.0), rows.row_max[r])
        shift = (OFFSET + bias[r]) - reference
        if cutlass.const_expr(is_gate):
            # A huge bias swallows the score in the reference: see `heads_m_softmax.softmax`. The
            # threads of a row have bounds of their own, and must agree on what is added: the limit
            # is far above any weight.
            shift = cute.arch.fmin(shift, MOST - tile_max[r])
        shifts.append(shift)
    return shifts


@cute.jit
def store_weights(
    scores: cute.Tensor, scales: cute.Tensor, rows: Rows, shifts, targets, terms: cutlass.Constexpr
):
    """Write a tile's weights for the products, and add them to the row sums.

    Args:
        shifts: from `follow_maxima`.
        targets: from `weight_places`.
    """
    s = by_row(scores)
    codes_start, rope_start = targets
    for r in cutlass.range_constexpr(2):
        sums = []
        for b in cutlass.range_constexpr(COLUMN_GROUPS // 2):
            columns = [(c, j) for j in (2 * b, 2 * b + 1) for c in range(2)]
            p = [exp2(s[r, c, j] * rows.scale[r] + shifts[r]) for c, j in columns]
            sums.append(tree(operator.add, p))
            scaled = [x * scales[c, j] for x, (c, j) in zip(p, columns, strict=True)]
            # The swizzle keeps bits of the row, so that the vector is a bit pattern beside it.
            place = codes_start ^ (b * VECTOR_BYTES)
            for term, word in enumerate(e4m3_terms(scaled, terms)):
                _store_word(place, word, term * 64 * GROUP + 8 * r * GROUP)
            for i in cutlass.range_constexpr(2):
                place = rope_start ^ ((2 * b + i) * VECTOR_BYTES)
                _store_word(place, pack_bf16(p[2 * i], p[2 * i + 1]), 8 * r * SPAN_BYTES)
        rows.row_sum[r] += tree(operator.add, sums)


def weight_places(smem: Smem, place, row, lane, terms: int):
    """Addresses of a thread's weights of its first row in a place of P, codes and bf16."""
    codes = cutlass.Int32(smem.p_codes_start.toint()) + place * (terms * 64 * GROUP)
    codes += row * GROUP + row // 2 % 4 * VECTOR_BYTES + lane % 4 * 4
    rope = cutlass.Int32(smem.p_rope_start.toint()) + place * (64 * SPAN_BYTES)
    return codes, rope + row * SPAN_BYTES + row % 8 * VECTOR_BYTES + lane % 4 * 4


def _store_word(address, word, offset: int) -> None:
    cute.arch.inline_ptx(
        f"st.shared.b32 [{{$r0}}+{offset}], {{$r1}};", read_only_args=[address, word]
    )
