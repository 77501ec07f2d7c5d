"""Scores and choice of a token's entries by a cluster, in one launch.

Each CTA scores a run of the token's tiles and keeps the order keys in shared memory. Then it adds
its counts of them by upper bits to those of every CTA of the cluster, so that each finds the bin of
the k-th best by itself; the choice among that bin is `Selection`'s.

Pages of keys are asked for, to L2, before the launch before is over: what it still writes of them
meets them there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import cutlass
from cutlass import BFloat16, Boolean, Float32, Int32, Int64, Uint16, Uint32, cute
from cutlass.memory import SmemAllocator

from dsv4.kernels.indexer.config import (
    BINS,
    KERNEL_DIM,
    KERNEL_HEADS,
    KERNEL_ROPE_DIM,
    TILE_KEYS,
    IndexTopkConfig,
)
from dsv4.kernels.indexer.context import Operands, bits_of, order_key, tiles_of, visible
from dsv4.kernels.indexer.fp4_tiles import Fp4Ring
from dsv4.kernels.indexer.fp8_tiles import Fp8Ring
from dsv4.kernels.indexer.plan import GROUPS, LOADERS, ClusterPlan
from dsv4.kernels.indexer.selection import (
    BOARD_STRIDE,
    HELD,
    VECTOR,
    Board,
    Selection,
    Share,
)
from dsv4.kernels.indexer.tile_scores import WARP, Run, TileScores, code_address
from dsv4.kernels.kit import mbarrier, pdl
from dsv4.kernels.kit.index_rounding import coded, rotated, transformed
from dsv4.kernels.kit.remote import add_remote
from dsv4.kernels.kit.storage import storage_struct
from dsv4.kernels.kit.tma import prefetch_descriptors
from dsv4.kernels.kit.vectors import address_of, pointer_to, vector_at

WARPS = GROUPS * 4  # of the consumers
WARP_HALF = WARP // 2
LANE_CHANNELS = KERNEL_DIM // WARP  # of a head, that a lane rounds
PAIRS = LANE_CHANNELS // 2
LANE_WORDS = 4  # lanes whose codes are a vector of a swizzled row
VECTORS = WARP // LANE_WORDS


class ClusterSmem(NamedTuple):
    """Views of shared memory: those of `tile_scores.Smem`, and of the choice."""

    keys: Fp8Ring | Fp4Ring
    queries: cute.Tensor
    queries_start: cute.Pointer
    factors: cute.Tensor
    counts: cute.Tensor
    sums: tuple
    order_keys: cute.Tensor  # [HELD_KEYS / 2], two a word
    totals: cute.Tensor  # [BINS]: counts of the whole cluster
    pages: cute.Tensor  # [most pages]: of the CTA's entries
    first_page: Int32  # number of the first of them
    sent: cute.Pointer  # mbarriers: of the queries, of the board
    choice: Board


class HeldSelection(Selection):
    """Choice among order keys that the CTAs have in shared memory."""

    @cute.jit
    def load(
        self, source: ClusterSmem, share: Share, first: Int32, per_thread: Int32,
        words: cute.Tensor, thread: Int32,
    ):  # fmt: skip
        """See `Selection`."""
        begin = first + thread * per_thread * VECTOR
        for v in cutlass.range_constexpr(HELD):
            if v < per_thread:
                at = begin + v * VECTOR
                if at < share.end:
                    found = self.vector(source, at - share.first)
                    for w in cutlass.range_constexpr(VECTOR // 2):
                        words[w, v] = found[w]
                else:
                    for w in cutlass.range_constexpr(VECTOR // 2):
                        words[w, v] = Uint32(0)

    def vector(self, source: ClusterSmem, entry: Int32) -> cute.Tensor:
        """Order keys of a vector of the CTA's entries."""
        at = source.order_keys.iterator + cute.assume(entry // 2, divby=VECTOR // 2)
        words = cute.make_rmem_tensor(VECTOR // 2, Uint32)
        found = cute.make_tensor(at, cute.make_layout(VECTOR // 2))
        cute.autovec_copy(cute.recast_tensor(found, Uint32), words)
        return words

    def load_bins(self, source: ClusterSmem, lowest: Int32, bins: cute.Tensor) -> None:
        """See `Selection`."""
        at = source.totals.iterator + cute.assume(lowest, divby=self.thread_bins)
        cute.autovec_copy(cute.make_tensor(at, cute.make_layout(self.thread_bins)), bins)

    def page(self, source: ClusterSmem, operands: Operands, request: Int32, number: Int32) -> Int32:
        """See `Selection`."""
        return source.pages[number - source.first_page]

    @cute.jit
    def exchange(self, source: ClusterSmem, smem: Board, rank: Int32, thread: Int32):
        """See `Selection`."""
        cute.arch.sync_threads()
        vectors = BOARD_STRIDE // 4
        for i in cutlass.range(thread, vectors * self.cluster, self.threads, unroll=1):
            at, other = i % vectors * 4, (rank + i // vectors) % self.cluster
            target = smem.board.iterator + (rank * BOARD_STRIDE + at)
            words = tuple(smem.own[at + j] for j in range(4))
            cute.arch.store_async_dsmem(target.align(16), words, source.sent + 1, other)
        cute.arch.mbarrier_wait(source.sent + 1, 0)


class OneLaunch(TileScores):
    """Kernel of one configuration.

    Args:
        cluster: CTAs of a token.
        products: see `TileScores`.
        has_tmem: see `ScoresPlan`.
    """

    def __init__(self, config: IndexTopkConfig, cluster: int, products: Callable, has_tmem: bool):
        keys = config.key_format, config.page
        plan = ClusterPlan(self.lanes_per_warp, *keys, has_tmem, cluster, config.topk)
        super().__init__(config, plan, products)
        self.cluster = cluster
        self.threads = plan.warps.threads
        self.selection = HeldSelection(config, self.threads, cluster)

    # ---- host ----

    @cute.jit
    def launch(self, operands: Operands, stream):
        """A cluster for each token."""
        key_map = self.tiles.key_map(operands.keys)
        self.kernel((key_map,), operands).launch(
            grid=[operands.indices.shape[0] * self.cluster, 1, 1],
            block=[self.threads, 1, 1],
            cluster=[self.cluster, 1, 1],
            stream=stream,
            min_blocks_per_mp=self.plan.ctas_per_sm,
            # Given, because the compiler would ask a driver for the capacity.
            preferred_smem_carveout=100,
            use_pdl=True,
        )

    # ---- device ----

    @cute.kernel
    def kernel(self, maps: cutlass.GridConstant[tuple], operands: Operands):
        plan = self.plan
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        thread = cute.arch.thread_idx()[0]
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        token = cute.arch.block_idx()[0] // self.cluster
        count, request = visible(operands, token)
        tiles = tiles_of(self.config, count)
        tile, end = rank * tiles // self.cluster, (rank + 1) * tiles // self.cluster
        run = Run(token, count, request, tile, end - tile)
        storage = storage_struct(plan.smem)(SmemAllocator().allocate(plan.smem.total_bytes, 1024))
        smem = self.cluster_views(storage, tile)
        ring = mbarrier.pipeline(plan.barriers, storage, "ring")
        self.prepare(smem, ring, warp, thread)
        if thread == 0:
            for i in cutlass.range_constexpr(2):
                cute.arch.mbarrier_init(smem.sent + i, 1)
            cute.arch.mbarrier_init_fence()
            if tiles > 0:
                for i in cutlass.range_constexpr(2):
                    cute.arch.mbarrier_arrive_and_expect_tx(smem.sent + i, plan.sent_bytes[i])
        for i in cutlass.range(thread, BINS, self.threads, unroll=1):
            smem.totals[i] = Int32(0)
        if thread < BOARD_STRIDE:
            smem.choice.own[thread] = Int32(0)
        pdl.launch_dependents()
        # Queries and counts of the others may come from here on.
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        if tiles > 0:
            if warp >= plan.warps["load"].first:
                prefetch_descriptors(maps)
                loader = warp - plan.warps["load"].first
                self.prefetch_run(operands, run, loader)
                pdl.wait_for_previous_launch()
                cursor = ring.skip(ring.producer(), loader)
                self.load_run(operands, smem, ring, maps[0], cursor, run, loader)
                self.keep_pages(operands, smem, run, loader)
            else:
                self.share_queries(operands, smem, token, rank, warp)
                cute.arch.mbarrier_wait(smem.sent, 0)
                # wgmma reads through the async proxy.
                cute.arch.fence_view_async_shared()
                group = warp // 4
                cursor = ring.skip(ring.consumer(), group)
                self.score_run(operands, smem, ring, cursor, run, group)
            self.add_counts(smem, rank, thread)
            share = Share(tile * TILE_KEYS, cutlass.min(end * TILE_KEYS, count))
            self.selection.select(operands, smem, smem.choice, token, request, share, rank, thread)
            self.store_scores(operands, smem, run, thread)
        else:
            pdl.wait_for_previous_launch()
            self.selection.name_all(operands, token, (count, request), rank, thread)
        self.tiles.free(smem.sums, warp)

    def cluster_views(self, storage, tile) -> ClusterSmem:
        """Views of the plan's shared memory."""
        choice = Board(
            board=self.words(storage, "board", BOARD_STRIDE, self.cluster),
            own=self.words(storage, "own"),
            sums=self.words(storage, "sums"),
            found=self.words(storage, "found"),
            chosen=self.words(storage, "chosen"),
        )
        return ClusterSmem(
            *self.views(storage),
            self.words(storage, "order_keys"),
            self.words(storage, "totals"),
            self.words(storage, "pages"),
            tile * TILE_KEYS // self.config.page,
            storage.sent.data_ptr(),
            choice,
        )

    # ---- load warps ----

    @cute.jit
    def keep_pages(self, operands: Operands, smem: ClusterSmem, run: Run, loader):
        """Keep the pages of the CTA's entries, by which chosen ones are called."""
        if cutlass.const_expr(self.config.gives_slots):
            page = self.config.page
            end = cutlass.min((run.tile + run.tiles) * TILE_KEYS, run.count)
            number = (end + page - 1) // page - smem.first_page
            own = loader * WARP + cute.arch.lane_idx()
            for i in cutlass.range(own, number, LOADERS * WARP, unroll=4):
                smem.pages[i] = operands.block_table[run.request, smem.first_page + i]

    # ---- consumers ----

    @cute.jit
    def share_queries(self, operands: Operands, smem: ClusterSmem, token, rank, warp):
        """Round some of the token's heads for all CTAs of the cluster: a warp has a head, a lane
        four channels."""
        lane = cute.arch.lane_idx()
        turns = [] if self.config.has_codes else self.load_turns(operands, token, lane)
        pdl.wait_for_previous_launch()
        heads = KERNEL_HEADS // self.cluster
        for first in cutlass.range_constexpr(0, heads, WARPS):
            own = first + warp
            if own < heads:
                self.share_head(operands, smem, token, rank, rank * heads + own, turns, lane)

    def load_turns(self, operands: Operands, token, lane) -> list[cute.Tensor]:
        """Cosines and sines of a lane's pairs of channels."""
        rope, half = operands.rope, KERNEL_ROPE_DIM // 2
        position = cutlass.max(cutlass.min(operands.positions[token], rope.shape[0] - 1), 0)
        turns = []
        for part in range(2):
            at = Int64(position) * rope.stride[0] + part * half + lane % WARP_HALF * PAIRS
            found = cute.make_rmem_tensor(PAIRS, Float32)
            cute.autovec_copy(vector_at(address_of(rope, at), Float32, 0, PAIRS), found)
            turns.append(found)
        return turns

    @cute.jit
    def share_head(self, operands: Operands, smem: ClusterSmem, token, rank, head, turns, lane):
        """Round a head, and send its codes and its factor to all CTAs."""
        words, scale = self.load_head(operands, token, head, lane)
        weight = self.weight_of(operands, token, head)
        code = words[0]
        if cutlass.const_expr(not self.config.has_codes):
            code, scale = self.code_of(words, turns, lane)
        # A vector of four lanes' codes has four senders, each for some of the CTAs.
        number = lane % VECTORS
        words = tuple(
            cute.arch.shuffle_sync(code, self.tiles.source_word(number, i))
            for i in range(LANE_WORDS)
        )
        word = head * (KERNEL_DIM // 4) + (number ^ (head % 8)) * LANE_WORDS
        target = cute.recast_ptr(smem.queries_start, dtype=Int32) + word
        for i in cutlass.range_constexpr(self.cluster * VECTORS // WARP):
            other = (rank + lane // VECTORS + i * (WARP // VECTORS)) % self.cluster
            cute.arch.store_async_dsmem(target.align(16), words, smem.sent, other)
        if lane < self.cluster:
            target = cute.recast_ptr(smem.factors.iterator, dtype=Int32) + head
            factor = (weight * scale).bitcast(Int32)
            cute.arch.store_async_dsmem(target, factor, smem.sent, lane)

    def load_head(
        self, operands: Operands, token, head, lane
    ) -> tuple[cute.Tensor, Float32 | None]:
        """A lane's channels of a head: pairs of them, or a word of codes and the head's scale."""
        if self.config.has_codes:
            address = code_address(operands, token, head, lane * LANE_CHANNELS)
            return vector_at(address, Int32, 0, 1), operands.q_scale[0][token, head]
        at = Int64(token) * operands.q.stride[0] + head * KERNEL_DIM + lane * LANE_CHANNELS
        words = cute.make_rmem_tensor(PAIRS, Uint32)
        source = vector_at(address_of(operands.q, at), BFloat16, 0, LANE_CHANNELS)
        cute.autovec_copy(cute.recast_tensor(source, Uint32), words)
        return words, None

    def code_of(self, words: cute.Tensor, turns: list[cute.Tensor], lane) -> tuple[Int32, Float32]:
        """A lane's codes of a head, in a word, and the head's scale."""
        pairs = [words[i] for i in range(PAIRS)]
        # The rotated channels are those of the last lanes.
        is_rotated = lane >= WARP_HALF
        pairs = [
            Uint32(cutlass.select_(is_rotated, new, old))
            for new, old in zip(rotated(pairs, *turns), pairs)
        ]
        codes, scale = coded(transformed(pairs, lane))
        return cute.recast_tensor(codes, Int32)[0], scale

    # ---- scores ----

    @cute.jit
    def keep(
        self, operands: Operands, smem: ClusterSmem, run: Run, entry, bits: Uint32, exists: Boolean
    ):
        """See `TileScores`: 0 of what is no entry; scores reach memory at the end."""
        key = order_key(bits)
        own = cute.recast_ptr(smem.order_keys.iterator, dtype=Uint16)
        kept = Uint16(cutlass.select_(exists, key, Uint32(0)))
        (own + (entry - run.tile * TILE_KEYS)).store(kept)
        if exists:
            self.count(smem, key)

    @cute.jit
    def add_counts(self, smem: ClusterSmem, rank, thread):
        """Add the CTA's counts to those of every CTA of the cluster, and wait for the others'."""
        cute.arch.sync_threads()
        for i in cutlass.range(thread, BINS, self.threads, unroll=1):
            count = smem.counts[i]
            if count != 0:
                for other in cutlass.range_constexpr(self.cluster):
                    target = (rank + other) % self.cluster
                    add_remote(smem.totals.iterator + i, target, count)
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()

    @cute.jit
    def store_scores(self, operands: Operands, smem: ClusterSmem, run: Run, thread):
        """Scores of the CTA's entries into memory."""
        first = run.tile * TILE_KEYS
        end = cutlass.min(first + run.tiles * TILE_KEYS, run.count)
        row = Int64(run.token) * operands.scores.stride[0]
        step = self.threads * VECTOR
        for at in cutlass.range(first + thread * VECTOR, end, step, unroll=1):
            words = self.selection.vector(smem, at - first)
            for w in cutlass.range_constexpr(VECTOR // 2):
                words[w] = bits_of(words[w])
            target = address_of(operands.scores, row + at)
            if at + VECTOR <= end:
                vector = vector_at(target, BFloat16, 0)
                cute.autovec_copy(words, cute.recast_tensor(vector, Uint32))
            else:
                for j in cutlass.range_constexpr(VECTOR):
                    if at + j < end:
                        bits = words[j // 2] >> (16 * (j % 2)) & Uint32(0xFFFF)
                        pointer_to(target + 2 * j, Uint16, 2).store(Uint16(bits))
