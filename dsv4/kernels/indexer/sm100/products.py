"""Products of tiles of keys for Blackwell: tcgen05 of 64 keys by all heads, sums in TMEM.

A warpgroup has sums of its own, and one of its warps issues the products of its tile. They have 16
rows in each warp's lanes, which a thread loads as wgmma would have left them: what follows, and the
order of its sums, are Hopper's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import cutlass
from cutlass import Float32, Int64, Uint32, cute

from dsv4.kernels.indexer.config import KERNEL_DIM, KERNEL_HEADS, TILE_KEYS, IndexTopkConfig
from dsv4.kernels.indexer.fp4_tiles import Fp4Tiles
from dsv4.kernels.indexer.fp8_tiles import Fp8Tiles
from dsv4.kernels.indexer.plan import GROUPS, STEPS, ScoresPlan
from dsv4.kernels.kit.mbarrier import Cursor, Signal
from dsv4.kernels.kit.plan import WARP_THREADS, WARPGROUP_WARPS
from dsv4.kernels.kit.swizzle import SPAN_BYTES
from dsv4.kernels.kit.tcgen05 import (
    LANE_STEP,
    Tmem,
    commit,
    fence_after_thread_sync,
    fence_before_thread_sync,
    load_rows,
    multiply,
    operand_descriptor,
)
from dsv4.kernels.kit.wgmma import by_row

STEP_BYTES = KERNEL_DIM // STEPS  # of a key in a product
STEP_COLUMNS = STEP_BYTES // 4  # of TMEM, that hold them
FIRST_GROUP = 2  # named barrier of the first warpgroup; those before it are `tile_scores`'
GROUP_THREADS = WARPGROUP_WARPS * WARP_THREADS


class Sums(NamedTuple):
    """Tensor Memory of a CTA, and what tells that products are over."""

    holder: cute.Pointer  # in shared memory, of the address
    done: Signal  # of each warpgroup


class Products(ABC):
    """Common part of the products of both formats, beside their tiles."""

    def __init__(self, config: IndexTopkConfig, plan: ScoresPlan):
        super().__init__(config, plan.tile)
        self.plan = plan

    # ---- Tensor Memory ----

    def tensor_memory(self, storage) -> Sums:
        """What the plan's shared memory has of it."""
        return Sums(storage.tmem_address.data_ptr(), Signal(storage.products_full.data_ptr()))

    def signals(self, sums: Sums) -> dict[str, Signal]:
        """Edges of products."""
        return {"products": sums.done}

    @cute.jit
    def allocate(self, sums: Sums, warp):
        """Ask for the plan's columns; the address is known behind a barrier of the CTA."""
        if warp == 0:
            tmem_of(sums).allocate(self.plan.tmem.allocated_columns)

    @cute.jit
    def free(self, sums: Sums, warp):
        """Return the columns, behind a barrier after which nothing reads sums: that before counts
        of scores are added up."""
        if warp == 0:
            fence_after_thread_sync()
            tmem_of(sums).free(self.plan.tmem.allocated_columns, first_column(sums))

    # ---- products ----

    def multiply(self, smem, cursor: Cursor, unit, lane) -> tuple[cute.Tensor, list[Float32]]:
        """Sums of a tile with all heads, as `by_row` views a thread's, and the scales of its two
        keys.

        Args:
            smem: `tile_scores.Smem`.
            unit: of 16 keys, the warp's.
        """
        group = cute.arch.make_warp_uniform(cute.arch.warp_idx()) // WARPGROUP_WARPS
        address = first_column(smem.sums)
        sums = address + cute.assume(group * KERNEL_HEADS, divby=KERNEL_HEADS)
        keys, scales = self.bring(smem.keys, address, group, cursor.stage, unit, lane)
        self.issue(smem, sums, keys, group, unit)
        smem.sums.done.at(group).wait(self.parity(cursor))
        fence_after_thread_sync()
        rows = load_rows(sums, KERNEL_HEADS, cute.arch.thread_idx()[0] % GROUP_THREADS)
        cute.arch.fence_view_async_tmem_load()
        # Before the warpgroup's next barrier, or that behind the last tile.
        fence_before_thread_sync()
        return by_row(rows), scales

    @cute.jit
    def issue(self, smem, sums: cute.Pointer, keys, group, unit):
        """Issue the products of a tile by one warp, once all have read the sums before, and have
        brought their keys."""
        cute.arch.barrier(barrier_id=FIRST_GROUP + group, number_of_threads=GROUP_THREADS)
        if unit == 0:
            fence_after_thread_sync()
            with cute.arch.elect_one():
                queries = smem.queries_start.toint()
                for step in cutlass.range_constexpr(STEPS):
                    a = self.operand(keys, step)
                    b = operand_descriptor(queries + step * STEP_BYTES, SPAN_BYTES)
                    multiply(sums, a, b, (TILE_KEYS, KERNEL_HEADS), step > 0)
                commit(smem.sums.done.full + group)

    def parity(self, cursor: Cursor):
        """Of the tiles that the warpgroup has had: every so many-th stage is its own."""
        rounds = self.plan.stages // GROUPS
        return (cursor.phase * rounds + cursor.stage // GROUPS) % 2

    @abstractmethod
    def bring(self, ring, address: cute.Pointer, group, stage, unit, lane) -> tuple:
        """Where a warpgroup's tile lies as an operand, and the scales of a thread's two keys."""

    @abstractmethod
    def operand(self, keys, step: int) -> Int64 | cute.Pointer:
        """Channels of a step, of what `bring` gave."""


class Fp8Products(Products, Fp8Tiles):
    """Products of FP8 keys, an operand in shared memory."""

    def bring(self, ring, address: cute.Pointer, group, stage, unit, lane) -> tuple:
        """See `Products`."""
        keys = ring.start.toint() + stage * (TILE_KEYS * KERNEL_DIM)
        return keys, self.scales(ring, stage, unit, lane)

    def operand(self, keys, step: int) -> Int64:
        """See `Products`."""
        return operand_descriptor(keys + step * STEP_BYTES, SPAN_BYTES)


class Fp4Products(Products, Fp4Tiles):
    """Products of FP4 keys, an operand in TMEM."""

    @cute.jit
    def bring(self, ring, address: cute.Pointer, group, stage, unit, lane):
        """See `Products`."""
        fragment = cute.make_rmem_tensor((4, STEPS), Uint32)
        scales = self.decode(ring, fragment, stage, unit, lane)
        column = self.plan.tmem.column("keys") + group * (STEPS * STEP_COLUMNS)
        keys = address + column
        # Rows of a unit, and four columns beside each other, are those of two words of a lane.
        names = ", ".join(f"{{$r{i + 1}}}" for i in range(cute.size(fragment)))
        cute.arch.inline_ptx(
            f"tcgen05.st.sync.aligned.16x128b.x{2 * STEPS}.b32 [{{$r0}}], {{{names}}};",
            read_only_args=[
                keys.toint() + unit * (WARP_THREADS * LANE_STEP),
                *(fragment[i] for i in range(cute.size(fragment))),
            ],
        )
        cute.arch.fence_view_async_tmem_store()
        fence_before_thread_sync()
        return keys, scales

    def operand(self, keys: cute.Pointer, step: int) -> cute.Pointer:
        """See `Products`."""
        return keys + step * STEP_COLUMNS


def tmem_of(sums: Sums) -> Tmem:
    """Tensor Memory by its holder; nothing waits at a barrier of its own."""
    return Tmem(sums.holder, barrier_id=0)


def first_column(sums: Sums) -> cute.Pointer:
    """Its address, behind the barrier that `Products.allocate` asks for."""
    return cute.arch.retrieve_tmem_ptr(Float32, 16, sums.holder)


def products_of(config: IndexTopkConfig, plan: ScoresPlan) -> Products:
    """Those of a configuration's keys."""
    kind = Fp4Products if config.key_format == "fp4" else Fp8Products
    return kind(config, plan)
