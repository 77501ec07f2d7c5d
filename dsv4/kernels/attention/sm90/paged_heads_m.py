"""Heads-in-M attention kernel of Hopper over a paged cache: the gather is part of the launch.

The kernel of `heads_m` with another source of keys: a warpgroup gathers the rows that a token's
index lists, or its request's page tables, name:

    gather warpgroup   key spans, Q (TMA), rows of pages -> shared memory
    score warpgroup    S = Q K^T, softmax, P -> shared memory, one key tile ahead of
    output warpgroups  O += P V, each over half of the columns

`print(PagedHeadsMPlan(512))` shows the budgets and the barrier graph.
"""

from dataclasses import replace
from typing import NamedTuple

import cutlass
from cutlass import cute
from cutlass.experimental.cuda.tensor_map import TensorMap

from dsv4.kernels.attention.paged_config import PagedFmhaConfig
from dsv4.kernels.attention.paged_context import PagedArguments
from dsv4.kernels.attention.paged_keys import PagedKeys
from dsv4.kernels.attention.sm90.gather_warps import GatherWarpgroup
from dsv4.kernels.attention.sm90.heads_m_combine import HeadsMCombine
from dsv4.kernels.attention.sm90.heads_m_context import HeadsMContext, allocate, init_barriers
from dsv4.kernels.attention.sm90.heads_m_epilogue import Epilogue
from dsv4.kernels.attention.sm90.heads_m_tiling import HeadsMTiling, make_tiling
from dsv4.kernels.attention.sm90.paged_output import PagedOutputWarpgroups
from dsv4.kernels.attention.sm90.paged_score import PagedScoreWarpgroup
from dsv4.kernels.attention.sm90.plan import HEADS, PagedHeadsMPlan
from dsv4.kernels.kit import pdl
from dsv4.kernels.kit.epilogue import WARP_ROWS
from dsv4.kernels.kit.mbarrier import FencedRing
from dsv4.kernels.kit.scheduler import (
    CLUSTER_SHAPE,
    DynamicTailScheduler,
    StaticTileScheduler,
    Throttle,
    cluster_grid,
    make_tail_scheduler,
)
from dsv4.kernels.kit.tma import make_head_tile_descriptor, make_row_descriptor


class Operands(NamedTuple):
    """Operands of a launch, beside the TMA descriptors."""

    keys: PagedKeys
    q_factor: cute.Tensor  # [T, n_h] fp32, or [0, n_h]: 1
    rope: cute.Tensor  # [positions, 64] fp32, or [0, 64]: none
    sink_logits: cute.Tensor
    o: cute.Tensor
    lse: cute.Tensor
    max_logits: cute.Tensor
    workspace: cute.Tensor
    tiling: HeadsMTiling
    tail_scheduler: DynamicTailScheduler


class PagedHeadsM:
    """Attention of any number of heads over the pages of two pools (sm_90a)."""

    # Lanes that arrive for their warp at an mbarrier; a checker that follows every thread by
    # itself needs all 32.
    lanes_per_warp = 1

    def __init__(self, config: PagedFmhaConfig):
        self.config = config
        self.plan = PagedHeadsMPlan(config.head_dim, self.lanes_per_warp, config.kv_format == "fp8")
        heads = config.num_query_heads
        # Head tiles of fewer heads are possible where they divide the heads evenly.
        self.has_even_tiles = heads <= HEADS or heads % HEADS == 0
        # One CTA reads a token's keys: where there are CTAs for all SMs, they wait for DRAM.
        self.is_read_bound = heads <= HEADS and config.head_dim == 512
        # Two CTAs read a token's keys, one for each head tile.
        self.has_neighbours = heads > HEADS

        # ==== roles ====
        self.combine = HeadsMCombine(config, self.plan)
        self.epilogue = Epilogue(heads, self.plan)
        is_gate = config.sink_mode == "swa_gate"
        self.loader = GatherWarpgroup(self.plan, self.has_even_tiles, is_gate)
        self.scorer = PagedScoreWarpgroup(config, self.plan, self.combine)
        self.outputs = PagedOutputWarpgroups(self.plan, self.combine, self.epilogue)

    # ---- host ----

    @cute.jit
    def launch(self, arguments: PagedArguments, stream):
        """Build the TMA descriptors, choose tiling and scheduler, launch."""
        q, num_splits, num_sms = arguments.q, arguments.num_splits, arguments.num_sms
        plan, num_heads = self.plan, self.config.num_query_heads
        tiling = make_tiling(
            *(num_heads, HEADS, self.has_even_tiles, q.shape[0], num_splits, num_sms),
            *(plan.subtiles == 2, self.combine.column_groups, arguments.workspace.shape[0]),
        )
        tile_rows = tiling.tile_heads if self.has_even_tiles else num_heads
        maps = (
            make_head_tile_descriptor(q, tile_rows, plan.chunk, HEADS),
            make_row_descriptor(arguments.o, q.iterator, plan.chunk, (WARP_ROWS, plan.chunk)),
        )
        tail_scheduler = make_tail_scheduler(tiling.work_tiles, num_sms, self.is_read_bound)
        operands = Operands(
            arguments.keys(),
            arguments.q_factor,
            arguments.rope,
            arguments.sink_logits,
            arguments.o,
            arguments.lse,
            arguments.max_logits,
            arguments.workspace,
            tiling,
            tail_scheduler,
        )
        alone = {"grid": [tail_scheduler.grid(tiling.work_tiles), 1, 1]}
        clusters = {
            "grid": [cluster_grid(tiling.work_tiles, num_sms), 1, 1],
            "cluster": CLUSTER_SHAPE,
        }
        plain_grid = clusters if self.has_neighbours else alone
        launch = {
            "block": [plan.warps.threads, 1, 1],
            "stream": stream,
            "min_blocks_per_mp": 1,
            "use_pdl": True,
        }
        # Two kernels, as in `heads_m`.
        if num_splits == 1 and tiling.column_slices == 1:
            self.kernel(maps, operands, True).launch(**plain_grid, **launch)
        else:
            self.kernel(maps, operands, False).launch(**clusters, **launch)

    # ---- device ----

    @cute.kernel
    def kernel(
        self,
        maps: tuple[
            cutlass.GridConstant[TensorMap],  # q
            cutlass.GridConstant[TensorMap],  # o
        ],
        operands: Operands,
        is_plain: cutlass.Constexpr,  # neither splits nor column slices
    ):
        """Initialise, then send every warp to its role."""
        q_map, o_map = maps
        plan, tiling = self.plan, operands.tiling
        throttle = Throttle.NONE
        if cutlass.const_expr(is_plain):
            tiling = tiling.plain(self.config.num_query_heads, HEADS)
        scheduler = StaticTileScheduler(tiling.work_tiles)
        if cutlass.const_expr(is_plain and self.is_read_bound):
            scheduler = operands.tail_scheduler
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        group = warp // 4
        smem, pipes = allocate(plan)
        if cutlass.const_expr(not plan.is_fp8):
            pipes = replace(pipes, kv=FencedRing(**vars(pipes.kv)))
        ctx = HeadsMContext(operands, tiling, scheduler, throttle, smem, pipes)
        if warp == 0:
            with cute.arch.elect_one():
                init_barriers(plan, pipes, tiling.column_slices, throttle)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        if group >= plan.warps["gather"].first // 4:
            if cutlass.const_expr(plan.registers["gather"] < plan.registers.at_launch):
                cute.arch.setmaxregister_decrease(plan.registers["gather"])
            pdl.launch_dependents()
            self.loader.gather(ctx, q_map, operands.keys)
        elif group == plan.warps["score"].first // 4:
            if cutlass.const_expr(plan.registers["score"] < plan.registers.at_launch):
                cute.arch.setmaxregister_decrease(plan.registers["score"])
            else:
                cute.arch.setmaxregister_increase(plan.registers["score"])
            self.scorer.score(ctx)
        else:
            cute.arch.setmaxregister_increase(plan.registers["output"])
            half = group - plan.warps["output"].first // 4
            o_maps = (o_map,) if is_plain and self.epilogue.can_stage else ()
            self.outputs.output(ctx, half, o_maps)
