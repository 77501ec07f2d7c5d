"""Epilogue of the weight-streaming kernel: sum of the parts of K, what a weight has of its own,
rounding, store."""

import cutlass
from cutlass import BFloat16, Float8E4M3FN, Float32, Int32, Int64, cute
from cutlass.experimental.cuda.tensor_map import create_tensor_map_tiled

from dsv4.kernels.gemm.operands import OutputTile, chosen_matrix, outputs_by_dtype
from dsv4.kernels.gemm.plan import CONSUMER_WARPS, LANE_VALUES, M_TILE, UNIT_ROWS, LinearPlan
from dsv4.kernels.gemm.sm90.activations import sync_consumers
from dsv4.kernels.gemm.sm90.best_rows import BestRows
from dsv4.kernels.gemm.sm90.context import LinearContext
from dsv4.kernels.gemm.sm90.index_tile import IndexTile
from dsv4.kernels.gemm.sm90.rounded_tile import RoundedTile
from dsv4.kernels.gemm.sm90.weight_epilogues import LoadedAhead, WeightEpilogues
from dsv4.kernels.kit.swizzle import SPAN_BYTES, TENSOR_MAP_SWIZZLES, VECTOR_BYTES
from dsv4.kernels.kit.tma import chosen_descriptor, tma_store

WARP = 32
WARPGROUP = 128
FIRST_GROUP = 2  # named barrier of the first warpgroup


def sync_group(group) -> None:
    """Named barrier of one warpgroup."""
    cute.arch.barrier(barrier_id=FIRST_GROUP + group, number_of_threads=WARPGROUP)


@cute.jit
def output_map(y: cute.Tensor, tokens: cutlass.Constexpr):
    """TMA descriptor of y [token, row] for the rows of a warpgroup; of an unaligned y it is not
    used."""
    return create_tensor_map_tiled(
        y.iterator.toint(),
        BFloat16,
        [Int32(y.shape[1]), Int32(y.shape[0])],
        [Int64(y.stride[0]) * 2 // VECTOR_BYTES],
        [M_TILE, tokens],
        swizzle=TENSOR_MAP_SWIZZLES[SPAN_BYTES],
    )


class Epilogue:
    """Partial sums of warpgroups and CTAs meet in shared memory, each unit of 16 rows, or where
    outputs are rounded each group of 8 tokens, in the CTA that owns it, and are added as the upper
    levels of the tree of slices."""

    def __init__(self, plan: LinearPlan):
        self.plan = plan
        self.weights = WeightEpilogues(plan)
        self.rounded = RoundedTile(plan)
        self.index = IndexTile(plan)
        self.best = BestRows(plan)

    def can_stage(self, ys: tuple[cute.Tensor, ...]) -> bool:
        """Whether tiles of outputs pass through shared memory, in rows of a token."""
        return self.plan.stages_output and all(y.element_type is BFloat16 for y in uncoded(ys))

    def output_maps(self, ys: tuple[cute.Tensor, ...]) -> tuple:
        """TMA descriptor of each output that is staged; host code."""
        if not self.can_stage(ys):
            return ()
        # Beside codes there is one, which is then taken without a look at the weight.
        stored = uncoded(ys)
        assert len(stored) in (1, len(ys)), "a descriptor for each weight"
        return tuple(output_map(y, self.plan.tokens) for y in stored)

    def make_loaded(self, ctx: LinearContext) -> LoadedAhead | None:
        """Registers of what epilogues of weights load ahead."""
        loaded = self.weights.make_loaded(self.can_stage(ctx.operands.ys))
        if self.index.heads is not None:
            loaded = (loaded or LoadedAhead())._replace(head=self.index.heads.held())
        return loaded

    def load_positions(self, ctx: LinearContext, tile: OutputTile, loaded: LoadedAhead) -> None:
        """Ask for the positions of a token tile, where a weight has an epilogue."""
        if loaded.positions is not None:
            self.weights.load_positions(ctx, tile, loaded, self.can_stage(ctx.operands.ys))
        if loaded.head is not None:
            self.index.load_position(ctx, tile, loaded.head)

    def load_turns(self, ctx: LinearContext, tile: OutputTile, unit, loaded: LoadedAhead) -> None:
        """Ask for what a tile is rotated by, where registers hold it while it is multiplied."""
        if loaded.positions is not None:
            self.weights.load_turns(ctx, tile, unit, loaded)
        if loaded.head is not None and self.index.loads_ahead:
            self.index.load_turns(ctx, tile, loaded.head)

    @cute.jit
    def expect_parts(self, ctx: LinearContext):
        """Announce the bytes of a tile's parts, which all CTAs of the cluster will send."""
        if cutlass.const_expr(ctx.pipes.partials is not None):  # noqa: SIM102 static, then dynamic
            if cute.arch.thread_idx()[0] == 0:
                ctx.pipes.partials.expect(4 * self.plan.partial_values)

    @cute.jit
    def store(
        self, ctx: LinearContext, sums: cute.Tensor, tile: OutputTile, part, unit, turn, y_maps,
        loaded: LoadedAhead | None,
    ):  # fmt: skip
        """Write a tile of y, of which `sums` is a part of a unit of rows."""
        plan = self.plan
        warp, lane = cute.arch.thread_idx()[0] // WARP, cute.arch.lane_idx()
        if cutlass.const_expr(self.index.heads is not None and not self.index.loads_ahead):
            self.index.load_turns(ctx, tile, loaded.head)
        if cutlass.const_expr(plan.parts > 1):
            self._publish(ctx, sums, part, unit, lane, turn)
            self._add_parts(ctx, tile, warp, lane, loaded)
            if cutlass.const_expr(plan.rounds_output):
                self._store_rounded(ctx, tile, loaded)
        elif cutlass.const_expr(plan.rounds_some):
            if self.index.is_here(tile.weight):
                self._stage_rounded(ctx, sums, unit, lane)
                self._store_rounded(ctx, tile, loaded)
            else:
                self._store_outputs(ctx, sums, tile, unit, lane, y_maps, loaded)
        elif cutlass.const_expr(plan.rounds_output):
            self._stage_rounded(ctx, sums, unit, lane)
            self._store_rounded(ctx, tile, loaded)
        else:
            self._store_outputs(ctx, sums, tile, unit, lane, y_maps, loaded)

    @cute.jit
    def _stage_rounded(self, ctx: LinearContext, sums: cute.Tensor, unit, lane):
        """Put a unit of rows where outputs that become codes meet."""
        if cutlass.const_expr(self.plan.stages_output):
            self.drain()
        sync_consumers()
        for n in cutlass.range_constexpr(self.plan.column_groups):
            values = [sums[LANE_VALUES * n + j] for j in range(LANE_VALUES)]
            self.rounded.stage(ctx, unit, n, lane, values)

    @cute.jit
    def _store_rounded(self, ctx: LinearContext, tile: OutputTile, loaded: LoadedAhead | None):
        """Write what has been staged as codes."""
        sync_consumers()
        if cutlass.const_expr(self.index.heads is not None):
            self.index.store_heads(ctx, tile, loaded.head)
        else:
            self.rounded.store(ctx, tile)

    @cute.jit
    def _store_outputs(
        self, ctx: LinearContext, sums: cute.Tensor, tile: OutputTile, unit, lane, y_maps,
        loaded: LoadedAhead | None,
    ):  # fmt: skip
        """Write a tile of y, of which `sums` is a unit of rows."""
        if cutlass.const_expr(self.can_stage(ctx.operands.ys) and any(self.weights.own)):
            self._store_staged(ctx, sums, tile, y_maps, loaded)
        elif cutlass.const_expr(self.can_stage(ctx.operands.ys)):
            if ctx.operands.stores_by_tma:
                self._store_staged(ctx, sums, tile, y_maps, loaded)
            else:
                self._store_unit(ctx, sums, tile, unit, lane, loaded)
        else:
            self._store_unit(ctx, sums, tile, unit, lane, loaded)

    @cute.jit
    def _store_unit(
        self, ctx: LinearContext, sums: cute.Tensor, tile: OutputTile, unit, lane,
        loaded: LoadedAhead | None,
    ):  # fmt: skip
        """Write a unit of rows of a warp, each element by itself."""
        ys, weight = ctx.operands.ys, tile.weight
        row = tile.row_tile * self.plan.rows + unit * UNIT_ROWS
        first_token = tile.token_tile * self.plan.tokens
        if cutlass.const_expr(any(self.weights.own)):
            self.weights.apply(ctx, weight, sums, self.weights.block(tile, unit, 0), loaded)
        if cutlass.const_expr(self.plan.finds_best):
            self.best.take(ctx, row, 0, lane, sums)
        for dtype, is_here in outputs_by_dtype(ys, weight):
            y = chosen_matrix(ys, weight, dtype)
            if is_here:
                for n in cutlass.range_constexpr(self.plan.column_groups):
                    values = [sums[LANE_VALUES * n + j] for j in range(LANE_VALUES)]
                    self._store_values(y, row + lane // 4, first_token + n * 8, lane, values)

    @cute.jit
    def _store_staged(
        self, ctx: LinearContext, sums: cute.Tensor, tile: OutputTile, y_maps,
        loaded: LoadedAhead | None,
    ):  # fmt: skip
        """Write the rows of a warpgroup through shared memory, transposed on the way: full
        sectors of a token's y. Rows and tokens past the last one are out of bounds."""
        thread, lane = cute.arch.thread_idx()[0], cute.arch.lane_idx()
        group, warp = thread // WARPGROUP, thread % WARPGROUP // WARP
        span = cute.recast_ptr(self.own_spills(ctx, group), dtype=BFloat16)
        if cutlass.const_expr(any(self.weights.own)):
            share = self.weights.staged_share(tile, group)
            turns = self.weights.load_staged_turns(ctx, tile, share, loaded)
        self.reclaim(group)
        # Four 8 x 8 matrices at a time: two of rows, of two groups of columns.
        token, vector = lane // 16 * 8 + lane % 8, 2 * warp + lane // 8 % 2
        address = span.toint() + token * SPAN_BYTES + (vector ^ (lane % 8)) * VECTOR_BYTES
        for n in cutlass.range_constexpr(0, self.plan.column_groups, 2):
            values = cute.make_rmem_tensor(2 * LANE_VALUES, BFloat16)
            for i in cutlass.range_constexpr(2 * LANE_VALUES):
                values[i] = sums[LANE_VALUES * n + i].to(BFloat16)
            words = cute.recast_tensor(values, Int32)
            cute.arch.inline_ptx(
                "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [{$r0}], "
                "{{$r1}, {$r2}, {$r3}, {$r4}};",
                read_only_args=[address + n * 8 * SPAN_BYTES, *(words[i] for i in range(4))],
            )
        if cutlass.const_expr(any(self.weights.own)):
            sync_group(group)
            self.weights.apply_staged(ctx, tile, share, span, turns)
        cute.arch.fence_view_async_shared()
        sync_group(group)
        if cutlass.const_expr(any(self.weights.own)):
            if ctx.operands.stores_by_tma:
                self._store_span(span, tile, group, y_maps)
            else:
                self.weights.copy_staged(ctx, tile, share, span)
        else:
            self._store_span(span, tile, group, y_maps)

    @cute.jit
    def _store_span(self, span: cute.Pointer, tile: OutputTile, group, y_maps):
        """Send the rows of a warpgroup from shared memory."""
        row, first_token = tile.row_tile * self.plan.rows, tile.token_tile * self.plan.tokens
        if cute.arch.thread_idx()[0] % WARPGROUP == 0:
            y_map = chosen_descriptor(y_maps, tile.weight)
            tma_store(y_map, span, [row + group * M_TILE, first_token])
            cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def drain(self):
        """The thread that stores waits until its stores have read shared memory."""
        if cute.arch.thread_idx()[0] % WARPGROUP == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def reclaim(self, group):
        """Wait until the stores before have read the warpgroup's spill buffer, and both warpgroups
        the heads that took its place."""
        self.drain()
        if cutlass.const_expr(self.plan.rounds_some):
            sync_consumers()
        else:
            sync_group(group)

    def own_spills(self, ctx: LinearContext, group) -> cute.Pointer:
        """A warpgroup's half of the spill buffer."""
        half = self.plan.spill_values // 2
        return ctx.smem.spills + cute.assume(group * half, divby=half)

    @cute.jit
    def _publish(self, ctx: LinearContext, sums: cute.Tensor, part, unit, lane, turn):
        """Send a part of a unit of rows to the CTA that owns it, and wait for those of the own
        units."""
        plan, barriers = self.plan, ctx.pipes.partials
        owner, own = unit // plan.own_units, unit % plan.own_units
        if cutlass.const_expr(plan.rounds_output):
            owner, own = Int32(0), unit
        words = cute.recast_tensor(sums, Int32)
        if cutlass.const_expr(barriers is not None):
            barriers.acquire(turn ^ 1)
        else:
            sync_consumers()
        for n in cutlass.range_constexpr(plan.column_groups):
            target = self._partial(ctx, part, own, n % plan.own_groups, lane)
            if cutlass.const_expr(barriers is not None):
                if cutlass.const_expr(plan.rounds_output):
                    owner = Int32(n // plan.own_groups)
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
        index = (part * self.plan.own_units + own) * self.plan.own_groups + n
        return ctx.smem.partials + cute.assume((index * WARP + lane) * LANE_VALUES, divby=4)

    @cute.jit
    def _add_parts(
        self, ctx: LinearContext, tile: OutputTile, warp, lane, loaded: LoadedAhead | None
    ):
        """Add the parts of the own units as a balanced tree, and store the sums."""
        plan = self.plan
        row, first_token = tile.row_tile * plan.rows, tile.token_tile * plan.tokens
        groups = plan.own_units * plan.own_groups
        if cutlass.const_expr(plan.rounds_output):
            sync_consumers()
        for i in cutlass.range(warp, groups, CONSUMER_WARPS, unroll=1):
            own, n = i // plan.own_groups, i % plan.own_groups
            parts = []
            for p in cutlass.range_constexpr(plan.parts):
                values = cute.make_rmem_tensor(LANE_VALUES, Float32)
                source = self._partial(ctx, p, own, n, lane)
                cute.autovec_copy(cute.make_tensor(source, cute.make_layout(LANE_VALUES)), values)
                parts.append([values[j] for j in range(LANE_VALUES)])
            if cutlass.const_expr(plan.rounds_output):
                self.rounded.stage(ctx, own, n, lane, balanced_sum(parts))
            else:
                unit = ctx.rank * plan.own_units + own
                first_row = row + unit * UNIT_ROWS + lane // 4
                block = self.weights.block(tile, unit, n)
                sums = self.weights.applied(ctx, tile.weight, balanced_sum(parts), block, loaded)
                if cutlass.const_expr(plan.finds_best):
                    self.best.take(ctx, row + unit * UNIT_ROWS, n, lane, in_registers(sums))
                ys = ctx.operands.ys
                for dtype, is_here in outputs_by_dtype(ys, tile.weight):
                    y = chosen_matrix(ys, tile.weight, dtype)
                    if is_here:
                        self._store_values(y, first_row, first_token + n * 8, lane, sums)
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


def uncoded(ys: tuple[cute.Tensor, ...]) -> list[cute.Tensor]:
    """Outputs that are no codes."""
    return [y for y in ys if y.element_type is not Float8E4M3FN]


def in_registers(values: list) -> cute.Tensor:
    """Sums of a lane as a tensor."""
    found = cute.make_rmem_tensor(len(values), Float32)
    for i, value in enumerate(values):
        found[i] = value
    return found


def balanced_sum(rows: list) -> list:
    """Elementwise sum of a power of two of rows of registers, as a balanced tree."""
    while len(rows) > 1:
        rows = [[a + b for a, b in zip(left, right)] for left, right in zip(rows[::2], rows[1::2])]
    return rows[0]
