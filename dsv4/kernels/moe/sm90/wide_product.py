"""Grouped product of many tokens of each expert for Hopper: tiles of 128 rows x up to 32,
64 or 128 tokens.

    load warps  prepared weights -> shared memory, as they lie (bulk copies); tokens of the tile, in
                the order of tiles, and their scales (TMA), where they are many shared by two CTAs
                with row tiles of their own
    consumers   two warpgroups: weights into registers, FP4 decoded there, for the next k block;
                promotion of this one by its scales; epilogue

The arithmetic is that of every other tiling (`product`).
"""

import cutlass
from cutlass import Int32, cute

from dsv4.kernels.kit import mbarrier, pdl
from dsv4.kernels.moe.sm90.context import Operands
from dsv4.kernels.moe.sm90.wide import WideTileConsumers, WideTileLoadWarp
from dsv4.kernels.moe.sm90.wide_context import Activations, WideContext, allocate, make_maps
from dsv4.kernels.moe.wide_plan import WidePlan


class WideProduct:
    """One of the two products of all experts.

    Args:
        epilogue: `WideSwiGlu` or `WideRows`.
    """

    def __init__(self, plan: WidePlan, epilogue):
        self.plan = plan
        self.loader = WideTileLoadWarp(plan)
        self.consumers = WideTileConsumers(plan, epilogue)

    @cute.jit
    def launch(
        self, operands: Operands, activations: Activations, factors: cute.Tensor, stream, num_sms
    ):
        """Launch as many clusters as the GPU holds, or as there can be tiles."""
        plan = self.plan
        tiles = operands.groups.shape[0]
        tiles += cute.ceil_div(operands.weights.shape[0], plan.shared.tokens)
        clusters = cutlass.min(tiles * plan.row_groups, num_sms * plan.ctas_per_sm // plan.sharing)
        maps = make_maps(plan, activations)
        self.kernel(maps, operands, activations, factors).launch(
            grid=[clusters * plan.sharing, 1, 1],
            block=[plan.warps.threads, 1, 1],
            cluster=[plan.sharing, 1, 1],
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
        operands: Operands,
        activations: Activations,
        factors: cute.Tensor,
    ):
        """Initialise, then send every warp to its role."""
        plan = self.plan
        smem, pipes = allocate(plan)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        slot = Int32(cute.arch.block_idx()[0]) // plan.sharing
        clusters = Int32(cute.arch.grid_dim()[0]) // plan.sharing
        if cutlass.const_expr(plan.sharing == 1):
            rank = Int32(0)
        ctx = WideContext(operands, smem, pipes, slot, clusters, activations, factors, rank)
        if warp == 0:
            with cute.arch.elect_one():
                mbarrier.init(plan.barriers, pipes.edges)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        if cutlass.const_expr(plan.sharing > 1):
            # The other CTA's barriers exist from here on.
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        if warp >= plan.warps["load"].first:
            cute.arch.setmaxregister_decrease(plan.registers["load"])
            pdl.launch_dependents()
            self.loader.load(ctx, maps, warp - plan.warps["load"].first)
        else:
            cute.arch.setmaxregister_increase(plan.registers["consumers"])
            self.consumers.compute(ctx, warp)
        if cutlass.const_expr(plan.sharing > 1):
            # No CTA may end while another one's tokens or arrivals are on their way to it.
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
