"""Grouped product of experts for Hopper: weights in M, from registers, tokens in N, one tiling.

A persistent CTA takes tiles of 128 rows of an expert and some of its tokens:

    load warp         prepared weights -> shared memory, as they lie (bulk copies)
    activation warps  tokens of the tile, gathered or quantised -> shared memory, swizzled
    consumers         two warpgroups: weights into registers, FP4 decoded there; products of a k
                      block (128), promoted by its scales; epilogue

Arithmetic, the same in every tiling and for any number of tokens: a k block by wgmma, four steps of
32, from zero ("raw" scales: each step by itself); that sum times (activation scale * weight scale)
added in fp32, in the order of k. A column's bits depend on no other column.

The launch before makes lists and activations, never weights: the shared expert's first ones are
asked for before `griddepcontrol.wait`. `print(ProductPlan.down(...))` shows the budgets.
"""

import cutlass
from cutlass import Int32, cute

from dsv4.kernels.kit import mbarrier, pdl
from dsv4.kernels.moe.plan import ProductPlan
from dsv4.kernels.moe.sm90.activations import ActivationWarps
from dsv4.kernels.moe.sm90.consumers import Consumers
from dsv4.kernels.moe.sm90.context import Operands, ProductContext, allocate
from dsv4.kernels.moe.sm90.load_warp import LoadWarp


class GroupedProduct:
    """One of the two products of all experts.

    Args:
        panels_of: see `LoadWarp`.
        epilogue: `SwiGlu` or `Rows`.
        top_k: experts of a token.
    """

    def __init__(self, plan: ProductPlan, panels_of, epilogue, top_k: int):
        self.plan = plan
        self.loader = LoadWarp(plan, panels_of)
        self.activations = ActivationWarps(plan, top_k)
        self.consumers = Consumers(plan, epilogue)

    @cute.jit
    def launch(self, operands: Operands, stream, num_sms):
        """Launch as many CTAs as the GPU holds, or as there can be tiles."""
        plan = self.plan
        shared = cute.ceil_div(operands.weights.shape[0], plan.tiling.shared_tokens)
        tiles = (shared + operands.groups.shape[0]) * plan.row_tiles
        ctas = cutlass.min(tiles, num_sms * plan.tiling.ctas_per_sm)
        self.kernel(operands).launch(
            grid=[ctas, 1, 1],
            block=[plan.warps.threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=plan.tiling.ctas_per_sm,
            # Given, because the compiler would ask a driver for the capacity.
            preferred_smem_carveout=100,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, operands: Operands):
        """Initialise, then send every warp to its role."""
        plan = self.plan
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem, pipes = allocate(plan)
        if warp == 0:
            with cute.arch.elect_one():
                mbarrier.init(plan.barriers, vars(pipes))
            cute.arch.mbarrier_init_fence()
        cta, ctas = Int32(cute.arch.block_idx()[0]), Int32(cute.arch.grid_dim()[0])
        ctx = ProductContext(operands, smem, pipes, cta, ctas)
        self.activations.clear(ctx)
        cute.arch.sync_threads()
        if warp == plan.warps["load"].first:
            pdl.launch_dependents()
            self.loader.load(ctx)
        elif warp >= plan.warps["activations"].first:
            self.activations.fill(ctx, warp - plan.warps["activations"].first)
        else:
            self.consumers.compute(ctx, warp)
