"""Score warpgroup of the paged heads-in-M kernel: rows of a key tile that are no keys may stand
anywhere in it."""

import operator

import cutlass
from cutlass import cute

from dsv4.kernels.attention.sm90.heads_m_context import HeadsMContext
from dsv4.kernels.attention.sm90.heads_m_score import ScoreFragments, ScoreWarpgroup
from dsv4.kernels.attention.sm90.plan import GATHER_WARPS, WARP_KEYS
from dsv4.kernels.kit.mbarrier import Cursor
from dsv4.kernels.kit.reduce import tree
from dsv4.kernels.kit.wgmma import by_row


class PagedScoreWarpgroup(ScoreWarpgroup):
    """Masks keys by a bit each; rows that are no keys have been filled with zeros."""

    def _tile_info(self, ctx: HeadsMContext, kv: Cursor):
        """A word of each warp that has gathered rows of the tile."""
        words = cute.make_rmem_tensor(GATHER_WARPS, cutlass.Int32)
        start = ctx.smem.tile_info.iterator + kv.stage * GATHER_WARPS
        start = cute.make_ptr(cutlass.Int32, start.toint(), start.memspace, assumed_align=16)
        cute.autovec_copy(cute.make_tensor(start, cute.make_layout(GATHER_WARPS)), words)
        return tuple(words[i] for i in range(GATHER_WARPS))

    @cute.jit
    def _mask(self, ctx: HeadsMContext, f: ScoreFragments, kv: Cursor, tile_info):
        all_keys = 2**WARP_KEYS - 1
        if tree(operator.and_, list(tile_info)) & all_keys != all_keys:
            s = by_row(f.s)
            words = [word >> f.lane % 4 * 2 for word in tile_info]
            for j in cutlass.range_constexpr(cute.size(s, mode=[2])):
                for c in cutlass.range_constexpr(2):
                    is_key = words[j * 8 // WARP_KEYS] & 1 << j * 8 % WARP_KEYS + c != 0
                    for r in cutlass.range_constexpr(2):
                        s[r, c, j] = cutlass.select_(is_key, s[r, c, j], -cutlass.Float32.inf)
        return tile_info[0] > all_keys
