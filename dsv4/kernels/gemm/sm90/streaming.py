"""Weight-streaming kernel of Hopper: weights in M, tokens in N, one tiling.

K is cut into slices of equal length, and a warpgroup computes 64 rows of some slices, one after the
other; the CTAs of a cluster may share the slices of a tile, and then send each other partial rows:

    load warp     weights, and streamed activations -> shared memory (TMA)
    consumers     two warpgroups: products of a k block (128), promoted by its scales; sums of
                  slices; output

Few activations stay in shared memory, quantised there from bf16, and the warpgroups take half of
the CTA's slices each of the same 64 rows ("resident"). More pass through the ring beside the
weights, and the warpgroups take 64 rows each ("streamed"): half the reads of activations.

Arithmetic, the same in every tiling and for any number of tokens: a k block by wgmma, four steps of
32, from zero; that sum times (activation scale * weight scale) added in fp32 to the sum of its
slice, in the order of k; slices added as a balanced binary tree. A column's bits depend on no other
column.

The launch before writes activations, never weights or their scales: both are loaded before
`griddepcontrol.wait`, so that DRAM works through the change of launches.
`print(LinearPlan(4096, Tiling(8, False, 2)))` shows the budgets and the barrier graph.
"""

import cutlass
from cutlass import Int32, Int64, cute
from cutlass.experimental.cuda.tensor_map import (
    TensorMap,
    TensorMapL2Promotion,
    create_tensor_map_tiled,
)

from dsv4.kernels.gemm.config import K_BLOCK
from dsv4.kernels.gemm.plan import LinearPlan, Tiling
from dsv4.kernels.gemm.sm90.consumers import Consumers
from dsv4.kernels.gemm.sm90.context import (
    DTYPE,
    LinearContext,
    Operands,
    TileScheduler,
    allocate,
)
from dsv4.kernels.gemm.sm90.epilogue import output_map
from dsv4.kernels.gemm.sm90.load_warp import LoadWarp
from dsv4.kernels.gemm.sm90.wide import ScaleWarp, WideConsumers, WideLoadWarp
from dsv4.kernels.kit import mbarrier, pdl
from dsv4.kernels.kit.swizzle import SPAN_BYTES, TENSOR_MAP_SWIZZLES


class StreamingLinear:
    """y = x W^T with block scales by one tiling."""

    # As in `LinearPlan`.
    lanes_per_warp = 1

    def __init__(self, in_features: int, tiling: Tiling):
        self.plan = LinearPlan(in_features, tiling, self.lanes_per_warp)
        if tiling.is_wide:
            roles = WideLoadWarp, WideConsumers
            self.scales = ScaleWarp(self.plan)
        else:
            roles = LoadWarp, Consumers
        self.loader, self.consumers = (role(self.plan) for role in roles)
        self.epilogue = self.consumers.epilogue

    # ---- host ----

    @cute.jit
    def launch(self, weight: cute.Tensor, x: cute.Tensor, operands: Operands, stream, num_sms):
        """Build the TMA descriptors and launch.

        Args:
            x: e4m3 codes of streamed activations; else not looked at.
        """
        plan, tiling = self.plan, self.plan.tiling
        weight_map = self._block_map(weight, plan.rows)
        x_map = y_map = weight_map
        if cutlass.const_expr(tiling.is_streamed):
            x_map = self._block_map(x, plan.tokens // tiling.sharing)
        if cutlass.const_expr(self.epilogue.can_stage(operands.y.element_type)):
            y_map = output_map(operands.y, plan.tokens)
        row_groups = cute.ceil_div(weight.shape[0], plan.rows * tiling.sharing)
        token_tiles = cute.ceil_div(operands.y.shape[0], plan.tokens)
        resident = num_sms * tiling.ctas_per_sm // tiling.ctas
        clusters = cutlass.max(cutlass.min(row_groups * token_tiles, resident), 1)
        self.kernel(weight_map, x_map, y_map, operands, row_groups, token_tiles).launch(
            grid=[clusters * tiling.ctas, 1, 1],
            block=[plan.warps.threads, 1, 1],
            cluster=[tiling.ctas, 1, 1],
            stream=stream,
            min_blocks_per_mp=tiling.ctas_per_sm,
            # Given, because the compiler would ask a driver for the capacity.
            preferred_smem_carveout=100,
            use_pdl=True,
        )

    def _block_map(self, tensor: cute.Tensor, rows: int):
        """TMA descriptor of a [row, K] tensor as (k of a block, row, k block); rows past the end
        are read as zeros."""
        return create_tensor_map_tiled(
            tensor.iterator.toint(),
            DTYPE,
            [K_BLOCK, Int32(tensor.shape[0]), self.plan.in_features // K_BLOCK],
            [Int64(tensor.stride[0]) // 16, K_BLOCK // 16],
            [K_BLOCK, rows, 1],
            swizzle=TENSOR_MAP_SWIZZLES[SPAN_BYTES],
            l2_promotion=TensorMapL2Promotion.none,
        )

    # ---- device ----

    @cute.kernel
    def kernel(
        self,
        weight_map: cutlass.GridConstant[TensorMap],
        x_map: cutlass.GridConstant[TensorMap],  # of streamed activations
        y_map: cutlass.GridConstant[TensorMap],  # where tiles are stored by TMA
        operands: Operands,
        row_groups: Int32,
        token_tiles: Int32,
    ):
        """Initialise, then send every warp to its role."""
        plan, tiling, size = self.plan, self.plan.tiling, self.plan.tiling.ctas
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        smem, pipes = allocate(plan)
        if warp == 0:
            with cute.arch.elect_one():
                used = {name: pipe for name, pipe in vars(pipes).items() if pipe is not None}
                mbarrier.init(plan.barriers, used)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        if cutlass.const_expr(size > 1):
            cute.arch.cluster_arrive_relaxed()
        cluster, clusters = cute.arch.block_idx()[0] // size, cute.arch.grid_dim()[0] // size
        rank, row_rank = (rank, Int32(0)) if tiling.sharing == 1 else (Int32(0), rank)
        tiles, bands = row_groups * token_tiles, token_tiles if tiling.is_wide else None
        tiling_of = (row_groups, tiles, tiling.sharing, row_rank, bands)
        scheduler = TileScheduler(cluster, clusters, *tiling_of)
        ctx = LinearContext(operands, scheduler, rank, smem, pipes)
        if warp >= plan.warps["load"].first:
            if cutlass.const_expr(tiling.is_wide):
                cute.arch.setmaxregister_decrease(plan.registers["load"])
            if cutlass.const_expr(tiling.sharing > 1):
                # The other CTAs' barriers exist from here on.
                cute.arch.cluster_wait()
            if warp == plan.warps["load"].first:
                pdl.launch_dependents()
                self.loader.load(ctx, weight_map, x_map)
            if cutlass.const_expr(tiling.is_wide):  # noqa: SIM102 static, then dynamic
                if warp == plan.warps["scales"].first:
                    self.scales.load(ctx)
            if cutlass.const_expr(tiling.cluster > 1):
                cute.arch.cluster_wait()
        else:
            if cutlass.const_expr(tiling.is_wide):
                cute.arch.setmaxregister_increase(plan.registers["consumers"])
            self.consumers.compute(ctx, warp, y_map)
        if cutlass.const_expr(size > 1):
            # No CTA may end while another one's rows or arrivals are on their way to it.
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
