"""Swap-AB attention kernel of Hopper: transposed products for few query heads.

With few heads the time goes into reading keys, and the head tiles of `heads_m`, 64 heads high,
would be mostly padding. So the products are transposed: keys, then columns of the output, are the
64 rows of a wgmma, and a tile of a token's heads, usually all of them, its N:

    scheduler warp  key spans of the next work tiles
    load warp       Q and tiles of 64 keys -> shared memory (TMA)
    math warpgroup  S^T = K Q^T, softmax, P^T -> shared memory, O^T += V^T P^T

A key tile serves as K and as V. It is loaded, and freed, in slots of its columns: the ring of slots
holds two to three key tiles, so that loads are in flight throughout the warpgroup's chain of
products and softmax. `print(SwapAbPlan(512, 16, 1))` shows the budgets and the barrier graph.
"""

import cutlass
from cutlass import cute
from cutlass.experimental.cuda.tensor_map import TensorMap

from dsv4.kernels.attention.config import FmhaConfig
from dsv4.kernels.attention.context import FmhaArguments
from dsv4.kernels.attention.key_span import KeyRules, SeqlenInfo, request_divisor
from dsv4.kernels.attention.sm90.kv_source import DenseKv
from dsv4.kernels.attention.sm90.plan import CHUNK, KEYS, SwapAbPlan
from dsv4.kernels.attention.sm90.scheduler_warp import schedule
from dsv4.kernels.attention.sm90.swap_ab_cluster import SwapAbCluster
from dsv4.kernels.attention.sm90.swap_ab_combine import SwapAbCombine
from dsv4.kernels.attention.sm90.swap_ab_context import (
    Operands,
    SwapAbContext,
    SwapAbTiling,
    allocate,
)
from dsv4.kernels.attention.sm90.swap_ab_load import LoadWarp
from dsv4.kernels.attention.sm90.swap_ab_math import MathWarpgroup
from dsv4.kernels.kit import mbarrier
from dsv4.kernels.kit.scheduler import CLUSTER_SHAPE, StaticTileScheduler, cluster_grid
from dsv4.kernels.kit.tma import make_row_descriptor


class FmhaSwapAB:
    """Attention of few query heads over compressed entries and a sliding window (sm_90a).

    Args:
        tile_heads: heads of a CTA, 8, 16 or 24; those of a token, up to 128, go to CTAs side by
            side.
    """

    # Lanes that arrive for their warp at an mbarrier; a checker that follows every thread by
    # itself needs all 32.
    lanes_per_warp = 1

    math_type = MathWarpgroup
    has_pieces = False  # whether splits are the pieces of each token

    def __init__(self, config: FmhaConfig, tile_heads: int):
        self.config = config
        self.head_tiles = config.num_query_heads // tile_heads
        self.plan = self._make_plan(tile_heads)

        # ==== roles ====
        self.combine = SwapAbCombine(config, self.plan, self.has_pieces)
        self.loader = self._make_loader()
        self.cluster = self._make_cluster()
        self.math = self.math_type(config, self.plan, self.combine, self.cluster)

    def _make_plan(self, tile_heads: int) -> SwapAbPlan:
        return SwapAbPlan(self.config.head_dim, tile_heads, self.head_tiles, self.lanes_per_warp)

    def _make_loader(self) -> LoadWarp:
        return LoadWarp(self.plan)

    def _make_cluster(self) -> SwapAbCluster | None:
        """What combines splits in a cluster, if any may be one."""
        return None

    # ---- host ----

    @cute.jit
    def launch(self, arguments: FmhaArguments, stream):
        """Build the TMA descriptors and launch."""
        q, num_splits = arguments.q, arguments.num_splits
        plan = self.plan
        maps = (
            make_row_descriptor(q, q.iterator, CHUNK, (plan.tile_heads, plan.head_dim)),
            *self._key_maps(arguments),
        )
        work_tiles = q.shape[0] * self.head_tiles * num_splits
        self.kernel(maps, self._operands(arguments, work_tiles)).launch(
            **self._grid(arguments, work_tiles),
            block=[plan.warps.threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=True,
        )

    def _grid(self, arguments: FmhaArguments, work_tiles: cutlass.Int32) -> dict:
        """CTAs of a launch, and of a cluster."""
        num_sms = arguments.num_sms
        if self.head_tiles % 2:
            return {"grid": [cutlass.min(work_tiles, num_sms), 1, 1]}
        return {"grid": [cluster_grid(work_tiles, num_sms), 1, 1], "cluster": CLUSTER_SHAPE}

    def _key_maps(self, arguments: FmhaArguments) -> tuple[TensorMap, ...]:
        """TMA descriptors of the keys."""
        box = (KEYS, self.plan.slot_dim)
        return tuple(
            make_row_descriptor(keys, arguments.q.iterator, CHUNK, box)
            for keys in (arguments.compressed_kv, arguments.swa_kv)
        )

    def _operands(self, arguments: FmhaArguments, work_tiles: cutlass.Int32) -> Operands:
        """Operands of a launch."""
        swa_kv = arguments.swa_kv
        return Operands(
            arguments.compressed_kv.shape[1],
            (swa_kv.shape[0], swa_kv.shape[1]),
            arguments.swa_lens,
            arguments.sink_logits,
            arguments.request_ids,
            arguments.o,
            arguments.compressed_lens,
            arguments.lse,
            arguments.workspace,
            arguments.num_splits,
            work_tiles,
            cute.fast_divmod_create_divisor_v2(arguments.num_splits),
            request_divisor(arguments.q.shape[0], swa_kv.shape[0]),
        )

    # ---- device ----

    @cute.kernel
    def kernel(
        self,
        maps: tuple[
            cutlass.GridConstant[TensorMap],  # q
            cutlass.GridConstant[TensorMap],  # compressed_kv
            cutlass.GridConstant[TensorMap],  # swa_kv
        ],
        operands: Operands,
    ):
        """The work tiles of a CTA."""
        self.run(maps, operands)

    @cute.jit
    def run(self, maps: tuple, operands: Operands):
        """Initialise, then send every warp to its role."""
        plan = self.plan
        tiling = self._tiling(operands)
        scheduler = StaticTileScheduler(tiling.work_tiles)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem, pipes = self._allocate()
        if warp == 0:
            with cute.arch.elect_one():
                mbarrier.init(plan.barriers, vars(pipes))
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        self._send(SwapAbContext(operands, tiling, scheduler, smem, pipes), warp, maps)

    def _tiling(self, operands: Operands) -> SwapAbTiling:
        return SwapAbTiling(
            *(operands.num_splits, operands.work_tiles, self.plan.tile_heads, self.head_tiles),
            operands.by_splits,
        )

    def _allocate(self) -> tuple:
        """Shared memory of a CTA: its views, and the mbarriers in it."""
        return allocate(self.plan)

    @cute.jit
    def _send(self, ctx: SwapAbContext, warp, maps: tuple):
        """Send a warp to its role."""
        plan, operands = self.plan, ctx.operands
        q_map, compressed_map, window_map = maps
        tensors = (operands.swa_lens, operands.request_ids, operands.compressed_lens)
        sizes = (operands.o.shape[0], operands.compressed_rows, *operands.window_shape)
        seqlens = SeqlenInfo(*sizes, *tensors, operands.by_request_tokens)
        if warp == plan.warps["load"].first:
            self.loader.load(ctx, q_map, DenseKv(compressed_map, window_map), seqlens)
        elif warp >= plan.warps["scheduler"].first:
            key_rules = KeyRules(KEYS, self.config.is_causal, self.config.sliding_window)
            smem, pipes = ctx.smem, ctx.pipes
            schedule(smem.span, pipes.span, seqlens, ctx.tiling, ctx.scheduler, key_rules, None)
        else:
            self.math.compute(ctx)
