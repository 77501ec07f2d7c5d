"""Load warp of attention: queries, keys and values by TMA, keys one tile ahead of values.

The same for every architecture: plans and contexts have the same names.
"""

from __future__ import annotations

import cutlass
from cutlass import Int32, Int64, cute
from cutlass.experimental.cuda.tensor_map import TensorMapL2Promotion, create_tensor_map_tiled

from dsv4.kernels.kit.mbarrier import Cursor
from dsv4.kernels.kit.swizzle import SPAN_BYTES, TENSOR_MAP_SWIZZLES, VECTOR_BYTES
from dsv4.kernels.kit.tma import bulk_load, prefetch_descriptors, tma_load
from dsv4.kernels.lowp.plan import SPAN, TilePlan
from dsv4.kernels.lowp.work import Work


@cute.jit
def make_row_map(q: cute.Tensor, count: cutlass.Constexpr):
    """TMA descriptor of queries or keys as they are [b, H, L, d] as (channel, row, head, batch), a
    box of 64 channels of so many; zeros are where there are none."""
    batch, heads, rows, dim = q.shape
    units = VECTOR_BYTES * 8 // q.element_type.width
    return create_tensor_map_tiled(
        q.iterator.toint(),
        q.element_type,
        [dim, cutlass.max(Int32(rows), 1), Int32(heads), Int32(batch)],
        [Int64(q.stride[i]) // units for i in (2, 1, 0)],
        [SPAN, count, 1, 1],
        swizzle=TENSOR_MAP_SWIZZLES[SPAN_BYTES],
        l2_promotion=TensorMapL2Promotion.none,
    )


@cute.jit
def make_key_map(plan: cutlass.Constexpr, k_codes: cute.Tensor):
    """TMA descriptor of keys [b, Hk, S, d] as (channel, key, head, batch), a tile a box, or
    128 channels of one."""
    batch, heads, rows, dim = k_codes.shape
    strides = [Int64(k_codes.stride[i]) // VECTOR_BYTES for i in (2, 1, 0)]
    return create_tensor_map_tiled(
        k_codes.iterator.toint(),
        k_codes.element_type,
        [dim, cutlass.max(Int32(rows), 1), Int32(heads), Int32(batch)],
        strides,
        [min(dim, SPAN_BYTES), plan.tile_keys, 1, 1],
        swizzle=TENSOR_MAP_SWIZZLES[plan.span_of_codes],
        l2_promotion=TensorMapL2Promotion.none,
    )


@cute.jit
def make_value_map(plan: cutlass.Constexpr, v_codes: cute.Tensor):
    """TMA descriptor of values [b, Hk, tiles, d, keys] as (key, channel, tile, head, batch), a tile
    a box; of fp16, [b, Hk, tiles, keys, d], as (channel, key, ..), a box of 64 channels."""
    batch, heads, tiles, rows, columns = v_codes.shape
    units = VECTOR_BYTES * 8 // v_codes.element_type.width
    span = SPAN if plan.pv == "fp16" else columns
    return create_tensor_map_tiled(
        v_codes.iterator.toint(),
        v_codes.element_type,
        [columns, rows, cutlass.max(Int32(tiles), 1), Int32(heads), Int32(batch)],
        [Int64(v_codes.stride[i]) // units for i in (3, 2, 1, 0)],
        [span, rows, 1, 1, 1],
        swizzle=TENSOR_MAP_SWIZZLES[span * v_codes.element_type.width // 8],
        l2_promotion=TensorMapL2Promotion.none,
    )


class LoadWarp:
    """Producer of queries and of both rings."""

    def __init__(self, plan: TilePlan):
        self.plan = plan

    @cute.jit
    def load(self, ctx, query_map, key_map, value_map, smooth_map=None):
        """Load what every work tile needs; one lane does all of it.

        Args:
            smooth_map: of keys that come as they are, too.
        """
        keys, values = ctx.pipes.keys.producer(), ctx.pipes.values.producer()
        if cute.arch.lane_idx() == 0:
            prefetch_descriptors((query_map, key_map, value_map))
            key_maps = (key_map, smooth_map)
            parity, index = Int32(0), Int32(cute.arch.block_idx()[0])
            stop = ctx.tiles.count(ctx.operands)
            if index < stop:
                work = ctx.tiles.find(ctx.operands, index)
                self._load_queries(ctx, query_map, work, parity)
            while index < stop:
                work = ctx.tiles.find(ctx.operands, index)
                index += cute.arch.grid_dim()[0]
                parity ^= 1
                # When a ring has gone round these queries are coded, and there is room for others.
                ahead = cutlass.min(work.count, self.plan.stages + 1)
                for tile in cutlass.range(work.count + 1, unroll=1):
                    if cutlass.const_expr(not self.plan.shares_rows):  # noqa: SIM102 then dynamic
                        if tile == ahead and index < stop:
                            following = ctx.tiles.find(ctx.operands, index)
                            self._load_queries(ctx, query_map, following, parity)
                    if tile < work.count:
                        keys = self._load_keys(ctx, key_maps, work, tile, keys)
                    if tile > 0:
                        values = self._load_values(ctx, value_map, work, tile - 1, values)
                if cutlass.const_expr(self.plan.shares_rows):  # noqa: SIM102 static, then dynamic
                    if index < stop:
                        following = ctx.tiles.find(ctx.operands, index)
                        self._load_queries(ctx, query_map, following, parity)

    @cute.jit
    def _load_queries(self, ctx, query_map, work: Work, parity):
        """Load a work tile's rows and the scales of its values, and hand it over itself."""
        pipe, smem, scales = ctx.pipes.queries, ctx.smem, ctx.operands.v_scale
        pipe.acquire(parity ^ 1)
        work.store(smem.works[None, parity])
        pipe.expect(self.plan.query_bytes)
        for i in cutlass.range_constexpr(self.plan.dim // SPAN):
            target = smem.rows_start + i * (self.plan.span_bytes // 2)
            place = [i * SPAN, work.first_row, work.head, work.batch]
            tma_load(query_map, target, place, pipe.full)
        if cutlass.const_expr(self.plan.scaled_channels > 0):
            # Rows behind the last sequence are nobody's.
            sequence = cutlass.min(work.sequence, Int32(scales.shape[0]) - 1)
            source = scales.iterator + Int64(sequence) * scales.stride[0]
            source = source + Int64(work.key_head) * scales.stride[1]
            target = smem.value_scales[None, parity].iterator
            bulk_load(source, target, 4 * self.plan.dim, pipe.full)

    @cute.jit
    def _load_keys(self, ctx, maps, work: Work, tile, cursor: Cursor):
        """Load a tile of keys, and whatever rows follow the last."""
        tile = ctx.tiles.number(ctx.operands, work, tile)
        ring = ctx.pipes.keys
        ring.acquire(cursor)
        ring.expect(cursor.stage, self.plan.keys_bytes)
        target = ctx.smem.keys_start + cursor.stage * self.plan.tile_bytes
        row = work.first_key + tile * self.plan.tile_keys
        span = self.plan.span_of_codes
        for i in cutlass.range_constexpr(self.plan.row_bytes // span):
            place = [i * span, row, work.key_head, work.batch]
            box = target + i * (self.plan.tile_keys * span)
            tma_load(maps[0], box, place, ring.at(cursor.stage).full)
        if cutlass.const_expr(self.plan.smooth_bytes > 0):
            for i in cutlass.range_constexpr(self.plan.dim // SPAN):
                offset = cursor.stage * (self.plan.smooth_bytes // 2) + i * (
                    self.plan.tile_keys * SPAN
                )
                place = [i * SPAN, row, work.key_head, work.batch]
                tma_load(maps[1], ctx.smem.smooth_keys + offset, place, ring.at(cursor.stage).full)
        if cutlass.const_expr(self.plan.key_scales > 0):
            source = scales_of_tile(ctx.operands.k_scale, work, tile)
            target = ctx.smem.key_scales[None, cursor.stage].iterator
            bulk_load(source, target, self.plan.key_scale_bytes, ring.at(cursor.stage).full)
        return ring.next(cursor)

    @cute.jit
    def _load_values(self, ctx, value_map, work: Work, tile, cursor: Cursor):
        """Load a tile of values."""
        tile = ctx.tiles.number(ctx.operands, work, tile)
        ring = ctx.pipes.values
        ring.acquire(cursor)
        ring.expect(cursor.stage, self.plan.values_bytes)
        dtype = ctx.smem.values_start.dtype
        start = ctx.smem.values_start + cursor.stage * (self.plan.value_bytes * 8 // dtype.width)
        boxes = self.plan.dim // SPAN if self.plan.pv == "fp16" else 1
        for i in cutlass.range_constexpr(boxes):
            place = [i * SPAN, 0, work.first_tile + tile, work.key_head, work.batch]
            target = start + i * (self.plan.tile_keys * SPAN)
            tma_load(value_map, target, place, ring.at(cursor.stage).full)
        if cutlass.const_expr(self.plan.value_scale_bytes > 0):
            source = scales_of_tile(ctx.operands.v_scale, work, tile)
            target = ctx.smem.value_block_scales[None, cursor.stage].iterator
            bulk_load(source, target, self.plan.value_scale_bytes, ring.at(cursor.stage).full)
        return ring.next(cursor)


def scales_of_tile(scales: cute.Tensor, work: Work, tile) -> cute.Pointer:
    """Scales [b, Hk, tiles, n] of a tile of keys."""
    start = scales.iterator + Int64(work.batch) * scales.stride[0]
    start = start + Int64(work.key_head) * scales.stride[1]
    return start + Int64(work.first_tile + tile) * scales.stride[2]
