"""Weight-streaming kernel of Hopper, one tiling: weights in M, tokens in N, or of many tokens the
other way round.

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

A launch may multiply its activations with several weights, each with an output of its own, FP8 and
bf16 ones: clusters are shared out among the two kinds, and each runs the body of one kind. Products
of bf16 are summed by the tensor core over a whole slice: nothing is promoted.

The launch before writes activations, never weights or their scales: both are loaded before
`griddepcontrol.wait`, so that DRAM works through the change of launches.
`print(LinearPlan(4096, Tiling(8, False, 2)))` shows the budgets and the barrier graph.
"""

from typing import NamedTuple

import cutlass
from cutlass import Int32, Int64, cute
from cutlass.experimental.cuda.tensor_map import (
    TensorMapL2Promotion,
    create_tensor_map_tiled,
)
from cutlass.memory import SmemAllocator

from dsv4.kernels.gemm.config import STEP_BYTES, Kind
from dsv4.kernels.gemm.epilogues import Epilogue
from dsv4.kernels.gemm.operands import clusters_of_kinds
from dsv4.kernels.gemm.plan import LinearPlan, Tiling, clusters_at_once
from dsv4.kernels.gemm.sm90.consumers import Consumers
from dsv4.kernels.gemm.sm90.context import (
    DTYPES,
    Bands,
    LastTokens,
    LinearContext,
    Operands,
    RowsFirst,
    TileScheduler,
    allocate,
    weight_policy,
)
from dsv4.kernels.gemm.sm90.load_warp import LoadWarp
from dsv4.kernels.gemm.sm90.wide import ScaleWarp, WideConsumers, WideLoadWarp
from dsv4.kernels.kit import mbarrier, pdl
from dsv4.kernels.kit.divisor import divisor
from dsv4.kernels.kit.swizzle import SPAN_BYTES, TENSOR_MAP_SWIZZLES, VECTOR_BYTES


class Grid(NamedTuple):
    """Output tiles of one kind of weights, and who shares them out."""

    first_tiles: tuple[Int32, ...]  # first row tile of each weight but the first
    row_groups: Int32  # of as many row tiles as CTAs share activations
    token_tiles: Int32
    by_clusters: cute.FastDivmodDivisorV2  # that share them out
    order: RowsFirst | Bands  # of the tiles


class LinearBody:
    """Body of the CTAs of one kind of weights."""

    def __init__(self, plan: LinearPlan):
        self.plan = plan
        if plan.tiling.is_wide:
            roles = WideLoadWarp, WideConsumers
            self.scales = ScaleWarp(plan)
        else:
            roles = LoadWarp, Consumers
        self.loader, self.consumers = (role(plan) for role in roles)
        self.epilogue = self.consumers.epilogue

    # ---- host ----

    def block_map(self, tensor: cute.Tensor, rows: int):
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

    def copied_rows(self, operands: Operands) -> tuple[int, ...]:
        """Rows of a copy of each weight; host and device code, which must agree."""
        counts = (y.shape[1] for y in operands.ys)
        return tuple(self.plan.copied_rows(m if isinstance(m, int) else None) for m in counts)

    def tiles(self, operands: Operands) -> tuple[tuple[Int32, ...], Int32, Int32]:
        """First row tile of each weight but the first, row groups, token tiles."""
        plan, total, firsts = self.plan, Int32(0), []
        for y in operands.ys:
            firsts.append(total)
            total = total + cute.ceil_div(Int32(y.shape[1]), plan.rows)
        row_groups = cute.ceil_div(total, plan.tiling.sharing)
        return tuple(firsts[1:]), row_groups, cute.ceil_div(operands.tokens, plan.tokens)

    def order(self, row_groups: Int32, token_tiles: Int32) -> RowsFirst | Bands:
        """Order of the tiles."""
        if self.plan.tiling.is_wide:
            return Bands.of(row_groups, token_tiles, self.plan.band)
        return RowsFirst.of(row_groups)

    # ---- device ----

    @cute.jit
    def run(self, start: cute.Pointer, maps, operands: Operands, grid: Grid, cluster: Int32):
        """Initialise, then send every warp to its role.

        Args:
            start: of the CTA's shared memory.
            maps: descriptors of the weights, of streamed activations by whole and by short copies,
                of outputs stored by TMA.
            cluster: index among those of the kind.
        """
        weight_maps, x_maps, y_maps = maps
        plan, tiling, size = self.plan, self.plan.tiling, self.plan.tiling.ctas
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        smem, pipes = allocate(plan, start)
        if warp == 0:
            with cute.arch.elect_one():
                used = {name: pipe for name, pipe in vars(pipes).items() if pipe is not None}
                mbarrier.init(plan.barriers, used)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        if cutlass.const_expr(size > 1):
            cute.arch.cluster_arrive_relaxed()
        rank, row_rank = (rank, Int32(0)) if tiling.sharing == 1 else (Int32(0), rank)
        tiles = grid.row_groups * grid.token_tiles
        order = tiling.sharing, row_rank, grid.order, plan.band
        scheduler = TileScheduler(cluster, grid.by_clusters, tiles, grid.first_tiles, *order)
        policy = weight_policy(plan, grid.token_tiles)
        copied_rows = self.copied_rows(operands)
        last = LastTokens.of(plan, operands.tokens)
        ctx = LinearContext(operands, scheduler, rank, smem, pipes, policy, copied_rows, last)
        if warp >= plan.warps["load"].first:
            if cutlass.const_expr(tiling.is_wide):
                cute.arch.setmaxregister_decrease(plan.registers["load"])
            if cutlass.const_expr(tiling.sharing > 1):
                # The other CTAs' barriers exist from here on.
                cute.arch.cluster_wait()
            if warp == plan.warps["load"].first:
                pdl.launch_dependents()
                self.loader.load(ctx, weight_maps, x_maps)
            if cutlass.const_expr(plan.has_tokens_in_m):  # noqa: SIM102 static, then dynamic
                if warp == plan.warps["scales"].first:
                    self.scales.load(ctx)
            if cutlass.const_expr(tiling.cluster > 1):
                cute.arch.cluster_wait()
        else:
            if cutlass.const_expr(tiling.is_wide):
                cute.arch.setmaxregister_increase(plan.registers["consumers"])
            self.consumers.compute(ctx, warp, y_maps)
        if cutlass.const_expr(tiling.sharing > 1):
            # No CTA may end while another one's arrivals are on their way to it. Parts of sums are
            # no reason: a CTA waits for all that are sent to it, and none sends more.
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()


class Factors(NamedTuple):
    """Factors of a launch's product for one kind of weights."""

    weights: tuple[cute.Tensor, ...]
    x: cute.Tensor  # streamed activations, of the kind; else not looked at
    operands: Operands


class StreamingLinear:
    """Products of the same activations with several weights by one tiling.

    Args:
        kinds: of the weights, those with the longest rows first: their clusters start first.
        group_rows: as in `LinearPlan`.
        epilogues: of the weights of the last kind, as there.
    """

    # As in `LinearPlan`.
    lanes_per_warp = 1

    def __init__(
        self,
        in_features: int,
        tiling: Tiling,
        kinds: tuple[Kind, ...] = (Kind.FP8,),
        group_rows: int = 0,
        epilogues: tuple[Epilogue | None, ...] = (),
    ):
        self.tiling = tiling
        self.bodies = [
            LinearBody(
                LinearPlan(
                    in_features,
                    tiling,
                    self.lanes_per_warp,
                    kind,
                    group_rows=group_rows,
                    epilogues=epilogues if kind is kinds[-1] else (),
                )
            )
            for kind in kinds
        ]
        self.plan = self.bodies[0].plan

    @cute.jit
    def launch(self, factors: tuple[Factors, ...], stream, num_sms):
        """Build the TMA descriptors, share out the clusters and launch.

        Args:
            factors: of each kind.
        """
        plan, tiling = self.plan, self.tiling
        maps, operands, tiles = [], [], []
        for body, factor in zip(self.bodies, factors):
            copied_rows = body.copied_rows(factor.operands)
            weight_maps = tuple(body.block_map(*pair) for pair in zip(factor.weights, copied_rows))
            x_maps = ()
            if cutlass.const_expr(body.plan.has_streamed_x):
                sizes = plan.columns // tiling.sharing, plan.short_rows
                x_maps = tuple(body.block_map(factor.x, rows) for rows in sizes)
            y_maps = body.epilogue.output_maps(factor.operands.ys)
            maps.append((weight_maps, x_maps, y_maps))
            operands.append(factor.operands)
            tiles.append(body.tiles(factor.operands))
        resident = num_sms * tiling.ctas_per_sm // tiling.ctas
        if cutlass.const_expr(tiling.is_deep):
            resident = clusters_at_once(tiling.ctas, num_sms)
        counts = [row_groups * token_tiles for _, row_groups, token_tiles in tiles]
        row_bytes = [body.plan.kind.value for body in self.bodies]
        clusters = clusters_of_kinds(counts, row_bytes, resident)
        orders = (body.order(*tile[1:]) for body, tile in zip(self.bodies, tiles))
        divisors = map(divisor, clusters)
        grids = tuple(Grid(*grid) for grid in zip(*zip(*tiles), divisors, orders))
        self.kernel(tuple(maps), tuple(operands), grids).launch(
            grid=[sum(clusters[1:], clusters[0]) * tiling.ctas, 1, 1],
            block=[plan.warps.threads, 1, 1],
            cluster=[tiling.ctas, 1, 1],
            stream=stream,
            min_blocks_per_mp=tiling.ctas_per_sm,
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
        size = self.tiling.ctas
        start = SmemAllocator().allocate(max(b.plan.smem.total_bytes for b in self.bodies), 1024)
        cluster = cute.arch.block_idx()[0] // size
        if cutlass.const_expr(len(self.bodies) == 1):
            self.bodies[0].run(start, maps[0], operands[0], grids[0], cluster)
        else:
            count = grids[0].by_clusters.divisor
            if cluster < count:
                self.bodies[0].run(start, maps[0], operands[0], grids[0], cluster)
            else:
                self.bodies[1].run(start, maps[1], operands[1], grids[1], cluster - count)
