"""Slots of a KV ring as the warps that gather rows see them, in the order in which a key tile's
columns are filled: the halves of `heads_m`, or the four parts of `swap_ab`.

Slots are frozen, as `heads_m_context` says why.
"""

from dataclasses import dataclass

import cutlass
from cutlass import cute

from dsv4.kernels.attention.sm90.heads_m_context import HeadsMContext
from dsv4.kernels.attention.sm90.plan import HALVES, TILE_INFO_WORDS
from dsv4.kernels.attention.sm90.swap_ab_context import SwapAbContext
from dsv4.kernels.kit.mbarrier import Cursor, arrive_warp


@dataclass(frozen=True)
class HeadsMSlots:
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
class SwapAbSlots:
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


@cute.jit
def commit(slots: HeadsMSlots | SwapAbSlots, slot, lane):
    """The arrival of a warp that has stored what belongs to a slot."""
    pipe = slots.ctx.pipes.kv
    arrive_warp(pipe.full + slot, lane, pipe.lanes_per_warp)


@cute.jit
def describe_rows(
    slots: HeadsMSlots | SwapAbSlots, kv: Cursor, is_key, is_window, warp, lane,
    warp_keys: cutlass.Constexpr,
):  # fmt: skip
    """Store which of a warp's rows of a tile are keys, from a ballot: a bit for each in two words;
    and in the third, 1 in the window.

    Args:
        warp_keys: rows of a tile that each warp gathers, 8 or 16.
    """
    tile_info = slots.ctx.smem.tile_info
    first = slots.tile(kv) * TILE_INFO_WORDS
    if lane == 0:
        bits = cutlass.Int32((tile_info.iterator + first).toint()) + warp * (warp_keys // 8)
        cute.arch.inline_ptx(
            f"st.shared.b{warp_keys} [{{$r0}}], {{$r1}};", read_only_args=[bits, is_key]
        )
        if warp == 0:
            tile_info[first + 2] = cutlass.Int32(is_window)
            tile_info[first + 3] = cutlass.Int32(0)
