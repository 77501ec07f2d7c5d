"""Attention kernel of Hopper over FP8 entries whose codes are multiplied as they are.

Entries whose groups share one scale need no conversion: the scale of a key multiplies its score,
and goes into its weight. One CTA computes 64 heads of a token, all of its keys:

    gather warpgroup   key spans, entries of pages -> shared memory (cp.async)
    score warpgroup    Q as codes; S = Q K^T, softmax, P -> shared memory, one key tile ahead of
    output warpgroups  O^T += V^T P^T, each over half of the columns

Queries and weights are one e4m3 number, or the sum of two (`compute`). The 64 rotated columns are
bf16 in entries, and stay so in both products. `print(CodesPlan(512))` shows the budgets.
"""

from typing import NamedTuple

import cutlass
from cutlass import cute

from dsv4.kernels.attention.paged_config import TERMS, PagedFmhaConfig
from dsv4.kernels.attention.paged_context import PagedArguments
from dsv4.kernels.attention.paged_keys import PagedKeys
from dsv4.kernels.attention.sm90.codes_context import allocate
from dsv4.kernels.attention.sm90.codes_gather import CodesGather
from dsv4.kernels.attention.sm90.codes_output import CodesOutputWarpgroups
from dsv4.kernels.attention.sm90.codes_plan import CodesPlan
from dsv4.kernels.attention.sm90.codes_score import CodesScoreWarpgroup
from dsv4.kernels.attention.sm90.heads_m_combine import HeadsMCombine
from dsv4.kernels.attention.sm90.heads_m_context import HeadsMContext
from dsv4.kernels.attention.sm90.heads_m_tiling import HeadsMTiling, make_tiling
from dsv4.kernels.attention.sm90.plan import HEADS
from dsv4.kernels.kit import mbarrier, pdl
from dsv4.kernels.kit.scheduler import (
    CLUSTER_SHAPE,
    DynamicTailScheduler,
    StaticTileScheduler,
    Throttle,
    cluster_grid,
    make_tail_scheduler,
)


class Operands(NamedTuple):
    """Operands of a launch."""

    q: cute.Tensor
    keys: PagedKeys
    q_factor: cute.Tensor  # as in `PagedArguments`
    rope: cute.Tensor
    sink_logits: cute.Tensor
    o: cute.Tensor
    lse: cute.Tensor
    max_logits: cute.Tensor
    workspace: cute.Tensor  # of splits, of which there are none
    tiling: HeadsMTiling
    tail_scheduler: DynamicTailScheduler


class PagedCodes:
    """Attention over FP8 entries with products of FP8 codes, without splits (sm_90a)."""

    # As in `FmhaHeadsM`.
    lanes_per_warp = 1

    def __init__(self, config: PagedFmhaConfig):
        self.config = config
        heads, terms = config.num_query_heads, TERMS[config.compute]
        self.plan = CodesPlan(config.head_dim, self.lanes_per_warp, terms=terms)
        # Two CTAs read a token's keys, one for each head tile.
        self.has_neighbours = heads > HEADS
        combine = HeadsMCombine(config, self.plan)
        self.gather = CodesGather(self.plan, config.sink_mode == "swa_gate")
        self.scorer = CodesScoreWarpgroup(config, self.plan, combine)
        self.outputs = CodesOutputWarpgroups(self.plan, combine, heads)

    @cute.jit
    def launch(self, arguments: PagedArguments, stream):
        """Choose the scheduler, and launch."""
        q, num_sms, heads = arguments.q, arguments.num_sms, self.config.num_query_heads
        one = cutlass.Int32(1)
        has_even_tiles = heads <= HEADS or heads % HEADS == 0
        tiling = make_tiling(
            heads, HEADS, has_even_tiles, q.shape[0], one, num_sms, False,
            self.plan.half_dim // 8, (), arguments.workspace.shape[0],
        )  # fmt: skip
        scheduler = make_tail_scheduler(tiling.work_tiles, num_sms, not self.has_neighbours)
        operands = Operands(
            q,
            arguments.keys(),
            arguments.q_factor,
            arguments.rope,
            arguments.sink_logits,
            arguments.o,
            arguments.lse,
            arguments.max_logits,
            arguments.workspace,
            tiling,
            scheduler,
        )
        grid = {"grid": [scheduler.grid(tiling.work_tiles), 1, 1]}
        if cutlass.const_expr(self.has_neighbours):
            grid = {
                "grid": [cluster_grid(tiling.work_tiles, num_sms), 1, 1],
                "cluster": CLUSTER_SHAPE,
            }
        self.kernel(operands).launch(
            **grid,
            block=[self.plan.warps.threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, operands: Operands):
        """Initialise, then send every warp to its role."""
        plan = self.plan
        tiling = operands.tiling.plain(self.config.num_query_heads, HEADS)
        scheduler = operands.tail_scheduler
        if cutlass.const_expr(self.has_neighbours):
            scheduler = StaticTileScheduler(tiling.work_tiles)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        group = warp // 4
        smem, pipes = allocate(plan)
        ctx = HeadsMContext(operands, tiling, scheduler, Throttle.NONE, smem, pipes)
        if warp == 0:
            with cute.arch.elect_one():
                names = (edge.name for edge in plan.barriers.edges)
                mbarrier.init(plan.barriers, {name: getattr(pipes, name) for name in names})
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        if group == plan.warps["score"].first // 4:
            cute.arch.setmaxregister_decrease(plan.registers["score"])
            self.scorer.score(ctx)
        elif group == plan.warps["gather"].first // 4:
            cute.arch.setmaxregister_decrease(plan.registers["gather"])
            pdl.launch_dependents()
            self.gather.gather(ctx)
        else:
            cute.arch.setmaxregister_increase(plan.registers["output"])
            if group == plan.warps["output"].first // 4:
                self.outputs.output(ctx, 0)
            else:
                self.outputs.output(ctx, 1)
