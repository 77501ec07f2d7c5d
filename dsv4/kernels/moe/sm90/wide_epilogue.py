"""Epilogues of products of many tokens: what they need of a column, a lane holds for four groups of
eight columns, so that few registers wait for the sums."""

import cutlass
from cutlass import Float32, Int32, cute

from dsv4.kernels.moe.sm90.context import WorkTile
from dsv4.kernels.moe.sm90.epilogue import Rows, SwiGlu
from dsv4.kernels.moe.sm90.wide_context import WideContext

WARP = 32
GROUPS = WARP // 8  # of columns that a register of each lane holds


class WideSwiGlu(SwiGlu):
    """`SwiGlu` with routing weights in the order of tiles."""

    @cute.jit
    def load_columns(
        self, ctx: WideContext, kind: cutlass.Constexpr, is_shared: cutlass.Constexpr,
        tile: WorkTile, lane,
    ):  # fmt: skip
        """Routing weights of columns `lane`, `lane` + 32 and so on."""
        held = cute.make_rmem_tensor(-(-kind.tokens // WARP), Float32)
        held.fill(1.0)
        if cutlass.const_expr(not is_shared):
            for i in cutlass.range_constexpr(cute.size(held)):
                column = i * WARP + lane
                if column < tile.count:
                    held[i] = ctx.factors[tile.first + column]
        return held

    def _weights(self, factors: cute.Tensor, n: int, lane) -> list[Float32]:
        first = n % GROUPS * 8 + lane % 4 * 2
        return [cute.arch.shuffle_sync(factors[n // GROUPS], first + c) for c in range(2)]


class WideRows(Rows):
    """`Rows` of tiles of many tokens."""

    @cute.jit
    def load_columns(
        self, ctx: WideContext, kind: cutlass.Constexpr, is_shared: cutlass.Constexpr,
        tile: WorkTile, lane,
    ):  # fmt: skip
        """Rows of y of columns `lane`, `lane` + 32 and so on."""
        held = cute.make_rmem_tensor(-(-kind.tokens // WARP), Int32)
        held.fill(0)
        for i in cutlass.range_constexpr(cute.size(held)):
            column = i * WARP + lane
            if column < tile.count:
                token, place = tile.first + column, Int32(self.top_k)
                if cutlass.const_expr(not is_shared):
                    pair = ctx.operands.pairs[tile.first + column]
                    token, place = pair // self.top_k, pair % self.top_k
                held[i] = token * (self.top_k + 1) + place
        return held

    def _row(self, found: cute.Tensor, n: int, lane) -> Int32:
        return cute.arch.shuffle_sync(found[n // GROUPS], n % GROUPS * 8 + lane // 4)
