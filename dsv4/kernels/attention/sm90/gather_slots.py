"""Slots of a KV ring as the warps that gather rows see them, in the order in which a key tile's
columns are filled: the halves of `heads_m`, or the four parts of `swap_ab`.

Slots are frozen, as `heads_m_context` says why.
"""

from dataclasses import dataclass

import cutlass
from cutlass import cute

from dsv4.kernels.attention.key_tiles import TILE_INFO_WORDS
from dsv4.kernels.attention.sm90.heads_m_context import HeadsMContext
from dsv4.kernels.attention.sm90.plan import HALVES
from dsv4.kernels.attention.sm90.swap_ab_context import SwapAbContext
from dsv4.kernels.attention.tile_info import store_tile_info
from dsv4.kernels.kit.mbarrier import Cursor, arrive_warp


class _Slots:
    """Base of both kernels' slots."""

    @property
    def kv_start(self) -> cute.Pointer:
        """Start of the ring."""
        return self.ctx.smem.kv_start

    @property
    def staging(self) -> cute.Pointer:
        """Start of what waits in shared memory before it is converted."""
        return self.ctx.smem.staging

    @cute.jit
    def commit(self, slot, lane):
        """The arrival of a warp that has stored what belongs to a slot."""
        pipe = self.ctx.pipes.kv
        arrive_warp(pipe.full + slot, lane, pipe.lanes_per_warp)

    def describe_rows(
        self, kv: Cursor, is_key, is_window, warp, lane, warp_keys: cutlass.Constexpr
    ) -> None:
        """Store which of a warp's rows of a tile are keys: see `tile_info`."""
        first = self.tile(kv) * TILE_INFO_WORDS
        store_tile_info(self.ctx.smem.tile_info, first, is_key, is_window, warp, lane, warp_keys)


@dataclass(frozen=True)
class HeadsMSlots(_Slots):
    """Halves of the columns; the one that QK reads first comes first."""

    ctx: HeadsMContext

    units = tuple(range(HALVES - 1, -1, -1))

    def slot(self, kv: Cursor, unit: int):
        """Index of a unit's slot."""
        return self.ctx.pipes.kv.slot(kv, unit)

    def acquire(self, kv: Cursor, unit: int) -> None:
        """Wait until a unit's slot is empty."""
        self.ctx.pipes.kv.acquire(kv, unit)

    def next(self, kv: Cursor) -> Cursor:
        """The next tile's place."""
        return self.ctx.pipes.kv.next(kv)

    def tile(self, kv: Cursor):
        """Where a tile's words are in `smem.tile_info`."""
        return kv.stage


@dataclass(frozen=True)
class SwapAbSlots(_Slots):
    """Parts of the columns in their order."""

    ctx: SwapAbContext
    units: tuple[int, ...]

    def slot(self, kv: Cursor, unit: int):
        """Index of a unit's slot."""
        return self.ctx.pipes.kv.skip(kv, unit).stage

    def acquire(self, kv: Cursor, unit: int) -> None:
        """Wait until a unit's slot is empty."""
        self.ctx.pipes.kv.acquire(self.ctx.pipes.kv.skip(kv, unit))

    def next(self, kv: Cursor) -> Cursor:
        """The next tile's place."""
        return self.ctx.pipes.kv.skip(kv, len(self.units))

    def tile(self, kv: Cursor):
        """Where a tile's words are in `smem.tile_info`."""
        return kv.stage
