"""Stages of Blackwell's KV rings as the warps that convert FP8 entries see them (`gather_fp8`)."""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, pipeline

from dsv4.kernels.attention.sm100.paged_context import TileInfo


class TileCount(NamedTuple):
    """A role's place in a ring: how many tiles it has gone through."""

    tiles: Int32


@dataclass(frozen=True)
class Slots:
    """KV stages of `units` slices of the columns of a key tile.

    Frozen, as what a staged loop carries must be.

    Attributes:
        units: slices that the CTA holds, in their order.
        stages: of the ring, each a slice.
    """

    kv: pipeline.PipelineAsyncUmma
    info: TileInfo
    kv_start: cute.Pointer
    units: tuple[int, ...]
    stages: int

    @property
    def staging(self) -> cute.Pointer:
        """Entries wait in registers: nothing is staged."""
        return self.kv_start

    def _number(self, count: TileCount, unit: int) -> Int32:
        return count.tiles * len(self.units) + self.units.index(unit)

    def slot(self, count: TileCount, unit: int) -> Int32:
        """Stage of a slice."""
        return self._number(count, unit) % self.stages

    def acquire(self, count: TileCount, unit: int) -> None:
        """Wait until the stage of a slice is empty."""
        number = self._number(count, unit)
        parity = number // self.stages % 2 ^ 1
        self.kv.producer_acquire(
            pipeline.PipelineState(self.stages, number, number % self.stages, parity)
        )

    def commit(self, slot: Int32, lane: Int32) -> None:
        """The arrival of a thread that has stored what belongs to a stage."""
        zero = Int32(0)
        self.kv.producer_commit(pipeline.PipelineState(self.stages, zero, slot, zero))

    def describe_rows(
        self, count: TileCount, is_key, is_window, warp, lane, warp_keys: cutlass.Constexpr
    ) -> None:
        """Say which of a warp's rows of a tile are keys."""
        self.info.send(count.tiles, (is_key,), is_window, warp, lane, warp_keys)

    def next(self, count: TileCount) -> TileCount:
        """The place after a tile."""
        return TileCount(count.tiles + 1)
