"""Router and the shared expert's first product in one launch, for few tokens (sm_90a).

The first CTAs are the gate's, a set of them for each tile of eight tokens: four warps have 32
experts and a slice of K, with the sums of `gate`, or a few of these one behind the other. The last
CTA of a set to finish chooses experts, a warp a token, and the last of these sorts the pairs, as
`select` does. The other CTAs are the product's. Neither part waits for the other: the product reads
codes that the launch before has made, or rounds the hidden states by itself; then the gate writes
codes for the launches behind.
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
    COUNTER_WORDS,
    EXPERT_TILE,
    GATE_THREADS,
    SLICE_PARTS,
    TOKEN_TILE,
    RoutingConfig,
)
from dsv4.kernels.moe.select import Lists, Select, SelectSmem, arrive, live_count, load_bias
from dsv4.kernels.moe.sm90.context import Operands, ProductContext, allocate
from dsv4.kernels.moe.sm90.product import GroupedProduct, launch_options

# ptxas bounds registers by them, so that the next launch's CTAs find some beside one of these.
CTAS_OF_REGISTERS = 2
SUMS_BYTES = 4 * 2 * PAIRS * SLICE_PARTS  # of four warps and a token tile


class RouterTensors(NamedTuple):
    """Tensors of the router."""

    x: cute.Tensor  # [T, D] bf16
    gate: cute.Tensor  # [E, D] bf16
    # [sets + 1] int32: CTAs of a set that have finished, and sets; 0 between launches.
    counter: cute.Tensor
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
        self.sets = self.tokens // TOKEN_TILE  # of the gate's CTAs
        self.select = Select(routing, plan.warps.threads // 32, own_tokens=self.tokens)
        assert self.select.warps >= TOKEN_TILE and self.sets < COUNTER_WORDS, plan
        assert plan.warps.threads % GATE_THREADS == 0, plan.warps
        assert self.tokens * routing.top_k <= plan.warps.threads, plan.warps
        self.units = plan.warps.threads // GATE_THREADS  # of a CTA, at a time
        # As many as leave an SM to each of the product's CTAs.
        most_ctas = max((SM_90A.num_sms - plan.row_tiles) // self.sets, 1)
        self.rounds = -(-self.all_units // (self.units * most_ctas))
        self.select_start = self.rounds * self.units * SUMS_BYTES
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
    def set_ctas(self) -> int:
        return -(-self.all_units // (self.units * self.rounds))

    @property
    def gate_ctas(self) -> int:
        return self.set_ctas * self.sets

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
        """The part of a CTA of the gate; the selection by the last one of a set, and the sort by
        the last of these.

        Args:
            storage: in shared memory.
        """
        own_set, rank = cta // self.set_ctas, cta % self.set_ctas
        views = self.select.views(storage + self.select_start)
        pdl.launch_dependents()
        self.select.clear(views.bits)
        self.add_logits(router, storage, rank, own_set)
        if self.is_last(router, views, own_set, self.set_ctas):
            self.choose(router.lists, views, own_set)
            if cutlass.const_expr(self.sets == 1):
                cute.arch.sync_threads()
                self.sort(router.lists, views, views.own_ids, group_tokens)
            else:
                if self.is_last(router, views, Int32(self.sets), self.sets):
                    self.sort(router.lists, views, router.lists.ids, group_tokens)

    @cute.jit
    def is_last(
        self, router: RouterTensors, views: SelectSmem, number: Int32, ctas: cutlass.Constexpr
    ) -> Boolean:
        """Whether all others of so many CTAs have arrived at a counter, which then is 0 again;
        orders what they wrote before what this one reads."""
        thread = cute.arch.thread_idx()[0]
        counter = cute.make_tensor(router.counter.iterator + number, cute.make_layout(1))
        cute.arch.sync_threads()
        if thread == 0:
            is_last = arrive(counter, Int32(ctas))
            views.is_last[0] = Int32(is_last)
            if is_last:
                counter[0] = Int32(0)
        cute.arch.sync_threads()
        return views.is_last[0] != 0

    @cute.jit
    def add_logits(
        self, router: RouterTensors, storage: cute.Pointer, cta: Int32, own_set: Int32
    ) -> None:
        """Write partial sums of the logits of each four warps' experts, of their slice of K and of
        the set's tokens."""
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
        first_token = own_set * TOKEN_TILE
        if own_set + cta == 0 and thread == 0:
            for word in cutlass.range_constexpr(ARRIVAL_WORDS):
                router.lists.arrivals[word] = Int32(0)
        for number in cutlass.range_constexpr(self.rounds):
            unit = self.unit_of(cta, number, thread)
            if unit.exists:
                if cutlass.const_expr(number > 0):
                    load_weights(router.gate, unit.expert_tile, unit.split, unit.part, weights)
                self.multiply(router, unit, weights, self.sums_of(storage, unit), first_token)
        cute.arch.sync_threads()
        for number in cutlass.range_constexpr(self.rounds):
            unit = self.unit_of(cta, number, thread)
            if unit.exists:
                pair, sums = thread % GATE_THREADS, self.sums_of(storage, unit)
                total = cute.make_rmem_tensor(2, Float32)
                for column in cutlass.range_constexpr(2):
                    total[column] = added_parts(sums[column, pair, None])
                store_totals(
                    router.lists.partials, total, first_token, unit.split, unit.expert_tile, pair
                )

    def unit_of(self, cta: Int32, number: int, thread: Int32) -> Unit:
        """That of a thread in a round."""
        warp = cute.arch.make_warp_uniform(thread // 32)
        place = number * self.units + warp // SLICE_PARTS
        index = (number * self.set_ctas + cta) * self.units + warp // SLICE_PARTS
        split = index // self.expert_tiles
        return Unit(
            index % self.expert_tiles, split, warp % SLICE_PARTS, place,
            split < self.routing.slices,
        )  # fmt: skip

    def sums_of(self, storage: cute.Pointer, unit: Unit) -> cute.Tensor:
        """[column, pair, part] of a unit in shared memory."""
        start = storage + unit.place * SUMS_BYTES
        layout = cute.make_layout((2, PAIRS, SLICE_PARTS), stride=ORDER[:3])
        return cute.make_tensor(cute.recast_ptr(start, dtype=Float32), layout)

    @cute.jit
    def multiply(
        self, router: RouterTensors, unit: Unit, weights: cute.Tensor, sums: cute.Tensor,
        first_token: Int32,
    ) -> None:  # fmt: skip
        """The sums of a warp's part of a unit; codes of its k block, where they are wanted."""
        words = cute.make_rmem_tensor((WORDS, CHUNKS), Uint32)
        k_block = unit.split * SLICE_PARTS + unit.part
        load_activations(router.x, first_token, k_block, words)
        store_sums(weights, words, sums[None, None, unit.part])
        if cutlass.const_expr(self.writes_codes):  # noqa: SIM102 static, dynamic
            if unit.expert_tile == 0:
                lane = cute.arch.lane_idx()
                store_codes(router, words, first_token + lane // 4, k_block, lane % 4)

    @cute.jit
    def choose(self, lists: Lists, views: SelectSmem, own_set: Int32) -> None:
        """Experts and weights of the set's tokens, each by a warp."""
        warp = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // 32)
        tokens = lists.ids.shape[0]
        live = live_count(lists.live_tokens, tokens)
        bias = None
        if cutlass.const_expr(not self.routing.is_hashed):
            bias = load_bias(lists.bias, self.routing)
        token = own_set * TOKEN_TILE + warp
        if token < tokens:
            scores, own_ids = views.scores[None, warp], views.own_ids[token, None]
            self.select.select(lists, scores, bias, own_ids, token, token < live)

    @cute.jit
    def sort(self, lists: Lists, views: SelectSmem, ids: cute.Tensor, group_tokens: Int32) -> None:
        """The list of pairs.

        Args:
            ids: of all sets' tokens, with rows behind each other.
        """
        live = live_count(lists.live_tokens, lists.ids.shape[0])
        self.select.sort_few(lists, views, ids, group_tokens, live)
