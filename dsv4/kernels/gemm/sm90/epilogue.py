"""Epilogue of the weight-streaming kernel: sum of the parts of K, rounding, store."""

import cutlass
from cutlass import Int32, cute

from dsv4.kernels.gemm.plan import CONSUMER_WARPS, LANE_VALUES, UNIT_ROWS, LinearPlan
from dsv4.kernels.gemm.sm90.activations import sync_consumers
from dsv4.kernels.gemm.sm90.context import LinearContext, OutputTile

WARP = 32


class Epilogue:
    """Partial sums of warpgroups and CTAs meet in shared memory, each unit of 16 rows in the CTA
    that owns it, and are added as the upper levels of the tree of slices."""

    def __init__(self, plan: LinearPlan):
        self.plan = plan

    @cute.jit
    def expect_parts(self, ctx: LinearContext):
        """Announce the bytes of a tile's parts, which all CTAs of the cluster will send."""
        if cutlass.const_expr(ctx.pipes.partials is not None):  # noqa: SIM102 static, then dynamic
            if cute.arch.thread_idx()[0] == 0:
                ctx.pipes.partials.expect(4 * self.plan.partial_values)

    @cute.jit
    def store(
        self, ctx: LinearContext, sums: cute.Tensor, tile: OutputTile, part, unit, warp, lane, turn
    ):
        """Write a tile of y, of which `sums` is a part of a unit of rows."""
        plan = self.plan
        row, first_token = tile.row_tile * plan.rows, tile.token_tile * plan.tokens
        if cutlass.const_expr(plan.parts > 1):
            self._publish(ctx, sums, part, unit, lane, turn)
            self._add_parts(ctx, row, first_token, warp, lane)
        else:
            for n in cutlass.range_constexpr(plan.column_groups):
                values = [sums[LANE_VALUES * n + j] for j in range(LANE_VALUES)]
                first_row = row + unit * UNIT_ROWS + lane // 4
                self._store_values(ctx.operands.y, first_row, first_token + n * 8, lane, values)

    @cute.jit
    def _publish(self, ctx: LinearContext, sums: cute.Tensor, part, unit, lane, turn):
        """Send a part of a unit of rows to the CTA that owns it, and wait for those of the own
        units."""
        plan, barriers = self.plan, ctx.pipes.partials
        owner, own = unit // plan.own_units, unit % plan.own_units
        words = cute.recast_tensor(sums, Int32)
        if cutlass.const_expr(barriers is not None):
            barriers.acquire(turn ^ 1)
        else:
            sync_consumers()
        for n in cutlass.range_constexpr(plan.column_groups):
            target = self._partial(ctx, part, own, n, lane)
            if cutlass.const_expr(barriers is not None):
                value = tuple(words[LANE_VALUES * n + i] for i in range(LANE_VALUES))
                cute.arch.store_async_dsmem(target, value, barriers.full, owner)
            else:
                layout = cute.make_layout(LANE_VALUES)
                values = cute.make_tensor(sums.iterator + LANE_VALUES * n, layout)
                cute.autovec_copy(values, cute.make_tensor(target, layout))
        if cutlass.const_expr(barriers is not None):
            barriers.wait(turn)
        else:
            sync_consumers()

    def _partial(self, ctx: LinearContext, part, own, n, lane) -> cute.Pointer:
        """Address of four values of a lane: columns 2 (lane % 4) + {0, 1} of rows
        lane / 4 + {0, 8}."""
        index = (part * self.plan.own_units + own) * self.plan.column_groups + n
        return ctx.smem.partials + cute.assume((index * WARP + lane) * LANE_VALUES, divby=4)

    @cute.jit
    def _add_parts(self, ctx: LinearContext, row, first_token, warp, lane):
        """Add the parts of the own units as a balanced tree, and store the sums."""
        plan = self.plan
        groups = plan.own_units * plan.column_groups
        for i in cutlass.range(warp, groups, CONSUMER_WARPS, unroll=1):
            own, n = i // plan.column_groups, i % plan.column_groups
            parts = []
            for p in cutlass.range_constexpr(plan.parts):
                values = cute.make_rmem_tensor(LANE_VALUES, cutlass.Float32)
                source = self._partial(ctx, p, own, n, lane)
                cute.autovec_copy(cute.make_tensor(source, cute.make_layout(LANE_VALUES)), values)
                parts.append([values[j] for j in range(LANE_VALUES)])
            first_row = row + (ctx.rank * plan.own_units + own) * UNIT_ROWS + lane // 4
            sums = balanced_sum(parts)
            self._store_values(ctx.operands.y, first_row, first_token + n * 8, lane, sums)
        if cutlass.const_expr(ctx.pipes.partials is not None):
            cute.arch.sync_warp()
            # Each CTA of the cluster may send its parts of the next tile.
            if lane < plan.tiling.cluster:
                cute.arch.mbarrier_arrive(ctx.pipes.partials.empty, lane)

    @cute.jit
    def _store_values(self, y: cute.Tensor, row, first_token, lane, values):
        """Round and store columns 2 (lane % 4) + {0, 1} of rows `row` + {0, 8}."""
        for c in cutlass.range_constexpr(2):
            token = first_token + lane % 4 * 2 + c
            if token < y.shape[0]:
                for r in cutlass.range_constexpr(2):
                    if row + r * 8 < y.shape[1]:
                        y[token, row + r * 8] = values[r * 2 + c].to(y.element_type)


def balanced_sum(rows: list) -> list:
    """Elementwise sum of a power of two of rows of registers, as a balanced tree."""
    while len(rows) > 1:
        rows = [[a + b for a, b in zip(left, right)] for left, right in zip(rows[::2], rows[1::2])]
    return rows[0]
