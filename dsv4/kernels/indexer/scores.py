"""Scores of all tokens' index keys, into memory: the first of two launches.

The tiles of all tokens, one token behind the other, are shared out evenly among the CTAs: lengths
are read on the device, and a launch costs what its live lengths cost. A CTA that meets another
token rounds that one's queries, while its ring fills.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import cutlass
from cutlass import Boolean, Int32, Int64, Uint16, Uint32, cute
from cutlass.memory import SmemAllocator

from dsv4.kernels.indexer.config import BINS, IndexTopkConfig
from dsv4.kernels.indexer.context import (
    Operands,
    order_key,
    order_key_fp32,
    tiles_of,
    visible,
)
from dsv4.kernels.indexer.plan import GROUPS, LOADERS, ScoresPlan
from dsv4.kernels.indexer.tile_scores import Run, Smem, TileScores, sync_consumers
from dsv4.kernels.kit import mbarrier, pdl
from dsv4.kernels.kit.mbarrier import Ring
from dsv4.kernels.kit.scan import sums_before
from dsv4.kernels.kit.storage import storage_struct
from dsv4.kernels.kit.tma import prefetch_descriptors
from dsv4.kernels.kit.vectors import address_of, pointer_to


class Work(NamedTuple):
    """A CTA's run of tiles: its first token, the first tile of that token, tiles in all."""

    token: Int32
    tile: Int32
    count: Int32


class Scores(TileScores):
    """Kernel of one configuration.

    Args:
        products: see `TileScores`.
        has_tmem: see `ScoresPlan`.
    """

    def __init__(self, config: IndexTopkConfig, products: Callable, has_tmem: bool):
        keys = config.key_format, config.page
        super().__init__(config, ScoresPlan(self.lanes_per_warp, *keys, has_tmem), products)
        is_fp32 = config.rank == "fp32"
        self.score_word = Uint32 if is_fp32 else Uint16
        self.order_key = order_key_fp32 if is_fp32 else order_key

    # ---- host ----

    @cute.jit
    def launch(self, operands: Operands, stream, num_ctas: Int32):
        """Score the entries of all tokens that see more than `topk`."""
        key_map = self.tiles.key_map(operands.keys)
        self.kernel((key_map,), operands).launch(
            grid=[num_ctas, 1, 1],
            block=[self.plan.warps.threads, 1, 1],
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
        storage = storage_struct(plan.smem)(SmemAllocator().allocate(plan.smem.total_bytes, 1024))
        smem, ring = self.views(storage), mbarrier.pipeline(plan.barriers, storage, "ring")
        self.prepare(smem, ring, warp, cute.arch.thread_idx()[0])
        pdl.launch_dependents()
        work = self.find_work(operands, self.words(storage, "sums"), self.words(storage, "start"))
        if warp >= plan.warps["load"].first:
            prefetch_descriptors(maps)
            loader = warp - plan.warps["load"].first
            run = self.run_of(operands, work.token, work.tile, work.count)
            self.prefetch_run(operands, run, loader)
            pdl.wait_for_previous_launch()
            self.load(operands, smem, ring, maps[0], work, loader)
        else:
            pdl.wait_for_previous_launch()
            self.compute(operands, smem, ring, work, warp)
        self.tiles.free(smem.sums, warp)

    # ---- work ----

    @cute.jit
    def find_work(self, operands: Operands, sums: cute.Tensor, start: cute.Tensor) -> Work:
        """The CTA's share of the tiles of all tokens. Reads nothing but what is the whole step's:
        lengths and requests."""
        thread, threads = cute.arch.thread_idx()[0], self.plan.warps.threads
        tokens = Int32(operands.lens.shape[0])
        run = (tokens + threads - 1) // threads
        first = thread * run
        own = Int32(0)
        for token in cutlass.range(first, cutlass.min(first + run, tokens), unroll=4):
            count, _ = visible(operands, token)
            own += tiles_of(self.config, count)
        if thread == 0:
            start[0] = Int32(0)
            start[1] = Int32(0)
        before, total = sums_before(own, sums)
        cta, ctas = Int64(cute.arch.block_idx()[0]), Int64(cute.arch.grid_dim()[0])
        begin, end = Int32(cta * total // ctas), Int32((cta + 1) * total // ctas)
        left = begin - before
        if left >= 0 and left < own:
            token = first
            count, _ = visible(operands, token)
            tiles = tiles_of(self.config, count)
            while left >= tiles:
                left -= tiles
                token += 1
                count, _ = visible(operands, token)
                tiles = tiles_of(self.config, count)
            start[0] = token
            start[1] = left
        cute.arch.sync_threads()
        return Work(start[0], start[1], end - begin)

    @cute.jit
    def run_of(self, operands: Operands, token, tile, left) -> Run:
        """Tiles of a token from `tile` on, at most `left`."""
        count, request = visible(operands, token)
        here = cutlass.max(cutlass.min(tiles_of(self.config, count) - tile, left), 0)
        return Run(token, count, request, tile, here)

    # ---- roles ----

    @cute.jit
    def load(self, operands: Operands, smem: Smem, ring: Ring, key_map, work: Work, loader):
        """Load the CTA's tiles; a warp takes every other one."""
        cursor = ring.skip(ring.producer(), loader)
        token, tile, left = work
        passed = Int32(0)
        while left > 0:
            run = self.run_of(operands, token, tile, left)
            first = (loader + passed) % LOADERS
            cursor = self.load_run(operands, smem, ring, key_map, cursor, run, first)
            passed += run.tiles
            left -= run.tiles
            token, tile = token + 1, Int32(0)

    @cute.jit
    def compute(self, operands: Operands, smem: Smem, ring: Ring, work: Work, warp):
        """Scores of the CTA's tiles; a warpgroup takes every other one."""
        group = warp // 4
        cursor = ring.skip(ring.consumer(), group)
        token, tile, left = work
        passed = Int32(0)
        while left > 0:
            run = self.run_of(operands, token, tile, left)
            if run.tiles > 0:
                thread, first = cute.arch.thread_idx()[0], (group + passed) % GROUPS
                self.take_token(operands, smem, token, thread, cute.arch.lane_idx())
                cursor = self.score_run(operands, smem, ring, cursor, run, first)
                self.add_counts(operands, smem, token, thread)
            passed += run.tiles
            left -= run.tiles
            token, tile = token + 1, Int32(0)

    @cute.jit
    def keep(self, operands: Operands, smem: Smem, run: Run, entry, bits: Uint32, exists: Boolean):
        """See `TileScores`."""
        if exists:
            at = Int64(run.token) * operands.scores.stride[0] + entry
            address, size = address_of(operands.scores, at), self.score_word.width // 8
            pointer_to(address, self.score_word, size).store(self.score_word(bits))
            self.count(smem, self.order_key(bits))

    @cute.jit
    def add_counts(self, operands: Operands, smem: Smem, token, thread):
        """Add the CTA's counts of a token to those of all, and clear them."""
        sync_consumers(self.plan.consumers)
        for i in cutlass.range(thread, BINS, self.plan.consumers, unroll=1):
            count = smem.counts[i]
            if count != 0:
                target = operands.counts.iterator + (Int64(token) * BINS + i)
                cute.arch.red(target, count, op="add", dtype="s32", sem="relaxed", scope="gpu")
                smem.counts[i] = Int32(0)
