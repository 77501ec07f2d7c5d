"""Scores and choice of a token's entries by a cluster, in one launch, for Hopper.

Each CTA scores a run of the token's tiles and keeps the order keys in shared memory. Then it adds
its counts of them by upper bits to those of every CTA of the cluster, so that each finds the bin of
the k-th best by itself; the choice among that bin is `Selection`'s.

Pages of keys are asked for, to L2, before the launch before is over: what it still writes of them
meets them there.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import Boolean, Int32, Uint16, Uint32, cute
from cutlass.memory import SmemAllocator

from dsv4.kernels.indexer.config import BINS, TILE_KEYS, IndexTopkConfig
from dsv4.kernels.indexer.context import Operands, order_key, tiles_of, visible
from dsv4.kernels.indexer.plan import PREFETCHED_BYTES, ClusterPlan
from dsv4.kernels.indexer.selection import BOARD_WORDS, HELD, VECTOR, Board, Selection, Share
from dsv4.kernels.indexer.sm90.tile_scores import Run, TileScores
from dsv4.kernels.kit import mbarrier, pdl
from dsv4.kernels.kit.mbarrier import Ring
from dsv4.kernels.kit.remote import add_remote
from dsv4.kernels.kit.storage import storage_struct
from dsv4.kernels.kit.tma import prefetch_descriptors


class ClusterSmem(NamedTuple):
    """Views of shared memory: those of `tile_scores.Smem`, and of the choice."""

    keys: cute.Tensor
    queries: cute.Tensor
    keys_start: cute.Pointer
    queries_start: cute.Pointer
    scales: cute.Tensor
    factors: cute.Tensor
    counts: cute.Tensor
    order_keys: cute.Tensor  # [HELD_KEYS / 2], two a word
    totals: cute.Tensor  # [BINS]: counts of the whole cluster
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
        start = source.order_keys.iterator
        for v in cutlass.range_constexpr(HELD):
            if v < per_thread:
                at = begin + v * VECTOR
                if at < share.end:
                    offset = cute.assume((at - share.first) // 2, divby=VECTOR // 2)
                    vector = cute.make_tensor(start + offset, cute.make_layout(VECTOR // 2))
                    cute.autovec_copy(cute.recast_tensor(vector, Uint32), words[None, v])
                else:
                    for w in cutlass.range_constexpr(VECTOR // 2):
                        words[w, v] = Uint32(0)

    def load_bins(self, source: ClusterSmem, lowest: Int32, bins: cute.Tensor) -> None:
        """See `Selection`."""
        at = source.totals.iterator + cute.assume(lowest, divby=self.thread_bins)
        cute.autovec_copy(cute.make_tensor(at, cute.make_layout(self.thread_bins)), bins)

    def meet_cluster(self) -> None:
        """They have, and have sent their counts."""


class OneLaunchSm90(TileScores):
    """Kernel of one configuration.

    Args:
        cluster: CTAs of a token.
    """

    def __init__(self, config: IndexTopkConfig, cluster: int):
        plan = ClusterPlan(self.lanes_per_warp, cluster, config.topk)
        super().__init__(config, plan)
        self.cluster = cluster
        self.threads = plan.warps.threads
        self.selection = HeldSelection(config, self.threads, cluster)

    # ---- host ----

    @cute.jit
    def launch(self, operands: Operands, stream):
        """A cluster for each token."""
        key_map = self.key_map(operands.keys)
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
        storage = storage_struct(plan.smem)(SmemAllocator().allocate(plan.smem.total_bytes, 1024))
        smem, ring = self.cluster_views(storage), mbarrier.pipeline(plan.barriers, storage, "ring")
        self.prepare(smem, ring, warp, thread)
        for i in cutlass.range(thread, BINS, self.threads, unroll=1):
            smem.totals[i] = Int32(0)
        if thread < BOARD_WORDS:
            smem.choice.own[thread] = Int32(0)
        # The others' counts may come from here on.
        cute.arch.cluster_arrive()
        pdl.launch_dependents()
        count, request = visible(operands, token)
        tiles = tiles_of(self.config, count)
        tile, end = rank * tiles // self.cluster, (rank + 1) * tiles // self.cluster
        run = Run(token, count, request, tile, end - tile)
        cute.arch.sync_threads()
        if warp >= plan.warps["load"].first:
            prefetch_descriptors(maps)
            pages = PREFETCHED_BYTES // (self.config.page * self.config.row)
            self.prefetch_run(operands, run, pages // Int32(cute.arch.grid_dim()[0]))
            pdl.wait_for_previous_launch()
            self.load_run(operands, smem, ring, maps[0], ring.producer(), run)
        else:
            pdl.wait_for_previous_launch()
            if run.tiles > 0:
                group = warp // 4
                cursor = ring.skip(ring.consumer(), group)
                self.score_run(operands, smem, ring, cursor, run, group)
        cute.arch.cluster_wait()
        if tiles > 0:
            self.add_counts(smem, rank, thread)
            share = Share(tile * TILE_KEYS, cutlass.min(end * TILE_KEYS, count))
            self.selection.select(
                operands, smem, smem.choice, token, request, share, rank, thread
            )
        else:
            self.selection.name_all(operands, token, (count, request), rank, thread)

    def cluster_views(self, storage) -> ClusterSmem:
        """Views of the plan's shared memory."""
        choice = Board(
            board=self.words(storage, "board", BOARD_WORDS, self.cluster),
            own=self.words(storage, "own"),
            sums=self.words(storage, "sums"),
            found=self.words(storage, "found"),
            chosen=self.words(storage, "chosen"),
        )
        return ClusterSmem(
            *self.views(storage),
            self.words(storage, "order_keys"),
            self.words(storage, "totals"),
            choice,
        )

    @cute.jit
    def keep(
        self, operands: Operands, smem: ClusterSmem, run: Run, entry, bits: Uint32, exists: Boolean
    ):
        """Store a score and its order key, 0 of what is no entry, and count it."""
        TileScores.keep(self, operands, smem, run, entry, bits, exists)
        key = Uint32(cutlass.select_(exists, order_key(bits), Uint32(0)))
        own = cute.recast_ptr(smem.order_keys.iterator, dtype=Uint16)
        (own + (entry - run.tile * TILE_KEYS)).store(Uint16(key))

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
