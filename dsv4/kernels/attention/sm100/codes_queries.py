"""Queries of a work tile as e4m3 codes in Tensor Memory, by the query warps of a CTA.

A thread has four rows, as 16x256b stores take them, and of a row's half every fourth vector of
eight codes. A row has a power of two as its scale, by which its rotated columns are divided, too.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, pipeline

from dsv4.kernels.attention.sm100.context import Context2Cta, WorkTile
from dsv4.kernels.attention.sm100.fragments_2cta import Thread, first_of
from dsv4.kernels.attention.sm100.plan_1cta import BF16_BYTES, ROWS
from dsv4.kernels.attention.sm100.plan_2cta import HEAD_DIM
from dsv4.kernels.attention.sm100.plan_codes import (
    CODE_SPAN,
    HALF_CODES,
    HALF_ROPE,
    SPANS,
    CodesBarriers,
    CodesPlan2Cta,
)
from dsv4.kernels.kit.kv_entry import ROPE_DIM
from dsv4.kernels.kit.pointers import row_pointer
from dsv4.kernels.kit.quant import (
    amax_bf16,
    divide_e8m0,
    e4m3_terms,
    e8m0_scale_e4m3,
    multiply_bf16x2,
    reciprocal_bf16x2,
    unpack_e8m0,
)
from dsv4.kernels.kit.tcgen05 import LANE_STEP
from dsv4.kernels.kit.vectors import vector_at

QUAD = 4  # lanes that have a row's half together
THREAD_ROWS = 4
BATCH = 2  # rows of a store of 16 lanes
STORE_COLUMNS = 8  # of TMEM
ROPE_STORES = HALF_ROPE * BF16_BYTES // 4 // STORE_COLUMNS


@dataclass(frozen=True)
class CodeQueries:
    """Quantiser of a CTA's queries; a row's half is in the lanes of the thread's half."""

    plan: CodesPlan2Cta
    num_query_heads: int

    def acquire(self, ctx: Context2Cta, parity: Int32) -> None:
        """Wait until the softmax has read the scales of the work tile before."""
        ctx.info.queries.acquire(parity ^ 1)

    def commit(self, ctx: Context2Cta, thread: Thread) -> None:
        """Give the softmax a work tile's scales."""
        ctx.info.queries.commit(thread.lane)

    def scales(
        self, ctx: Context2Cta, thread: Thread, rows: list, batch: int, parity
    ) -> list[Int32]:
        """Scales of two rows, which the softmax is told, too; both halves of the rows find them
        together.

        Args:
            rows: of `load_batch`.
            parity: of the work tile's number.
        """
        maxima = ctx.smem.q_maxima
        largest = [
            amax_bf16([word for vector in codes for word in vector], QUAD) for codes, _ in rows
        ]
        self._exchange(maxima, thread, largest, batch, parity)
        found = []
        for r in range(BATCH):
            row, _ = first_of(thread, BATCH * batch + r)
            other = maxima[row, 1 - thread.half, parity]
            found.append(e8m0_scale_e4m3(cute.arch.fmax(largest[r], other, nan=True)))
        self._tell(ctx.info.q_scales, thread, found, batch)
        return found

    @cute.jit
    def _exchange(
        self, maxima: cute.Tensor, thread: Thread, largest: list, batch: cutlass.Constexpr, parity
    ):
        """Write the thread's maxima for the other half, and wait for its."""
        if thread.lane % QUAD == 0:
            for r in cutlass.range_constexpr(BATCH):
                row, _ = first_of(thread, BATCH * batch + r)
                maxima[row, thread.half, parity] = largest[r]
        pipeline.NamedBarrier(
            CodesBarriers.QUERIES + thread.warp % 2, 2 * cute.arch.WARP_SIZE
        ).arrive_and_wait()

    @cute.jit
    def _tell(self, q_scales: cute.Tensor, thread: Thread, scales: list, batch: cutlass.Constexpr):
        """Write scales for the softmax."""
        if thread.half == 0 and thread.lane % QUAD == 0:
            for r in cutlass.range_constexpr(BATCH):
                row, _ = first_of(thread, BATCH * batch + r)
                q_scales[row] = unpack_e8m0(scales[r])

    def load_batch(self, ctx: Context2Cta, work: WorkTile, thread: Thread, batch: int) -> list:
        """Ask for two of the thread's rows."""
        rows = range(BATCH * batch, BATCH * (batch + 1))
        return [self._load_row(ctx, work, thread, r) for r in rows]

    def codes(self, rows: list, scales: list) -> list:
        """What two rows are in TMEM: words of 16 lanes, by first column of Q.

        Args:
            rows, scales: of the batch.
        """
        found = []
        for span in range(SPANS):
            terms = [
                self._terms(codes[span], scale)
                for (codes, _), scale in zip(rows, scales, strict=True)
            ]
            for term in range(self.plan.terms):
                column = term * HALF_CODES // 4 + span * STORE_COLUMNS
                found.append((column, [word for row in terms for word in row[term]]))
        for i in range(ROPE_STORES):
            words = []
            for (_, rope), scale in zip(rows, scales, strict=True):
                reciprocal = reciprocal_bf16x2(scale)
                words += [multiply_bf16x2(word, reciprocal) for word in rope[i]]
            found.append((self.plan.q_rope_column + i * STORE_COLUMNS, words))
        return found

    def store_batch(self, address: cute.Pointer, thread: Thread, batch: int, codes: list) -> None:
        """Write two rows to TMEM; the caller fences.

        Args:
            address: first column of Q.
            codes: of the batch.
        """
        start = Int32(address.toint()) + (thread.warp * 32 + 16 * batch) * LANE_STEP
        for column, words in codes:
            _store(start + column, words)

    def _terms(self, vector: list, scale) -> list[tuple]:
        """By term, two words of codes of eight values over their scale."""
        values = divide_e8m0(vector, scale)
        halves = [e4m3_terms(values[i : i + 4], self.plan.terms) for i in (0, 4)]
        return list(zip(*halves, strict=True))

    def _load_row(self, ctx: Context2Cta, work: WorkTile, thread: Thread, r: int) -> tuple:
        """The thread's vectors of a row: words of codes to be, by span, and of rotated columns.
        Rows past the last head repeat it."""
        row, _ = first_of(thread, r)
        head = cutlass.min(work.head_block * ROWS + row, self.num_query_heads - 1)
        address = row_pointer(ctx.params.q, work.token, head).toint()
        lane = thread.lane % QUAD
        codes = [
            self._words(address, thread.half * HALF_CODES + span * CODE_SPAN + lane * 8, 4)
            for span in range(SPANS)
        ]
        first = HEAD_DIM - ROPE_DIM + thread.half * HALF_ROPE
        rope = [self._words(address, first + i * 16 + lane * 4, 2) for i in range(ROPE_STORES)]
        return codes, rope

    def _words(self, address: Int64, element: Int32, count: int) -> list:
        """Words of neighbouring bf16 values."""
        words = cute.make_rmem_tensor(count, Uint32)
        start = address + Int64(element) * BF16_BYTES
        cute.autovec_copy(vector_at(start, Uint32, 0, count), words)
        return [words[k] for k in range(count)]


def _store(address: Int32, words: list) -> None:
    """Eight columns of 16 lanes: of two rows of the thread, two words each."""
    names = ", ".join(f"{{$r{k + 1}}}" for k in range(4))
    cute.arch.inline_ptx(
        f"tcgen05.st.sync.aligned.16x256b.x1.b32 [{{$r0}}], {{{names}}};",
        read_only_args=[address, *words],
    )
