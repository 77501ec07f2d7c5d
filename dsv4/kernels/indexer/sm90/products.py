"""Products of tiles of keys for Hopper: wgmma, sums in registers."""

from __future__ import annotations

from abc import ABC, abstractmethod

from cutlass import Float8E4M3FN, Float32, Uint32, cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from dsv4.kernels.indexer.config import KERNEL_HEADS, TILE_KEYS, IndexTopkConfig
from dsv4.kernels.indexer.fp4_tiles import Fp4Tiles
from dsv4.kernels.indexer.fp8_tiles import Fp8Tiles
from dsv4.kernels.indexer.plan import STEPS, ScoresPlan
from dsv4.kernels.kit.mbarrier import Cursor
from dsv4.kernels.kit.swizzle import VECTOR_BYTES
from dsv4.kernels.kit.wgmma import by_row, gemm, make_mma


class Products(ABC):
    """Common part of the products of both formats, beside their tiles."""

    def tensor_memory(self, storage) -> tuple[()]:
        """There is none."""
        return ()

    def signals(self, sums: tuple[()]) -> dict:
        """Edges of products: none."""
        return {}

    def allocate(self, sums: tuple[()], warp) -> None:  # noqa: B027 nothing is right here
        """Nothing to ask for."""

    def free(self, sums: tuple[()], warp) -> None:  # noqa: B027 nothing is right here
        """Nothing to return."""

    def multiply(self, smem, cursor: Cursor, unit, lane) -> tuple[cute.Tensor, list[Float32]]:
        """Sums of a tile with all heads, as `by_row` views a thread's, and the scales of its two
        keys.

        Args:
            smem: `tile_scores.Smem`.
            unit: of 16 keys, the warp's.
        """
        mma = self.mma()
        acc = mma.make_fragment_C(mma.partition_shape_C((TILE_KEYS, KERNEL_HEADS)))
        scales = self.issue(smem.keys, smem.queries, acc, cursor.stage, unit, lane)
        warpgroup.wait_group(0)
        return by_row(acc), scales

    @staticmethod
    @abstractmethod
    def mma() -> cute.TiledMma:
        """wgmma of 64 keys and all heads."""

    @abstractmethod
    def issue(self, ring, queries: cute.Tensor, acc, stage, unit, lane) -> list[Float32]:
        """Issue the products of a tile; the scales of a thread's two keys."""


class Fp8Products(Products, Fp8Tiles):
    """Products of FP8 keys, an operand in shared memory."""

    @cute.jit
    def issue(self, ring, queries: cute.Tensor, acc: cute.Tensor, stage, unit, lane):
        """See `Products`."""
        own = self.mma().get_slice(0)
        mma = self.mma()
        a = mma.make_fragment_A(own.partition_A(ring.keys))
        b = mma.make_fragment_B(own.partition_B(queries))
        warpgroup.fence()
        gemm(self.mma, acc, a[None, None, None, stage], b, range(STEPS), 0, False)
        warpgroup.commit_group()
        return self.scales(ring, stage, unit, lane)

    @staticmethod
    def mma() -> cute.TiledMma:
        """See `Products`."""
        return make_mma(Float8E4M3FN, (TILE_KEYS, KERNEL_HEADS), OperandMajorMode.K)


class Fp4Products(Products, Fp4Tiles):
    """Products of FP4 keys, an operand in registers."""

    @cute.jit
    def issue(self, ring, queries: cute.Tensor, acc: cute.Tensor, stage, unit, lane):
        """See `Products`."""
        fragment = cute.make_rmem_tensor((4, STEPS), Uint32)
        scales = self.decode(ring, fragment, stage, unit, lane)
        mma = self.mma()
        b = mma.make_fragment_B(mma.get_slice(0).partition_B(queries))
        codes = cute.recast_tensor(fragment, Float8E4M3FN)
        layout = cute.make_layout(((4, 2, 2), 1, STEPS), stride=((1, 4, 8), 0, VECTOR_BYTES))
        a = cute.make_tensor(codes.iterator, layout)
        warpgroup.fence()
        gemm(self.mma, acc, a, b, range(STEPS), 0, False)
        warpgroup.commit_group()
        return scales

    @staticmethod
    def mma() -> cute.TiledMma:
        """See `Products`."""
        shape = (TILE_KEYS, KERNEL_HEADS)
        return make_mma(Float8E4M3FN, shape, OperandMajorMode.K, is_a_in_registers=True)


def products_of(config: IndexTopkConfig, plan: ScoresPlan) -> Products:
    """Those of a configuration's keys."""
    kind = Fp4Products if config.key_format == "fp4" else Fp8Products
    return kind(config, plan.tile)
