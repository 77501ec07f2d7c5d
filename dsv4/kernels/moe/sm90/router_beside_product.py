"""Router and the shared expert's first product in one launch, for few tokens (sm_90a).

The first CTAs are the gate's: four warps have 32 experts and a slice of K, with the sums of `gate`,
or a few of these one behind the other. The last of these CTAs to finish chooses experts and sorts
the pairs, as `select` does. The other CTAs are the product's. Neither part waits for the other: the
product reads codes that the launch before has made, or rounds the hidden states by itself; then the
gate writes codes for the launches behind.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32, Uint32, cute

from dsv4.arch import SM_90A
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
    prefetch_weights,
    store_codes,
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
    codes: cute.Tensor  # [T, D] e4m3, written where the product rounds x by itself
    scales: cute.Tensor  # [T, D / 128] E8M0 bytes, likewise


class Unit(NamedTuple):
    """Part of the gate that four warps take, as one of them sees it."""

    expert_tile: Int32
    split: Int32  # slice of K
    part: Int32  # of the slice, the warp's
    place: Int32  # among those of the CTA
    exists: Boolean


class RouterBesideProduct:
    """Kernel: the lists of a router, and h of the shared expert.

    Args:
        product: of the shared expert alone.
        writes_codes: whether launches behind read codes of x that none before has made.
    """

    def __init__(self, product: GroupedProduct, routing: RoutingConfig, writes_codes: bool = False):
        self.product = product
        self.routing = routing
        self.writes_codes = writes_codes
        plan = product.plan
        self.tokens = plan.shared.tokens
        self.token_tiles = self.tokens // TOKEN_TILE
        self.select = Select(routing, plan.warps.threads // 32, own_tokens=self.tokens)
        assert plan.warps.threads % GATE_THREADS == 0, plan.warps
        assert self.tokens * routing.top_k <= plan.warps.threads, plan.warps
        self.units = plan.warps.threads // GATE_THREADS  # of a CTA, at a time
        # As many as leave an SM to each of the product's CTAs.
        most_ctas = max(SM_90A.num_sms - plan.row_tiles, 1)
        self.rounds = -(-self.all_units // (self.units * most_ctas))
        self.select_start = self.rounds * self.units * self.token_tiles * SUMS_BYTES
        used = self.select_start + self.select.smem_bytes
        assert used <= plan.smem["weight"].bytes, used

    @property
    def expert_tiles(self) -> int:
        return self.routing.experts // EXPERT_TILE

    @property
    def all_units(self) -> int:
        """32 experts and a slice of K each."""
        return self.expert_tiles * self.routing.slices

    @property
    def gate_ctas(self) -> int:
        return -(-self.all_units // (self.units * self.rounds))

    def serves(self, tokens: Int32, num_sms: Int32) -> Boolean:
        """Whether a launch has no more tokens than a tile of the product, and an SM for each CTA:
        else the product's last ones would wait for the gate's."""
        plan = self.product.plan
        has_room = self.gate_ctas + plan.row_tiles <= num_sms
        return (tokens <= self.tokens) & has_room

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
        thread = cute.arch.thread_idx()[0]
        weights = cute.make_rmem_tensor((WORDS, 2 * M_TILES, CHUNKS), Uint32)
        for number in cutlass.range_constexpr(self.rounds):
            unit = self.unit_of(cta, number, thread)
            if unit.exists:
                if cutlass.const_expr(number == 0):
                    load_weights(router.gate, unit.expert_tile, unit.split, unit.part, weights)
                else:
                    prefetch_weights(router.gate, unit.expert_tile, unit.split, unit.part)
        pdl.wait_for_previous_launch()
        if cta == 0 and thread == 0:
            for word in cutlass.range_constexpr(ARRIVAL_WORDS):
                router.lists.arrivals[word] = Int32(0)
        for number in cutlass.range_constexpr(self.rounds):
            unit = self.unit_of(cta, number, thread)
            if unit.exists:
                if cutlass.const_expr(number > 0):
                    load_weights(router.gate, unit.expert_tile, unit.split, unit.part, weights)
                self.multiply(router, unit, weights, self.sums_of(storage, unit))
        cute.arch.sync_threads()
        for number in cutlass.range_constexpr(self.rounds):
            unit = self.unit_of(cta, number, thread)
            if unit.exists:
                pair, sums = thread % GATE_THREADS, self.sums_of(storage, unit)
                total = cute.make_rmem_tensor(2, Float32)
                for tile in cutlass.range_constexpr(self.token_tiles):
                    for column in cutlass.range_constexpr(2):
                        total[column] = added_parts(sums[column, pair, None, tile])
                    store_totals(
                        router.lists.partials, total, tile * TOKEN_TILE, unit.split,
                        unit.expert_tile, pair,
                    )  # fmt: skip

    def unit_of(self, cta: Int32, number: int, thread: Int32) -> Unit:
        """That of a thread in a round."""
        warp = cute.arch.make_warp_uniform(thread // 32)
        place = number * self.units + warp // SLICE_PARTS
        index = (number * self.gate_ctas + cta) * self.units + warp // SLICE_PARTS
        split = index // self.expert_tiles
        return Unit(
            index % self.expert_tiles, split, warp % SLICE_PARTS, place,
            split < self.routing.slices,
        )  # fmt: skip

    def sums_of(self, storage: cute.Pointer, unit: Unit) -> cute.Tensor:
        """[column, pair, part, token tile] of a unit in shared memory."""
        start = storage + unit.place * (self.token_tiles * SUMS_BYTES)
        layout = cute.make_layout((2, PAIRS, SLICE_PARTS, self.token_tiles), stride=ORDER)
        return cute.make_tensor(cute.recast_ptr(start, dtype=Float32), layout)

    @cute.jit
    def multiply(
        self, router: RouterTensors, unit: Unit, weights: cute.Tensor, sums: cute.Tensor
    ) -> None:
        """The sums of a warp's part of a unit; codes of its k block, where they are wanted."""
        # All loads are under way before the first product.
        words = cute.make_rmem_tensor((WORDS, CHUNKS, self.token_tiles), Uint32)
        k_block = unit.split * SLICE_PARTS + unit.part
        for tile in cutlass.range_constexpr(self.token_tiles):
            load_activations(router.x, tile * TOKEN_TILE, k_block, words[None, None, tile])
        for tile in cutlass.range_constexpr(self.token_tiles):
            own = words[None, None, tile]
            store_sums(weights, own, sums[None, None, unit.part, tile])
            if cutlass.const_expr(self.writes_codes):  # noqa: SIM102 static, dynamic
                if unit.expert_tile == 0:
                    lane = cute.arch.lane_idx()
                    token = tile * TOKEN_TILE + lane // 4
                    store_codes(router, own, token, k_block, lane % 4)

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
