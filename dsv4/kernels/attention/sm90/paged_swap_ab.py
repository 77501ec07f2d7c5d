"""Swap-AB attention kernel of Hopper over a paged cache: the gather is part of the launch.

The kernel of `swap_ab` with another source of keys: a warpgroup gathers the rows that a token's
index lists, or its request's page tables, name:

    gather warpgroup  key spans, Q (TMA), rows of pages -> shared memory
    math warpgroup    S^T = K Q^T, softmax, P^T -> shared memory, O^T += V^T P^T

`print(PagedSwapAbPlan(512, 16, 1))` shows the budgets and the barrier graph.
"""

from dataclasses import replace
from typing import NamedTuple

import cutlass
from cutlass import cute
from cutlass.experimental.cuda.tensor_map import TensorMap

from dsv4.kernels.attention.gather_fp8 import Fp8Rows
from dsv4.kernels.attention.paged_config import PagedFmhaConfig
from dsv4.kernels.attention.paged_context import PagedArguments
from dsv4.kernels.attention.paged_keys import PagedKeys
from dsv4.kernels.attention.sm90.gather_rows import Bf16Rows
from dsv4.kernels.attention.sm90.gather_slots import SwapAbSlots
from dsv4.kernels.attention.sm90.paged_math import PagedMathWarpgroup
from dsv4.kernels.attention.sm90.plan import (
    CHUNK,
    KEYS,
    PagedSwapAbPlan,
)
from dsv4.kernels.attention.sm90.swap_ab_combine import SwapAbCombine
from dsv4.kernels.attention.sm90.swap_ab_context import SwapAbContext, SwapAbTiling, allocate
from dsv4.kernels.kit import mbarrier, pdl
from dsv4.kernels.kit.mbarrier import FencedRing
from dsv4.kernels.kit.scheduler import CLUSTER_SHAPE, StaticTileScheduler, cluster_grid
from dsv4.kernels.kit.tma import make_row_descriptor, prefetch_descriptors, tma_load


class Operands(NamedTuple):
    """Operands of a launch, beside the TMA descriptor."""

    keys: PagedKeys
    q_factor: cute.Tensor  # [T, n_h] fp32, or [0, n_h]: 1
    rope: cute.Tensor  # [positions, 64] fp32, or [0, 64]: none
    sink_logits: cute.Tensor
    o: cute.Tensor
    lse: cute.Tensor
    max_logits: cute.Tensor
    workspace: cute.Tensor
    num_splits: cutlass.Int32
    work_tiles: cutlass.Int32
    by_splits: cute.FastDivmodDivisorV2


class PagedSwapAB:
    """Attention of few query heads over the pages of two pools (sm_90a).

    Args:
        tile_heads: heads of a CTA, 8, 16 or 24; those of a token, up to 128, go to CTAs side by
            side.
    """

    # Lanes that arrive for their warp at an mbarrier; a checker that follows every thread by
    # itself needs all 32.
    lanes_per_warp = 1

    def __init__(self, config: PagedFmhaConfig, tile_heads: int):
        self.config = config
        self.head_tiles = config.num_query_heads // tile_heads
        is_fp8 = config.kv_format == "fp8"
        sizes = (config.head_dim, tile_heads, self.head_tiles)
        self.plan = PagedSwapAbPlan(*sizes, self.lanes_per_warp, is_fp8)

        # ==== roles ====
        self.combine = SwapAbCombine(config, self.plan)
        self.is_gate = config.sink_mode == "swa_gate"
        if is_fp8:
            staged, warps = range(self.plan.pieces), self.plan.warps["gather"].count
            sizes = (config.head_dim, self.plan.slot_dim)
            self.rows = Fp8Rows(*sizes, staged, self.plan.ahead, warps)
        else:
            self.rows = Bf16Rows(self.plan.slot_dim, CHUNK)
        self.math = PagedMathWarpgroup(config, self.plan, self.combine)

    # ---- host ----

    @cute.jit
    def launch(self, arguments: PagedArguments, stream):
        """Build the TMA descriptor and launch."""
        q, num_splits, num_sms = arguments.q, arguments.num_splits, arguments.num_sms
        plan = self.plan
        q_map = make_row_descriptor(q, q.iterator, CHUNK, (plan.tile_heads, plan.head_dim))
        work_tiles = q.shape[0] * self.head_tiles * num_splits
        grid = {"grid": [cutlass.min(work_tiles, num_sms), 1, 1]}
        if cutlass.const_expr(self.head_tiles % 2 == 0):
            grid = {"grid": [cluster_grid(work_tiles, num_sms), 1, 1], "cluster": CLUSTER_SHAPE}
        operands = Operands(
            arguments.keys(),
            arguments.q_factor,
            arguments.rope,
            arguments.sink_logits,
            arguments.o,
            arguments.lse,
            arguments.max_logits,
            arguments.workspace,
            num_splits,
            work_tiles,
            cute.fast_divmod_create_divisor_v2(num_splits),
        )
        self.kernel(q_map, operands).launch(
            **grid,
            block=[plan.warps.threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=True,
        )

    # ---- device ----

    @cute.kernel
    def kernel(self, q_map: cutlass.GridConstant[TensorMap], operands: Operands):
        """Initialise, then send every warp to its role."""
        plan = self.plan
        tiling = SwapAbTiling(
            *(operands.num_splits, operands.work_tiles, plan.tile_heads, self.head_tiles),
            operands.by_splits,
        )
        scheduler = StaticTileScheduler(tiling.work_tiles)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem, pipes = allocate(plan)
        if cutlass.const_expr(not plan.is_fp8):
            pipes = replace(pipes, kv=FencedRing(**vars(pipes.kv)))
        if warp == 0:
            with cute.arch.elect_one():
                mbarrier.init(plan.barriers, vars(pipes))
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        ctx = SwapAbContext(operands, tiling, scheduler, smem, pipes)
        if warp >= plan.warps["gather"].first:
            self.gather(ctx, q_map, operands.keys)
        else:
            self.math.compute(ctx)

    @cute.jit
    def gather(self, ctx: SwapAbContext, q_map, keys: PagedKeys):
        """Load what every work tile needs."""
        lane = cute.arch.lane_idx()
        first = self.plan.warps["gather"].first
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx() - first)
        if warp == 0:
            prefetch_descriptors((q_map,))
        index, stop, step = ctx.scheduler.range_of(cute.arch.block_idx()[0])
        # Whatever ran before may still be writing the inputs, or reading what this launch writes.
        pdl.wait_for_previous_launch()
        phase = cutlass.Int32(1)
        kv = ctx.pipes.kv.producer()
        slots = SwapAbSlots(ctx, tuple(range(self.plan.slots_per_tile)))
        while index < stop:
            head, split, token = ctx.tiling.coordinates(index)
            if warp == 0:
                ctx.pipes.q.acquire(phase)
                if lane == 0:
                    ctx.pipes.q.expect(self.plan.q_bytes)
                    tma_load(q_map, ctx.smem.q_start, [0, head, 0, token], ctx.pipes.q.full)
            span = keys.span(token, split, ctx.tiling.by_splits, KEYS, self.is_gate)
            row = warp * self.rows.warp_keys + lane % self.rows.warp_keys
            word = keys.fetch(span, token, span.first, row, KEYS)
            if warp == 0:
                ctx.pipes.span.acquire(phase)
                if lane == 0:
                    span.store(ctx.smem.span)
                    cute.arch.mbarrier_arrive(ctx.pipes.span.full)
            phase ^= 1
            kv = self.rows.gather_tiles(slots, keys, span, token, word, warp, lane, kv)
            index += step
        # Not earlier: the next launch would delay these loads.
        pdl.launch_dependents()
