"""Tiles that lack rows: the last one of the activations, and that of a weight of few rows.

TMA takes longer to fill a row past the end of a tensor than to bring one. So copies of a short tile
bring no more than there is, as nearly as their sizes allow. Rows that no copy fills are zero where
the first copy into a stage leaves them out, and else what a tile before has left: a row of products
depends on no other one, and those of such rows are not stored.
"""

from __future__ import annotations

import cutlass
from cutlass import Int32, cute

from dsv4.kernels.gemm.config import STEP_BYTES
from dsv4.kernels.gemm.operands import OutputTile, chosen
from dsv4.kernels.gemm.plan import LinearPlan
from dsv4.kernels.gemm.sm90.activations import clear_vectors, sync_consumers
from dsv4.kernels.gemm.sm90.context import LinearContext
from dsv4.kernels.kit.swizzle import VECTOR_BYTES


def short_copies(ctx: LinearContext, tile: OutputTile) -> Int32:
    """Copies of `LinearPlan.short_rows` that bring what a tile has of streamed activations; 0: it
    is whole, or nearly so."""
    is_last = tile.token_tile == ctx.last_tokens.tile
    return Int32(cutlass.select_(is_last, ctx.last_tokens.copies, Int32(0)))


def x_bytes(plan: LinearPlan, copies: Int32) -> Int32:
    """Of the activations of a stage."""
    if not plan.has_streamed_x:
        return Int32(0)
    short = copies * (plan.short_rows * STEP_BYTES)
    return Int32(cutlass.select_(copies == 0, Int32(plan.x_bytes), short))


def weight_rows(ctx: LinearContext, tile: OutputTile) -> Int32 | int:
    """Rows of the weight that a tile's copies bring."""
    if len(set(ctx.copied_rows)) == 1:
        return ctx.copied_rows[0]
    return chosen([Int32(rows) for rows in ctx.copied_rows], tile.weight)


def weight_bytes(ctx: LinearContext, tile: OutputTile) -> Int32 | int:
    """Of the weight, of a part of a stage."""
    return weight_rows(ctx, tile) * STEP_BYTES


@cute.jit
def clear_missing(plan: cutlass.Constexpr, ctx: LinearContext) -> None:
    """Zero what the first copies into each stage leave out, by the consumers."""
    for n in cutlass.range_constexpr(-(-plan.stages // plan.ring_blocks)):
        index = ctx.scheduler.index(n)
        stages = range(n * plan.ring_blocks, min((n + 1) * plan.ring_blocks, plan.stages))
        slots = range(stages.start * plan.rings, stages.stop * plan.rings)
        if ctx.scheduler.exists(index):
            tile = ctx.scheduler.coordinates(index)
            if cutlass.const_expr(plan.has_streamed_x):
                copies = short_copies(ctx, tile)
                if copies > 0:
                    _clear_rows(ctx.smem.x_start, slots, plan.columns, copies * plan.short_rows)
            if cutlass.const_expr(min(ctx.copied_rows) < plan.rows):
                rows = weight_rows(ctx, tile)
                if rows < plan.rows:
                    _clear_rows(ctx.smem.weight_start, slots, plan.rows, rows)
    # Products read them, and copies of later tiles may come in their place.
    cute.arch.fence_view_async_shared()
    sync_consumers()


def _clear_rows(start: cute.Pointer, slots: range, rows: int, first: Int32) -> None:
    """Zero the rows from `first` on of some tiles; swizzles keep to a row."""
    vectors = STEP_BYTES // VECTOR_BYTES
    for slot in slots:
        tile = slot * rows * vectors
        clear_vectors(start, tile + first * vectors, tile + rows * vectors)
