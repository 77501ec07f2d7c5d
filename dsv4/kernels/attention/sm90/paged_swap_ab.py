"""Swap-AB attention kernel of Hopper over a paged cache: the gather is part of the launch.

The kernel of `swap_ab` with another source of keys: a warpgroup gathers the rows that a token's
index lists, or its request's page tables, name:

    gather warpgroup  key spans, Q (TMA), rows of pages -> shared memory
    math warpgroup    S^T = K Q^T, softmax, P^T -> shared memory, O^T += V^T P^T

In small launches the CTAs of a head tile's splits are a cluster, and combine them through its
shared memory (`swap_ab_cluster`); in all others through the workspace (`swap_ab_combine`).

`print(PagedSwapAbPlan(512, 16, 1))` shows the budgets and the barrier graph.
"""

from dataclasses import replace
from typing import NamedTuple

import cutlass
from cutlass import cute
from cutlass.experimental.cuda.tensor_map import TensorMap

from dsv4.kernels.attention.key_span import TokenPieces
from dsv4.kernels.attention.paged_context import PagedArguments
from dsv4.kernels.attention.paged_keys import PagedKeys
from dsv4.kernels.attention.sm90.paged_math import PagedMathWarpgroup
from dsv4.kernels.attention.sm90.plan import PagedSwapAbPlan
from dsv4.kernels.attention.sm90.swap_ab import FmhaSwapAB
from dsv4.kernels.attention.sm90.swap_ab_cluster import SwapAbCluster
from dsv4.kernels.attention.sm90.swap_ab_context import SwapAbContext, SwapAbTiling, allocate
from dsv4.kernels.attention.sm90.swap_ab_gather import GatherWarps
from dsv4.kernels.attention.split_kv import meets_in_cluster
from dsv4.kernels.kit.mbarrier import FencedRing


class Operands(NamedTuple):
    """Operands of a launch, beside the TMA descriptor."""

    keys: PagedKeys
    q_factor: cute.Tensor  # [T, n_h] fp32, or [0, n_h]: 1; or squares: see `PagedArguments`
    rope: cute.Tensor  # [positions, 64] fp32, or [0, 64]: none
    sink_logits: cute.Tensor
    o: cute.Tensor
    lse: cute.Tensor
    max_logits: cute.Tensor
    workspace: cute.Tensor
    num_splits: cutlass.Int32
    work_tiles: cutlass.Int32
    by_splits: cute.FastDivmodDivisorV2
    by_tokens: cute.FastDivmodDivisorV2 | None  # where tokens have pieces
    is_clustered: cutlass.Boolean | None  # else: whether splits meet in a cluster


class PagedSwapAB(FmhaSwapAB):
    """Attention of few query heads over the pages of two pools (sm_90a); arguments as there."""

    math_type = PagedMathWarpgroup

    @property
    def has_pieces(self) -> bool:
        return self.config.batch_invariant

    def _make_plan(self, tile_heads: int) -> PagedSwapAbPlan:
        sizes = (self.config.head_dim, tile_heads, self.head_tiles)
        return PagedSwapAbPlan(*sizes, self.lanes_per_warp, self.config.kv_format == "fp8")

    def _make_loader(self) -> GatherWarps:
        return GatherWarps(self.plan, self.config.sink_mode == "swa_gate")

    def _make_cluster(self) -> SwapAbCluster | None:
        # How many pieces a token has is known on the device alone.
        return None if self.has_pieces else SwapAbCluster(self.config, self.plan)

    # ---- host ----

    def _grid(self, arguments: PagedArguments, work_tiles: cutlass.Int32) -> dict:
        """One launch for both ways to combine splits: it says how many CTAs a cluster has."""
        found = super()._grid(arguments, work_tiles)
        if self.has_pieces:
            return found
        is_clustered, most = self._is_clustered(arguments), found.get("cluster", (1, 1, 1))[0]
        ctas = cutlass.select_(is_clustered, work_tiles, found["grid"][0])
        cluster = cutlass.select_(is_clustered, arguments.num_splits, cutlass.Int32(most))
        return {"grid": [cutlass.Int32(ctas), 1, 1], "cluster": [cutlass.Int32(cluster), 1, 1]}

    def _is_clustered(self, arguments: PagedArguments) -> cutlass.Boolean:
        """Whether the splits of each head tile of a launch meet in a cluster."""
        groups = arguments.q.shape[0] * self.head_tiles
        return meets_in_cluster(groups, arguments.num_splits, arguments.num_sms)

    def _key_maps(self, arguments: PagedArguments) -> tuple[()]:
        return ()

    def _operands(self, arguments: PagedArguments, work_tiles: cutlass.Int32) -> Operands:
        by_tokens = None
        if cutlass.const_expr(self.has_pieces):
            tokens = cutlass.max(cutlass.Int32(arguments.q.shape[0]), 1)
            by_tokens = cute.fast_divmod_create_divisor_v2(tokens)
        return Operands(
            arguments.keys(),
            arguments.q_factor,
            arguments.rope,
            arguments.sink_logits,
            arguments.o,
            arguments.lse,
            arguments.max_logits,
            arguments.workspace,
            arguments.num_splits,
            work_tiles,
            cute.fast_divmod_create_divisor_v2(arguments.num_splits),
            by_tokens,
            None if self.has_pieces else self._is_clustered(arguments),
        )

    # ---- device ----

    @cute.kernel
    def kernel(self, maps: tuple[cutlass.GridConstant[TensorMap]], operands: Operands):
        """The work tiles of a CTA."""
        self.run(maps, operands)

    def _tiling(self, operands: Operands) -> SwapAbTiling:
        tiling = super()._tiling(operands)
        if self.has_pieces:
            pieces = TokenPieces(operands.num_splits)
            return tiling._replace(by_splits=pieces, by_tokens=operands.by_tokens)
        return tiling._replace(is_clustered=operands.is_clustered)

    def _allocate(self) -> tuple:
        smem, pipes = allocate(self.plan)
        if not self.plan.is_fp8:
            pipes = replace(pipes, kv=FencedRing(**vars(pipes.kv)))
        return smem, pipes

    @cute.jit
    def _send(self, ctx: SwapAbContext, warp, maps: tuple):
        if warp >= self.plan.warps["gather"].first:
            self.loader.gather(ctx, maps[0], ctx.operands.keys)
        else:
            self.math.compute(ctx)
