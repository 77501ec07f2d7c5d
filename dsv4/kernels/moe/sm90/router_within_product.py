"""Router and the shared expert's first product in one launch, for some tokens (sm_90a).

Every CTA of the product has eight warps more, which route beside it: they have 32 experts, a slice
of K and some tokens, with the sums of `gate`; then a warp takes a token, as `select` does, and the
last CTA to finish sorts the pairs. The product reads codes that the launch before has made, so that
neither part waits for the other.

The choice waits for all logits, but only where all CTAs have begun, so that no CTA waits for
one that may have no place: a CTA that does not find them begun leaves its tokens to the last one to
arrive.

Memory order: a barrier of the eight warps puts their stores before the atomic of one thread, whose
release at GPU scope is cumulative. Read-modify-writes continue a release sequence, so that an
acquire that finds the last arrival synchronises with all; the next barrier extends that to the
other warps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute
from cutlass.memory import SmemAllocator

from dsv4.kernels.kit import pdl
from dsv4.kernels.kit.plan import Warps
from dsv4.kernels.kit.pointers import pointer_at
from dsv4.kernels.moe.gate import (
    CHUNKS,
    M_TILE,
    M_TILES,
    ORDER,
    PAIRS,
    WORDS,
    added_parts,
    load_activations,
    load_rows,
    products,
    store_product,
    store_totals,
)
from dsv4.kernels.moe.routing import (
    ARRIVAL_WORDS,
    EXPERT_TILE,
    MOST_ROUTED,
    SLICE_PARTS,
    TOKEN_TILE,
    RoutingConfig,
)
from dsv4.kernels.moe.select import Lists, Select, arrive, live_count, load_bias
from dsv4.kernels.moe.sm90.context import Operands, ProductContext, allocate
from dsv4.kernels.moe.sm90.product import GroupedProduct, launch_options
from dsv4.kernels.moe.sm90.router_beside_product import RouterTensors
from dsv4.kernels.moe.team import Team

ROUTER_WARPS = M_TILES * SLICE_PARTS  # each has 16 experts and a part of a slice
ROUTER_MEETS = 8  # named barrier
STEP_TILES = 2  # of tokens, whose loads are under way at a time
MOST_BLOCKS = 4  # of tokens, for each of which a CTA loads its weights
# Reads of the count of CTAs that have begun, before a CTA leaves its tokens to another one.
MAX_POLLS = 16
# In one word CTAs that have arrived, and above them those of these that wait.
WAITING = 1 << 16
TOLD_WORDS = 3
# Of the gate: sums of a step's tiles, two sets by turns.
SUMS_SHAPE = (2, PAIRS, SLICE_PARTS, STEP_TILES, 2)
SUMS_BYTES = 4 * 2 * PAIRS * SLICE_PARTS * STEP_TILES * 2


class Job(NamedTuple):
    """Part of the gate that a CTA takes, as one of its warps sees it."""

    expert_tile: Int32
    split: Int32  # slice of K
    k_block: Int32  # the warp's part of it
    first_token: Int32
    end: Int32  # of its tokens


@dataclass(frozen=True)
class Counts:
    """Counts of CTAs, all 0 between launches.

    Attributes:
        begun, ended: that run or have run, and whose tokens have their experts.
        met: that have stored their logits, and `WAITING` for each that takes tokens of its own.
    """

    begun: cute.Pointer
    met: cute.Pointer
    ended: cute.Tensor

    @classmethod
    def of(cls, counter: cute.Tensor) -> Counts:
        begun, met = (pointer_at(counter.iterator, Int64(i), Int32, align=4) for i in range(2))
        return cls(begun, met, cute.make_tensor(counter.iterator + 2, cute.make_layout(1)))


class RouterWithinProduct:
    """Kernel: the lists of a router, and h of the shared expert.

    Args:
        product: of the shared expert alone.
    """

    def __init__(self, product: GroupedProduct, routing: RoutingConfig):
        self.product = product
        self.routing = routing
        own = product.plan.warps
        self.warps = Warps.of(**{role.name: role.count for role in own.roles}, router=ROUTER_WARPS)
        self.first_warp = self.warps["router"].first
        self.team = Team(32 * ROUTER_WARPS, own.threads, ROUTER_MEETS)
        self.select = Select(routing, ROUTER_WARPS, team=self.team)
        assert self.team.threads == STEP_TILES * PAIRS, own

    @property
    def smem_bytes(self) -> int:
        """Of the router: sums of the gate, then what the selection has, then the sort."""
        select = self.select
        return max(SUMS_BYTES, select.smem_bytes, select.masks_bytes(MOST_ROUTED))

    @property
    def all_units(self) -> int:
        """32 experts and a slice of K each."""
        return self.routing.experts // EXPERT_TILE * self.routing.slices

    @cute.jit
    def launch(
        self, operands: Operands, router: RouterTensors, stream, num_sms, group_tokens: Int32
    ):
        """Launch a CTA on each SM."""
        options = launch_options(self.product.plan) | {"block": [self.warps.threads, 1, 1]}
        block_tokens = self.block_tokens(router.x.shape[0], num_sms)
        self.kernel(operands, router, group_tokens, block_tokens).launch(
            grid=[num_sms, 1, 1], stream=stream, **options
        )

    def block_tokens(self, tokens: Int32, ctas: Int32) -> Int32:
        """Tokens of a CTA at a time: those with which the CTA that has most takes the fewest
        steps."""
        best, fewest = Int32(0), Int32(0)
        for blocks in range(1, MOST_BLOCKS + 1):
            steps = cute.ceil_div(tokens, blocks * STEP_TILES * TOKEN_TILE)
            taken = cute.ceil_div(self.all_units * blocks, ctas) * steps
            is_better = (taken < fewest) | (fewest == 0)
            best = cutlass.select_(is_better, steps * (STEP_TILES * TOKEN_TILE), best)
            fewest = cutlass.select_(is_better, taken, fewest)
        return best

    @cute.kernel
    def kernel(
        self, operands: Operands, router: RouterTensors, group_tokens: Int32, block_tokens: Int32
    ):
        smem, pipes = allocate(self.product.plan)
        storage = SmemAllocator().allocate(self.smem_bytes, byte_alignment=16)
        told = SmemAllocator().allocate_tensor(Int32, cute.make_layout(TOLD_WORDS), 16)
        cta, ctas = Int32(cute.arch.block_idx()[0]), Int32(cute.arch.grid_dim()[0])
        ctx = ProductContext(operands, smem, pipes, cta, ctas)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp < self.first_warp:
            self.product.initialise(ctx, warp)
        cute.arch.sync_threads()
        if warp < self.first_warp:
            self.product.take_role(ctx, warp)
        else:
            self.route(router, storage, told, cta, ctas, group_tokens, block_tokens)

    # ---- router ----

    @cute.jit
    def route(
        self, router: RouterTensors, storage: cute.Pointer, told: cute.Tensor, cta: Int32,
        ctas: Int32, group_tokens: Int32, block_tokens: Int32,
    ) -> None:  # fmt: skip
        """The part of a CTA's last warps: logits, then experts of some tokens; the pairs by the
        last CTA.

        Args:
            storage: `smem_bytes` of shared memory.
            told: of what one thread tells the others.
        """
        lists, counts = router.lists, Counts.of(router.counter)
        thread, tokens = self.team.thread(), lists.ids.shape[0]
        begun = self.add_logits(router, counts, storage, cta, ctas, block_tokens)
        bias = None
        if cutlass.const_expr(not self.routing.is_hashed):
            bias = load_bias(lists.bias, self.routing)
        live = live_count(lists.live_tokens, tokens)
        share = cute.ceil_div(tokens, ctas)
        self.team.meet()
        if thread == 0:
            told[0], told[1] = self.meet(counts, begun, ctas, share, tokens)
        self.team.meet()
        views = self.select.views(storage)
        first, rest = told[0], told[1]
        self.choose(lists, views, bias, first, cutlass.min(first + share, tokens), rest, live)
        self.team.meet()
        if thread == 0:
            is_last = arrive(counts.ended, ctas)
            told[2] = Int32(is_last)
            if is_last:
                for word in (counts.begun, counts.met):
                    word.store(Int32(0))
                ended = counts.ended
                ended[0] = Int32(0)
        self.team.meet()
        if told[2] != 0:
            if cutlass.const_expr(self.routing.is_hashed):
                # A table may list an expert twice.
                self.select.sort(lists, views.counts, views.board, group_tokens, live)
            else:
                self.select.sort_some(lists, storage, MOST_ROUTED, group_tokens, live)

    # ---- logits ----

    @cute.jit
    def add_logits(
        self, router: RouterTensors, counts: Counts, storage: cute.Pointer, first: Int32,
        step: Int32, block_tokens: Int32,
    ) -> Int32:  # fmt: skip
        """Write partial sums of the logits: of a unit and some tokens at a time. Returns how many
        CTAs have begun, to one thread."""
        thread, tokens = self.team.thread(), router.x.shape[0]
        layout = cute.make_layout(SUMS_SHAPE, stride=(*ORDER, SUMS_BYTES // 8))
        sums = cute.make_tensor(cute.recast_ptr(storage, dtype=Float32), layout)
        jobs = self.all_units * cute.ceil_div(tokens, block_tokens)
        warp = cute.arch.make_warp_uniform(thread // 32)
        m = warp // SLICE_PARTS
        weights = cute.make_rmem_tensor((WORDS, M_TILE // 8, CHUNKS), Uint32)
        job = self.job_of(first, warp, block_tokens, tokens)
        if first < jobs:
            load_rows(router.gate, job.expert_tile * EXPERT_TILE + m * M_TILE, job.k_block, weights)
        pdl.wait_for_previous_launch()
        if thread == 0:
            cute.arch.red(counts.begun, Int32(1), op="add", dtype="s32", sem="relaxed", scope="gpu")
            if first == 0:
                arrivals = router.lists.arrivals
                for word in cutlass.range_constexpr(ARRIVAL_WORDS):
                    arrivals[word] = Int32(0)
        turn, begun = Int32(0), Int32(0)
        for index in cutlass.range(first, jobs, step, unroll=1):
            job = self.job_of(index, warp, block_tokens, tokens)
            if index != first:
                row = job.expert_tile * EXPERT_TILE + m * M_TILE
                load_rows(router.gate, row, job.k_block, weights)
            for token in cutlass.range(job.first_token, job.end, STEP_TILES * TOKEN_TILE, unroll=1):
                if thread == 0:
                    # It is there before it is needed, behind the last step.
                    begun = cute.arch.load(counts.begun, Int32, sem="relaxed", scope="gpu")
                own = sums[None, None, None, None, turn]
                self.multiply(router, job, weights, own, token, warp, thread)
                turn = 1 - turn
        return begun

    @cute.jit
    def job_of(self, index: Int32, warp: Int32, block_tokens: Int32, tokens: Int32) -> Job:
        """That of a warp."""
        expert_tiles = self.routing.experts // EXPERT_TILE
        unit, block = index % self.all_units, index // self.all_units
        split, first_token = unit // expert_tiles, block * block_tokens
        return Job(
            unit % expert_tiles, split, split * SLICE_PARTS + warp % SLICE_PARTS, first_token,
            cutlass.min(first_token + block_tokens, tokens),
        )  # fmt: skip

    @cute.jit
    def multiply(
        self, router: RouterTensors, job: Job, weights: cute.Tensor, sums: cute.Tensor,
        token: Int32, warp: Int32, thread: Int32,
    ) -> None:  # fmt: skip
        """The partial sums of a step's tokens: products by parts, then their sums, a pair a
        thread. Steps have two sets of `sums` by turns, so that one barrier parts them."""
        words = cute.make_rmem_tensor((WORDS, CHUNKS, STEP_TILES), Uint32)
        for tile in cutlass.range_constexpr(STEP_TILES):
            load_activations(
                router.x, token + tile * TOKEN_TILE, job.k_block, words[None, None, tile]
            )
        part, m = warp % SLICE_PARTS, warp // SLICE_PARTS
        for tile in cutlass.range_constexpr(STEP_TILES):
            found = products(weights, words[None, None, tile], 0)
            store_product(found, m, sums[None, None, part, tile])
        self.team.meet()
        tile, pair = thread // PAIRS, thread % PAIRS
        total = cute.make_rmem_tensor(2, Float32)
        for column in cutlass.range_constexpr(2):
            total[column] = added_parts(sums[column, pair, None, tile])
        first = token + tile * TOKEN_TILE
        store_totals(router.lists.partials, total, first, job.split, job.expert_tile, pair)

    # ---- experts ----

    @cute.jit
    def meet(
        self, counts: Counts, begun: Int32, ctas: Int32, share: Int32, tokens: Int32
    ) -> tuple[Int32, Int32]:
        """Publish the CTA's logits, and wait for those of the others where it has tokens; the first
        of its own, and, of the last CTA to arrive, of those that are left. By one thread."""
        polls = Int32(0)
        while begun < ctas and polls < MAX_POLLS:
            begun = cute.arch.load(counts.begun, Int32, sem="relaxed", scope="gpu")
            polls += 1
        waits = cutlass.select_(begun == ctas, Int32(1), Int32(0))
        added = 1 + waits * WAITING
        before = cute.arch.atomic_add(counts.met, added, sem="acq_rel", scope="gpu")
        first, arrived = before // WAITING * share, before % WAITING + 1
        rest = tokens
        if arrived == ctas:
            # Those that wait have drawn their tokens before they arrived; no more are drawn.
            rest = cutlass.min((before // WAITING + waits) * share, tokens)
        if waits == 0 or first >= tokens:
            first = Int32(tokens)
        else:
            while arrived < ctas:
                found = cute.arch.load(counts.met, Int32, sem="acquire", scope="gpu")
                arrived = found % WAITING
        return first, rest

    @cute.jit
    def choose(
        self, lists: Lists, views, bias, first: Int32, end: Int32, rest: Int32, live: Int32
    ) -> None:
        """Experts and weights of the tokens from `first` to `end`, and of those from `rest` on,
        each by a warp."""
        warp = cute.arch.make_warp_uniform(self.team.thread() // 32)
        scores, own_ids = views.scores[None, warp], views.own_ids[warp, None]
        own = end - first
        for i in cutlass.range(warp, own + lists.ids.shape[0] - rest, ROUTER_WARPS, unroll=1):
            token = cutlass.select_(i < own, first + i, rest + i - own)
            self.select.select(lists, scores, bias, own_ids, token, token < live)
            # The next token's scores come where lanes may still read this one's.
            cute.arch.sync_warp()
