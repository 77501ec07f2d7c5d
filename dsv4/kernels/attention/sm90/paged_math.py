"""Math warpgroup of the paged swap-AB kernel: rows that are no keys may stand anywhere in a key
tile, scores may have a factor per head, and the output may be rotated."""

import cutlass
from cutlass import cute

from dsv4.kernels.attention.inverse_rope import rope_row, rotation
from dsv4.kernels.attention.key_tiles import TILE_INFO_WORDS
from dsv4.kernels.attention.paged_config import PagedFmhaConfig
from dsv4.kernels.attention.query_norm import query_norm
from dsv4.kernels.attention.sm90.paged_score import positive_scale
from dsv4.kernels.attention.sm90.plan import SwapAbPlan
from dsv4.kernels.attention.sm90.swap_ab_cluster import SwapAbCluster
from dsv4.kernels.attention.sm90.swap_ab_combine import SwapAbCombine
from dsv4.kernels.attention.sm90.swap_ab_context import SwapAbContext
from dsv4.kernels.attention.sm90.swap_ab_math import MathFragments, MathWarpgroup, TileMask
from dsv4.kernels.attention.sm90.swap_ab_softmax import ReductionScratch, reduce_over_keys
from dsv4.kernels.attention.softmax import LN_2
from dsv4.kernels.kit.mbarrier import Cursor
from dsv4.kernels.kit.wgmma import by_row


class PagedMathWarpgroup(MathWarpgroup):
    """Masks keys by a bit each; rows that are no keys have been filled with zeros."""

    is_paged = True

    def __init__(
        self,
        config: PagedFmhaConfig,
        plan: SwapAbPlan,
        combine: SwapAbCombine,
        cluster: SwapAbCluster | None,
    ):
        super().__init__(config, plan, combine, cluster)
        self.norm = query_norm(config)

    @cute.jit
    def _load_scales(self, ctx: SwapAbContext, f: MathFragments, index):
        head, _, token = ctx.tiling.coordinates(index)
        q_factor, scale = ctx.operands.q_factor, f.heads.scale
        f.heads.largest.fill(-cutlass.Float32.inf)
        f.heads.negative.fill(0)
        scale.fill(self.scale_log2)
        if token < q_factor.shape[0]:
            own = [(c, j, head + 8 * j + f.lane % 4 * 2 + c) for c, j in f.heads.columns()]
            factors = self._factors(q_factor, token, [head for _, _, head in own], f.lane)
            for (c, j, _), factor in zip(own, factors):
                factor = self.scale_log2 * factor
                scale[c, j] = positive_scale(factor)
                bit = cutlass.select_(factor < 0.0, cutlass.Int32(1 << 2 * j + c), cutlass.Int32(0))
                f.heads.negative[0] |= bit

    def _factors(self, q_factor: cute.Tensor, token, heads: list, lane) -> list:
        """Factors of heads, which eight lanes of every warp have."""
        if self.norm is None:
            return [q_factor[token, head] for head in heads]
        return self.norm.of_lanes(q_factor, token, heads, lane // 4, 4)

    @cute.jit
    def _mask(
        self,
        ctx: SwapAbContext,
        f: MathFragments,
        scratch: ReductionScratch,
        mask: TileMask,
        kv: Cursor,
    ):
        if f.heads.negative[0] != 0:
            self._negate(f)
        # A warp has the scores of 16 rows.
        word = ctx.smem.tile_info[kv.stage * TILE_INFO_WORDS + f.warp // 2] >> f.warp % 2 * 16
        if word & 0xFFFF != 0xFFFF:
            s = by_row(f.s)
            for r in cutlass.range_constexpr(2):
                if word >> f.lane // 4 + 8 * r & 1 == 0:
                    for c, j in f.heads.columns():
                        s[r, c, j] = -cutlass.Float32.inf

        if ctx.operands.max_logits.shape[0] > 0:
            values, heads = by_row(f.s), f.heads
            for c, j in heads.columns():
                score = cute.arch.fmax(values[0, c, j], values[1, c, j]) * heads.scale[c, j]
                heads.largest[c, j] = cute.arch.fmax(heads.largest[c, j], score)

    @cute.jit
    def _negate(self, f: MathFragments):
        """Give the scores of a head the sign of its factor: the softmax takes its maxima before it
        multiplies, and -inf is to stay what it is."""
        s = by_row(f.s)
        for c, j in f.heads.columns():
            is_negative = f.heads.negative[0] >> 2 * j + c & 1 != 0
            for r in cutlass.range_constexpr(2):
                s[r, c, j] = cutlass.select_(is_negative, -s[r, c, j], s[r, c, j])

    @cute.jit
    def _store_largest(self, ctx: SwapAbContext, f: MathFragments, coord):
        max_logits = ctx.operands.max_logits
        if coord.token < max_logits.shape[0]:
            f.scratch.sync()
            largest = f.heads.largest
            reduce_over_keys(cute.arch.fmax, largest, f.scratch.tile_max, f.scratch)
            # The next work tile's maxima go to the same place.
            f.scratch.sync()
            if f.warp == 0 and f.lane < 4:
                for c, j in f.heads.columns():
                    head = coord.head + 8 * j + 2 * f.lane + c
                    if cutlass.const_expr(ctx.tiling.has_pieces):
                        if ctx.tiling.num_splits > 1:
                            own_head = head - coord.head
                            self.combine.store_largest(ctx, coord, own_head, largest[c, j])
                        else:
                            max_logits[coord.token, head] = largest[c, j] * LN_2
                    else:
                        max_logits[coord.token, head] = largest[c, j] * LN_2

    @cute.jit
    def _load_turns(self, ctx: SwapAbContext, f: MathFragments, index, turns: cute.Tensor):
        """Cosines and sines of a lane's two pairs of columns, if there is a table: two latencies,
        one behind the other, that nothing waits for before the keys are there."""
        rope = ctx.operands.rope
        if rope.shape[0] > 0:
            token = ctx.tiling.coordinates(index)[2]
            row = rope_row(rope, ctx.operands.keys.positions, token)
            for r in cutlass.range_constexpr(2):
                turns[0, r], turns[1, r] = rotation(rope, row, self._pair(f, r))

    def _pair(self, f: MathFragments, r: int):
        """Pair of columns that row `r` of a lane's two of a chunk belongs to."""
        return (f.warp * 16 + 8 * r + f.lane // 4) // 2

    @cute.jit
    def _rotate(self, ctx: SwapAbContext, f: MathFragments, turns: cute.Tensor):
        """Rotate the last chunk of the accumulators, if there is a table: columns are rows of the
        fragment, a pair of them four lanes apart."""
        if ctx.operands.rope.shape[0] > 0:
            values, is_first = by_row(f.chunks[-1]), f.lane // 4 % 2 == 0
            for r in cutlass.range_constexpr(2):
                cosine, sine = turns[0, r], turns[1, r]
                sine = cutlass.select_(is_first, sine, -sine)
                for c, j in f.heads.columns():
                    own = values[r, c, j]
                    values[r, c, j] = own * cosine + sine * cute.arch.shuffle_sync_bfly(own, 4)
