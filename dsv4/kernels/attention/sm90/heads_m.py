"""Heads-in-M attention kernel of Hopper: TMA, wgmma, one score and two output warpgroups.

One CTA computes 64 heads of one token (or one split of its keys). Keys come in tiles of 64,
compressed rows first, then the window; a key tile is fetched once and serves as K and as V:

    scheduler warp     key spans of the next work tiles
    prefetch warp      first boxes -> L2, while the launch before ends
    load warp          Q, key tiles -> shared memory (TMA)
    score warpgroup    S = Q K^T, softmax, P -> shared memory, one key tile ahead of
    output warpgroups  O += P V, each over half of the columns

Most of Q lives in the score warpgroup's registers, which leaves shared memory for three stages of
head_dim 512: a key tile's successor-but-two is in flight while it is used, and the softmax of one
tile runs beside the PV products of the previous one. `print(HeadsMPlan(512))` shows the budgets and
the barrier graph.

Where a launch has work for at most half of the SMs, two CTAs compute a head tile: both all of P,
each a slice of the output columns. Stages are then free, and rows written, sooner. CTAs that read
the same keys are neighbours in a cluster, and load in lockstep (`kit.scheduler.Throttle`).

The softmax keeps a stale row maximum instead of the running one: P = 2^(s - max), and max is
updated only when a key tile exceeds it by more than 2^8; then the accumulators are rescaled. All of
P stays relative to one maximum, so the final division is exact and nothing overflows.
"""

import cutlass
from cutlass import cute
from cutlass.experimental.cuda.tensor_map import TensorMap

from dsv4.kernels.attention.config import FmhaConfig
from dsv4.kernels.attention.context import FmhaArguments
from dsv4.kernels.attention.key_span import KeyRules, SeqlenInfo, request_divisor
from dsv4.kernels.attention.sm90.heads_m_combine import HeadsMCombine
from dsv4.kernels.attention.sm90.heads_m_context import (
    HeadsMContext,
    Operands,
    allocate,
    init_barriers,
)
from dsv4.kernels.attention.sm90.heads_m_epilogue import Epilogue
from dsv4.kernels.attention.sm90.heads_m_load import LoadWarp
from dsv4.kernels.attention.sm90.heads_m_output import OutputWarpgroups
from dsv4.kernels.attention.sm90.heads_m_score import ScoreWarpgroup
from dsv4.kernels.attention.sm90.heads_m_tiling import HeadsMTiling, make_tiling
from dsv4.kernels.attention.sm90.kv_source import DenseKv
from dsv4.kernels.attention.sm90.plan import HEADS, KEYS, HeadsMPlan
from dsv4.kernels.attention.sm90.scheduler_warp import schedule
from dsv4.kernels.kit import pdl
from dsv4.kernels.kit.epilogue import WARP_ROWS
from dsv4.kernels.kit.scheduler import (
    CLUSTER_SHAPE,
    StaticTileScheduler,
    Throttle,
    cluster_grid,
    cluster_sync,
    make_tail_scheduler,
)
from dsv4.kernels.kit.tma import make_head_tile_descriptor, make_row_descriptor


class FmhaHeadsM:
    """Attention of any number of heads over compressed entries and a sliding window (sm_90a)."""

    # Lanes that arrive for their warp at an mbarrier; a checker that follows every thread by
    # itself needs all 32.
    lanes_per_warp = 1

    scorer_type, outputs_type = ScoreWarpgroup, OutputWarpgroups
    has_pieces = False  # whether splits are the pieces of each token

    def __init__(self, config: FmhaConfig):
        self.config = config
        self.plan = self._make_plan()
        heads = config.num_query_heads
        # Head tiles of fewer heads are possible where they divide the heads evenly.
        self.has_even_tiles = heads <= HEADS or heads % HEADS == 0
        # One CTA reads a token's keys, in key tiles of 64 KB: where there are CTAs for all SMs,
        # they wait for DRAM.
        self.is_read_bound = heads <= HEADS and config.head_dim == 512
        # Two CTAs read a token's keys, one for each head tile.
        self.has_neighbours = heads > HEADS

        # ==== roles ====
        self.combine = self._make_combine()
        self.epilogue = self._make_epilogue()
        self.loader = self._make_loader()
        self.scorer = self.scorer_type(config, self.plan, self.combine)
        self.outputs = self.outputs_type(self.plan, self.combine, self.epilogue)

    def _make_plan(self) -> HeadsMPlan:
        return HeadsMPlan(self.config.head_dim, self.lanes_per_warp)

    def _make_loader(self) -> LoadWarp:
        return LoadWarp(self.plan, self.has_even_tiles)

    def _make_combine(self) -> HeadsMCombine:
        return HeadsMCombine(self.config, self.plan, self.has_pieces)

    def _make_epilogue(self) -> Epilogue:
        return Epilogue(self.config.num_query_heads, self.plan)

    # ---- host ----

    @cute.jit
    def launch(self, arguments: FmhaArguments, stream):
        """Build the TMA descriptors, choose tiling and scheduler, launch."""
        q, num_splits, num_sms = arguments.q, arguments.num_splits, arguments.num_sms
        plan, num_heads = self.plan, self.config.num_query_heads
        tiling = make_tiling(
            *(num_heads, HEADS, self.has_even_tiles, q.shape[0], num_splits, num_sms),
            *(plan.subtiles == 2, self.combine.column_groups, self.combine.sizes),
            arguments.workspace.shape[0],
        )
        tile_rows = tiling.tile_heads if self.has_even_tiles else num_heads
        maps = (
            make_head_tile_descriptor(q, tile_rows, plan.chunk, HEADS),
            *self._key_maps(arguments),
            make_row_descriptor(arguments.o, q.iterator, plan.chunk, (WARP_ROWS, plan.chunk)),
        )
        operands = self._operands(arguments, tiling)
        alone = {"grid": [operands.tail_scheduler.grid(tiling.work_tiles), 1, 1]}
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
        # Two kernels: what splits and column slices need costs the others instructions and
        # registers at every change of work tiles.
        if num_splits == 1 and tiling.column_slices == 1:
            self.kernel(maps, operands, True).launch(**plain_grid, **launch)
        else:
            self.kernel(maps, operands, False).launch(**clusters, **launch)

    def _key_maps(self, arguments: FmhaArguments) -> tuple[TensorMap, ...]:
        """TMA descriptors of the keys."""
        box = (KEYS, self.plan.half_dim)
        return tuple(
            make_row_descriptor(keys, arguments.q.iterator, self.plan.chunk, box)
            for keys in (arguments.compressed_kv, arguments.swa_kv)
        )

    def _operands(self, arguments: FmhaArguments, tiling: HeadsMTiling) -> Operands:
        """Operands of a launch."""
        q, swa_kv = arguments.q, arguments.swa_kv
        by_request_tokens = request_divisor(q.shape[0], swa_kv.shape[0])
        return Operands(
            q,
            arguments.compressed_kv.shape[1],
            (swa_kv.shape[0], swa_kv.shape[1]),
            arguments.swa_lens,
            arguments.sink_logits,
            arguments.request_ids,
            arguments.o,
            arguments.compressed_lens,
            arguments.lse,
            arguments.workspace,
            tiling,
            by_request_tokens,
            self._tail_scheduler(arguments, tiling),
        )

    def _tail_scheduler(self, arguments: FmhaArguments, tiling: HeadsMTiling):
        return make_tail_scheduler(tiling.work_tiles, arguments.num_sms, self.is_read_bound)

    # ---- device ----

    @cute.kernel
    def kernel(
        self,
        maps: tuple[
            cutlass.GridConstant[TensorMap],  # q
            cutlass.GridConstant[TensorMap],  # compressed_kv
            cutlass.GridConstant[TensorMap],  # swa_kv
            cutlass.GridConstant[TensorMap],  # o
        ],
        operands: Operands,
        is_plain: cutlass.Constexpr,  # neither splits nor column slices
    ):
        """The work tiles of a CTA."""
        self.run(maps, operands, is_plain)

    @cute.jit
    def run(self, maps: tuple, operands: Operands, is_plain: cutlass.Constexpr):
        """Initialise, then send every warp to its role."""
        plan, throttle = self.plan, self._throttle(is_plain)
        tiling = operands.tiling
        if cutlass.const_expr(is_plain):
            tiling = tiling.plain(self.config.num_query_heads, HEADS)
        elif cutlass.const_expr(self.has_pieces):
            tiling = tiling.in_pieces()
        scheduler = StaticTileScheduler(tiling.work_tiles)
        if cutlass.const_expr(is_plain and self.is_read_bound):
            scheduler = operands.tail_scheduler
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        group = warp // 4
        smem, pipes = self._allocate()
        ctx = HeadsMContext(operands, tiling, scheduler, throttle, smem, pipes)
        if warp == 0:
            with cute.arch.elect_one():
                init_barriers(plan, pipes, tiling.column_slices, throttle)
            cute.arch.mbarrier_init_fence()
        if cutlass.const_expr(throttle is Throttle.CLUSTER_LOCKSTEP):
            cluster_sync()
        else:
            cute.arch.sync_threads()
        if self._is_load(group):
            self._load(ctx, warp, maps)
        elif group == plan.warps["score"].first // 4:
            if cutlass.const_expr(plan.registers["score"] < plan.registers.at_launch):
                cute.arch.setmaxregister_decrease(plan.registers["score"])
            else:
                cute.arch.setmaxregister_increase(plan.registers["score"])
            self.scorer.score(ctx)
        else:
            cute.arch.setmaxregister_increase(plan.registers["output"])
            half = group - plan.warps["output"].first // 4
            o_maps = (maps[-1],) if is_plain and self.epilogue.can_stage else ()
            self.outputs.output(ctx, half, o_maps)

    def _throttle(self, is_plain: bool) -> Throttle:
        if is_plain and self.is_read_bound:
            return Throttle.TWO_HALF_TILES
        return Throttle.CLUSTER_LOCKSTEP if is_plain and self.has_neighbours else Throttle.NONE

    def _allocate(self) -> tuple:
        """Shared memory of a CTA: its views, and the mbarriers in it."""
        return allocate(self.plan)

    def _is_load(self, group) -> cutlass.Boolean:
        """Whether a group of four warps is the one that loads."""
        return group == self.plan.warps["load"].first // 4

    @cute.jit
    def _load(self, ctx: HeadsMContext, warp, maps: tuple):
        """Send the warps that load to their roles."""
        plan, throttle, operands = self.plan, ctx.throttle, ctx.operands
        q_map, compressed_map, window_map, _ = maps
        cute.arch.setmaxregister_decrease(plan.registers["load"])
        tensors = (operands.swa_lens, operands.request_ids, operands.compressed_lens)
        sizes = (operands.q.shape[0], operands.compressed_rows, *operands.window_shape)
        seqlens = SeqlenInfo(*sizes, *tensors, operands.by_request_tokens)
        source = DenseKv(compressed_map, window_map)
        if warp == plan.warps["load"].first:
            pdl.launch_dependents()
            self.loader.load(ctx, q_map, source, seqlens)
            if cutlass.const_expr(throttle is Throttle.CLUSTER_LOCKSTEP):
                cluster_sync()
        elif warp == plan.warps["scheduler"].first:
            stage = 1 if plan.q_register_dim else 0
            key_rules = KeyRules(KEYS, self.config.is_causal, self.config.sliding_window)
            schedule(
                *(ctx.smem.span, ctx.pipes.span, seqlens, ctx.tiling, ctx.scheduler, key_rules),
                lambda span: self.loader.describe_tile(ctx, span, span.first, stage),
            )
        elif warp == plan.warps["prefetch"].first:  # noqa: SIM102 dynamic, then static
            if cutlass.const_expr(throttle is Throttle.TWO_HALF_TILES):
                self.loader.prefetch_until_ready(ctx, q_map, source)
