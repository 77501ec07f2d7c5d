"""Router and the shared expert's first product in one launch, for few tokens (sm_90a).

The first CTAs are the gate's: four warps have 32 experts and a slice of K, with the sums of `gate`.
The last of these CTAs to finish chooses experts and sorts the pairs, as `select` does. The other
CTAs are the product's. Neither part waits for the other: the codes that the product reads were made
by the launch before, as the hidden states were.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32, Uint32, cute

from dsv4.kernels.kit import pdl
from dsv4.kernels.moe.gate import (
    CHUNKS,
    M_TILES,
    ORDER,
    PAIRS,
    WORDS,
    added_parts,
    load_activations,
    load_weights,
    store_sums,
    store_totals,
)
from dsv4.kernels.moe.routing import (
    ARRIVAL_WORDS,
    EXPERT_TILE,
    GATE_THREADS,
    SLICE_PARTS,
    TOKEN_TILE,
    RoutingConfig,
)
from dsv4.kernels.moe.select import Lists, Select, arrive, live_count, load_bias
from dsv4.kernels.moe.sm90.context import Operands, ProductContext, allocate
from dsv4.kernels.moe.sm90.product import GroupedProduct, launch_options

# ptxas bounds registers by them, so that the next launch's CTAs find some beside one of these.
CTAS_OF_REGISTERS = 2
SUMS_BYTES = 4 * 2 * PAIRS * SLICE_PARTS  # of four warps and a token tile


class RouterTensors(NamedTuple):
    """Tensors of the router."""

    x: cute.Tensor  # [T, D] bf16
    gate: cute.Tensor  # [E, D] bf16
    counter: cute.Tensor  # [1] int32: CTAs of the gate that have finished; 0 between launches
    lists: Lists


class RouterBesideProduct:
    """Kernel: the lists of a router, and h of the shared expert.

    Args:
        product: of the shared expert alone.
    """

    def __init__(self, product: GroupedProduct, routing: RoutingConfig):
        self.product = product
        self.routing = routing
        plan = product.plan
        self.tokens = plan.shared.tokens
        self.token_tiles = self.tokens // TOKEN_TILE
        self.select = Select(routing, plan.warps.threads // 32, own_tokens=self.tokens)
        assert plan.warps.threads % GATE_THREADS == 0, plan.warps
        assert self.tokens * routing.top_k <= plan.warps.threads, plan.warps
        self.units = plan.warps.threads // GATE_THREADS  # of a CTA
        self.select_start = self.units * self.token_tiles * SUMS_BYTES
        used = self.select_start + self.select.smem_bytes
        assert used <= plan.smem["weight"].bytes, used

    @property
    def expert_tiles(self) -> int:
        return self.routing.experts // EXPERT_TILE

    @property
    def gate_ctas(self) -> int:
        return -(-self.expert_tiles * self.routing.slices // self.units)

    def serves(self, tokens: Int32, x_codes: cute.Tensor, num_sms: Int32) -> Boolean:
        """Whether a launch has codes, no more tokens than a tile of the product, and an SM for each
        CTA: else the product's last ones would wait for the gate's."""
        plan = self.product.plan
        has_room = self.gate_ctas + plan.row_tiles <= num_sms
        return (x_codes.shape[0] > 0) & (tokens <= self.tokens) & has_room

    @cute.jit
    def launch(
        self, operands: Operands, router: RouterTensors, stream, num_sms, group_tokens: Int32
    ):
        """Launch both parts."""
        ctas = self.gate_ctas + self.product.ctas(operands, num_sms)
        options = launch_options(self.product.plan) | {"min_blocks_per_mp": CTAS_OF_REGISTERS}
        self.kernel(operands, router, group_tokens).launch(
            grid=[ctas, 1, 1], stream=stream, **options
        )

    @cute.kernel
    def kernel(self, operands: Operands, router: RouterTensors, group_tokens: Int32):
        smem, pipes = allocate(self.product.plan)
        cta, ctas = Int32(cute.arch.block_idx()[0]), Int32(cute.arch.grid_dim()[0])
        first = self.gate_ctas
        if cta < first:
            self.route(router, smem.weight, cta, group_tokens)
        else:
            self.product.run(ProductContext(operands, smem, pipes, cta - first, ctas - first))

    # ---- router ----

    @cute.jit
    def route(
        self, router: RouterTensors, storage: cute.Pointer, cta: Int32, group_tokens: Int32
    ) -> None:
        """The part of a CTA of the gate, and the selection by the last one.

        Args:
            storage: in shared memory.
        """
        lists, thread = router.lists, cute.arch.thread_idx()[0]
        is_last = self.select.views(storage + self.select_start).is_last
        pdl.launch_dependents()
        self.add_logits(router, storage, cta)
        cute.arch.sync_threads()
        if thread == 0:
            is_last[0] = Int32(arrive(router.counter, Int32(self.gate_ctas)))
        cute.arch.sync_threads()
        if is_last[0] != 0:
            self.choose(lists, storage + self.select_start, group_tokens)
            if thread == 0:
                router.counter[0] = Int32(0)

    @cute.jit
    def add_logits(self, router: RouterTensors, storage: cute.Pointer, cta: Int32) -> None:
        """Write partial sums of the logits of each four warps' experts, of their slice of K."""
        routing, partials = self.routing, router.lists.partials
        thread = cute.arch.thread_idx()[0]
        warp = cute.arch.make_warp_uniform(thread // 32)
        own, part = warp // SLICE_PARTS, warp % SLICE_PARTS
        unit = cta * self.units + own
        expert_tile, split = unit % self.expert_tiles, unit // self.expert_tiles
        has_unit = split < routing.slices
        weights = cute.make_rmem_tensor((WORDS, 2 * M_TILES, CHUNKS), Uint32)
        if has_unit:
            load_weights(router.gate, expert_tile, split, part, weights)
        pdl.wait_for_previous_launch()
        if cta == 0 and thread == 0:
            for word in cutlass.range_constexpr(ARRIVAL_WORDS):
                router.lists.arrivals[word] = Int32(0)
        start = storage + own * (self.token_tiles * SUMS_BYTES)
        shape = (2, PAIRS, SLICE_PARTS, self.token_tiles)
        layout = cute.make_layout(shape, stride=ORDER)
        sums = cute.make_tensor(cute.recast_ptr(start, dtype=Float32), layout)
        if has_unit:
            # All loads are under way before the first product.
            words = cute.make_rmem_tensor((WORDS, CHUNKS, self.token_tiles), Uint32)
            for tile in cutlass.range_constexpr(self.token_tiles):
                k_block = split * SLICE_PARTS + part
                load_activations(router.x, tile * TOKEN_TILE, k_block, words[None, None, tile])
            for tile in cutlass.range_constexpr(self.token_tiles):
                store_sums(weights, words[None, None, tile], sums[None, None, part, tile])
        cute.arch.sync_threads()
        if has_unit:
            pair = thread % GATE_THREADS
            total = cute.make_rmem_tensor(2, Float32)
            for tile in cutlass.range_constexpr(self.token_tiles):
                for column in cutlass.range_constexpr(2):
                    total[column] = added_parts(sums[column, pair, None, tile])
                store_totals(partials, total, tile * TOKEN_TILE, split, expert_tile, pair)

    @cute.jit
    def choose(self, lists: Lists, storage: cute.Pointer, group_tokens: Int32) -> None:
        """Experts and weights of all tokens, by the warps in turn, and the list of pairs."""
        views = self.select.views(storage)
        warp = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // 32)
        tokens = lists.ids.shape[0]
        live = live_count(lists.live_tokens, tokens)
        bias = None
        if cutlass.const_expr(not self.routing.is_hashed):
            bias = load_bias(lists.bias, self.routing)
        scores = views.scores[None, warp]
        for token in cutlass.range(warp, tokens, self.select.warps, unroll=1):
            own_ids = views.own_ids[token, None]
            self.select.select(lists, scores, bias, own_ids, Int32(token), token < live)
            # The next token's scores come where lanes may still read this one's.
            cute.arch.sync_warp()
        cute.arch.sync_threads()
        self.select.sort_few(lists, views.counts, views.own_ids, group_tokens, live)
