"""Load warp of a grouped product of Blackwell: weights, their FP4 scales, and codes of tokens, by
TMA.

FP4 weights lie packed in memory; on its way to shared memory each 16 of them are padded to 16
bytes, as the tensor core takes them beside e4m3; NVFP4 ones stay packed, beside tokens that are,
too. Codes of tokens are gathered four rows at a time, by as many lanes.
"""

import cutlass
from cutlass import Float4E2M1FNx2, Float8E4M3FN, Int32, Int64, Uint8, cute
from cutlass.experimental.cuda.tensor_map import (
    TensorMapDataFormat,
    TensorMapL2Promotion,
    create_tensor_map_tiled,
)

from dsv4.kernels.kit import pdl
from dsv4.kernels.kit.pointers import pointer_at
from dsv4.kernels.kit.swizzle import SPAN_BYTES, TENSOR_MAP_SWIZZLES
from dsv4.kernels.kit.tma import (
    bulk_load,
    chosen_descriptor,
    prefetch_descriptors,
    tma_gather4,
    tma_load,
)
from dsv4.kernels.moe.layout import ATOM_BYTES, K_BLOCK, TILE_ROWS
from dsv4.kernels.moe.sm100.context import ProductContext, WorkTile
from dsv4.kernels.moe.sm100.plan import PACKED_BYTES, ProductPlan

UNIT_BYTES = 16  # of a descriptor's strides
GATHERED = 4  # rows of a copy
FIRST_STAGES = 2  # whose weights are asked for before the tokens are known


@cute.jit
def tiled_map(weight: cute.Tensor, dtype: cutlass.Constexpr):
    """TMA descriptor of a tiled weight as (k of a block, row of a block), blocks one behind the
    other."""
    is_fp4, is_packed = dtype == "fp4", dtype == "nvfp4"
    row_bytes = K_BLOCK if dtype == "fp8" else PACKED_BYTES
    size = Int64(1)  # past 2^31
    for extent in weight.shape:
        size *= extent
    return create_tensor_map_tiled(
        weight.iterator.toint(),
        Uint8 if is_packed else Float4E2M1FNx2 if is_fp4 else Float8E4M3FN,
        [row_bytes if is_packed else K_BLOCK, Int32(size // row_bytes)],
        [row_bytes // UNIT_BYTES],
        [row_bytes if is_packed else K_BLOCK, TILE_ROWS],
        swizzle=TENSOR_MAP_SWIZZLES[row_bytes if is_packed else SPAN_BYTES],
        l2_promotion=TensorMapL2Promotion.none,
        tma_format=TensorMapDataFormat.B4X16_P64 if is_fp4 else None,
    )


@cute.jit
def row_map(codes: cute.Tensor, block_bytes: cutlass.Constexpr = K_BLOCK):
    """TMA descriptor of [row, K] e4m3 codes, or of bytes of packed ones, whose rows are gathered, a
    k block at a time."""
    return create_tensor_map_tiled(
        codes.iterator.toint(),
        Float8E4M3FN if block_bytes == K_BLOCK else Uint8,
        [codes.shape[1], Int32(codes.shape[0])],
        [Int64(codes.stride[0]) // UNIT_BYTES],
        [block_bytes, 1],
        swizzle=TENSOR_MAP_SWIZZLES[block_bytes],
        l2_promotion=TensorMapL2Promotion.none,
    )


class LoadWarp:
    """Producer of the ring, of the shared expert's weights before the launch before is over."""

    def __init__(self, plan: ProductPlan, top_k: int):
        self.plan = plan
        self.top_k = top_k

    @cute.jit
    def load(self, ctx: ProductContext, x_maps, routed_maps, shared_maps):
        """Load the k blocks of every tile."""
        plan, ring, lane = self.plan, ctx.pipes.ring, cute.arch.lane_idx()
        scheduler, counts = ctx.schedule(plan), ctx.operands.counts
        columns = [lane * GATHERED + i for i in range(GATHERED)]
        # ---- the first tile: weights of some stages before the wait where they are known, and
        # before the tokens, which lists name; of the others behind these, which are small ----
        early, is_known = Int32(min(plan.stages, plan.k_blocks)), ctx.cluster < plan.row_tiles
        first = cutlass.min(early, FIRST_STAGES)
        tile = scheduler.shared(Int32(0), Int32(0))
        if is_known:
            for step in cutlass.range(first, unroll=1):
                self._load_weights(ctx, routed_maps, shared_maps, tile, lane, step, step)
        pdl.wait_for_previous_launch()
        words, words_ahead = scheduler.words(Int32(0)), scheduler.words(Int32(1))
        num_groups, live = counts[0], counts[1]
        if lane == 0:
            prefetch_descriptors((*x_maps, *routed_maps, *shared_maps))
        tile = scheduler.tile(Int32(0), words, live)
        if not scheduler.has_tile(num_groups) or tile.steps == 0:
            early, first = Int32(0), Int32(0)
        if not is_known:
            for step in cutlass.range(first, unroll=1):
                self._load_weights(ctx, routed_maps, shared_maps, tile, lane, step, step)
        pairs = ctx.places(tile, columns)
        rows = ctx.rows(plan, self.top_k, tile, columns, pairs)
        for step in cutlass.range(first, unroll=1):
            self._load_codes(ctx, x_maps, tile, rows, lane, step, step)
        for step in cutlass.range(first, early, unroll=1):
            self._load_codes(ctx, x_maps, tile, rows, lane, step, step)
            self._load_weights(ctx, routed_maps, shared_maps, tile, lane, step, step)
        # ---- what is left of it, and the others ----
        cursor, first = ring.skip(ring.producer(), early), early
        ahead = scheduler.tile(Int32(1), words_ahead, live)
        for n in cutlass.range(scheduler.count(num_groups), unroll=1):
            # Asked for a tile early.
            later = scheduler.words(n + 2)
            pairs = ctx.places(ahead, columns)
            for step in cutlass.range(first, tile.steps, unroll=1):
                ring.acquire(cursor)
                self._load_codes(ctx, x_maps, tile, rows, lane, step, cursor.stage)
                self._load_weights(ctx, routed_maps, shared_maps, tile, lane, step, cursor.stage)
                cursor = ring.next(cursor)
            tile, first = ahead, Int32(0)
            rows = ctx.rows(plan, self.top_k, tile, columns, pairs)
            ahead = scheduler.tile(n + 2, later, live)

    @cute.jit
    def _load_weights(
        self, ctx: ProductContext, routed_maps, shared_maps, tile: WorkTile, lane, step, stage
    ):
        """Announce the bytes of a stage, and load its weights with their scales."""
        plan, smem = self.plan, ctx.smem
        barriers = ctx.pipes.ring.at(stage)
        if lane == 0:
            x_bytes = tile.columns * K_BLOCK
            target = smem.weight + stage * plan.weight_bytes
            block = tile.row_tile * plan.k_blocks + step
            if tile.is_shared:
                barriers.expect(plan.loaded_bytes("fp8", 1) + x_bytes)
                # Of a pair one CTA has gate, the other one up.
                weight_map = chosen_descriptor(shared_maps, ctx.rank)
                tma_load(weight_map, target, [0, block * TILE_ROWS], barriers.full)
            else:
                if cutlass.const_expr(plan.is_packed):
                    x_bytes = tile.columns * PACKED_BYTES
                barriers.expect(plan.loaded_bytes(plan.expert_dtype, plan.weights) + x_bytes)
                block += tile.expert * (plan.row_tiles * plan.k_blocks)
                for i in cutlass.range_constexpr(plan.weights):
                    place = target + i * plan.block_bytes
                    tma_load(routed_maps[i], place, [0, block * TILE_ROWS], barriers.full)
                    if cutlass.const_expr(plan.expert_dtype != "fp8"):
                        scale, size = ctx.operands.scales[i], plan.atoms * ATOM_BYTES
                        source = pointer_at(scale.iterator, Int64(block) * size, Uint8)
                        atom = smem.weight_scales + (stage * plan.weights + i) * plan.atom_words
                        bulk_load(source, atom, size, barriers.full)

    @cute.jit
    def _load_codes(self, ctx: ProductContext, x_maps, tile: WorkTile, rows, lane, step, stage):
        """Load the codes of a stage."""
        column = lane * GATHERED
        if column < tile.columns:
            row_bytes = K_BLOCK
            if cutlass.const_expr(self.plan.is_packed):
                row_bytes = cutlass.select_(tile.is_shared, Int32(K_BLOCK), Int32(PACKED_BYTES))
            target = ctx.smem.x + stage * self.plan.x_bytes + column * row_bytes
            barrier = ctx.pipes.ring.full + stage
            address = x_maps[0].get_ptr().toint()
            if cutlass.const_expr(self.plan.is_packed):
                packed = x_maps[1].get_ptr().toint()
                address = cutlass.select_(tile.is_shared, address, packed)
            tma_gather4(
                address, target.toint(), step * row_bytes, rows, barrier.toint(), is_pair=False
            )
