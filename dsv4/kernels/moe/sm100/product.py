"""Grouped product of experts for Blackwell: weights in M, tokens in N, sums in Tensor Memory.

A persistent CTA takes tiles of 128 rows of an expert and some of its tokens:

    load      weights, FP4 padded to bytes on the way, their scales,
              codes of the tile's tokens, gathered                    -> ring
    scales    scales of the tokens, and of FP8 weights                -> ring
    mma       scales to TMEM, products; frees the stage               -> sums
    epilogue  sums from TMEM, outputs; frees sums                     (-> up)

Arithmetic, the same in every tiling and for any number of tokens: the tensor core
(tcgen05.mma of kind mxf8f6f4) sums all of K in one accumulator, 32 elements a product, with the
scales of both factors: nothing is promoted in registers. A column's bits depend on no other column.
Routed experts in NVFP4 are multiplied by kind mxf4nvf4, 64 elements a product, and their tokens are
in NVFP4, too; the epilogue multiplies a sum with the fp32 scales of both.

A tile of the first product has 128 rows of gate and as many of up, so that a thread has both of a
channel, and 128 channels share a scale of h. Where a tile of the shared expert would take twice as
long as the others, the CTAs of a pair have one of both each, and the sums of up cross over.

The launch before makes lists and activations, never weights: the shared expert's first ones are
asked for before `griddepcontrol.wait`. `print(ProductPlan.down(...))` shows the budgets.
"""

import cutlass
from cutlass import Int32, cute
from cutlass.memory import SmemAllocator

from dsv4.kernels.kit import mbarrier, pdl
from dsv4.kernels.moe.sm100.context import Division, Operands, ProductContext, allocate
from dsv4.kernels.moe.sm100.load_warp import LoadWarp, row_map, tiled_map
from dsv4.kernels.moe.sm100.mma_warp import MmaWarp
from dsv4.kernels.moe.sm100.plan import PACKED_BYTES, ProductPlan
from dsv4.kernels.moe.sm100.scales import PackedScaleWarp, ScaleWarp


class GroupedProduct:
    """One of the two products of all experts.

    Args:
        epilogue: `SwiGlu` or `Rows`, or those of NVFP4.
        top_k: experts of a token.
    """

    def __init__(self, plan: ProductPlan, epilogue, top_k: int):
        self.plan = plan
        self.loader, self.mma = LoadWarp(plan, top_k), MmaWarp(plan)
        scales = PackedScaleWarp if plan.is_packed else ScaleWarp
        self.scales, self.epilogue = scales(plan, top_k), epilogue

    @cute.jit
    def launch(self, operands: Operands, stream, num_sms):
        """Build the TMA descriptors and launch."""
        plan = self.plan
        routed = tuple(
            tiled_map(operands.weights[i], plan.expert_dtype) for i in range(plan.weights)
        )
        shared = tuple(tiled_map(operands.shared_weights[i], "fp8") for i in range(plan.weights))
        tokens = (row_map(operands.x),)
        if cutlass.const_expr(plan.is_packed):
            tokens += (row_map(operands.packed.x.codes, PACKED_BYTES),)
        division = self.divide(operands, num_sms)
        self.kernel((tokens, routed, shared), operands, division).launch(
            grid=[division.clusters * plan.cluster, 1, 1],
            block=[plan.warps.threads, 1, 1],
            cluster=[plan.cluster, 1, 1],
            stream=stream,
            min_blocks_per_mp=plan.ctas_per_sm,
            # Given, because the compiler would ask a driver for the capacity.
            preferred_smem_carveout=100,
            use_pdl=True,
        )

    def divide(self, operands: Operands, num_sms) -> Division:
        """As few clusters as take no more turns than all that the GPU holds."""
        plan = self.plan
        tokens, pairs = Int32(operands.factors.shape[0]), Int32(operands.pairs.shape[0])
        shared = cute.ceil_div(tokens, plan.tiling.shared_tokens) * plan.row_tiles
        turns = shared + cute.ceil_div(pairs * plan.row_tiles, plan.cluster * plan.width)
        resident = cutlass.max(num_sms * plan.ctas_per_sm // plan.cluster, 1)
        clusters = cute.ceil_div(turns, cute.ceil_div(turns, resident))
        return Division(clusters, shared, shared // clusters, shared % clusters)

    @cute.kernel
    def kernel(self, maps: cutlass.GridConstant[tuple], operands: Operands, division: Division):
        """Initialise, then send every warp to its role."""
        plan = self.plan
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        start = SmemAllocator().allocate(plan.smem.total_bytes, 1024)
        smem, pipes, tmem = allocate(plan, start)
        if warp == 0:
            with cute.arch.elect_one():
                used = {name: pipe for name, pipe in vars(pipes).items() if pipe is not None}
                mbarrier.init(plan.barriers, used)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        rank = Int32(0)
        if cutlass.const_expr(plan.cluster > 1):
            rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
            cute.arch.cluster_arrive_relaxed()
        cluster = Int32(cute.arch.block_idx()[0]) // plan.cluster
        ctx = ProductContext(operands, smem, pipes, tmem, division, cluster, rank)
        # One `if` a role: the compiler fails on chains of them.
        if warp < plan.warps["epilogue"].count:
            self.epilogue.store_tiles(ctx)
        if warp == plan.warps["load"].first:
            pdl.launch_dependents()
            self.loader.load(ctx, *maps)
        if warp == plan.warps["mma"].first:
            self.mma.multiply(ctx)
        if warp == plan.warps["scales"].first:
            self.scales.fill(ctx)
        if cutlass.const_expr(plan.cluster > 1):  # noqa: SIM102 static, then dynamic
            if warp >= plan.warps["epilogue"].count:
                cute.arch.cluster_wait()
