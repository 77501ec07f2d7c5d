"""Queries of a head tile as e4m3 codes in shared memory, by the score warpgroup.

A row has a power of two as its scale, by which its rotated columns are divided, too: S is then one
sum times the scale.
"""

import cutlass
from cutlass import cute

from dsv4.kernels.attention.sm90.codes_plan import QUERY_SCALES, CodesPlan
from dsv4.kernels.attention.sm90.heads_m_context import HeadsMContext
from dsv4.kernels.attention.sm90.named_barriers import HeadsMBarrier
from dsv4.kernels.kit.kv_entry import GROUP
from dsv4.kernels.kit.quant import (
    amax_bf16,
    divide_e8m0,
    e4m3_terms,
    e8m0_scale_e4m3,
    multiply_bf16x2,
    reciprocal_bf16x2,
    unpack_e8m0,
)
from dsv4.kernels.kit.swizzle import SPAN_BYTES, VECTOR_BYTES
from dsv4.kernels.kit.vectors import vector_at

QUAD = 4  # lanes that have a row together
QUAD_ROWS = 8  # of a warp at a time
VECTOR = 8  # bf16 of a load


class CodeQueries:
    """Quantiser of a head tile's queries."""

    def __init__(self, plan: CodesPlan, num_query_heads: int):
        self.plan = plan
        self.num_query_heads = num_query_heads

    @cute.jit
    def load(self, ctx: HeadsMContext, coord, thread, lane):
        """Write a head tile's codes, rotated columns and scales; the whole warpgroup calls this,
        when the products with those before are over. It fences when it waits for keys."""
        warp, inputs = thread // 32, ctx.smem.row_inputs
        for i in cutlass.range_constexpr(2):
            row = warp * 16 + QUAD_ROWS * i + lane // QUAD
            codes, rope = self._load_row(ctx, coord, row, lane % QUAD)
            scale = e8m0_scale_e4m3(amax_bf16(_words(codes), QUAD))
            if cutlass.const_expr(i == 0):
                # PTX does not say that a warp's part of a product reads that warp's rows alone.
                _sync()
            self._store_codes(ctx, codes, scale, row, lane % QUAD)
            self._store_rope(ctx, rope, scale, row, lane % QUAD)
            if lane % QUAD == 0:
                inputs[QUERY_SCALES, row] = unpack_e8m0(scale)
        _sync()

    def _load_row(self, ctx: HeadsMContext, coord, row, part) -> tuple[list, list]:
        """A lane's vectors of a row: every fourth one of codes, and of rotated columns. Rows of
        padding have the first head's."""
        q, head = ctx.operands.q, coord.head + row
        head = cutlass.select_(head < self.num_query_heads, head, cutlass.Int32(0))
        address = q[coord.token, head, None].iterator.toint()
        found = []
        for k in range(self.plan.head_dim // VECTOR // QUAD):
            words = cute.make_rmem_tensor(VECTOR // 2, cutlass.Uint32)
            element = (part + k * QUAD) * (VECTOR // 2)
            cute.autovec_copy(vector_at(address, cutlass.Uint32, element, VECTOR // 2), words)
            found.append(words)
        first = self.plan.codes // VECTOR // QUAD
        return found[:first], found[first:]

    def _store_codes(self, ctx: HeadsMContext, vectors: list, scale, row, part) -> None:
        """Write the codes of a lane's vectors, eight bytes each, where the product reads them."""
        place = (part // 2) ^ (row // 2 % 4)
        start = cutlass.Int32(ctx.smem.q_codes_start.toint())
        start += row * GROUP + place * VECTOR_BYTES + part % 2 * VECTOR
        for k, vector in enumerate(vectors):
            values = divide_e8m0([vector[i] for i in range(VECTOR // 2)], scale)
            halves = [e4m3_terms(values[i : i + 4], self.plan.terms) for i in (0, 4)]
            # Vectors four apart are two spans' halves of one, then the next span.
            target = start ^ 32 if k % 2 else start
            for term, words in enumerate(zip(*halves)):
                offset = term * self.plan.code_bytes + k // 2 * (64 * GROUP)
                cute.arch.inline_ptx(
                    f"st.shared.v2.b32 [{{$r0}}+{offset}], {{{{$r1}}, {{$r2}}}};",
                    read_only_args=[target, *words],
                )

    def _store_rope(self, ctx: HeadsMContext, vectors: list, scale, row, part) -> None:
        """Write a lane's vectors of rotated columns, divided by the row's scale."""
        reciprocal = reciprocal_bf16x2(scale)
        start = cutlass.Int32(ctx.smem.q_rope_start.toint())
        start += row * SPAN_BYTES + (part ^ row % 8) * VECTOR_BYTES
        for k, vector in enumerate(vectors):
            words = [multiply_bf16x2(vector[i], reciprocal) for i in range(VECTOR // 2)]
            names = ", ".join(f"{{$r{i + 1}}}" for i in range(4))
            cute.arch.inline_ptx(
                f"st.shared.v4.b32 [{{$r0}}], {{{names}}};",
                read_only_args=[start ^ 64 if k else start, *words],
            )


def _words(vectors: list) -> list:
    return [vector[i] for vector in vectors for i in range(VECTOR // 2)]


def _sync() -> None:
    """Named barrier of the score warpgroup."""
    cute.arch.barrier(barrier_id=HeadsMBarrier.QUERIES, number_of_threads=128)
