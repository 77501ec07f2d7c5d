"""Weight-streaming kernel of Blackwell: weights in M, tokens in N, sums in TMEM, one tiling.

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

A launch may multiply its activations with several weights, each with an output of its own, FP8 and
bf16 ones: clusters are shared out among the two kinds, and each runs the body of one kind. Products
of bf16 (kind f16) have no scales, and no warp that fills them.

Activations that nothing rounds are sums of two codes, with scales of their own: products of second
terms are added to those of first ones of the same k block.

The launch before writes activations, never weights or their scales: weights are asked for before
`griddepcontrol.wait`, so that DRAM works through the change of launches.
"""

from typing import NamedTuple

import cutlass
from cutlass import Float8E4M3FN, Int32, Int64, cute
from cutlass.experimental.cuda.tensor_map import TensorMapL2Promotion, create_tensor_map_tiled
from cutlass.memory import SmemAllocator

from dsv4.kernels.gemm.config import STEP_BYTES, Kind
from dsv4.kernels.gemm.operands import clusters_of_kinds
from dsv4.kernels.gemm.sm100.context import LinearContext, Operands, TileScheduler, allocate
from dsv4.kernels.gemm.sm100.epilogue import Epilogue
from dsv4.kernels.gemm.sm100.load_warp import LoadWarp
from dsv4.kernels.gemm.sm100.mma_warp import MmaWarp
from dsv4.kernels.gemm.sm100.plan import ROWS, LinearPlan
from dsv4.kernels.gemm.sm100.scales import ActivationWarps, ScaleWarp
from dsv4.kernels.kit import mbarrier, pdl
from dsv4.kernels.kit.swizzle import SPAN_BYTES, TENSOR_MAP_SWIZZLES, VECTOR_BYTES

DTYPES = {Kind.FP8: Float8E4M3FN, Kind.BF16: cutlass.BFloat16}


class Factors(NamedTuple):
    """Factors of a launch's product for one kind of weights."""

    weights: tuple[cute.Tensor, ...]
    x: cute.Tensor  # streamed activations, of the kind; else not looked at
    operands: Operands


class Grid(NamedTuple):
    """Output tiles of one kind of weights, and the clusters that share them out."""

    first_tiles: tuple[Int32, ...]  # first row tile of each weight but the first
    row_tiles: Int32
    token_tiles: Int32
    clusters: Int32


class LinearBody:
    """Body of the CTAs of one kind of weights."""

    def __init__(self, plan: LinearPlan):
        self.plan = plan
        self.loader, self.mma = LoadWarp(plan), MmaWarp(plan)
        filler = ScaleWarp if plan.tiling.is_streamed else ActivationWarps
        self.filler = filler(plan) if plan.is_quantized else None
        self.epilogue = Epilogue(plan)

    # ---- host ----

    @cute.jit
    def block_map(self, tensor: cute.Tensor, rows: cutlass.Constexpr):
        """TMA descriptor of a [row, K] tensor as (k of a block, row, k block); rows past the end
        are read as zeros."""
        kind = self.plan.kind
        return create_tensor_map_tiled(
            tensor.iterator.toint(),
            DTYPES[kind],
            [kind.step, Int32(tensor.shape[0]), tensor.shape[1] // kind.step],
            [Int64(tensor.stride[0]) * kind.value // VECTOR_BYTES, STEP_BYTES // VECTOR_BYTES],
            [kind.step, rows, 1],
            swizzle=TENSOR_MAP_SWIZZLES[SPAN_BYTES],
            l2_promotion=TensorMapL2Promotion.none,
        )

    def maps(self, factors: Factors) -> tuple:
        """Descriptors of the weights, and of streamed activations."""
        weight_maps = tuple(self.block_map(weight, ROWS) for weight in factors.weights)
        x_map = weight_maps[0]
        if self.plan.has_streamed_x:
            x_map = self.block_map(factors.x, self.plan.x_rows)
        return weight_maps, x_map

    def tiles(self, operands: Operands) -> tuple[tuple[Int32, ...], Int32, Int32]:
        """First row tile of each weight but the first, row tiles, token tiles."""
        total, firsts = Int32(0), []
        for y in operands.ys:
            firsts.append(total)
            total = total + cute.ceil_div(Int32(y.shape[1]), ROWS)
        token_tiles = cute.ceil_div(operands.tokens, self.plan.tokens)
        return tuple(firsts[1:]), total, token_tiles

    # ---- device ----

    @cute.jit
    def run(self, start: cute.Pointer, maps, operands: Operands, grid: Grid, cluster: Int32):
        """Initialise, then send every warp to its role.

        Args:
            start: of the CTA's shared memory.
            cluster: index among those of the kind.
        """
        plan, size = self.plan, self.plan.tiling.cluster
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        smem, pipes, tmem = allocate(plan, start)
        if warp == 0:
            with cute.arch.elect_one():
                used = {name: pipe for name, pipe in vars(pipes).items() if pipe is not None}
                mbarrier.init(plan.barriers, used)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        if cutlass.const_expr(size > 1):
            cute.arch.cluster_arrive_relaxed()
        sizes = grid.row_tiles, grid.token_tiles, grid.first_tiles
        scheduler = TileScheduler(cluster, grid.clusters, *sizes)
        ctx = LinearContext(operands, scheduler, rank, smem, pipes, tmem)
        # One `if` a role: the compiler fails on chains of them.
        if warp < plan.warps["epilogue"].count:
            self.epilogue.store_tiles(ctx)
        if warp == plan.warps["load"].first:
            pdl.launch_dependents()
            self.loader.load(ctx, *maps)
        if warp == plan.warps["mma"].first:
            self.mma.multiply(ctx)
        if cutlass.const_expr(self.filler is not None):
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


class StreamingLinear:
    """Products of the same activations with several weights by one tiling.

    Args:
        plans: of each kind of weights.
    """

    def __init__(self, *plans: LinearPlan):
        self.bodies = [LinearBody(plan) for plan in plans]
        self.plan = plans[0]
        assert len({(plan.warps.threads, plan.tiling) for plan in plans}) == 1, "one shape of CTA"

    @cute.jit
    def launch(self, factors: tuple[Factors, ...], stream, num_sms):
        """Build the TMA descriptors, share out the clusters and launch.

        Args:
            factors: of each kind.
        """
        plan, cluster = self.plan, self.plan.tiling.cluster
        maps = tuple(body.maps(factor) for body, factor in zip(self.bodies, factors))
        operands = tuple(factor.operands for factor in factors)
        tiles = [body.tiles(factor.operands) for body, factor in zip(self.bodies, factors)]
        counts = [row_tiles * token_tiles for _, row_tiles, token_tiles in tiles]
        row_bytes = [body.plan.kind.value for body in self.bodies]
        clusters = clusters_of_kinds(counts, row_bytes, num_sms * plan.ctas_per_sm // cluster)
        grids = tuple(Grid(*tile, count) for tile, count in zip(tiles, clusters))
        self.kernel(maps, operands, grids).launch(
            grid=[sum(clusters[1:], clusters[0]) * cluster, 1, 1],
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
        self,
        maps: cutlass.GridConstant[tuple],
        operands: tuple[Operands, ...],
        grids: tuple[Grid, ...],
    ):
        """Send every cluster to the body of its kind."""
        start = SmemAllocator().allocate(max(b.plan.smem.total_bytes for b in self.bodies), 1024)
        cluster = cute.arch.block_idx()[0] // self.plan.tiling.cluster
        if cutlass.const_expr(len(self.bodies) == 1):
            self.bodies[0].run(start, maps[0], operands[0], grids[0], cluster)
        else:
            count = grids[0].clusters
            if cluster < count:
                self.bodies[0].run(start, maps[0], operands[0], grids[0], cluster)
            else:
                self.bodies[1].run(start, maps[1], operands[1], grids[1], cluster - count)
