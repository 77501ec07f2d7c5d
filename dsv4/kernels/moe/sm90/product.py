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

from typing import ClassVar

import cutlass
from cutlass import Int32, cute

from dsv4.kernels.kit import mbarrier, pdl
from dsv4.kernels.moe.plan import ProductPlan
from dsv4.kernels.moe.select import Lists, Select
from dsv4.kernels.moe.sm90.activations import ActivationWarps
from dsv4.kernels.moe.sm90.consumers import Consumers
from dsv4.kernels.moe.sm90.context import Operands, ProductContext, allocate
from dsv4.kernels.moe.sm90.load_warp import LoadWarp

# CTAs of the selection beside a product that has work for all SMs. 64 and 256 tokens of Flash have
# 128 tiles, and an H200 132 SMs: with a warp for each token tiles were left for a second turn.
SELECTION_CTAS = 4


class GroupedProduct:
    """One of the two products of all experts.

    Args:
        epilogue: `SwiGlu` or `Rows`.
        top_k: experts of a token.
    """

    # Of the kinds of tiles that there are.
    activation_warps: ClassVar[type[ActivationWarps]] = ActivationWarps
    consumer_warps: ClassVar[type[Consumers]] = Consumers

    def __init__(self, plan: ProductPlan, epilogue, top_k: int):
        self.plan = plan
        self.loader = LoadWarp(plan)
        self.activations = self.activation_warps(plan, top_k)
        self.consumers = self.consumer_warps(plan, epilogue)

    @cute.jit
    def launch(self, operands: Operands, stream, num_sms):
        """Launch as many CTAs as the GPU holds, or as there can be tiles."""
        self.kernel(operands).launch(
            grid=[self.ctas(operands, num_sms), 1, 1], stream=stream, **launch_options(self.plan)
        )

    def ctas(self, operands: Operands, num_sms) -> Int32:
        """CTAs of a launch."""
        plan = self.plan
        tiles = operands.groups.shape[0] if plan.has_routed else Int32(0)
        if plan.has_shared:
            shared = cute.ceil_div(operands.weights.shape[0], plan.shared.tokens)
            tiles += shared
        return cutlass.min(tiles * plan.row_tiles, num_sms * plan.tiling.ctas_per_sm)

    @cute.kernel
    def kernel(self, operands: Operands):
        smem, pipes = allocate(self.plan)
        cta, ctas = Int32(cute.arch.block_idx()[0]), Int32(cute.arch.grid_dim()[0])
        self.run(ProductContext(operands, smem, pipes, cta, ctas))

    @cute.jit
    def run(self, ctx: ProductContext):
        """Initialise, then send every warp of a CTA to its role."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        self.initialise(ctx, warp)
        cute.arch.sync_threads()
        self.take_role(ctx, warp)

    @cute.jit
    def initialise(self, ctx: ProductContext, warp):
        """What the CTA's barrier behind it shows to all roles."""
        if warp == 0:
            with cute.arch.elect_one():
                mbarrier.init(self.plan.barriers, ctx.pipes.edges)
            cute.arch.mbarrier_init_fence()
        self.activations.clear(ctx)

    @cute.jit
    def take_role(self, ctx: ProductContext, warp):
        """The part of a warp."""
        plan = self.plan
        if warp == plan.warps["load"].first:
            pdl.launch_dependents()
            self.loader.load(ctx)
        elif warp >= plan.warps["activations"].first:
            self.activations.fill(ctx, warp - plan.warps["activations"].first)
        else:
            self.consumers.compute(ctx, warp)


class ProductBesideSelection:
    """The shared expert's first product and the selection of experts in one launch: neither reads
    what the other writes.

    The selection has the SMs that the product leaves, so that no CTA waits for another one's place.

    Args:
        product: of the shared expert alone.
        select: the selection; its CTAs are the first.
    """

    def __init__(self, product: GroupedProduct, select: Select):
        self.product = product
        self.select = select
        plan = product.plan
        assert plan.warps.threads == select.threads, plan.warps
        assert select.smem_bytes <= plan.smem["weight"].bytes, select.smem_bytes

    @cute.jit
    def launch(self, operands: Operands, lists: Lists, stream, num_sms, group_tokens: Int32):
        """Launch both."""
        left = num_sms - self.product.ctas(operands, num_sms)
        first = cutlass.min(
            Int32(self.select.ctas(lists)), cutlass.max(left, Int32(SELECTION_CTAS))
        )
        ctas = first + self.product.ctas(operands, cutlass.max(num_sms - first, Int32(1)))
        self.kernel(operands, lists, group_tokens, first).launch(
            grid=[ctas, 1, 1],
            stream=stream,
            **launch_options(self.product.plan),
        )

    @cute.kernel
    def kernel(self, operands: Operands, lists: Lists, group_tokens: Int32, first: Int32):
        smem, pipes = allocate(self.product.plan)
        cta, ctas = Int32(cute.arch.block_idx()[0]), Int32(cute.arch.grid_dim()[0])
        if cta < first:
            self.select.run(lists, smem.weight, cta, first, group_tokens)
        else:
            self.product.run(ProductContext(operands, smem, pipes, cta - first, ctas - first))


def launch_options(plan: ProductPlan) -> dict:
    """Of a launch of a plan's CTAs."""
    return {
        "block": [plan.warps.threads, 1, 1],
        "min_blocks_per_mp": plan.tiling.ctas_per_sm,
        # Given, because the compiler would ask a driver for the capacity.
        "preferred_smem_carveout": 100,
        "use_pdl": True,
    }
