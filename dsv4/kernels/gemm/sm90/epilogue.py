"""Epilogue of the weight-streaming kernel: sum of the parts of K, what a weight has of its own,
rounding, store."""

import itertools
from typing import NamedTuple

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
from dsv4.kernels.kit.epilogue import transpose_pair
from dsv4.kernels.kit.swizzle import SPAN_BYTES, TENSOR_MAP_SWIZZLES, VECTOR_BYTES
from dsv4.kernels.kit.tma import chosen_descriptor, tma_store

WARP = 32
WARPGROUP = 128
FIRST_GROUP = 2  # named barrier of the first warpgroup


def sync_group(group) -> None:
    """Named barrier of one warpgroup."""
    cute.arch.barrier(barrier_id=FIRST_GROUP + group, number_of_threads=WARPGROUP)


class UnitSums(NamedTuple):
    """A lane's sums of 16 rows of the weight and some groups of 8 tokens: of each group those of
    columns 2 (lane % 4) + {0, 1} of rows lane / 4 + {0, 8}."""

    unit: Int32 | int  # of the tile
    first_group: Int32 | int  # of the tile
    values: cute.Tensor  # fp32 [row, column, group]

    @property
    def blocks(self) -> list[tuple]:
        """Group of each block, and its four values."""
        count = cute.size(self.values) // LANE_VALUES
        values = [
            [self.values[LANE_VALUES * n + i] for i in range(LANE_VALUES)] for n in range(count)
        ]
        return [(self.first_group + n, values[n]) for n in range(count)]


@cute.jit
def output_map(y: cute.Tensor, tokens: cutlass.Constexpr):
    """TMA descriptor of y [token, row] for 64 rows of some tokens; of an unaligned y it is not
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
        return tuple(output_map(y, self.weights.staged_tokens) for y in stored)

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
        self, ctx: LinearContext, sums: cute.Tensor, tile: OutputTile, part, unit, turn, has_next,
        y_maps, loaded: LoadedAhead | None,
    ):  # fmt: skip
        """Write a tile of y.

        Args:
            has_next: whether the CTA has another tile behind it.
            sums: those of a warp, or a part of them: a unit of rows, or where tokens are M two
                groups of tokens.
        """
        plan = self.plan
        warp, lane = cute.arch.thread_idx()[0] // WARP, cute.arch.lane_idx()
        if cutlass.const_expr(self.index.heads is not None and not self.index.loads_ahead):
            self.index.load_turns(ctx, tile, loaded.head)
        if cutlass.const_expr(plan.parts > 1):
            self._publish(ctx, self._units(sums, unit), part, lane, turn)
            self._add_parts(ctx, tile, warp, lane, has_next, loaded)
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
        """Put the sums of a warp where outputs that become codes meet."""
        if cutlass.const_expr(self.plan.stages_output):
            self.drain()
        sync_consumers()
        for found in self._units(sums, unit):
            for group, values in found.blocks:
                self.rounded.stage(ctx, found.unit, group, lane, values)

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
        """Write a tile of y, of which `sums` are those of a warp."""
        if cutlass.const_expr(self.can_stage(ctx.operands.ys) and any(self.weights.own)):
            self._store_staged(ctx, sums, tile, y_maps, loaded)
        elif cutlass.const_expr(self.can_stage(ctx.operands.ys)):
            if ctx.operands.stores_by_tma:
                self._store_staged(ctx, sums, tile, y_maps, loaded)
            else:
                self._store_units(ctx, sums, tile, unit, lane, loaded)
        else:
            self._store_units(ctx, sums, tile, unit, lane, loaded)

    def _units(self, sums: cute.Tensor, unit) -> list[UnitSums]:
        """A warp's sums by units of rows: one, or where tokens are M, all of the tile; then lanes
        exchange them, a matrix of 8 x 8 at a time."""
        if not self.plan.has_tokens_in_m:
            return [UnitSums(unit, 0, sums)]
        groups = self.plan.warp_groups
        found = []
        for own in range(self.plan.rows // UNIT_ROWS):
            values = cute.make_rmem_tensor(LANE_VALUES * groups, Float32)
            for r, group in itertools.product(range(2), range(groups)):
                first = ((2 * own + r) * groups + group) * 2
                pair = transpose_pair(sums[first], sums[first + 1])
                for c in range(2):
                    values[LANE_VALUES * group + 2 * r + c] = pair[c]
            found.append(UnitSums(own, unit * groups, values))
        return found

    def _store_units(
        self, ctx: LinearContext, sums: cute.Tensor, tile: OutputTile, unit, lane,
        loaded: LoadedAhead | None,
    ) -> None:  # fmt: skip
        """Write the sums of a warp, each element by itself."""
        for found in self._units(sums, unit):
            self._store_unit(ctx, found, tile, lane, loaded)

    @cute.jit
    def _store_unit(
        self, ctx: LinearContext, found: UnitSums, tile: OutputTile, lane,
        loaded: LoadedAhead | None,
    ):  # fmt: skip
        """Write the sums of a unit of rows."""
        ys, weight = ctx.operands.ys, tile.weight
        row = tile.row_tile * self.plan.rows + found.unit * UNIT_ROWS
        first_token = tile.token_tile * self.plan.tokens
        if cutlass.const_expr(any(self.weights.own)):
            block = self.weights.block(tile, found.unit, found.first_group)
            self.weights.apply(ctx, weight, found.values, block, loaded)
        if cutlass.const_expr(self.plan.finds_best):
            self.best.take(ctx, row, 0, lane, found.values)
        for dtype, is_here in outputs_by_dtype(ys, weight):
            y = chosen_matrix(ys, weight, dtype)
            if is_here:
                for group, values in found.blocks:
                    self._store_values(y, row + lane // 4, first_token + group * 8, lane, values)

    @cute.jit
    def _store_staged(
        self, ctx: LinearContext, sums: cute.Tensor, tile: OutputTile, y_maps,
        loaded: LoadedAhead | None,
    ):  # fmt: skip
        """Write the sums of a warpgroup through shared memory: full sectors of a token's y. Rows
        and tokens past the last one are out of bounds.

        They are spans of 64 rows, [token, row] each: one, transposed on the way, or where tokens
        are M, two of half of the tokens.
        """
        thread = cute.arch.thread_idx()[0]
        group, warp = thread // WARPGROUP, thread % WARPGROUP // WARP
        start = cute.recast_ptr(self.own_spills(ctx, group), dtype=BFloat16)
        size = self.weights.staged_tokens * M_TILE
        shares = self.weights.staged_shares(tile, group)
        spans = [start + cute.assume(i * size, divby=size) for i in range(len(shares))]
        if cutlass.const_expr(any(self.weights.own)):
            turns = [self.weights.load_staged_turns(ctx, tile, share, loaded) for share in shares]
        self.reclaim(group)
        if cutlass.const_expr(self.plan.has_tokens_in_m):
            self._stage_tokens(sums, start.toint(), warp)
        else:
            self._stage_rows(sums, start.toint(), warp)
        if cutlass.const_expr(any(self.weights.own)):
            sync_group(group)
            for i in cutlass.range_constexpr(len(shares)):
                self.weights.apply_staged(ctx, tile, shares[i], spans[i], turns[i])
        cute.arch.fence_view_async_shared()
        sync_group(group)
        if cutlass.const_expr(any(self.weights.own)):
            if ctx.operands.stores_by_tma:
                self._store_spans(spans, shares, tile, y_maps)
            else:
                for i in cutlass.range_constexpr(len(shares)):
                    self.weights.copy_staged(ctx, tile, shares[i], spans[i])
        else:
            self._store_spans(spans, shares, tile, y_maps)

    def _stage_rows(self, sums: cute.Tensor, address, warp) -> None:
        """Write sums of 16 rows of all tokens to a span, rounded to bf16, four 8 x 8 matrices at a
        time: two of rows, of two groups of columns."""
        lane = cute.arch.lane_idx()
        token, vector = lane // 16 * 8 + lane % 8, 2 * warp + lane // 8 % 2
        address += token * SPAN_BYTES + (vector ^ (lane % 8)) * VECTOR_BYTES
        for n in range(0, self.plan.column_groups, 2):
            _store_matrices(sums, n, address + n * 8 * SPAN_BYTES, ".trans")

    def _stage_tokens(self, sums: cute.Tensor, address, warp) -> None:
        """Write sums of all rows of 16 tokens, or of two terms of 8, to two spans, rounded to bf16,
        four 8 x 8 matrices at a time: of two or four vectors of rows."""
        lane, groups = cute.arch.lane_idx(), self.plan.warp_groups
        matrix, vectors = lane // 8, LANE_VALUES // groups
        token = (warp * groups + matrix % groups) * 8 + lane % 8
        span_bytes = self.weights.staged_tokens * SPAN_BYTES
        for n in range(0, self.plan.rows // 8, vectors):
            span, first = divmod(n, SPAN_BYTES // VECTOR_BYTES)
            vector = first + matrix // groups
            place = token * SPAN_BYTES + (vector ^ (lane % 8)) * VECTOR_BYTES
            _store_matrices(sums, n * groups // 2, address + span * span_bytes + place)

    @cute.jit
    def _store_spans(self, spans: list, shares: list, tile: OutputTile, y_maps):
        """Send the spans of a warpgroup from shared memory."""
        if cute.arch.thread_idx()[0] % WARPGROUP == 0:
            y_map = chosen_descriptor(y_maps, tile.weight)
            for span, share in zip(spans, shares):
                tma_store(y_map, span, [share.row, share.first_token])
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
    def _publish(self, ctx: LinearContext, units: list, part, lane, turn):
        """Send parts of units of rows to the CTAs that own them, and wait for those of the own
        units."""
        barriers = ctx.pipes.partials
        if cutlass.const_expr(barriers is not None):
            barriers.acquire(turn ^ 1)
        else:
            sync_consumers()
        for found in units:
            self._send(ctx, found, part, lane)
        if cutlass.const_expr(barriers is not None):
            barriers.wait(turn)
        else:
            sync_consumers()

    def _send(self, ctx: LinearContext, found: UnitSums, part, lane) -> None:
        """Send a part of a unit of rows, or where outputs are rounded of its groups of tokens."""
        plan, barriers = self.plan, ctx.pipes.partials
        owner, own = found.unit // plan.own_units, found.unit % plan.own_units
        if plan.rounds_output:
            own = found.unit
        words = cute.recast_tensor(found.values, Int32)
        for n in range(cute.size(found.values) // LANE_VALUES):
            group = found.first_group + n
            target = self._partial(ctx, part, own, group % plan.own_groups, lane)
            if barriers is not None:
                if plan.rounds_output:
                    owner = group // plan.own_groups
                value = tuple(words[LANE_VALUES * n + i] for i in range(LANE_VALUES))
                cute.arch.store_async_dsmem(target, value, barriers.full, Int32(owner))
            else:
                layout = cute.make_layout(LANE_VALUES)
                values = cute.make_tensor(found.values.iterator + LANE_VALUES * n, layout)
                cute.autovec_copy(values, cute.make_tensor(target, layout))

    def _partial(self, ctx: LinearContext, part, own, n, lane) -> cute.Pointer:
        """Address of four values of a lane: columns 2 (lane % 4) + {0, 1} of rows
        lane / 4 + {0, 8}."""
        index = (part * self.plan.own_units + own) * self.plan.own_groups + n
        return ctx.smem.partials + cute.assume((index * WARP + lane) * LANE_VALUES, divby=4)

    @cute.jit
    def _add_parts(
        self, ctx: LinearContext, tile: OutputTile, warp, lane, has_next,
        loaded: LoadedAhead | None,
    ):  # fmt: skip
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
            # Each CTA of the cluster may send its parts of the next tile. Without one nothing
            # arrives: a CTA that has its last parts may end, and no arrival must find it gone.
            if has_next and lane < plan.tiling.cluster:
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


def _store_matrices(sums: cute.Tensor, first: int, address, order: str = "") -> None:
    """Round eight sums of a lane to bf16, and store the four 8 x 8 matrices that they are of.

    Args:
        first: in units of four.
    """
    values = cute.make_rmem_tensor(2 * LANE_VALUES, BFloat16)
    for i in range(2 * LANE_VALUES):
        values[i] = sums[LANE_VALUES * first + i].to(BFloat16)
    words = cute.recast_tensor(values, Int32)
    cute.arch.inline_ptx(
        f"stmatrix.sync.aligned.m8n8.x4{order}.shared.b16 [{{$r0}}], "
        "{{$r1}, {$r2}, {$r3}, {$r4}};",
        read_only_args=[address, *(words[i] for i in range(4))],
    )


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
