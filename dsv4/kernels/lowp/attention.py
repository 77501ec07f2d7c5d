"""Launch of attention over codes, the same for every architecture: arguments, descriptors, and the
maxima of queries where a head's share one scale, and the tiles that a mask lets them see.
"""

from __future__ import annotations

import cutlass
from cutlass import Int32, cute

from dsv4.kernels.lowp.config import QuantizedAttentionConfig
from dsv4.kernels.lowp.load_warp import LoadWarp, make_key_map, make_row_map, make_value_map
from dsv4.kernels.lowp.mask_tiles import MaskTiles
from dsv4.kernels.lowp.plan import TilePlan
from dsv4.kernels.lowp.query_maxima import QueryMaxima
from dsv4.kernels.lowp.work import Operands, WorkTiles


class Attention:
    """Attention of one configuration; an architecture adds its `kernel(maps, operands)`."""

    # Lanes that arrive for their warp at an mbarrier; a checker that follows every thread by
    # itself needs all 32.
    lanes_per_warp = 1

    def __init__(self, config: QuantizedAttentionConfig, plan: TilePlan):
        self.config = config
        self.plan = plan
        self.tiles = WorkTiles(config, plan.groups, plan.group_queries)
        self.loader = LoadWarp(plan)
        self.maxima = QueryMaxima(config)
        self.lists = MaskTiles(self.tiles)

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,  # [b, Hq, L, d] bf16 or fp16
        k_codes: cute.Tensor,  # [b, Hk, S, dp] int8 or e4m3; FP4 [.., dp / 2]
        k_scale: cute.Tensor,  # [b, Hk, tiles, scales] fp32; of FP4 e4m3
        v_codes: cute.Tensor,  # [b, Hk, tiles, dp, n] e4m3; FP4 [.., n / 2]; fp16 [.., n, dp]
        out: cute.Tensor,  # [b, Hq, L, d], written
        stream,
        *,
        v_scale: cute.Tensor,  # [N, Hk, dp] fp32
        v_block_scale: cute.Tensor,  # [b, Hk, tiles, 8 dp] e4m3, of FP4
        km: cute.Tensor,  # [N, Hk, d], or [0, ..]: nothing was taken off
        vm: cute.Tensor,  # [N, Hk, d] fp32
        k_smooth: cute.Tensor,  # [b, Hk, S, d], of smoothed queries
        attn_mask: cute.Tensor,  # [b, Hq, L, S] uint8 or fp32, or [0, ..]
        cu_seqlens_q: cute.Tensor,  # [N + 1] int32 of packed sequences
        cu_seqlens_k: cute.Tensor,
        lse: cute.Tensor,  # [b, Hq, L] fp32, written, or [0, ..]: not wanted
        workspace: cute.Tensor,  # maxima of blocks of queries, lists of tiles of a mask
        factor: Int32,
        section: Int32,
        num_ctas: Int32,
    ):
        """Launch the attention."""
        plan = self.plan
        maps = (
            make_row_map(q, plan.tile_queries),
            make_key_map(plan, k_codes),
            make_value_map(plan, v_codes),
        )
        if cutlass.const_expr(plan.smooth_bytes > 0):
            maps = (*maps, make_row_map(k_smooth, plan.tile_keys))
        of_values = v_block_scale if self.config.pv == "nvfp4" else v_scale
        operands = Operands(
            q, k_codes, k_scale, out, of_values, km, vm, cu_seqlens_q, cu_seqlens_k, lse, factor,
            section, attn_mask, workspace,
        )  # fmt: skip
        if cutlass.const_expr(self.config.has_query_maxima):
            self.maxima.launch(operands, stream)
        if cutlass.const_expr(self.config.mask != "none"):
            self.lists.launch(operands, stream)
        self.kernel(maps, operands).launch(
            grid=[num_ctas, 1, 1],
            block=[plan.warps.threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=True,
        )
