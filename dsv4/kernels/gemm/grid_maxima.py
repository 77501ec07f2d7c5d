"""Largest keys of tokens: of the warps of a CTA in shared memory, of all CTAs in global memory."""

from __future__ import annotations

from typing import Any, ClassVar

import cutlass
from cutlass import Int32, Int64, cute

from dsv4.kernels.gemm.best_keys import NO_VALUE, row_of
from dsv4.kernels.gemm.operands import OutputTile
from dsv4.kernels.kit.pointers import pointer_at


class GridMaxima:
    """Exchange of maxima between warps and CTAs, by the warps that have them.

    A context has `operands.best` and `smem.best`, a key for each warp and token of a tile.

    Attributes:
        warps, threads: that have maxima.
        tokens: of a tile.
    """

    warps: ClassVar[int]
    threads: ClassVar[int]
    tokens: int

    def sync(self) -> None:
        """Named barrier of the threads."""
        raise NotImplementedError

    @cute.jit
    def hand_on(self, ctx: Any, tile: OutputTile):
        """Bring the maxima of a tile's tokens to those of all CTAs; the warps begin anew."""
        best = ctx.operands.best[0]
        self.sync()
        for own in cutlass.range(cute.arch.thread_idx()[0], self.tokens, self.threads, unroll=1):
            found = Int64(NO_VALUE)
            for warp in cutlass.range_constexpr(self.warps):
                slot = ctx.smem.best + (warp * self.tokens + own)
                found = cutlass.max(found, slot.load())
                slot.store(Int64(NO_VALUE))
            token = tile.token_tile * self.tokens + own
            if token < best.rows.shape[0]:
                cute.arch.atomic_max(best.key(token), found, sem="relaxed", scope="gpu")
        self.sync()

    @cute.jit
    def write_rows(self, ctx: Any):
        """Write the rows, if all other CTAs have handed on what they had.

        The atomic releases and acquires at GPU scope; the barriers extend that to all threads.
        """
        best, thread = ctx.operands.best[0], cute.arch.thread_idx()[0]
        counter = pointer_at(best.workspace.iterator, Int64(0), Int32, align=4)
        flag = cute.recast_ptr(ctx.smem.best, dtype=Int32)
        if thread == 0:
            before = cute.arch.atomic_add(counter, Int32(1), sem="acq_rel", scope="gpu")
            flag.store(Int32(before == cute.arch.grid_dim()[0] - 1))
        self.sync()
        if flag.load() != 0:
            for token in cutlass.range(thread, best.rows.shape[0], self.threads, unroll=1):
                key = cute.arch.load(best.key(token), Int64, sem="relaxed", scope="gpu")
                best.key(token).store(Int64(NO_VALUE))
                best.rows[token] = row_of(key)
            if thread == 0:
                counter.store(Int32(0))
