"""Roles of a product of many tokens: load warps, and consumers that decode a k block between the
products of the one before and their sums."""

from typing import NamedTuple

import cutlass
from cutlass import Float32, Int32, Uint32, cute
from cutlass.cute.nvgpu import warpgroup

from dsv4.kernels.gemm.sm90.activations import scale_value
from dsv4.kernels.kit import pdl
from dsv4.kernels.kit.mbarrier import Cursor
from dsv4.kernels.kit.tma import prefetch_descriptors, tma_load, tma_multicast
from dsv4.kernels.kit.wgmma import gemm, scale_rows
from dsv4.kernels.moe.layout import K_BLOCK, PANEL_ROWS, STEPS
from dsv4.kernels.moe.sm90.context import WorkTile, panels_of, tile_mma
from dsv4.kernels.moe.sm90.fragments import (
    fill_fragment,
    load_fragment,
    make_fragment,
    operand,
    packed_scale,
    raw_scale,
    row_scale,
)
from dsv4.kernels.moe.sm90.load_warp import LoadWarp
from dsv4.kernels.moe.sm90.wide_context import (
    WideContext,
    read_schedule,
    scale_place,
)
from dsv4.kernels.moe.wide_plan import WidePlan


class TileView(NamedTuple):
    """A warp's view of a tile.

    Attributes:
        is_shared: static.
        shift: place of the first column among a stage's scales.
    """

    is_shared: bool
    tile: WorkTile
    warp: Int32
    lane: Int32
    shift: Int32


class WideTileLoadWarp(LoadWarp):
    """Producers of the ring: weights by bulk copies, a warp for each panel, tokens and their scales
    by TMA. CTAs of a cluster load a part of the tokens each, for all.

    One lane of each warp issues: copies of several lanes would follow each other in a loop.
    """

    @cute.jit
    def load(self, ctx: WideContext, maps: tuple[tuple, tuple], warp):
        """Load every tile.

        Args:
            maps: as `make_maps` has them.
            warp: within the role.
        """
        plan = self.plan
        if cute.arch.lane_idx() == 0:
            if warp == 0:
                prefetch_descriptors((*maps[0], *maps[1]))
            pdl.wait_for_previous_launch()
            scheduler = read_schedule(ctx, plan)
            cursor, slot = ctx.pipes.ring.producer(), ctx.slot
            tile = scheduler.find(slot)
            while scheduler.exists(slot):
                slot = scheduler.next(slot)
                ahead = scheduler.find(slot)
                if tile.is_shared:
                    cursor = self._load(ctx, maps, len(plan.routed), tile, warp, cursor)
                else:
                    cursor = self._load_routed(ctx, maps, 0, tile, warp, cursor)
                tile = ahead

    @cute.jit
    def _load_routed(
        self, ctx: WideContext, maps, index: cutlass.Constexpr, tile: WorkTile, warp,
        cursor: Cursor,
    ):  # fmt: skip
        """A tile by its kind, from the kind of this index on."""
        if cutlass.const_expr(index == len(self.plan.routed) - 1):  # noqa: SIM114 static
            cursor = self._load(ctx, maps, index, tile, warp, cursor)
        elif tile.count <= self.plan.routed[index].tokens:
            cursor = self._load(ctx, maps, index, tile, warp, cursor)
        else:
            cursor = self._load_routed(ctx, maps, index + 1, tile, warp, cursor)
        return cursor

    @cute.jit
    def _load(
        self, ctx: WideContext, maps, index: cutlass.Constexpr, tile: WorkTile, warp,
        cursor: Cursor,
    ):  # fmt: skip
        """A tile of the kind of an index among the launch's."""
        plan, ring = self.plan, ctx.pipes.ring
        kind, is_shared = plan.kinds[index], index == len(plan.routed)
        codes, scales = maps[0][index], maps[1][index]
        row = tile.first
        if cutlass.const_expr(is_shared):
            row += ctx.activations.shared_first
        place = scale_place(ctx, is_shared, tile)
        part = kind.tokens // plan.sharing
        for step in cutlass.range(kind.steps, unroll=1):
            ring.acquire(cursor)
            stage = cursor.stage
            full = ring.at(stage).full
            if warp == 0:
                ring.at(stage).expect(plan.stage_bytes(kind))
                target = ctx.smem.x_scale + stage * plan.scale_rows
                where = [place.first, place.copy * plan.k_blocks + step]
                tma_load(scales, target, where, full)
            elif warp == 1:
                target = ctx.smem.x + stage * (plan.x_rows * K_BLOCK)
                if cutlass.const_expr(plan.sharing == 1):
                    tma_load(codes, target, [0, row, step], full)
                else:
                    target += ctx.rank * (part * K_BLOCK)
                    where = [0, row + ctx.rank * part, step]
                    tma_multicast(codes, target, where, full, (1 << plan.sharing) - 1)
            self.load_panel(
                ctx, kind, is_shared, tile.row_tile, tile.expert, warp, step, Int32(1), stage
            )
            cursor = ring.next(cursor)
        return cursor


class WideTileConsumers:
    """Warpgroups of consumers: 64 rows each of a tile, those of two panels, all of K.

    Args:
        epilogue: what becomes of the sums.
    """

    def __init__(self, plan: WidePlan, epilogue):
        self.plan = plan
        self.epilogue = epilogue

    @cute.jit
    def compute(self, ctx: WideContext, warp):
        """Every tile of the CTA; a warp has the unit of its number in both panels."""
        plan = self.plan
        lane = cute.arch.lane_idx()
        pdl.wait_for_previous_launch()
        scheduler = read_schedule(ctx, plan)
        cursor, slot = ctx.pipes.ring.consumer(), ctx.slot
        tile = scheduler.find(slot)
        while scheduler.exists(slot):
            slot = scheduler.next(slot)
            ahead = scheduler.find(slot)
            if tile.is_shared:
                cursor = self._tile(ctx, plan.shared, True, tile, warp, lane, cursor)
            else:
                cursor = self._routed(ctx, 0, tile, warp, lane, cursor)
            tile = ahead

    @cute.jit
    def _routed(
        self, ctx: WideContext, index: cutlass.Constexpr, tile: WorkTile, warp, lane, cursor: Cursor
    ):
        """A tile by its kind, from the kind of this index on."""
        kind = self.plan.routed[index]
        if cutlass.const_expr(index == len(self.plan.routed) - 1):  # noqa: SIM114 static
            cursor = self._tile(ctx, kind, False, tile, warp, lane, cursor)
        elif tile.count <= kind.tokens:
            cursor = self._tile(ctx, kind, False, tile, warp, lane, cursor)
        else:
            cursor = self._routed(ctx, index + 1, tile, warp, lane, cursor)
        return cursor

    @cute.jit
    def _tile(
        self, ctx: WideContext, kind: cutlass.Constexpr, is_shared: cutlass.Constexpr,
        tile: WorkTile, warp, lane, cursor: Cursor,
    ):  # fmt: skip
        """Sum k blocks in order, and store; returns the next place in the ring."""
        mma = tile_mma(kind)
        acc = mma.make_fragment_C(mma.partition_shape_C((2 * PANEL_ROWS, kind.tokens)))
        sums = cute.make_rmem_tensor(cute.size(acc), Float32)
        sums.fill(0.0)
        shift = scale_place(ctx, is_shared, tile).shift
        view = TileView(is_shared, tile, warp, lane, shift)
        columns = self.epilogue.load_columns(ctx, kind, is_shared, tile, warp, lane)
        if cutlass.const_expr(kind.is_summed_by_step):
            cursor = self._sum_by_step(ctx, kind, sums, acc, view, cursor)
        else:
            cursor = self._sum(ctx, kind, sums, acc, view, cursor)
        self.epilogue.store(ctx, kind, is_shared, sums, columns, tile, warp, lane)
        return cursor

    # ---- packed FP4, and FP8 ----

    @cute.jit
    def _sum(
        self, ctx: WideContext, kind: cutlass.Constexpr, sums: cute.Tensor, acc: cute.Tensor,
        view: TileView, cursor: Cursor,
    ):  # fmt: skip
        """Two operands in turn: one is filled when the other's products are on their way. ptxas
        puts what decodes behind the wait for these, where it is faster: they would slow it down."""
        dtype = Uint32 if self.plan.scales_rows_last(kind) else Float32
        operands = [(make_fragment(), cute.make_rmem_tensor(2, dtype)) for _ in range(2)]
        factors = self._first_factors(ctx, kind, view)
        ctx.pipes.ring.wait(cursor)
        self._fill(ctx, kind, operands[0], factors, view, Int32(0), cursor.stage)
        # All steps but the last are followed by one.
        followed = kind.steps - 1
        for pair in cutlass.range(followed // 2, unroll=1):
            for i in cutlass.range_constexpr(2):
                now, after = operands[i], operands[1 - i]
                step = 2 * pair + i
                self._multiply(ctx, kind, acc, now, view, step, cursor)
                self._fill_next(ctx, kind, after, factors, view, step, cursor)
                cursor = self._add(ctx, kind, sums, acc, now, view, cursor)
        if cutlass.const_expr(followed % 2 == 1):
            step = Int32(followed - 1)
            self._multiply(ctx, kind, acc, operands[0], view, step, cursor)
            self._fill_next(ctx, kind, operands[1], factors, view, step, cursor)
            cursor = self._add(ctx, kind, sums, acc, operands[0], view, cursor)
        last = operands[followed % 2]
        self._multiply(ctx, kind, acc, last, view, Int32(followed), cursor)
        cursor = self._add(ctx, kind, sums, acc, last, view, cursor)
        if cutlass.const_expr(self.plan.scales_rows_last(kind)):
            (_, even), (_, odd) = operands
            scale_rows(sums, [row_scale(even[panel], odd[panel]) for panel in range(2)])
        ring = ctx.pipes.ring
        ring.release_to(ring.previous(cursor), view.lane, self.plan.sharing)
        return cursor

    @cute.jit
    def _multiply(
        self, ctx: WideContext, kind: cutlass.Constexpr, acc: cute.Tensor, now, view: TileView,
        step, cursor: Cursor,
    ):  # fmt: skip
        """Send the products of a k block on their way, and give the stage of the one before back:
        they go where its own have been read, so that all of its scales have arrived."""
        warpgroup.fence()
        b = self._tokens(ctx, kind, cursor.stage)
        gemm(lambda: tile_mma(kind), acc, operand(now[0]), b, range(STEPS), 0, False)
        warpgroup.commit_group()
        if step > 0:
            ring = ctx.pipes.ring
            ring.release_to(ring.previous(cursor), view.lane, self.plan.sharing, is_read=True)

    @cute.jit
    def _add(
        self, ctx: WideContext, kind: cutlass.Constexpr, sums: cute.Tensor, acc: cute.Tensor, now,
        view: TileView, cursor: Cursor,
    ):  # fmt: skip
        """Add the products of a k block."""
        warpgroup.wait_group(0)
        factors = None if self.plan.scales_rows_last(kind) else now[1]
        self._promote(ctx, kind, sums, acc, factors, view, cursor.stage)
        return ctx.pipes.ring.next(cursor)

    @cute.jit
    def _fill_next(
        self, ctx: WideContext, kind: cutlass.Constexpr, into, factors, view, step, cursor: Cursor
    ):
        """Fill an operand with the k block after a step."""
        following = ctx.pipes.ring.next(cursor)
        ctx.pipes.ring.wait(following)
        self._fill(ctx, kind, into, factors, view, step + 1, following.stage)

    @cute.jit
    def _fill(self, ctx: WideContext, kind: cutlass.Constexpr, into, factors, view, step, stage):
        """Decode or load a k block, and the factors of its rows, or words of these; of FP8 those of
        the next one are on their way meanwhile."""
        fragment, scales = into
        words = fill_fragment(fragment, ctx.smem, self.plan, stage, 0, kind, view.warp, view.lane)
        if cutlass.const_expr(kind.dtype == "fp4"):
            is_word = cutlass.const_expr(self.plan.scales_rows_last(kind))
            for panel in cutlass.range_constexpr(2):
                scales[panel] = words[panel] if is_word else packed_scale(words[panel])
        else:
            for panel in cutlass.range_constexpr(2):
                scales[panel] = scale_value(factors[panel][0])
            self._load_factors(ctx, view, factors, cutlass.min(step + 1, kind.steps - 1))

    def _first_factors(self, ctx: WideContext, kind, view):
        """Scales of FP8 weights of the first k block, as they are stored; None of FP4."""
        if kind.dtype == "fp4":
            return None
        dtypes = [tensor.element_type for tensor in self._scale_tensors(ctx, view)]
        factors = tuple(cute.make_rmem_tensor(1, dtype) for dtype in dtypes)
        self._load_factors(ctx, view, factors, Int32(0))
        return factors

    def _load_factors(self, ctx: WideContext, view, factors, k_block) -> None:
        """Scales of FP8 weights of a k block, of the rows g and of the rows g + 8."""
        is_shared, tile = view.is_shared, view.tile
        rows = (row // (K_BLOCK // PANEL_ROWS) for row in panels_of(self.plan, tile.row_tile))
        for into, scale, row in zip(factors, self._scale_tensors(ctx, view), rows):
            into[0] = scale[row, k_block] if is_shared else scale[tile.expert, row, k_block]

    def _scale_tensors(self, ctx: WideContext, view: TileView) -> tuple[cute.Tensor, cute.Tensor]:
        operands = ctx.operands
        if view.is_shared:
            return operands.shared_a_scale, operands.shared_b_scale
        return operands.a_scale, operands.b_scale

    # ---- raw FP4 ----

    @cute.jit
    def _sum_by_step(
        self, ctx: WideContext, kind: cutlass.Constexpr, sums: cute.Tensor, acc: cute.Tensor,
        view: TileView, cursor: Cursor,
    ):  # fmt: skip
        """Each step of 32 by itself."""
        ring = ctx.pipes.ring
        factors = cute.make_rmem_tensor(2, Float32)
        for _ in cutlass.range(kind.steps, unroll=1):
            ring.wait(cursor)
            fragment, words = load_fragment(
                ctx.smem, self.plan, cursor.stage, 0, kind, view.warp, view.lane
            )
            b = self._tokens(ctx, kind, cursor.stage)
            for step in cutlass.range_constexpr(STEPS):
                warpgroup.fence()
                gemm(lambda: tile_mma(kind), acc, fragment, b, [step], 0, False)
                warpgroup.commit_group()
                warpgroup.wait_group(0)
                for panel in cutlass.range_constexpr(2):
                    factors[panel] = raw_scale(words[panel], step)
                self._promote(ctx, kind, sums, acc, factors, view, cursor.stage)
            ring.release_to(cursor, view.lane, self.plan.sharing)
            cursor = ring.next(cursor)
        return cursor

    # ---- both ----

    def _tokens(self, ctx: WideContext, kind, stage):
        """The B operand of a stage."""
        mma = tile_mma(kind)
        b = mma.make_fragment_B(mma.get_slice(0).partition_B(ctx.smem.x_tiles[kind.tokens]))
        return b[None, None, None, stage]

    @cute.jit
    def _promote(
        self, ctx: WideContext, kind: cutlass.Constexpr, sums: cute.Tensor, acc: cute.Tensor,
        factors: cute.Tensor | None, view: TileView, stage,
    ):  # fmt: skip
        """sums += products * (activation scale of the column * weight scale of the row), or without
        the row's."""
        first = stage * self.plan.scale_rows + (view.shift + view.lane % 4 * 2)
        for n in cutlass.range_constexpr(kind.column_groups):
            pair = cute.make_rmem_tensor(2, Float32)
            start = ctx.smem.x_scale + cute.assume(first + n * 8, divby=2)
            cute.autovec_copy(cute.make_tensor(start, cute.make_layout(2)), pair)
            for c in cutlass.range_constexpr(2):
                for r in cutlass.range_constexpr(2):
                    i = n * 4 + r * 2 + c
                    factor = pair[c]
                    if cutlass.const_expr(factors is not None):
                        factor *= factors[r]
                    sums[i] = sums[i] + acc[i] * factor
