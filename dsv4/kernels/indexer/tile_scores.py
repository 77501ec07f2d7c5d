"""Scores of tiles of index keys: FP8 products of keys by heads, keys from pages by TMA.

    load warps    tiles of 64 keys and their scales -> ring, every other one each; how they lie
                  there is `Fp8Tiles`' or `Fp4Tiles`', how they are multiplied the architecture's
                  (`products`)
    consumers     two warpgroups: a token's queries, rounded, into shared memory; a tile each in
                  turn: products with all heads, ReLU, weights, sum over heads; scores; counts of
                  scores by their upper bits, which the selection begins with

A score is a sum over heads in the order of a quad's columns, whatever the tile, and its products
are those of one tensor core chain of 128: bits depend on the token's query and the key alone, not
on the format of the key.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import cutlass
from cutlass import Boolean, Float8E4M3FN, Float32, Int32, Int64, Uint32, cute

from dsv4.kernels.indexer.config import (
    BINS,
    KERNEL_DIM,
    KERNEL_HEADS,
    KERNEL_ROPE_DIM,
    TILE_KEYS,
    IndexTopkConfig,
)
from dsv4.kernels.indexer.context import FP32_SIGN, SIGN, Operands
from dsv4.kernels.indexer.fp4_tiles import Fp4Ring
from dsv4.kernels.indexer.fp8_tiles import Fp8Ring
from dsv4.kernels.indexer.plan import GROUPS, LOADERS, PREFETCHED_BYTES, ScoresPlan
from dsv4.kernels.kit import mbarrier, quant
from dsv4.kernels.kit.index_entry import FP4_GROUP
from dsv4.kernels.kit.index_rounding import LANES, PAIRS, coded, rotated, transformed
from dsv4.kernels.kit.mbarrier import Ring
from dsv4.kernels.kit.reduce import quad_sum
from dsv4.kernels.kit.swizzle import SPAN_BYTES, VECTOR_BYTES, operand_atoms
from dsv4.kernels.kit.tma import bulk_prefetch
from dsv4.kernels.kit.vectors import address_of, pointer_to, vector_at

WARP = 32
UNIT_ROWS = 16  # of a warp in a product
CODE_WORD = 4  # codes of a word
CONSUMING = 1  # named barrier


class Run(NamedTuple):
    """Tiles of one token, one behind the other: its entries, its request, the first tile, tiles."""

    token: Int32
    count: Int32
    request: Int32
    tile: Int32
    tiles: Int32


class Smem(NamedTuple):
    """Views of shared memory."""

    keys: Fp8Ring | Fp4Ring
    queries: cute.Tensor  # swizzled [64, 128]
    queries_start: cute.Pointer
    factors: cute.Tensor  # [64]: weights of the heads times the scales of their queries
    counts: cute.Tensor  # [BINS]
    sums: tuple  # what products have of Tensor Memory; nothing on Hopper


class TileScores:
    """Roles of a CTA with such a ring.

    Args:
        plan: of the CTA.
        products: how it multiplies: `sm90.products`, `sm100.products`.
    """

    # As in `ScoresPlan`.
    lanes_per_warp = 1

    def __init__(self, config: IndexTopkConfig, plan: ScoresPlan, products: Callable):
        self.config = config
        self.plan = plan
        self.tiles = products(config, plan)

    # ---- shared memory ----

    def views(self, storage) -> Smem:
        """Views of the plan's shared memory."""
        k_major, _ = operand_atoms(Float8E4M3FN, SPAN_BYTES)
        b = cute.tile_to_shape(k_major, (KERNEL_HEADS, KERNEL_DIM), order=(0, 1))
        return Smem(
            keys=self.tiles.views(storage, self.plan.stages),
            queries=storage.queries.get_tensor(b.outer, swizzle=b.inner),
            queries_start=storage.queries.data_ptr(),
            factors=storage.factors.get_tensor(cute.make_layout(KERNEL_HEADS)),
            counts=self.words(storage, "counts"),
            sums=self.tiles.tensor_memory(storage),
        )

    def words(self, storage, name: str, *shape: int) -> cute.Tensor:
        """A buffer of the plan as a tensor, by default of one dimension."""
        layout = cute.make_layout(shape or self.plan.smem[name].count)
        return getattr(storage, name).get_tensor(layout)

    @cute.jit
    def prepare(self, smem: Smem, ring: Ring, warp, thread):
        """Initialise barriers and counts, ask for Tensor Memory; seen by all after a barrier."""
        if warp == 0:
            with cute.arch.elect_one():
                pipes = {"ring": ring, **self.tiles.signals(smem.sums)}
                mbarrier.init(self.plan.barriers, pipes)
            cute.arch.mbarrier_init_fence()
        self.tiles.allocate(smem.sums, warp)
        for i in cutlass.range(thread, BINS, self.plan.warps.threads, unroll=1):
            smem.counts[i] = Int32(0)

    # ---- load warps ----

    @cute.jit
    def load_run(
        self, operands: Operands, smem: Smem, ring: Ring, key_map, cursor, run: Run, first
    ):
        """Load tiles of a token: the lanes hold the pages of the next ones.

        Args:
            first: tile of the run that is this warp's first one; it takes every other one.
        """
        page_keys, table, tile = self.config.page, operands.block_table, self.plan.tile
        last_of_pool = cutlass.max(operands.keys.shape[0] - 1, 0)
        lane = cute.arch.lane_idx()
        last = cutlass.max(run.count - 1, 0) // page_keys
        held, base = Int32(0), Int32(-WARP)
        for i in cutlass.range(first, run.tiles, LOADERS, unroll=1):
            entry = (run.tile + i) * TILE_KEYS
            page = entry // page_keys
            if page + tile.parts > base + WARP:
                base = page
                held = table[run.request, cutlass.min(page + lane, last)]
                held = cutlass.max(cutlass.min(held, last_of_pool), 0)
            ring.acquire(cursor)
            if lane == 0:
                ring.expect(cursor.stage, tile.loaded_bytes)
            cute.arch.sync_warp()
            mine = cute.arch.shuffle_sync(held, (page - base + lane) % WARP)
            if lane < tile.parts:
                full = ring.at(cursor.stage).full
                self.tiles.load_part(
                    operands, smem.keys, full, key_map, cursor.stage, mine, entry, lane
                )
            cursor = ring.skip(cursor, LOADERS)
        return cursor

    @cute.jit
    def prefetch_run(self, operands: Operands, run: Run, loader):
        """Ask for the run's first pages to be brought into L2, which may be while they are still
        written: as many as L2 holds of all CTAs."""
        page_keys, keys = self.config.page, operands.keys
        pages = PREFETCHED_BYTES // (page_keys * self.config.row)
        last_of_pool = cutlass.max(keys.shape[0] - 1, 0)
        first = run.tile * TILE_KEYS
        end = cutlass.min(first + run.tiles * TILE_KEYS, run.count)
        first, end = first // page_keys, (end + page_keys - 1) // page_keys
        end = cutlass.min(end, first + pages // Int32(cute.arch.grid_dim()[0]))
        own = first + loader * WARP + cute.arch.lane_idx()
        for i in cutlass.range(own, end, LOADERS * WARP, unroll=1):
            page = operands.block_table[run.request, i]
            page = cutlass.max(cutlass.min(page, last_of_pool), 0)
            at = address_of(keys, Int64(page) * keys.stride[0])
            bulk_prefetch(pointer_to(at, cutlass.Uint8, 16), page_keys * self.config.row)

    # ---- consumers ----

    @cute.jit
    def score_run(self, operands: Operands, smem: Smem, ring: Ring, cursor, run: Run, first):
        """Scores of tiles of a token, whose queries and factors are there.

        Args:
            first: tile of the run that is this warpgroup's first one; it takes every other one.
        """
        lane = cute.arch.lane_idx()
        unit = cute.arch.warp_idx() % 4
        weights = cute.make_rmem_tensor((2, KERNEL_HEADS // 8), Float32)
        for j in cutlass.range_constexpr(KERNEL_HEADS // 8):
            for c in cutlass.range_constexpr(2):
                weights[c, j] = smem.factors[j * 8 + lane % 4 * 2 + c]
        for i in cutlass.range(first, run.tiles, GROUPS, unroll=1):
            first_key = (run.tile + i) * TILE_KEYS
            self.score_tile(operands, smem, ring, cursor, weights, run, first_key, unit)
            cursor = ring.skip(cursor, GROUPS)
        return cursor

    @cute.jit
    def take_token(self, operands: Operands, smem: Smem, token, thread, lane):
        """Codes of a token's queries, and factors of its heads, into shared memory."""
        head, part = thread // LANES, thread % LANES
        words, scale = self.codes_of(operands, token, head, part, lane)
        weight = self.weight_of(operands, token, head)
        # All are done with the token before.
        sync_consumers(self.plan.consumers)
        for half in cutlass.range_constexpr(2):
            vector = (part * 2 + half) ^ (head % 8)
            offset = head * KERNEL_DIM + vector * VECTOR_BYTES
            target = cute.recast_ptr(
                smem.queries_start + cute.assume(offset, divby=VECTOR_BYTES), dtype=Uint32
            )
            four = cute.make_rmem_tensor(4, Uint32)
            for i in cutlass.range_constexpr(4):
                four[i] = words[self.tiles.source_word(half, i)]
            cute.autovec_copy(four, cute.make_tensor(target, cute.make_layout(4)))
        if part == 0:
            smem.factors[head] = weight * scale
        # wgmma reads through the async proxy.
        cute.arch.fence_view_async_shared()
        sync_consumers(self.plan.consumers)

    def codes_of(self, operands: Operands, token, head, part, lane) -> tuple[cute.Tensor, Float32]:
        """A lane's codes of a query, as words, and the query's scale."""
        if not self.config.has_codes:
            pairs = self.load_query(operands, token, head, part)
            codes, scale = coded(transformed(pairs, lane))
            return cute.recast_tensor(codes, Uint32), scale
        words = cute.make_rmem_tensor(FP4_GROUP // CODE_WORD, Uint32)
        address = code_address(operands, token, head, part * FP4_GROUP)
        for v in range(FP4_GROUP // VECTOR_BYTES):
            target = cute.make_tensor(words.iterator + v * 4, cute.make_layout(4))
            cute.autovec_copy(vector_at(address, Uint32, v * 4, 4), target)
        return words, operands.q_scale[0][token, head]

    def weight_of(self, operands: Operands, token, head) -> Float32:
        """Weight of a head times the configuration's factor, rounded to bf16."""
        weight = operands.weights[token, head].to(Float32) * Float32(self.config.weight_scale)
        return quant.unpack_bf16(quant.pack_bf16(weight, Float32(0.0)))[0]

    def load_query(self, operands: Operands, token, head, part) -> list[Uint32]:
        """Pairs of a lane's channels, rotated where they are."""
        q, rope = operands.q, operands.rope
        at = Int64(token) * q.stride[0] + head * KERNEL_DIM + part * FP4_GROUP
        words = cute.make_rmem_tensor(PAIRS, Uint32)
        for v in range(PAIRS // 4):
            source = vector_at(address_of(q, at + v * 8), cutlass.BFloat16, 0)
            target = cute.make_tensor(words.iterator + v * 4, cute.make_layout(4))
            cute.autovec_copy(cute.recast_tensor(source, Uint32), target)
        position = cutlass.max(cutlass.min(operands.positions[token], rope.shape[0] - 1), 0)
        turns = []
        for half in range(2):
            column = half * (KERNEL_ROPE_DIM // 2) + part % 2 * PAIRS
            found = cute.make_rmem_tensor(PAIRS, Float32)
            address = address_of(rope, Int64(position) * rope.stride[0] + column)
            for v in range(PAIRS // 4):
                target = cute.make_tensor(found.iterator + v * 4, cute.make_layout(4))
                cute.autovec_copy(vector_at(address, Float32, v * 4, 4), target)
            turns.append(found)
        pairs = [words[i] for i in range(PAIRS)]
        # The rotated channels are those of the last lanes.
        is_rotated = part >= LANES // 2
        return [
            Uint32(cutlass.select_(is_rotated, new, old))
            for new, old in zip(rotated(pairs, *turns), pairs)
        ]

    @cute.jit
    def score_tile(
        self, operands: Operands, smem: Smem, ring: Ring, cursor, weights, run, first, unit
    ):
        """Scores of a tile: a warp has 16 keys, a quad two of them.

        Args:
            first: entry of its first key.
            unit: of 16 keys, the warp's.
        """
        lane = cute.arch.lane_idx()
        ring.wait(cursor)
        rows, scales = self.tiles.multiply(smem, cursor, unit, lane)
        sums = []
        for r in cutlass.range_constexpr(2):
            total = Float32(0.0)
            for j in cutlass.range_constexpr(KERNEL_HEADS // 8):
                for c in cutlass.range_constexpr(2):
                    positive = cute.arch.fmax(rows[r, c, j], Float32(0.0))
                    total = cute.math.fma(positive, weights[c, j], total)
            sums.append(quad_sum(total) * scales[r])
        # Not earlier: an arrival overtakes loads of scales on their way, and the next copy would
        # be what they read. A fence would wait for the stores of the tile before, too.
        ring.release(cursor, lane)
        # Two lanes of a quad store a row each.
        own_row = lane % 4
        value = cutlass.select_(own_row == 0, sums[0], sums[1])
        entry = first + unit * UNIT_ROWS + lane // 4 + own_row * 8
        if own_row < 2:
            self.keep(operands, smem, run, entry, self.bits_of(value), entry < run.count)

    def bits_of(self, score: Float32) -> Uint32:
        """Of a score as it is compared; -0 equals 0, and has its bits from here on."""
        if self.config.rank == "fp32":
            bits, minus_zero = Float32(score).bitcast(Uint32), FP32_SIGN
        else:
            bits, minus_zero = quant.pack_bf16(score, Float32(0.0)) & Uint32(0xFFFF), SIGN
        return cutlass.select_(bits == Uint32(minus_zero), Uint32(0), Uint32(bits))

    def keep(self, operands: Operands, smem: Smem, run: Run, entry, bits: Uint32, exists: Boolean):
        """Store a score where there is such an entry, and count it."""
        raise NotImplementedError

    def count(self, smem: Smem, key: Uint32) -> None:
        """Count an order key by its upper bits."""
        target = smem.counts.iterator + Int32(key >> self.config.bin_shift)
        cute.arch.atomic_add(target, Int32(1))


def code_address(operands: Operands, token, head, channel) -> Int64:
    """Address of the code of a channel of a query."""
    pair = head * (KERNEL_DIM // 2) + channel // 2
    return address_of(operands.q, Int64(token) * operands.q.stride[0] + pair)


def sync_consumers(threads: int) -> None:
    """Named barrier of both warpgroups."""
    cute.arch.barrier(barrier_id=CONSUMING, number_of_threads=threads)
