"""Epilogues of the grouped products: SwiGLU with the routing weight, in bf16 or rounded further to
codes, or rows of an expert."""

import cutlass
from cutlass import Float32, Int32, Int64, Uint8, Uint16, Uint32, cute

from dsv4.kernels.kit import quant
from dsv4.kernels.kit.epilogue import transpose
from dsv4.kernels.kit.pointers import pointer_at
from dsv4.kernels.moe.layout import PANEL_ROWS, UNIT_ROWS
from dsv4.kernels.moe.sm90.context import ProductContext, WorkTile
from dsv4.kernels.moe.swiglu import swiglu

WARP = 32
QUAD = 4  # lanes that have eight channels of a column
CONSUMERS_MEET = 3  # named barrier


@cute.jit
def store_channels(target: cute.Tensor, row, channel, low, high, is_used, lane):
    """Round and store 8 x 8 values, of which a lane holds channel `lane / 4` of columns
    2 (lane % 4) + {0, 1}, as rows of eight channels.

    Args:
        target: bf16 [row, channel].
        row: of column `lane / 4`.
        channel: the first of eight.
        is_used: whether column `lane / 4` is.
    """
    pair = transpose(Int32(quant.pack_bf16(low, high)))
    if is_used:
        offset = Int64(row) * target.stride[0] + channel + lane % 4 * 2
        pointer_at(target.iterator, offset, Int32, align=4).store(pair)


class SwiGlu:
    """h = silu(min(gate, limit)) * clamp(up) * routing weight, bf16.

    Args:
        panels: of gate in a tile, and of up.
        top_k: experts of a token.
    """

    def __init__(self, panels: int, top_k: int, limit: float):
        self.panels = panels
        self.top_k = top_k
        self.limit = limit

    @cute.jit
    def load_columns(
        self, ctx: ProductContext, kind: cutlass.Constexpr, is_shared: cutlass.Constexpr,
        tile: WorkTile, lane,
    ):  # fmt: skip
        """Routing weights of a lane's columns."""
        factors = cute.make_rmem_tensor((2, kind.column_groups), Float32)
        factors.fill(1.0)
        if cutlass.const_expr(not is_shared):
            for n in cutlass.range_constexpr(kind.column_groups):
                for c in cutlass.range_constexpr(2):
                    column = n * 8 + lane % 4 * 2 + c
                    if column < tile.count:
                        pair = ctx.operands.pairs[tile.first + column]
                        token, place = pair // self.top_k, pair % self.top_k
                        factors[c, n] = ctx.operands.weights[token, place]
        return factors

    @cute.jit
    def store(
        self, ctx: ProductContext, kind: cutlass.Constexpr, is_shared: cutlass.Constexpr,
        sums: cute.Tensor, factors: cute.Tensor, tile: WorkTile, warp, lane,
    ):  # fmt: skip
        h = ctx.operands.y
        channel = tile.row_tile * (self.panels * PANEL_ROWS) + warp * UNIT_ROWS
        row = tile.first
        if cutlass.const_expr(is_shared):
            row += ctx.operands.pairs.shape[0]
        for n in cutlass.range_constexpr(kind.column_groups):
            weights = self._weights(factors, n, lane)
            values = [
                self._swiglu(sums[4 * n + c], sums[4 * n + 2 + c]) * weights[c] for c in range(2)
            ]
            column = n * 8 + lane // 4
            store_channels(h, row + column, channel, *values, column < tile.count, lane)

    def _weights(self, factors: cute.Tensor, n: int, lane) -> list[Float32]:
        """Routing weights of a lane's columns of a group of eight."""
        return [factors[c, n] for c in range(2)]

    def _swiglu(self, gate: Float32, up: Float32) -> Float32:
        return swiglu(gate, up, self.limit)


class RoundedSwiGlu(SwiGlu):
    """`SwiGlu` of routed experts as e4m3 codes with E8M0 scales: a tile has all channels of a group
    of 128, a warp eight of them.

    The codes are those of the rounded bf16 values, as a launch that reads these makes them.
    Magnitudes of the next tile take the places of this one's behind the barrier of all consumers
    with which a joint launch publishes h.
    """

    @cute.jit
    def store(
        self, ctx: ProductContext, kind: cutlass.Constexpr, is_shared: cutlass.Constexpr,
        sums: cute.Tensor, factors: cute.Tensor, tile: WorkTile, warp, lane,
    ):  # fmt: skip
        largest, quad = ctx.smem.largest, lane % QUAD
        codes, scales = ctx.operands.y, ctx.operands.y_scale
        pairs = cute.make_rmem_tensor(kind.column_groups, Uint32)
        for n in cutlass.range_constexpr(kind.column_groups):
            weights = self._weights(factors, n, lane)
            low, high = (
                self._swiglu(sums[4 * n + c], sums[4 * n + 2 + c]) * weights[c] for c in range(2)
            )
            pairs[n] = Uint32(transpose(Int32(quant.pack_bf16(low, high))))
            own = quant.amax_bf16([pairs[n]], QUAD)
            if quad == 0:
                largest[warp, n * 8 + lane // QUAD] = own
        self._meet(largest)
        scale = cute.make_rmem_tensor(kind.column_groups, Int32)
        for n in cutlass.range_constexpr(kind.column_groups):
            amax = self._amax(largest, n * 8 + lane // QUAD, quad)
            scale[n] = quant.e8m0_scale_e4m3(amax)
        channel = tile.row_tile * (self.panels * PANEL_ROWS) + warp * UNIT_ROWS + 2 * quad
        for n in cutlass.range_constexpr(kind.column_groups):
            column = n * 8 + lane // QUAD
            if column < tile.count:
                row = tile.first + column
                self._store_codes(codes, row, channel, pairs[n], scale[n])
                if warp == 0 and quad == 0:
                    scales[row, tile.row_tile] = Uint8(scale[n])

    def _meet(self, largest: cute.Tensor) -> None:
        """Wait for all consumers."""
        threads = WARP * cute.size(largest, mode=[0])
        cute.arch.barrier(barrier_id=CONSUMERS_MEET, number_of_threads=threads)

    @cute.jit
    def _amax(self, largest: cute.Tensor, column, quad) -> Float32:
        """The largest magnitude of a column, of which the lanes of a quad read some warps' each."""
        count = cute.size(largest, mode=[0]) // QUAD
        source = largest.iterator + cute.assume(
            column * cute.size(largest, mode=[0]) + quad * count, divby=count
        )
        found = cute.make_rmem_tensor(count, Float32)
        cute.autovec_copy(cute.make_tensor(source, cute.make_layout(count)), found)
        amax = found[0]
        for i in range(1, count):
            amax = cute.arch.fmax(amax, found[i], nan=True)
        for step in (1, 2):
            amax = cute.arch.fmax(amax, cute.arch.shuffle_sync_bfly(amax, step), nan=True)
        return amax

    @cute.jit
    def _store_codes(self, target: cute.Tensor, row, channel, pair: Uint32, scale: Int32):
        """Two channels of a row."""
        codes = cute.recast_tensor(quant.quantize_e4m3([pair] * 2, scale), Uint16)
        offset = Int64(row) * target.stride[0] + channel
        pointer_at(target.iterator, offset, Uint16, align=2).store(codes[0])


class Rows:
    """Rows of an expert's output, bf16, by token and its place.

    Args:
        panels: half of a tile's.
    """

    def __init__(self, panels: int, top_k: int):
        self.panels = panels
        self.top_k = top_k

    @cute.jit
    def load_columns(
        self, ctx: ProductContext, kind: cutlass.Constexpr, is_shared: cutlass.Constexpr,
        tile: WorkTile, lane,
    ):  # fmt: skip
        """Rows of y of columns 8 n + lane / 4."""
        found = cute.make_rmem_tensor(kind.column_groups, Int32)
        found.fill(0)
        for n in cutlass.range_constexpr(kind.column_groups):
            column = n * 8 + lane // 4
            if column < tile.count:
                token, place = tile.first + column, Int32(self.top_k)
                if cutlass.const_expr(not is_shared):
                    pair = ctx.operands.pairs[tile.first + column]
                    token, place = pair // self.top_k, pair % self.top_k
                found[n] = token * (self.top_k + 1) + place
        return found

    @cute.jit
    def store(
        self, ctx: ProductContext, kind: cutlass.Constexpr, is_shared: cutlass.Constexpr,
        sums: cute.Tensor, found: cute.Tensor, tile: WorkTile, warp, lane,
    ):  # fmt: skip
        y = ctx.operands.y
        rows = self.panels * PANEL_ROWS
        channel = tile.row_tile * (2 * rows) + warp * UNIT_ROWS
        for n in cutlass.range_constexpr(kind.column_groups):
            is_used = n * 8 + lane // 4 < tile.count
            row = self._row(found, n, lane)
            for r in cutlass.range_constexpr(2):
                values = [sums[4 * n + 2 * r + c] for c in range(2)]
                store_channels(y, row, channel + r * rows, *values, is_used, lane)

    def _row(self, found: cute.Tensor, n: int, lane) -> Int32:
        """Row of column `lane / 4` of a group of eight."""
        return found[n]
