"""Epilogues of routed experts in NVFP4 beside a shared one in FP8: fp32 scales of both factors, and
NVFP4 codes of h.

Sixteen neighbouring lanes have the channels that share a scale of h.
"""

import cutlass
from cutlass import Float32, Int32, Int64, Uint8, cute

from dsv4.kernels.kit.fp4 import block_scale, pack_e2m1_pair, per_whole
from dsv4.kernels.kit.pointers import pointer_at
from dsv4.kernels.moe.layer_config import NVFP4_GROUP
from dsv4.kernels.moe.layout import TILE_ROWS
from dsv4.kernels.moe.packed_rows import H_ROW
from dsv4.kernels.moe.sm100.context import ProductContext, WorkTile
from dsv4.kernels.moe.sm100.epilogue import Rows, SwiGlu

DOWN_ROW = 2  # of `global_scales`
MAGNITUDE = 0x7FFFFFFF


class PackedSwiGlu(SwiGlu):
    """h of routed experts in NVFP4, of the shared one in e4m3."""

    @cute.jit
    def load_columns(self, ctx: ProductContext, tile: WorkTile, lane):
        """Routing weights of a lane's columns; then what the sums of gate and of up are multiplied
        by, and the fp32 scale of h."""
        factors = SwiGlu.load_columns(self, ctx, tile, lane)
        packed = ctx.operands.packed
        scales, of_x = packed.global_scales, packed.x_whole[0]
        for row in cutlass.range_constexpr(2):
            factor = scales[row, tile.expert] * of_x
            factors += (cutlass.select_(tile.is_shared, Float32(1.0), factor),)
        return (*factors, scales[H_ROW, tile.expert])

    def scaled(self, value: Float32, columns: tuple, weight: int) -> Float32:
        return value * columns[self.lane_columns + weight]

    @cute.jit
    def store_rounded(self, ctx: ProductContext, tile: WorkTile, factors, values, first, turn):
        """Codes and scales of a thread's values of some columns."""
        if tile.is_shared:
            SwiGlu.store_rounded(self, ctx, tile, factors, values, first, turn)
        else:
            self._store_packed(ctx, tile, factors[-1], values, first)

    @cute.jit
    def _store_packed(self, ctx: ProductContext, tile: WorkTile, whole, values, first):
        """A pair of lanes has a byte of codes, sixteen have a scale."""
        rows, thread = ctx.operands.packed.y, cute.arch.thread_idx()[0]
        channel, factor = tile.row_tile * TILE_ROWS + thread, per_whole(whole)
        for i in cutlass.range_constexpr(len(values)):
            byte, inverse = block_scale(largest_of_block(values[i]), factor, whole)
            own = values[i] * inverse
            codes = pack_e2m1_pair(own, cute.arch.shuffle_sync_bfly(own, 1))
            if first + i < tile.count:
                row = Int64(tile.first + first + i)
                if thread % 2 == 0:
                    place = row * rows.codes.stride[0] + channel // 2
                    pointer_at(rows.codes.iterator, place, Uint8, align=1).store(Uint8(codes))
                if thread % NVFP4_GROUP == 0:
                    place = row * rows.scales.stride[0] + channel // NVFP4_GROUP
                    pointer_at(rows.scales.iterator, place, Uint8, align=1).store(Uint8(byte))


class PackedDown(Rows):
    """Rows of an expert's output, whose sums are still to be multiplied by fp32 scales."""

    @cute.jit
    def load_columns(self, ctx: ProductContext, tile: WorkTile, lane):
        """Rows of y of a lane's columns, and the factor of the sums."""
        found = Rows.load_columns(self, ctx, tile, lane)
        scales = ctx.operands.packed.global_scales
        factor = scales[DOWN_ROW, tile.expert] * scales[H_ROW, tile.expert]
        return (*found, cutlass.select_(tile.is_shared, Float32(1.0), factor))

    def scaled(self, value: Float32, columns: tuple, weight: int) -> Float32:
        return value * columns[self.lane_columns]


def largest_of_block(value: Float32) -> Float32:
    """The largest magnitude among sixteen neighbouring lanes; a NaN wins."""
    largest = value.bitcast(Int32) & MAGNITUDE
    distance = NVFP4_GROUP // 2
    while distance:
        largest = cutlass.max(largest, cute.arch.shuffle_sync_bfly(largest, distance))
        distance //= 2
    return Int32(largest).bitcast(Float32)
