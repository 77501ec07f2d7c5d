"""FP8 product of Blackwell with one tiling: weights in M, tokens in N, sums in Tensor Memory.

K is cut into slices of equal length, as many as the weight's shape says. The tensor core sums a
slice from its first k block to its last one in one accumulator, each product of 32 elements with
the scales of both of its factors (tcgen05.mma of kind mxf8f6f4); slices are added in fp32 as a
balanced binary tree, those of a CTA first, then those of the CTAs of a cluster. A column's bits
depend on no other column, nor on how many CTAs share the slices.

Roles, and what travels between them (`print(LinearPlan(4096, 8, Tiling(16, 8)))`):

    load          weights, and codes of activations, by TMA       -> ring
    scales        their scales; or of bf16 activations
    (activations) the codes, too, to shared memory                -> ring
    mma           scales to TMEM, products; frees the stage       -> sums
    epilogue      sums from TMEM, parts to the CTA of a cluster
                  that owns their tokens, outputs                 -> partials; frees sums

Scales are powers of two. Where those of the weight are fp32 and may be others ("promoted") the
tensor core sums a k block with scale 1 for the weight, and the epilogue adds it, times the weight's
scale, in fp32 in the order of k: the arithmetic of Hopper's kernel.

The launch before writes activations, never weights or their scales: weights are asked for before
`griddepcontrol.wait`, so that DRAM works through the change of launches.
"""

import cutlass
from cutlass import Float8E4M3FN, Int32, Int64, cute
from cutlass.experimental.cuda.tensor_map import TensorMapL2Promotion, create_tensor_map_tiled
from cutlass.memory import SmemAllocator

from dsv4.kernels.gemm.config import K_BLOCK
from dsv4.kernels.gemm.epilogues import HeadRotation
from dsv4.kernels.gemm.sm100.context import LinearContext, Operands, TileScheduler, allocate
from dsv4.kernels.gemm.sm100.epilogue import Epilogue
from dsv4.kernels.gemm.sm100.load_warp import LoadWarp
from dsv4.kernels.gemm.sm100.mma_warp import MmaWarp
from dsv4.kernels.gemm.sm100.plan import ROWS, LinearPlan
from dsv4.kernels.gemm.sm100.scales import ActivationWarps, ScaleWarp
from dsv4.kernels.kit import mbarrier, pdl
from dsv4.kernels.kit.swizzle import SPAN_BYTES, TENSOR_MAP_SWIZZLES, VECTOR_BYTES


@cute.jit
def block_map(tensor: cute.Tensor, rows: cutlass.Constexpr):
    """TMA descriptor of a [row, K] e4m3 tensor as (k of a block, row, k block); rows past the end
    are read as zeros."""
    return create_tensor_map_tiled(
        tensor.iterator.toint(),
        Float8E4M3FN,
        [K_BLOCK, Int32(tensor.shape[0]), tensor.shape[1] // K_BLOCK],
        [Int64(tensor.stride[0]) // VECTOR_BYTES, K_BLOCK // VECTOR_BYTES],
        [K_BLOCK, rows, 1],
        swizzle=TENSOR_MAP_SWIZZLES[SPAN_BYTES],
        l2_promotion=TensorMapL2Promotion.none,
    )


class StreamingLinear:
    """Product of activations with a weight by one tiling."""

    def __init__(self, plan: LinearPlan, rotation: HeadRotation | None = None):
        self.plan = plan
        self.loader, self.mma = LoadWarp(plan), MmaWarp(plan)
        filler = ScaleWarp if plan.tiling.is_streamed else ActivationWarps
        self.filler, self.epilogue = filler(plan), Epilogue(plan, rotation)

    @cute.jit
    def launch(self, weight: cute.Tensor, codes: cute.Tensor, operands: Operands, stream, num_sms):
        """Build the TMA descriptors and launch.

        Args:
            codes: [T, K] e4m3 activations; where bf16 ones are quantised, not looked at.
        """
        plan, cluster = self.plan, self.plan.tiling.cluster
        weight_map = block_map(weight, ROWS)
        x_map = weight_map
        if cutlass.const_expr(plan.tiling.is_streamed):
            x_map = block_map(codes, plan.tokens)
        y = operands.y
        row_tiles = cute.ceil_div(Int32(y.shape[1]), ROWS)
        token_tiles = cute.ceil_div(Int32(y.shape[0]), plan.tokens)
        resident = num_sms * plan.ctas_per_sm // cluster
        clusters = cutlass.max(cutlass.min(row_tiles * token_tiles, resident), 1)
        self.kernel((weight_map, x_map), operands, row_tiles, token_tiles, clusters).launch(
            grid=[clusters * cluster, 1, 1],
            block=[plan.warps.threads, 1, 1],
            cluster=[cluster, 1, 1],
            stream=stream,
            min_blocks_per_mp=plan.ctas_per_sm,
            # Given, because the compiler would ask a driver for the capacity.
            preferred_smem_carveout=100,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self, maps: cutlass.GridConstant[tuple], operands: Operands,
        row_tiles: Int32, token_tiles: Int32, clusters: Int32,
    ):  # fmt: skip
        """Initialise, then send every warp to its role."""
        plan, size = self.plan, self.plan.tiling.cluster
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        start = SmemAllocator().allocate(plan.smem.total_bytes, 1024)
        smem, pipes, tmem = allocate(plan, start)
        if warp == 0:
            with cute.arch.elect_one():
                used = {name: pipe for name, pipe in vars(pipes).items() if pipe is not None}
                mbarrier.init(plan.barriers, used)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        if cutlass.const_expr(size > 1):
            cute.arch.cluster_arrive_relaxed()
        cluster = cute.arch.block_idx()[0] // size
        scheduler = TileScheduler(cluster, clusters, row_tiles, token_tiles)
        ctx = LinearContext(operands, scheduler, rank, smem, pipes, tmem)
        # One `if` a role: the compiler fails on chains of them.
        if warp < plan.warps["epilogue"].count:
            self.epilogue.store_tiles(ctx)
        if warp == plan.warps["load"].first:
            pdl.launch_dependents()
            self.loader.load(ctx, *maps)
        if warp == plan.warps["mma"].first:
            self.mma.multiply(ctx)
        filler = plan.warps[plan.filler]
        if warp >= filler.first and warp < filler.first + filler.count:
            self.filler.fill(ctx)
        if cutlass.const_expr(size > 1):  # noqa: SIM102 static, then dynamic
            if warp >= plan.warps["epilogue"].count:
                cute.arch.cluster_wait()
        if cutlass.const_expr(size > 1):
            # No CTA may end while another one's rows or arrivals are on their way to it.
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
