"""Largest magnitude of every block of a head's queries, where all of them share one scale, or those
of a block: a launch before the attention, whose CTAs have but some of them.
"""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.memory import SmemAllocator

from dsv4.kernels.kit import pdl
from dsv4.kernels.kit.reduce import tree
from dsv4.kernels.lowp.config import QuantizedAttentionConfig
from dsv4.kernels.lowp.groups import first_block
from dsv4.kernels.lowp.plan import MAXIMA_ROWS
from dsv4.kernels.lowp.rounding import abs_of, across_lanes, fmax_nan
from dsv4.kernels.lowp.sequences import VECTOR, load_rows, rows_of, tile_of_rows
from dsv4.kernels.lowp.work import Operands, Work

THREADS = 256
WARP = 32


class QueryMaxima:
    """Maxima of blocks, a CTA each, and of the heads that these belong to."""

    def __init__(self, config: QuantizedAttentionConfig):
        self.config = config
        self.vectors = config.padded_dim // VECTOR  # of a row
        self.rows = THREADS // self.vectors  # that are loaded at a time

    @cute.jit
    def blocks(self, operands: Operands) -> Int32:
        """Blocks of a head: `groups.num_blocks`."""
        rows = Int32(operands.q.shape[2])
        if cutlass.const_expr(self.config.is_varlen):
            return rows // MAXIMA_ROWS + Int32(operands.cu_seqlens_q.shape[0]) - 1
        return (rows + MAXIMA_ROWS - 1) // MAXIMA_ROWS

    @cute.jit
    def launch(self, operands: Operands, stream):
        """Maxima of all blocks."""
        self.kernel(operands).launch(
            grid=[self.blocks(operands), operands.q.shape[1], operands.q.shape[0]],
            block=[THREADS, 1, 1],
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, operands: Operands):
        """Maximum of a block; 0 of one between sequences."""
        pdl.launch_dependents()
        pdl.wait_for_previous_launch()
        q, thread = operands.q, cute.arch.thread_idx()[0]
        number, head, batch = cute.arch.block_idx()
        ends, size = operands.cu_seqlens_q, q.shape[2]
        tile = tile_of_rows(ends, size, batch, number, MAXIMA_ROWS, self.config.is_varlen)
        rows = [thread // self.vectors + self.rows * i for i in range(MAXIMA_ROWS // self.rows)]
        channel = thread % self.vectors * VECTOR
        x = load_rows(q, tile, batch, head, channel, rows, self.config.head_dim)
        amax = tree(fmax_nan, [abs_of(x[i].to(Float32)) for i in range(cute.size(x))])
        amax = across_lanes(fmax_nan, amax, WARP)
        maxima = SmemAllocator().allocate_tensor(Float32, cute.make_layout(THREADS // WARP), 16)
        if thread % WARP == 0:
            maxima[thread // WARP] = amax
        cute.arch.sync_threads()
        if thread == 0:
            found = tree(fmax_nan, [maxima[i] for i in range(THREADS // WARP)])
            operands.maxima[self.first(operands, batch, head) + number] = found

    @cute.jit
    def first(self, operands: Operands, batch, head) -> Int64:
        """Place of the first block of a head."""
        heads = operands.q.shape[1]
        return (Int64(batch) * heads + head) * Int64(self.blocks(operands))

    @cute.jit
    def of_block(self, operands: Operands, work: Work, row) -> Float32:
        """Largest magnitude of the block that a row of a work tile is in."""
        place, first = work.first_row + row, Int32(0)
        if cutlass.const_expr(self.config.is_varlen):
            ends = operands.cu_seqlens_q
            # Rows behind the last sequence have no keys, and need no scale.
            sequence = cutlass.min(work.sequence, Int32(ends.shape[0]) - 2)
            rows = rows_of(ends, sequence, operands.q.shape[2])
            place = place - rows.first
            first = first_block(rows.first, sequence, MAXIMA_ROWS)
        block = cutlass.min(first + place // MAXIMA_ROWS, self.blocks(operands) - 1)
        return operands.maxima[self.first(operands, work.batch, work.head) + block]

    @cute.jit
    def of_head(self, operands: Operands, work: Work, lane) -> Float32:
        """Largest magnitude of all queries of a work tile's head and sequence, found by a warp."""
        count, first = Int32(operands.q.shape[2]), Int32(0)
        if cutlass.const_expr(self.config.is_varlen):
            ends = operands.cu_seqlens_q
            # Rows behind the last sequence have no keys, and need no scale.
            sequence = cutlass.min(work.sequence, Int32(ends.shape[0]) - 2)
            rows = rows_of(ends, sequence, count)
            count, first = rows.count, first_block(rows.first, sequence, MAXIMA_ROWS)
        start = self.first(operands, work.batch, work.head) + first
        blocks = (count + MAXIMA_ROWS - 1) // MAXIMA_ROWS
        amax = Float32(0.0)
        for block in cutlass.range(lane, blocks, WARP, unroll=1):
            amax = fmax_nan(amax, operands.maxima[start + block])
        return across_lanes(fmax_nan, amax, WARP)
